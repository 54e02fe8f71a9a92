# SPDX-License-Identifier: Apache-2.0
"""The draft tree: drafted tokens and their ancestry, on the device."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry


@dataclass(frozen=True)
class Tree:
    """Drafted tokens below a root; the root is node 0, the last committed token.

    Args:
        tokens: int64 [n].
        ancestry: of the n nodes; only the root's parent is -1.
        log_probs: float32 [n], the draft's log-probability of the path to the node; 0 at the root; -inf if unknown.
        valid: bool [n]; False marks padding, which is never accepted. The root is valid.
        relaxable: bool [n]; False: the node is accepted only if it is the target's own choice, whatever the rule.
        depth: no node is deeper; known to the host.
    """

    tokens: Tensor
    ancestry: Ancestry
    log_probs: Tensor
    valid: Tensor
    relaxable: Tensor
    depth: int

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @staticmethod
    def from_root(root: Tensor) -> "Tree":
        """The tree of a plain decode step: int64 [] or [1] to one node."""
        return replace(_single(root.device), tokens=root.reshape(1))

    def joined_with(self, other: "Tree") -> "Tree":
        """Both trees' drafted nodes below their common root, without reading either.

        A token that both hold is there twice; it is then accepted once.
        """
        if len(other) == 1:
            return self
        if len(self) == 1:
            return other
        # Its root is this one's; its other nodes come after all of this one's.
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


@cache  # nothing but its token differs: a tree of one node launches nothing
def _single(device: torch.device) -> Tree:
    none = torch.zeros(1, dtype=torch.int64, device=device)
    yes = torch.ones(1, dtype=torch.bool, device=device)
    ancestry = Ancestry(torch.full_like(none, -1), none, torch.ones_like(none))
    return Tree(none, ancestry, torch.zeros(1, device=device), valid=yes, relaxable=yes, depth=0)
