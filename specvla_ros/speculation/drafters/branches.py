# SPDX-License-Identifier: Apache-2.0
"""Chains of drafted tokens that the host knows, as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class Branches:
    """Chains that begin at the root, with common beginnings joined.

    `parents`: of each node, as an index into these nodes; -1: the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_chains(chains: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int) -> Branches:
        """Joins chains of drafted tokens, the first after the root.

        Args:
            max_depth: tokens taken of each chain.
            max_nodes: in all; the last tokens are left out.
        """
        nodes: dict[tuple[int, int], int] = {}
        for chain in chains:
            node = -1
            for token in chain[:max_depth]:
                if (node, token) not in nodes:
                    if len(nodes) >= max_nodes:
                        break
                    nodes[node, token] = len(nodes)
                node = nodes[node, token]
        return Branches(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))

    @staticmethod
    def level_by_level(
        chains: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int, paces: Sequence[int] = ()
    ) -> Branches:
        """Joins chains that grow together: where nodes run out, all of them end at the same depth, or one before.

        Args:
            max_depth: tokens taken of each chain.
            max_nodes: in all.
            paces: tokens that each chain grows by in its turn, and so its share of the nodes; by default one.
        """
        nodes: dict[tuple[int, int], int] = {}
        ends, grown, growing = [-1] * len(chains), [0] * len(chains), True
        while growing and len(nodes) < max_nodes:
            growing = False
            for i, chain in enumerate(chains):
                for token in chain[grown[i] : min(grown[i] + (paces[i] if paces else 1), max_depth)]:
                    node = (ends[i], token)
                    if node not in nodes and len(nodes) >= max_nodes:
                        break
                    ends[i] = nodes.setdefault(node, len(nodes))
                    grown[i] += 1
                    growing = True
        return Branches(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))

    @property
    def depth(self) -> int:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)

    def tree(self, root: Tensor, *, relaxable: bool) -> Tree:
        """The branches below a root, int64 [] or [1].

        Their probability is unknown: their log_probs are -inf, the last in a tie. `relaxable`: whether they may be
        accepted where they are not the target's own choice.
        """
        import torch

        from specvla_kernels.device import to_device
        from specvla_kernels.layout import Ancestry
        from specvla_ros.speculation.tree import Tree

        if not len(self):
            return Tree.from_root(root)
        tokens = torch.cat((root.reshape(1), to_device(self.tokens, root.device)))
        return Tree(
            tokens=tokens,
            ancestry=Ancestry.from_parents((-1, *(parent + 1 for parent in self.parents)), tokens.device),
            log_probs=torch.full_like(tokens, -torch.inf, dtype=torch.float32),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            relaxable=torch.full_like(tokens, relaxable, dtype=torch.bool),
            depth=self.depth,
        )
