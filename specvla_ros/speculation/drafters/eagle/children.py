# SPDX-License-Identifier: Apache-2.0
"""Which children of a node a draft tree considers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.expand_tree import Candidates, Window, choose_children
from specvla_ros.models.codecs.codec import ActionIds

IN_TEXT = -(1 << 20)
"""Below 0, however deep a tree grows from it: in place of an action dimension where the child may be text."""

# From log-probabilities [b, vocab] and the children's action dimensions, int64 [b], to tokens and scores, both [b, k].
Children = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TopK:
    """The k likeliest tokens, scored by their log-probability (EAGLE-2)."""

    k: int

    def __call__(self, log_probs: Tensor, dimensions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and scores [b, k]."""
        best = log_probs.topk(self.k, dim=-1)
        return best.indices, best.values


@dataclass(frozen=True)
class WindowMass:
    """Action tokens that between them cover most of the draft's probability, each with its tolerance.

    Under relaxation neighbouring bins cover the same target: the likeliest k bins are mostly one guess. Here the first
    child is the likeliest bin; the mass that its window [b - r, b + r] covers is taken away, and so on. Siblings are at
    least r + 1 bins apart, and a child's score is the log of the mass that it alone covers: the draft's estimate that
    this sibling will be the accepted one. With r = 0 these are the k likeliest bins.

    A child is not put where its window holds most mass. Where the draft is sure, every window around its guess holds
    nearly all of the mass, and the one that catches a little more of the tails is off by up to r bins, always to the
    same side: accepted, and wrong. The nano policy then hardly ever lifted a cube.

    Args:
        k: children per node.
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
        candidates = self.candidates(log_probs[:, None], dimensions, normalised=True)
        tokens, scores = choose_children(candidates, self.k)
        return tokens[:, 0], scores[:, 0]

    def candidates(self, rows: Tensor, dimensions: Tensor, *, normalised: bool) -> Candidates:
        """The candidates for children, of rows [trees, beam, vocab] and their dimensions, int64 [trees].

        Rows are logits of the actions' ids alone, or, `normalised`, log-probabilities of the vocabulary.
        """
        likeliest = rows.topk(self.k, dim=-1) if self.text else None
        first, stop = self.actions.first, self.actions.stop
        return Candidates(
            dimensions,
            rows[..., first:stop],
            first_id=first,
            normalised=normalised,
            window=Window(self.actions.bins, self.bins),
            chosen=None if likeliest is None else (likeliest.indices, likeliest.values),
        )
