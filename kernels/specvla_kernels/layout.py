# SPDX-License-Identifier: Apache-2.0
"""Location of each segment of a packed forward, in the packed rows and in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, Span, plan_attention
from specvla_kernels.device import to_device

MAX_TREE_NODES = 64  # a node's ancestors are the bits of one int64


@dataclass(frozen=True)
class Ancestry:
    """Parents, depths and ancestors of a tree's nodes, int64 [n]; parents come before their children."""

    parents: Tensor  # -1 for nodes that follow the slot's committed rows directly
    depths: Tensor  # 0 for these
    ancestors: Tensor  # bit j: node j is an ancestor or the node itself

    def __len__(self) -> int:
        return self.parents.shape[0]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.parents, self.depths, self.ancestors

    @staticmethod
    def from_parents(parents: Sequence[int], device: torch.device | str = "cpu") -> "Ancestry":
        """Makes it from parents known on the host; raises ValueError as `ancestry_columns` does."""
        return Ancestry(*to_device(ancestry_columns(parents), torch.device(device)).unbind())

    @staticmethod
    def on_device(parents: Tensor, levels: int) -> "Ancestry":
        """Makes it from parents [n] or [trees, n] on the device, at most `levels` deep, without a read-back."""
        one = torch.ones_like(parents)
        ancestors, depths, above = one << torch.arange(parents.shape[-1], device=parents.device), one - 1, parents
        for _ in range(levels):
            there, node = above >= 0, above.clamp(min=0)
            ancestors = ancestors | torch.where(there, one << node, 0)
            depths = depths + there
            above = torch.where(there, parents.gather(-1, node), -1)
        return Ancestry(parents, depths, ancestors)

    def without_root(self) -> "Ancestry":
        """The ancestry of the nodes after node 0, for a forward in which node 0 is the end of another segment."""
        return Ancestry(self.parents[1:] - 1, self.depths[1:] - 1, (self.ancestors[1:] >> 1) & (1 << 63) - 1)


def ancestry_columns(parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Parents, depths and ancestors of 1 to 64 nodes; raises ValueError if a parent is not before its node."""
    n = len(parents)
    if not 0 < n <= MAX_TREE_NODES:
        raise ValueError(f"a tree holds 1 to {MAX_TREE_NODES} nodes, got {n}")
    if any(not -1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"each of the {n} nodes needs a parent before itself or -1, got {tuple(parents)}")
    depths, ancestors = [0] * n, [1 << node for node in range(n)]
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node], ancestors[node] = depths[parent] + 1, ancestors[parent] | ancestors[node]
    return [*parents], depths, [bits - (bits >> 63 << 64) for bits in ancestors]


@dataclass(frozen=True)
class PackedLayout:
    """The layout that all operators of one packed forward share."""

    spans: tuple[Span, ...]  # one per segment, in packed order, none empty
    # int64 [n_rows], RoPE position of each row: prefix length + depth in the segment; [axes, n_rows] for a model with
    # several per row (M-RoPE).
    positions: Tensor
    kv_rows: Tensor  # int64 [n_rows], destination of each row's keys and values, see `Span.first_kv_row`
    # int64 [n_rows], bit j set: node j of the same segment is an ancestor or the node itself. 0 for the rows of causal
    # chains; all bits for rows that see all of their chain, of any length.
    ancestors: Tensor
    # Plans of the attention kernel, by group and key heads, made on demand; a captured forward provides its own.
    plans: dict[tuple[int, int], AttentionPlan] = field(default_factory=dict, compare=False, repr=False)

    def attention_plan(self, heads: int, kv_heads: int, slot_rows: int) -> AttentionPlan:
        """The attention kernel's work in this forward, the same object for every layer."""
        group, device = heads // kv_heads, self.ancestors.device
        if (group, kv_heads) not in self.plans:
            plan = plan_attention(self.spans, group=group, kv_heads=kv_heads, slot_rows=slot_rows, device=device)
            self.plans[group, kv_heads] = plan
        return self.plans[group, kv_heads]

    @cached_property
    def masks(self) -> tuple[Tensor | None, ...]:
        """Mask per segment, bool [length, prefix_len + length], True = visible; None if causal or all is visible."""
        return tuple(self._mask(span) for span in self.spans)

    def _mask(self, span: Span) -> Tensor | None:
        if span.length == 1 or span.sees_all or (not span.is_tree and span.prefix_len == 0):
            return None
        device = self.ancestors.device
        nodes = torch.arange(span.earlier + span.length, device=device)
        if span.is_tree:
            among = (self.ancestors[span.start : span.stop, None] >> nodes) & 1 == 1
        else:
            among = nodes[:, None] >= nodes
        prefix = torch.ones(span.length, span.prefix_len - span.earlier, dtype=torch.bool, device=device)
        return torch.cat((prefix, among), dim=1)


def pack_layout(
    parts: Sequence[tuple[Span, Ancestry | None]],
    slot_rows: int,
    device: torch.device,
    first_positions: Tensor | None = None,
) -> PackedLayout:
    """Lays out segments in packed order, each with its ancestry if it is a tree, without a read-back.

    `first_positions`, int64 [axes, n_rows], are RoPE positions that do not count up with the slot's rows: those of a
    chain's rows, and for a tree's rows that of its root.
    """
    positions: list[Tensor] = []
    kv_rows: list[Tensor] = []
    ancestors: list[Tensor] = []
    for span, ancestry in parts:
        nodes = torch.arange(span.length, device=device)
        if first_positions is None:
            positions.append(span.prefix_len + (nodes if ancestry is None else ancestry.depths))
        else:
            first = first_positions[:, span.start : span.stop]
            positions.append(first if ancestry is None else first + ancestry.depths)
        kv_rows.append(span.first_kv_row(slot_rows) + nodes)
        of_chain = -1 if span.sees_all else 0
        ancestors.append(torch.full_like(nodes, of_chain) if ancestry is None else ancestry.ancestors)
    spans = tuple(span for span, _ in parts)
    return PackedLayout(spans, torch.cat(positions, dim=-1), torch.cat(kv_rows), torch.cat(ancestors))
