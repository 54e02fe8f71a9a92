# SPDX-License-Identifier: Apache-2.0
"""The KV cache: one slot per request in flight, all layers, allocated once."""

import torch
from torch import Tensor

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.target import Decoder, Target

_ROW_MULTIPLE = 16  # slots start at a multiple of an attention tile's rows
_SINK_ROWS = 1  # rows of a slot that no request uses; see KVCache.sink_row
_GIB = 1 << 30
_LESS_MEMORY = (
    "Lower decode.max_in_flight, decode.max_text_tokens or draft.nodes, choose a smaller model.quantization, or stop "
    "other processes that use the GPU"
)


def memory_advice(problem: str) -> str:
    """Advice to append to a message about a full GPU; empty for another problem."""
    return f". {_LESS_MEMORY}" if "out of memory" in problem else ""


class SlotPool:
    """The free slots. A free list and not a ring, since requests finish out of order."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Takes a free slot; None if all are held."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Frees a slot; the next request overwrites its rows."""
        if slot in self._free or not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not held")
        self._free.append(slot)


class KVCache(SlotPool):
    """Keys and values of the requests in flight, [layers, slots, slot_rows, kv_heads, head_dim]; keys are rotated.

    A request keeps its slot to its end, unlike in ActionFlow, whose ring buffer shifts rows. Within the slot, the rows
    of an accepted path move to the end of the committed prefix (`specvla_kernels.commit_kv`). A slot holds the prompt,
    the answer's tokens and the drafted nodes of one forward.
    """

    def __init__(self, shape: tuple[int, int, int, int, int], *, dtype: torch.dtype, device: torch.device) -> None:
        _, slots, self.slot_rows, _, _ = shape
        super().__init__(slots)
        self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.empty_like(self.keys)

    @property
    def sink_row(self) -> int:
        """The last row of all slots: padding rows of a forward of fixed size write to it, and no request reads it."""
        return self.slots * self.slot_rows - 1


def new_cache(decoder: Decoder, *, slots: int, slot_rows: int) -> KVCache:
    """A KV cache in the decoder's shape."""
    config = decoder.config
    shape = (config.num_hidden_layers, slots, slot_rows, config.num_key_value_heads, config.head_dim)
    return KVCache(shape, dtype=decoder.dtype, device=decoder.device)


def allocate_cache(target: Target, settings: EngineSettings, answer_tokens: int) -> KVCache:
    """Allocates slots with rows for the prompt, the longest answer and the nodes verified after them.

    Raises UserError if a slot would exceed the model's positions, or the slots the device's memory.
    """
    scratch = settings.draft.nodes if settings.drafts else 0
    rows = target.image_tokens + settings.max_text_tokens + answer_tokens + scratch + _SINK_ROWS
    rows += -rows % _ROW_MULTIPLE
    longest = target.decoder.config.max_position_embeddings
    if rows > longest:
        raise UserError(
            f"a slot of {rows} rows exceeds the model's {longest} positions: lower decode.max_text_tokens, "
            "decode.max_reasoning_tokens or draft.nodes"
        )
    try:
        return new_cache(target.decoder, slots=settings.slots, slot_rows=rows)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        raise UserError(_what_would_fit(target.decoder, settings, rows)) from None


def _what_would_fit(decoder: Decoder, settings: EngineSettings, rows: int) -> str:
    config = decoder.config
    size = 2 * config.num_hidden_layers * rows * config.num_key_value_heads * config.head_dim
    slot_bytes = size * decoder.dtype.itemsize
    text = f"{settings.slots} KV slots of {rows} rows take {settings.slots * slot_bytes / _GIB:.2f} GiB"
    if decoder.device.type != "cuda":
        return f"{text}, more memory than is available: lower decode.max_in_flight or decode.max_text_tokens"
    free, _ = torch.cuda.mem_get_info(decoder.device)
    return (
        f"{text}, but the GPU has {free / _GIB:.2f} GiB free, enough for {free // slot_bytes}: lower "
        "decode.max_in_flight, decode.max_text_tokens or draft.nodes, or stop other processes that use the GPU"
    )
