"""Which children of a node a draft tree considers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.acceptance.verification import ActionIds

# From log-probabilities [b, vocab] and the action dimension of the children to tokens and scores, both [b, k].
Children = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def top_k(k: int) -> Children:
    """The k likeliest tokens, scored by their log-probability (EAGLE-2)."""

    def choose(log_probs: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
        best = log_probs.topk(k, dim=-1)
        return best.indices, best.values

    return choose


@dataclass(frozen=True)
class WindowMass:
    """Action tokens whose tolerance covers most of the draft's probability.

    Under relaxation neighbouring bins cover the same target: the likeliest k bins are mostly one guess. The first child
    is the bin whose window [b - r, b + r] holds most mass; what it covers is taken away, and so on. Siblings are at
    least r + 1 bins apart, and a child's score is the log of the mass that it alone covers: the draft's estimate that
    this sibling will be the accepted one. With r = 0 these are the k likeliest bins.

    Args:
        k: children per node.
        actions: which ids are actions.
        bins: r per action dimension.
    """

    k: int
    actions: ActionIds
    bins: tuple[int, ...]

    def __call__(self, log_probs: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
        """Tokens and scores [b, k]; -inf where no mass is left."""
        r = self.bins[dimension] if dimension < len(self.bins) else 0
        left = self._by_bin(log_probs.exp())
        places = torch.arange(left.shape[-1], device=left.device)
        free = torch.ones_like(left, dtype=torch.bool)
        tokens, scores = [], []
        for _ in range(self.k):
            mass = torch.where(free, _windows(left, r), 0.0)
            # Windows that hold the same mass differ in the last digit by the order of summation.
            most = mass >= mass.amax(dim=-1, keepdim=True) * (1 - 1e-6)
            likeliest = torch.where(most & free, left, -1.0)
            likeliest = likeliest == likeliest.amax(dim=-1, keepdim=True)
            bin_ = torch.where(likeliest, places, len(places)).amin(dim=-1, keepdim=True)
            tokens.append(self.actions.stop - 1 - bin_)
            scores.append(mass.gather(-1, bin_).log())
            free = free & ((places - bin_).abs() > r)
            left = torch.where(free, left, 0.0)
        return torch.cat(tokens, dim=-1), torch.cat(scores, dim=-1)

    def _by_bin(self, probabilities: Tensor) -> Tensor:
        """[b, bins], the lowest value first; the two lowest ids share the highest value's bin."""
        of_ids = probabilities[:, self.actions.first : self.actions.stop].flip(-1)
        shared = of_ids[:, self.actions.bins - 1 :].sum(dim=-1, keepdim=True)
        return torch.cat((of_ids[:, : self.actions.bins - 1], shared), dim=-1)


def _windows(mass: Tensor, r: int) -> Tensor:
    """[b, bins]: sum over [b - r, b + r]."""
    if not r:
        return mass
    padded = torch.nn.functional.pad(mass, (r, r))
    return padded.unfold(-1, 2 * r + 1, 1).sum(dim=-1)
