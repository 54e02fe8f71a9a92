"""The KV ring that fits a policy and its settings."""

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.kv_ring import KVRing
from specvla_ros.engine.packed_forward import new_ring
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.policy import Policy

_ROW_MULTIPLE = 16  # slots begin on a multiple of an attention tile's rows


def allocate_ring(policy: Policy, settings: EngineSettings, answer: AnswerFormat, *, slots: int) -> KVRing:
    """Slots with rows for the prompt, the answer, and the nodes that are verified behind them.

    Raises:
        UserError: a slot would be longer than the model's positions.
    """
    scratch = settings.draft.nodes if settings.mode != "ar" else 0
    rows = policy.image_tokens + settings.max_text_tokens + answer.longest + scratch
    rows += -rows % _ROW_MULTIPLE
    longest = policy.decoder.config.max_position_embeddings
    if rows > longest:
        raise UserError(
            f"a slot of {rows} rows is longer than the model's {longest} positions: lower decode.max_text_tokens, "
            "decode.max_reasoning_tokens or draft.nodes"
        )
    return new_ring(policy.decoder, slots=slots, slot_rows=rows)
