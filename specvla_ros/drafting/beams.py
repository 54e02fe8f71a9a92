"""The nodes that the draft head runs over: each level's beam, all levels so far."""

import torch
from torch import Tensor

from specvla_ros.drafting.dynamic_tree import TreeGrowth


class Beams:
    """Beams of some trees, level behind level.

    Args:
        levels: int64 [trees], of drafted tokens; no depth is counted beyond them, so that every position exists.

    Attributes:
        tokens: int64 [trees, n].
        states: [trees, n, hidden], what the head foresaw at the nodes' parents.
        depths: int64 [trees, n]; 0 right behind the root.
        ancestors: int64 [trees, n]; bit j set: node j is an ancestor or the node itself.
    """

    def __init__(self, levels: Tensor) -> None:
        self._deepest = (levels - 1).clamp(min=0)[:, None]
        self._width = 0
        self._levels = 0
        none = torch.empty((len(levels), 0), dtype=torch.int64, device=levels.device)
        self.tokens = self.depths = self.ancestors = none
        self.states: Tensor | None = None

    def add(self, growth: TreeGrowth, foreseen: Tensor) -> None:
        """Puts the newest beam behind those before it.

        Args:
            growth: of the trees.
            foreseen: [trees, beam, hidden], the head's states at the beam before; at the root for the first.
        """
        trees, width = growth.beam_tokens.shape
        before = self.tokens.shape[1]
        parents = growth.beam_parents
        bits = torch.ones_like(parents) << torch.arange(before, before + width, device=parents.device)
        if before:
            bits = bits | self.ancestors.gather(1, before - self._width + parents)
        states = foreseen.gather(1, parents[:, :, None].expand(-1, -1, foreseen.shape[2]))
        depth = self._deepest.clamp(max=self._levels).expand(trees, width)
        self.tokens = torch.cat((self.tokens, growth.beam_tokens), dim=1)
        self.states = states if self.states is None else torch.cat((self.states, states), dim=1)
        self.depths = torch.cat((self.depths, depth), dim=1)
        self.ancestors = torch.cat((self.ancestors, bits), dim=1)
        self._width = width
        self._levels += 1
