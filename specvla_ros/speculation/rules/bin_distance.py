# SPDX-License-Identifier: Apache-2.0
"""Bin-distance acceptance: an action token near the target's own choice will do (Spec-VLA, section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from specvla_ros.speculation.rules.registry import RuleContext, rule

if TYPE_CHECKING:
    from specvla_ros.speculation.accept import Acceptance, Verification


@dataclass(frozen=True)
class BinDistance:
    """Accepts an action token at most r bins from the target's own choice for the same prefix (Spec-VLA eq. 5).

    Distances are between bins, not ids: the two lowest action ids decode alike. The published code compares raw ids of
    any token, so that with r = 9 it also takes ids that are no actions, and the -1 that pads its shorter paths.

    Args:
        bins: r per action dimension; a dimension beyond the last is strict.
    """

    bins: tuple[int, ...]
    needs_hidden: ClassVar[bool] = False
    needs_visual: ClassVar[bool] = False

    def accept(self, verification: Verification) -> Acceptance:
        """Exact tokens, and action tokens within the tolerance of their dimension."""
        import torch

        from specvla_ros.speculation.accept import Acceptance, AcceptReason

        exact, dimensions = verification.exact, verification.comparison.dimensions
        # r as a step function of the dimension, -1 for text, which is never near: its numbers travel with the launches,
        # where a table would be a copy from the host.
        tolerance = torch.full_like(dimensions, -1)
        for first, (before, r) in enumerate(pairwise((-1, *self.bins, 0))):
            if r != before:
                tolerance = torch.where(dimensions >= first, r, tolerance)
        near = verification.comparison.distances <= tolerance
        reasons = torch.where(exact, int(AcceptReason.EXACT), int(AcceptReason.NEAR))
        return Acceptance((exact | near)[:, None], reasons)


@rule("bin_distance", order=10)
def _bin_distance(context: RuleContext) -> BinDistance:
    return BinDistance(context.bins)
