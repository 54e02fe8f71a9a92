# SPDX-License-Identifier: Apache-2.0
"""The engine's one primitive: segments, and the packed forward that carries any mix of them.

Everything the model computes is one call on a list of segments. A prefill is a chain of prompt embeddings, whole or a
chunk after a committed prefix; a decode step is a tree of one node; a verification is a tree of drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_kernels.layout import Ancestry, PackedLayout, Span, pack_layout
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.models.target import Decoder, ForwardResult


@dataclass(frozen=True)
class Segment:
    """One request's share of a packed forward.

    Args:
        slot: the request's KV slot.
        prefix_len: rows already committed in the slot.
        inputs: embeddings [n, hidden], or int64 token ids [n].
        ancestry: None for a chain. For a tree: who descends from whom; -1 for a node that follows the prefix directly
            (the root).
        wanted: how many of the last nodes need logits: 0 for a chunk that does not end the prompt, 1 for the end of a
            prefill, n for a tree.
        positions: int64 [axes, n], RoPE positions of a chain's rows, or those of a tree's root in each of its rows, for
            a model whose rows have several; None: they count up with the slot's rows.
        sees_all: of a chain: every row sees all of it (the prompt of a prefix language model).

    Raises:
        ValueError: no nodes, an ancestry or positions that do not fit them, wanted out of range.
    """

    slot: int
    prefix_len: int
    inputs: Tensor
    ancestry: Ancestry | None = None
    wanted: int = 1
    positions: np.ndarray | None = None
    sees_all: bool = False

    def __post_init__(self) -> None:
        n = len(self)
        if n == 0:
            raise ValueError("a segment needs at least one node")
        if not 0 <= self.wanted <= n:
            raise ValueError(f"wanted must be 0 to {n}, got {self.wanted}")
        if self.ancestry is not None and len(self.ancestry) != n:
            raise ValueError(f"{n} nodes have an ancestry of {len(self.ancestry)}")
        if self.positions is not None and self.positions.shape[1] != n:
            raise ValueError(f"{n} nodes have {self.positions.shape[1]} positions")

    def __len__(self) -> int:
        return self.inputs.shape[0]


@dataclass(frozen=True)
class PackedBatch:
    """Segments side by side, ready for one forward.

    Args:
        embeddings: [n_rows, hidden], the segments' inputs in order.
        layout: where each segment lies in the rows and in the KV cache.
        wanted_rows: int64 [n_wanted], the rows whose logits are computed, segments in order.
    """

    embeddings: Tensor
    layout: PackedLayout
    wanted_rows: Tensor


def spans_of(segments: Sequence[Segment], slot_rows: int) -> list[Span]:
    """Where the segments lie, side by side.

    Args:
        segments: as in `pack`.
        slot_rows: of a slot that they may be written to.

    Raises:
        ValueError: two segments of a slot that do not follow each other, or one that does not fit its slot.
    """
    ends: dict[int, int] = {}
    spans: list[Span] = []
    start = 0
    for segment in segments:
        n, prefix_len = len(segment), segment.prefix_len
        if ends.get(segment.slot, prefix_len) != prefix_len:
            raise ValueError(f"two segments of slot {segment.slot} do not follow each other")
        # Behind a tree there is no one place to go on from.
        ends[segment.slot] = prefix_len + n if segment.ancestry is None else -1
        if prefix_len + n > slot_rows:
            raise ValueError(f"{prefix_len} committed rows and {n} nodes do not fit a slot of {slot_rows} rows")
        is_tree = segment.ancestry is not None
        spans.append(Span(segment.slot, start, n, prefix_len, is_tree=is_tree, sees_all=segment.sees_all))
        start += n
    return spans


def wanted_rows(segments: Sequence[Segment], spans: Sequence[Span]) -> list[int]:
    """The packed rows whose logits are wanted, segments in order."""
    return [
        row
        for segment, span in zip(segments, spans, strict=True)
        for row in range(span.stop - segment.wanted, span.stop)
    ]


def pack(segments: Sequence[Segment], slot_rows: int, embed: Callable[[Tensor], Tensor]) -> PackedBatch:
    """Concatenates segments.

    Args:
        segments: at least one. A slot's second segment is a tree that begins where its first, a chain, ends.
        slot_rows: rows per slot of the KV cache they are to be written to.
        embed: token ids [n] to embeddings [n, hidden].

    Raises:
        ValueError: two segments of a slot that do not follow each other, or one that does not fit its slot.
    """
    spans = spans_of(segments, slot_rows)
    parts = [(span, segment.ancestry) for span, segment in zip(spans, segments, strict=True)]
    embedded = [s.inputs if s.inputs.is_floating_point() else embed(s.inputs) for s in segments]
    device = embedded[0].device
    return PackedBatch(
        embeddings=embedded[0] if len(embedded) == 1 else torch.cat(embedded),
        layout=pack_layout(parts, slot_rows, device, _first_positions(segments, spans, device)),
        wanted_rows=to_device(wanted_rows(segments, spans), device),
    )


def _first_positions(segments: Sequence[Segment], spans: Sequence[Span], device: torch.device) -> Tensor | None:
    """Int64 [axes, n_rows]; None where no segment brings its own."""
    axes = next((len(segment.positions) for segment in segments if segment.positions is not None), 0)
    if not axes:
        return None
    rows = [first_positions(segment, span, axes) for segment, span in zip(segments, spans, strict=True)]
    return to_device(np.concatenate(rows, axis=1).tolist(), device)


def first_positions(segment: Segment, span: Span, axes: int) -> np.ndarray:
    """A segment's own, or those that count up with the slot's rows: int64 [axes, n], see `Segment.positions`."""
    if segment.positions is not None:
        return segment.positions
    rows = np.zeros(span.length, np.int64) if span.is_tree else np.arange(span.length)
    return np.tile(span.prefix_len + rows, (axes, 1))


def packed_forward(decoder: Decoder, segments: Sequence[Segment], cache: KVCache) -> ForwardResult:
    """Runs any mix of prefills, chunks, decode steps and trees; writes their keys and values to the KV cache.

    Each segment gets what it would get alone, to rounding.

    Returns:
        Logits of each segment's last `wanted` nodes, and hidden states of all nodes, segments in order.
    """
    batch = pack(segments, cache.slot_rows, decoder.embed_tokens)
    return decoder(batch.embeddings, batch.layout, batch.wanted_rows, cache.keys, cache.values)
