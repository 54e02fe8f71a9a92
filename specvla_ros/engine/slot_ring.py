"""The KV cache that fits a policy and its settings."""

import torch

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.packed_forward import new_cache
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import Target

_ROW_MULTIPLE = 16  # slots begin on a multiple of an attention tile's rows
_SINK_ROWS = 1  # of a slot, which no request uses; see KVCache.sink_row
_GIB = 1 << 30


def allocate_cache(policy: Target, settings: EngineSettings, answer: AnswerFormat) -> KVCache:
    """Slots with rows for the prompt, the answer, and the nodes that are verified behind them.

    Raises:
        UserError: a slot would be longer than the model's positions, or the slots do not fit the device's memory.
    """
    rows = slot_rows(policy, settings, answer)
    longest = policy.decoder.config.max_position_embeddings
    if rows > longest:
        raise UserError(
            f"a slot of {rows} rows is longer than the model's {longest} positions: lower decode.max_text_tokens, "
            "decode.max_reasoning_tokens or draft.nodes"
        )
    try:
        return new_cache(policy.decoder, slots=settings.slots, slot_rows=rows)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        raise UserError(_what_would_fit(policy, settings, rows)) from None


def slot_rows(policy: Target, settings: EngineSettings, answer: AnswerFormat) -> int:
    """Rows of a slot."""
    scratch = settings.draft.nodes if settings.drafts else 0
    rows = policy.image_tokens + settings.max_text_tokens + answer.longest + scratch + _SINK_ROWS
    return rows + -rows % _ROW_MULTIPLE


def _what_would_fit(policy: Target, settings: EngineSettings, rows: int) -> str:
    config = policy.decoder.config
    size = 2 * config.num_hidden_layers * rows * config.num_key_value_heads * config.head_dim
    slot_bytes = size * policy.decoder.dtype.itemsize
    text = f"{settings.slots} KV slots of {rows} rows take {settings.slots * slot_bytes / _GIB:.2f} GiB"
    if policy.decoder.device.type != "cuda":
        return f"{text}, more than there is: lower decode.max_in_flight or decode.max_text_tokens"
    free, _ = torch.cuda.mem_get_info(policy.decoder.device)
    return (
        f"{text}, but the GPU has {free / _GIB:.2f} GiB free, enough for {free // slot_bytes}: lower "
        "decode.max_in_flight, decode.max_text_tokens or draft.nodes, or close what else uses the GPU"
    )
