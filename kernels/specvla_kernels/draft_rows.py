# SPDX-License-Identifier: Apache-2.0
"""Input rows and layout of a draft head's next forward, over several requests with equal numbers of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl
from specvla_kernels.expand_tree import Beam

_BLOCK = 1024  # elements of a row that a program moves: 8 per thread


@dataclass(frozen=True)
class DraftSlots:
    """Location of the requests' rows, int64 [requests], and the tables that all forwards share."""

    slots: Tensor  # of the head's keys and values
    prefix_lens: Tensor  # committed rows of the slots
    rows: Tensor  # number of new ones among these
    max_depths: Tensor  # of the trees; positions are limited to them, so that all are in the tables
    slot_rows: int
    cos: Tensor  # [positions, dim], RoPE's table
    sin: Tensor  # likewise
    embeddings: Tensor  # [vocab, hidden], for the tokens of a beam
    scale: float  # of the embeddings, representable in their dtype


@dataclass(frozen=True)
class DraftRows:
    """One forward's rows, request by request."""

    inputs: Tensor  # [requests, n, 2 hidden], each row's embedding and state
    positions: Tensor  # int64 [requests * n], as in PackedLayout
    kv_rows: Tensor  # likewise
    ancestors: Tensor  # likewise; 0 for chains
    cos: Tensor  # [requests * n, dim], of the positions
    sin: Tensor  # likewise
    ends: Tensor  # int64 [requests], the row of each request's last committed token; only for chains


def chain_rows(where: DraftSlots, following: Tensor, hidden: Tensor, tiles: Tensor, *, masks: int = 0) -> DraftRows:
    """Lays out the newest committed rows of each request, and a parallel head's masks after them.

    `following` (embeddings) and `hidden` (states) are [requests, n, hidden]; the first `rows` of each request count,
    and the next `masks`, whose inputs the caller replaces after the fusion. The others are computed too, into
    uncommitted rows of the slot. Slots and first rows are written into `tiles`, int32 [tiles, 6], the attention's table
    (see AttentionPlan), with equally many tiles per request.
    """
    run = chain_rows_triton if has_kernels(hidden) else chain_rows_reference
    return run(where, following, hidden, tiles, masks=masks)


def beam_rows(where: DraftSlots, beam: Beam, states: Tensor, before: Tensor | None, tiles: Tensor) -> DraftRows:
    """Lays out the beams of the trees so far, after the committed rows.

    On a GPU these are all: reading the head's only layer from memory takes longer than any number of rows. On a CPU
    each row takes its time, and only the newest beam is laid out. The earlier beams' keys and values are in the slots.

    Args:
        states: [requests, width, hidden], states after the previous beam's nodes, which the newest beam's parents
            index; the last dimension is contiguous.
        before: [requests, n, 2 hidden], the earlier beams' inputs; None: there are none.
        tiles: as in `chain_rows`.
    """
    if has_kernels(states):
        return beam_rows_triton(where, beam, states, before, tiles)
    return newest_rows(where, beam, states, tiles)


def chain_rows_reference(
    where: DraftSlots, following: Tensor, hidden: Tensor, tiles: Tensor, *, masks: int = 0
) -> DraftRows:
    """`chain_rows` in PyTorch."""
    requests, n = hidden.shape[:2]
    index = torch.arange(n, device=hidden.device).expand(requests, -1)
    deepest = where.rows[:, None] - 1 + (where.max_depths[:, None] - 1).clamp(0, masks)
    ends = torch.arange(requests, device=index.device) * n + where.rows - 1
    none = torch.zeros_like(index)
    inputs = torch.cat((following, hidden), dim=-1)
    return _laid_out(where, where.prefix_lens - where.rows, inputs, index.minimum(deepest), none, ends, tiles)


