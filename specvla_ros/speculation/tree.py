# SPDX-License-Identifier: Apache-2.0
"""The draft tree: drafted tokens and their ancestry on the device, and trees made from chains on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specvla_kernels.layout import Ancestry


@dataclass(frozen=True)
class Tree:
    """Drafted tokens below a root; the root is node 0, the last committed token."""

    tokens: Tensor  # int64 [n]
    ancestry: Ancestry  # of the n nodes; only the root's parent is -1
    # float32 [n], the draft's log-probability of the path to the node: 0 at the root, -inf if unknown.
    log_probs: Tensor
    valid: Tensor  # bool [n]; False marks padding, which is never accepted. The root is valid
    relaxable: Tensor  # bool [n]; False: accepted only if it is the target's own choice, regardless of the rule
    depth: int  # upper bound of the nodes' depths, known to the host

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @staticmethod
    def from_root(root: Tensor) -> Tree:
        """The one-node tree of a plain decode step, from a token, int64 [] or [1]."""
        return replace(_single(root.device), tokens=root.reshape(1))

    def joined_with(self, other: Tree) -> Tree:
        """Merges both trees' drafted nodes below their common root, without reading their values.

        A token in both trees occurs twice in the result, but is accepted only once.
        """
        import torch

        from specvla_kernels.layout import Ancestry

        if len(other) == 1:
            return self
        if len(self) == 1:
            return other
        # The other's root becomes this one's; its other nodes follow all of this one's.
        mine, above, n = self.ancestry, other.ancestry.parents[1:], len(self)
        return Tree(
            tokens=torch.cat((self.tokens, other.tokens[1:])),
            ancestry=Ancestry(
                parents=torch.cat((mine.parents, torch.where(above == 0, 0, above + n - 1))),
                depths=torch.cat((mine.depths, other.ancestry.depths[1:])),
                ancestors=torch.cat((mine.ancestors, other.ancestry.ancestors[1:] >> 1 << n | 1)),
            ),
            log_probs=torch.cat((self.log_probs, other.log_probs[1:])),
            valid=torch.cat((self.valid, other.valid[1:])),
            relaxable=torch.cat((self.relaxable, other.relaxable[1:])),
            depth=max(self.depth, other.depth),
        )


@cache  # only its token varies, so making a one-node tree launches nothing
def _single(device: torch.device) -> Tree:
    import torch

    from specvla_kernels.layout import Ancestry

    none = torch.zeros(1, dtype=torch.int64, device=device)
    yes = torch.ones(1, dtype=torch.bool, device=device)
    ancestry = Ancestry(torch.full_like(none, -1), none, torch.ones_like(none))
    return Tree(none, ancestry, torch.zeros(1, device=device), valid=yes, relaxable=yes, depth=0)


@dataclass(frozen=True)
class Branches:
    """Chains that start at the root, with common prefixes merged."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index of each node's parent among these nodes; -1: the root

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def from_chains(chains: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int) -> Branches:
        """Merges chains, each cut to `max_depth` tokens; tokens beyond `max_nodes` in total are left out."""
        whole = [max_depth] * len(chains)
        return Branches.level_by_level(chains, max_depth=max_depth, max_nodes=max_nodes, paces=whole)

    @staticmethod
    def level_by_level(
        chains: Sequence[Sequence[int]], *, max_depth: int, max_nodes: int, paces: Sequence[int] = ()
    ) -> Branches:
        """Merges chains grown in turn, so that all end within one level of each other when nodes run out.

        `paces` is the number of tokens that each chain grows by per turn, i.e. its share of the nodes; 1 by default.
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
        """Returns the tree of these branches below a root, int64 [] or [1].

        Their probability is unknown: log_probs are -inf, which loses ties. `relaxable`: whether nodes other than the
        target's own choice may be accepted.
        """
        import torch

        from specvla_kernels.device import to_device
        from specvla_kernels.layout import Ancestry

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
