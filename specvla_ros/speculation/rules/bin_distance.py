"""Bin-distance acceptance: an action token near the target's own choice will do (Spec-VLA, section 4.2)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specvla_ros.speculation.accept import Acceptance, AcceptReason, Verification


@dataclass(frozen=True)
class BinDistance:
    """Accepts an action token at most r bins from the target's own choice for the same prefix (Spec-VLA eq. 5).

    Distances are between bins, not ids: the two lowest action ids decode alike. The published code compares raw ids of
    any token, so that with r = 9 it also takes ids that are no actions, and the -1 that pads its shorter paths.

    Args:
        bins: r per action dimension; a dimension beyond the last is strict.
    """

    bins: tuple[int, ...]
    needs_hidden: bool = False
    needs_visual: bool = False

    def accept(self, verification: Verification) -> Acceptance:
        """Exact tokens, and action tokens within the tolerance of their dimension."""
        exact, comparison = verification.exact, verification.comparison
        near = comparison.distances <= self._tolerance(comparison.dimensions)
        reasons = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.NEAR))
        return Acceptance((exact | near)[:, None], reasons)

    def _tolerance(self, dimensions: Tensor) -> Tensor:
        """int64 [requests, n], r of each node's dimension; -1 for text, which is never near."""
        # A step function of the dimension: its numbers travel with the launches, where a table would be a copy from the
        # host.
        tolerance = torch.full_like(dimensions, -1)
        for first, (before, r) in enumerate(pairwise((-1, *self.bins, 0))):
            if r != before:
                tolerance = torch.where(dimensions >= first, r, tolerance)
        return tolerance