def beam_rows_reference(
    where: DraftSlots, beam: Beam, states: Tensor, before: Tensor | None, tiles: Tensor
) -> DraftRows:
    """`beam_rows_triton` in PyTorch."""
    inputs = _beam_inputs(where, beam, states)
    inputs = inputs if before is None else torch.cat((before, inputs), dim=1)
    depths = torch.arange(inputs.shape[1], device=inputs.device) // beam.tokens.shape[1]
    depths = depths.minimum(_deepest(where))
    return _laid_out(where, where.prefix_lens, inputs, depths, beam.ancestors, where.slots, tiles)


def newest_rows(where: DraftSlots, beam: Beam, states: Tensor, tiles: Tensor) -> DraftRows:
    """The rows of `beam_rows_reference` that are the newest beam's."""
    k = beam.tokens.shape[1]
    earlier = beam.ancestors.shape[1] - k
    depths = torch.full((1, k), earlier // k, device=states.device).minimum(_deepest(where))
    inputs, ancestors = _beam_inputs(where, beam, states), beam.ancestors[:, earlier:]
    return _laid_out(where, where.prefix_lens + earlier, inputs, depths - earlier, ancestors, where.slots, tiles)


def _beam_inputs(where: DraftSlots, beam: Beam, states: Tensor) -> Tensor:
    """The newest beam's inputs, [requests, k, 2 hidden]."""
    embedded = where.embeddings[beam.tokens]
    embedded = embedded if where.scale == 1.0 else embedded * where.scale
    above = states.gather(1, beam.parents[:, :, None].expand(-1, -1, states.shape[2]))
    return torch.cat((embedded, above), dim=-1)


def _deepest(where: DraftSlots) -> Tensor:
    """The largest offset of a position from the committed rows, int64 [requests, 1]."""
    return (where.max_depths - 1).clamp(min=0)[:, None]


def _laid_out(
    where: DraftSlots,
    first_rows: Tensor,
    inputs: Tensor,
    offsets: Tensor,
    ancestors: Tensor,
    ends: Tensor,
    tiles: Tensor,
) -> DraftRows:
    """The layout of rows [requests, n] at positions `first_rows + offsets`."""
    positions = (first_rows[:, None] + offsets).flatten()
    begin = where.slots * where.slot_rows + first_rows
    kv_rows = (begin[:, None] + torch.arange(inputs.shape[1], device=begin.device)).flatten()
    begins = torch.stack((where.slots, first_rows), dim=1).to(torch.int32)
    tiles[:, :2] = begins.repeat_interleave(len(tiles) // len(begins), dim=0)
    return DraftRows(inputs, positions, kv_rows, ancestors.flatten(), where.cos[positions], where.sin[positions], ends)


def chain_rows_triton(
    where: DraftSlots, following: Tensor, hidden: Tensor, tiles: Tensor, *, masks: int = 0
) -> DraftRows:
    """`chain_rows` as one launch."""
    sources = (following, hidden, hidden, where.slots, where.slots, where.slots)
    return _launch(where, sources, tiles, hidden.shape[1], n_before=0, scale=1.0, k=1, chain=True, masks=masks)


def beam_rows_triton(where: DraftSlots, beam: Beam, states: Tensor, before: Tensor | None, tiles: Tensor) -> DraftRows:
    """All beams, in one launch."""
    n, k = beam.ancestors.shape[1], beam.tokens.shape[1]
    before = states if before is None else before
    sources = (where.embeddings, states, before, beam.tokens, beam.parents, beam.ancestors)
    return _launch(where, sources, tiles, n, n_before=n - k, scale=where.scale, k=k, chain=False)


def _launch(
    where: DraftSlots, sources: tuple[Tensor, ...], tiles: Tensor, n: int,
    *, n_before: int, scale: float, k: int, chain: bool, masks: int = 0,
) -> DraftRows:  # fmt: skip
    states, dim = sources[1], where.cos.shape[1]
    requests, _, size = states.shape
    positions, kv_rows, ancestors = where.slots.new_empty(3, requests * n).unbind()
    cos, sin = (table.new_empty(requests * n, dim) for table in (where.cos, where.sin))
    inputs, ends = states.new_empty(requests, n, 2 * size), where.slots.new_empty(requests)
    made = DraftRows(inputs, positions, kv_rows, ancestors, cos, sin, ends)
    _draft_rows[(requests * n, -(-size // _BLOCK))](
        *sources, where.slots, where.prefix_lens, where.rows, where.max_depths, where.cos, where.sin,
        made.inputs, made.positions, made.kv_rows, made.ancestors, made.cos, made.sin, made.ends, tiles,
        states.stride(0), n, n_before, masks, where.slot_rows, len(tiles) // requests, scale,
        SIZE=size, DIM=dim, K=k, CHAIN=chain, BLOCK=min(_BLOCK, power_of_two(size)),
        BLOCK_DIM=power_of_two(dim), num_warps=4,
    )  # fmt: skip
    return made


@jit(
    do_not_specialize=["n", "n_before", "masks", "slot_rows", "tiles_each", "scale"],
    do_not_specialize_on_alignment=[
        "tokens", "parents", "beam_ancestors", "slots", "prefix_lens", "new_rows", "max_depths", "positions",
        "kv_rows", "ancestors", "ends", "tiles",
    ],
)  # fmt: skip
def _draft_rows(  # type: ignore[no-untyped-def]
    embeddings, states, before, tokens, parents, beam_ancestors, slots, prefix_lens, new_rows, max_depths, cos, sin,
    inputs, positions, kv_rows, ancestors, row_cos, row_sin, ends, tiles,
    state_stride, n, n_before, masks, slot_rows, tiles_each, scale,
    SIZE: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request, index = row // n, row % n
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    to = inputs + row * 2 * SIZE + column
    if CHAIN:
        at = request * state_stride + index * SIZE + column
        tl.store(to, tl.load(embeddings + at, mask), mask)
        tl.store(to + SIZE, tl.load(states + at, mask), mask)
    elif index < n_before:
        at = (request * n_before + index) * 2 * SIZE + column
        tl.store(to, tl.load(before + at, mask), mask)
        tl.store(to + SIZE, tl.load(before + at + SIZE, mask), mask)
    else:
        node = request * K + index - n_before
        embedding = tl.load(embeddings + tl.load(tokens + node) * SIZE + column, mask)
        tl.store(to, (embedding.to(tl.float32) * scale).to(embedding.dtype), mask)
        at = request * state_stride + tl.load(parents + node) * SIZE + column
        tl.store(to + SIZE, tl.load(states + at, mask), mask)

    if tl.program_id(1) == 0:
        slot, first = tl.load(slots + request), tl.load(prefix_lens + request)
        if CHAIN:
            count = tl.load(new_rows + request)
            first = first - count
            later = tl.minimum(tl.maximum(tl.load(max_depths + request) - 1, 0), masks)
            position = first + tl.minimum(index, count - 1 + later)
            tl.store(ancestors + row, tl.zeros((), tl.int64))
            tl.store(ends + request, request * n + count - 1)
        else:
            deepest = tl.maximum(tl.load(max_depths + request) - 1, 0)
            position = first + tl.minimum(index // K, deepest)
            tl.store(ancestors + row, tl.load(beam_ancestors + row))
        tl.store(positions + row, position)
        tl.store(kv_rows + row, slot * slot_rows + first + index)
        dim = tl.arange(0, BLOCK_DIM)
        tl.store(row_cos + row * DIM + dim, tl.load(cos + position * DIM + dim, dim < DIM), dim < DIM)
        tl.store(row_sin + row * DIM + dim, tl.load(sin + position * DIM + dim, dim < DIM), dim < DIM)
        if index == 0:
            for tile in range(tiles_each):
                own = tiles + (request * tiles_each + tile) * 6
                tl.store(own, slot.to(tl.int32))
                tl.store(own + 1, first.to(tl.int32))
