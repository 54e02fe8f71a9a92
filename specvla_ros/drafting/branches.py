"""Chains that the host knows, as branches of a draft tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specvla_kernels.layout import Ancestry
from specvla_kernels.send import send
from specvla_ros.drafting.tree import Tree


@dataclass(frozen=True)
class Branches:
    """Chains that begin at the root, with common beginnings joined.

    Args:
        tokens: one per node.
        parents: of each node, as an index into these nodes; -1: the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def of(chains: Sequence[Sequence[int]], *, levels: int, most: int) -> "Branches":
        """Joins chains.

        Args:
            chains: drafted tokens, the first behind the root.
            levels: of each chain, so many tokens are taken.
            most: nodes in all; what comes last is left out.
        """
        places: dict[tuple[int, int], int] = {}
        for chain in chains:
            node = -1
            for token in chain[:levels]:
                if (node, token) not in places:
                    if len(places) >= most:
                        break
                    places[node, token] = len(places)
                node = places[node, token]
        return Branches(tuple(token for _, token in places), tuple(parent for parent, _ in places))

    @property
    def depths(self) -> list[int]:
        """Of each node below the root, from 1 on."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return depths

    @property
    def levels(self) -> int:
        """Nodes on the longest branch."""
        return max(self.depths, default=0)

    def ancestors(self, first: int) -> list[int]:
        """Of each node, as bits of an int64: the root, and nodes from number `first` on."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append((found[parent] if parent >= 0 else 1) | 1 << first + node)
        return [bits - (bits >> 63 << 64) for bits in found]


def add_branches(tree: Tree, branches: Branches, *, relaxable: bool) -> Tree:
    """The tree with the branches below its root.

    Args:
        tree: of any source.
        branches: to add.
        relaxable: whether they may be taken when they are not the target's own choice.

    What the tree holds is not known to the host, so that a token may be there twice; it is then accepted once. Nothing
    is known of the branches' probability: their log_probs are -inf, the last in a tie.
    """
    if not len(branches):
        return tree
    n = len(tree)
    parents = [parent + n if parent >= 0 else 0 for parent in branches.parents]
    numbers = send((branches.tokens, parents, branches.depths, branches.ancestors(n)), tree.tokens.device)
    own = tree.tokens, tree.ancestry.parents, tree.ancestry.depths, tree.ancestry.ancestors
    tokens, *ancestry = (torch.cat(pair) for pair in zip(own, numbers, strict=True))
    return Tree(
        tokens=tokens,
        ancestry=Ancestry(*ancestry),
        log_probs=torch.cat((tree.log_probs, torch.full_like(numbers[0], -torch.inf, dtype=tree.log_probs.dtype))),
        valid=torch.cat((tree.valid, torch.ones_like(numbers[0], dtype=torch.bool))),
        relaxable=torch.cat((tree.relaxable, torch.full_like(numbers[0], relaxable, dtype=torch.bool))),
        levels=max(tree.levels, branches.levels),
    )
