"""Segments, and the packed batch that carries any mix of them through one forward.

Everything the model computes is one call on a list of segments. A prefill is a chain of prompt embeddings, whole or a
chunk behind a committed prefix; a decode step is a tree of one node; a verification is a tree of drafted tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.layout import MAX_TREE_NODES, PackedLayout, Span


@dataclass(frozen=True)
class Segment:
    """One request's share of a packed forward.

    Args:
        slot: the request's KV slot.
        prefix_len: rows already committed in the slot.
        inputs: embeddings [n, hidden], or int64 token ids [n].
        parents: None for a chain. For a tree: each node's parent as an index into the segment, less than the node's
            own; -1 for a node that follows the prefix directly (the root).
        wanted: how many of the last nodes need logits: 0 for a chunk that does not end the prompt, 1 for the end of a
            prefill, n for a tree.

    Raises:
        ValueError: no nodes, parents that do not fit the nodes, a tree over 64 nodes, wanted out of range.
    """

    slot: int
    prefix_len: int
    inputs: Tensor
    parents: tuple[int, ...] | None = None
    wanted: int = 1

    def __post_init__(self) -> None:
        n = len(self)
        if n == 0:
            raise ValueError("a segment needs at least one node")
        if not 0 <= self.wanted <= n:
            raise ValueError(f"wanted must be 0 to {n}, got {self.wanted}")
        if self.parents is None:
            return
        if len(self.parents) != n or any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"each of the {n} nodes needs a parent before itself or -1, got {self.parents}")
        if n > MAX_TREE_NODES:
            raise ValueError(f"a tree holds at most {MAX_TREE_NODES} nodes, got {n}")

    def __len__(self) -> int:
        return self.inputs.shape[0]


@dataclass(frozen=True)
class PackedBatch:
    """Segments side by side, ready for one forward.

    Args:
        embeddings: [n_rows, hidden], the segments' inputs in order.
        layout: where each segment lies in the rows and in the KV ring.
        wanted_rows: int64 [n_wanted], the rows whose logits are computed, segments in order.
    """

    embeddings: Tensor
    layout: PackedLayout
    wanted_rows: Tensor


def pack(segments: Sequence[Segment], slot_rows: int, embed: Callable[[Tensor], Tensor]) -> PackedBatch:
    """Concatenates segments.

    Args:
        segments: at least one, of different slots.
        slot_rows: rows per slot of the ring they are to be written to.
        embed: token ids [n] to embeddings [n, hidden].

    Raises:
        ValueError: two segments share a slot, or one does not fit its slot.
    """
    if len({segment.slot for segment in segments}) != len(segments):
        raise ValueError(f"each segment needs a slot of its own, got {[segment.slot for segment in segments]}")
    for segment in segments:
        if segment.prefix_len + len(segment) > slot_rows:
            raise ValueError(
                f"{segment.prefix_len} committed rows and {len(segment)} nodes do not fit a slot of {slot_rows} rows"
            )
    spans: list[Span] = []
    positions: list[int] = []
    kv_rows: list[int] = []
    ancestors: list[int] = []
    wanted: list[int] = []
    start = 0
    for segment in segments:
        n, prefix = len(segment), segment.prefix_len
        depths, masks = _ancestry(segment)
        spans.append(Span(segment.slot, start, n, prefix, segment.parents is not None))
        positions += [prefix + depth for depth in depths]
        first_row = segment.slot * slot_rows + prefix
        kv_rows += range(first_row, first_row + n)
        ancestors += masks
        wanted += range(start + n - segment.wanted, start + n)
        start += n
    embedded = [s.inputs if s.inputs.is_floating_point() else embed(s.inputs) for s in segments]
    device = embedded[0].device

    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedBatch(
        embeddings=embedded[0] if len(embedded) == 1 else torch.cat(embedded),
        layout=PackedLayout(tuple(spans), upload(positions), upload(kv_rows), upload(ancestors)),
        wanted_rows=upload(wanted),
    )


def _ancestry(segment: Segment) -> tuple[Sequence[int], list[int]]:
    """Depth of each node, and its ancestors and itself as bits (0 in a chain, where the order says it)."""
    if segment.parents is None:
        return range(len(segment)), [0] * len(segment)
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(segment.parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        mask = (masks[parent] if parent >= 0 else 0) | 1 << node
        masks.append(mask)
    return depths, [mask - (1 << 64) if mask >= 1 << 63 else mask for mask in masks]
