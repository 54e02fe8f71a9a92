# SPDX-License-Identifier: Apache-2.0
"""Which children of a node a draft tree considers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.models.codecs.codec import ActionIds

IN_TEXT = -(1 << 20)
"""Below 0, however deep a tree grows from it: in place of an action dimension where the child may be text."""

# From log-probabilities [b, vocab] and the children's action dimensions, int64 [b], to tokens and scores, both [b, k].
Children = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def top_k(k: int) -> Children:
    """The k likeliest tokens, scored by their log-probability (EAGLE-2)."""

    def choose(log_probs: Tensor, dimensions: Tensor) -> tuple[Tensor, Tensor]:
        best = log_probs.topk(k, dim=-1)
        return best.indices, best.values

    return choose


@dataclass(frozen=True)
class WindowMass:
    """Action tokens that between them cover most of the draft's probability, each with its tolerance.

    Under relaxation neighbouring bins cover the same target: the likeliest k bins are mostly one guess. Here the first
    child is the likeliest bin; what its window [b - r, b + r] covers is taken away, and so on. Siblings are at least
    r + 1 bins apart, and a child's score is the log of the mass that it alone covers: the draft's estimate that this
    sibling will be the accepted one. With r = 0 these are the k likeliest bins.

    A child is not put where its window holds most mass. Where the draft is sure, every window around its guess holds
    nearly all of the mass, and the one that catches a little more of the tails is off by up to r bins, always to the
    same side: accepted, and wrong. The nano policy then hardly ever lifted a cube.

    Args:
        k: children per node.
        actions: ids of action tokens.
        bins: int64 [dimensions + 1], r per action dimension; the last is for every dimension beyond.
        text: whether children may be text; where they may, in dimension `IN_TEXT`, they are the k likeliest tokens.
    """

    k: int
    actions: ActionIds
    bins: Tensor
    text: bool = False

    @staticmethod
    def from_actions(
        k: int, actions: ActionIds, dimensions: int, device: torch.device, *, text: bool = False
    ) -> "WindowMass":
        """Without tolerance in any of the action's dimensions."""
        return WindowMass(k, actions, torch.zeros(dimensions + 1, dtype=torch.int64, device=device), text)

    def tolerate(self, bins: Sequence[int]) -> None:
        """Takes another r per action dimension, 0 beyond them, in the same memory: a captured draft reads it."""
        self.bins.copy_(torch.tensor([*bins] + [0] * (len(self.bins) - len(bins))))

    def __call__(self, log_probs: Tensor, dimensions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and scores [b, k]; -inf where no mass is left."""
        tokens, scores = self._actions(log_probs, dimensions.clamp(min=0) if self.text else dimensions)
        if not self.text:
            return tokens, scores
        likeliest, is_text = log_probs.topk(self.k, dim=-1), (dimensions < 0)[:, None]
        return torch.where(is_text, likeliest.indices, tokens), torch.where(is_text, likeliest.values, scores)

    def _actions(self, log_probs: Tensor, dimensions: Tensor) -> tuple[Tensor, Tensor]:
        r = self.bins[dimensions.clamp(max=len(self.bins) - 1), None]
        left = self._by_bin(log_probs)
        bins = torch.arange(left.shape[-1], device=left.device)
        tokens, scores = [], []
        for _ in range(self.k):
            likeliest = left == left.amax(dim=-1, keepdim=True)
            bin_ = torch.where(likeliest, bins, len(bins)).amin(dim=-1, keepdim=True)
            near = (bins - bin_).abs() <= r
            tokens.append(self._token(bin_, log_probs))
            scores.append(torch.where(near, left, 0.0).sum(dim=-1, keepdim=True).log())
            left = torch.where(near, 0.0, left)
        return torch.cat(tokens, dim=-1), torch.cat(scores, dim=-1)

    def _token(self, bin_: Tensor, log_probs: Tensor) -> Tensor:
        """The id of a bin; of the two that share the highest value's, the likelier: policies know only one of them."""
        first = self.actions.first
        highest = first + log_probs[:, first : first + 2].argmax(dim=-1, keepdim=True)
        return torch.where(bin_ == self.actions.bins - 1, highest, self.actions.stop - 1 - bin_)

    def _by_bin(self, log_probs: Tensor) -> Tensor:
        """Probabilities [b, bins], the lowest value first; the two lowest ids share the highest value's bin."""
        of_ids = log_probs[:, self.actions.first : self.actions.stop].exp().flip(-1)
        shared = of_ids[:, self.actions.bins - 1 :].sum(dim=-1, keepdim=True)
        return torch.cat((of_ids[:, : self.actions.bins - 1], shared), dim=-1)
