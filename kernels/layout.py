"""Where each segment of a packed forward lies: in the packed rows and in the KV ring."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_TREE_NODES = 64  # a node's ancestors are the bits of one int64


@dataclass(frozen=True)
class Span:
    """One segment's place.

    Args:
        slot: its KV slot.
        start: its first row in the packed batch.
        length: its number of rows (nodes).
        prefix_len: committed rows of the slot; node j writes its keys and values to row `prefix_len + j`.
        is_tree: True: node i sees the prefix and the nodes in `ancestors[start + i]`. False: a chain, causal.
    """

    slot: int
    start: int
    length: int
    prefix_len: int
    is_tree: bool

    @property
    def stop(self) -> int:
        """One past its last row in the packed batch."""
        return self.start + self.length


@dataclass(frozen=True)
class PackedLayout:
    """The layout that all operators of one packed forward share.

    Args:
        spans: one per segment, in packed order, none empty.
        positions: int64 [n_rows], RoPE position of each row: prefix length + depth in the segment.
        kv_rows: int64 [n_rows], where each row's keys and values go: `slot * slot_rows + prefix_len + node`.
        ancestors: int64 [n_rows], bit j set: node j of the same segment is an ancestor or the node itself.
            0 for the rows of chains.
    """

    spans: tuple[Span, ...]
    positions: Tensor
    kv_rows: Tensor
    ancestors: Tensor

    @cached_property
    def masks(self) -> tuple[Tensor | None, ...]:
        """Per segment: bool [length, prefix_len + length], True = visible; None where causal or all is visible."""
        return tuple(self._mask(span) for span in self.spans)

    def _mask(self, span: Span) -> Tensor | None:
        if span.length == 1 or (not span.is_tree and span.prefix_len == 0):
            return None
        device = self.ancestors.device
        nodes = torch.arange(span.length, device=device)
        if span.is_tree:
            among = (self.ancestors[span.start : span.stop, None] >> nodes) & 1 == 1
        else:
            among = nodes[:, None] >= nodes
        prefix = torch.ones(span.length, span.prefix_len, dtype=torch.bool, device=device)
        return torch.cat((prefix, among), dim=1)
