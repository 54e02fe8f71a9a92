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
    def levels(self) -> int:
        """Nodes on the longest branch."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)


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
    # With a root in front, which becomes the tree's.
    tokens = send((0, *branches.tokens), tree.tokens.device)
    alone = Tree(
        tokens=tokens,
        ancestry=Ancestry.of((-1, *(parent + 1 for parent in branches.parents)), tokens.device),
        log_probs=torch.full_like(tokens, -torch.inf, dtype=tree.log_probs.dtype),
        valid=torch.ones_like(tokens, dtype=torch.bool),
        relaxable=torch.full_like(tokens, relaxable, dtype=torch.bool),
        levels=branches.levels,
    )
    return tree.joined_with(alone)
