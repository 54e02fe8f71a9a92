"""Bin-distance acceptance: an action token near the target's own choice will do (Spec-VLA, section 4.2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import DEFAULT_NAMES, ActionStatistics
from specvla_ros.speculation.accept import Acceptance, AcceptReason, Verification

_METRES = ("x", "y", "z")


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


def tolerance_in_bins(
    statistics: ActionStatistics, values: int, *, metres: float, radians: float, gripper_bins: int
) -> tuple[int, ...]:
    """Physical tolerances as whole bins per dimension, rounded down.

    Args:
        statistics: of the checkpoint; a bin of a dimension is 2 / `values` of half its range.
        values: bin centres per dimension (255).
        metres: for x, y, z; 0: strict.
        radians: for roll, pitch, yaw; 0: strict.
        gripper_bins: for dimensions that the statistics do not scale.

    Raises:
        UserError: a tolerance smaller than one bin of its dimension, or statistics whose units are not known.
    """
    if statistics.names != DEFAULT_NAMES:
        raise UserError(
            "acceptance.tolerance_m and acceptance.tolerance_rad need actions named x y z roll pitch yaw gripper; this "
            f"checkpoint has {len(statistics.low)} dimensions without units: set acceptance.bins instead"
        )
    bins = []
    widths = (statistics.high - statistics.low) / values
    for name, width, scaled in zip(statistics.names, widths, statistics.mask, strict=True):
        tolerance, unit = (metres, "m") if name in _METRES else (radians, "rad")
        if not scaled:
            bins.append(gripper_bins)
            continue
        if not tolerance or not width:  # a dimension that never moved in training has one value
            bins.append(0)
            continue
        whole = math.floor(tolerance / width * (1 + 1e-12))
        if whole < 1:
            least = _rounded_up(width)
            raise UserError(
                f"a tolerance of {tolerance:g} {unit} is smaller than one bin of {name}: "
                f"set it to {least:g} {unit} or more, or to 0 for strict"
            )
        bins.append(min(values - 1, whole))
    return tuple(bins)


def _rounded_up(width: float) -> float:
    """To four digits and not below, so that the number a message names is one that is taken."""
    unit = 10.0 ** (math.floor(math.log10(width)) - 3)
    return math.ceil(width / unit) * unit


def spread_bins(bins: Sequence[int], mask: Sequence[bool], gripper_bins: int) -> tuple[int, ...]:
    """One tolerance for all moving dimensions, or one per dimension as given.

    Args:
        bins: one number, or one per dimension.
        mask: which dimensions the statistics scale; the others take `gripper_bins` when one number is given.

    Raises:
        UserError: neither one number nor one per dimension.
    """
    if len(bins) == 1:
        return tuple(bins[0] if scaled else gripper_bins for scaled in mask)
    if len(bins) != len(mask):
        raise UserError(
            f"acceptance.bins has {len(bins)} numbers, but the action has {len(mask)} dimensions: give one, or one each"
        )
    return tuple(bins)
