# SPDX-License-Identifier: Apache-2.0
"""Action statistics of a checkpoint, which scale normalised values to the robot's units and tolerances to bins."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES, default_names, is_gripper
from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import is_number, shown

MAX_VALUE = 1e6  # no robot's action is larger in any unit
_METRES = ("x", "y", "z")


@dataclass(frozen=True)
class ActionStatistics:
    """The statistics of one dataset."""

    unnorm_key: str  # the dataset's name in the checkpoint
    low: np.ndarray  # float64 [action_dim], the 1st percentile of the training actions
    high: np.ndarray  # float64 [action_dim], the 99th
    mask: np.ndarray  # bool [action_dim]; False: the dimension is not scaled (a gripper in [0, 1])
    switches: tuple[int, ...] = ()  # indices of unscaled dimensions that are set to 1 above 0.5, else to 0
    given_names: tuple[str, ...] = ()  # of the dimensions; empty: the checkpoint does not give them

    @property
    def names(self) -> tuple[str, ...]:
        """One name per dimension: the checkpoint's, or those of a tool action if there are seven, or dim_0 …."""
        return self.given_names or default_names(len(self.low))

    @property
    def moves(self) -> tuple[bool, ...]:
        """True for each dimension with the tolerance of motion: scaled, and no gripper (some policies scale theirs).

        The others take `acceptance.gripper_bins`.
        """
        return tuple(bool(scaled) and not is_gripper(name) for name, scaled in zip(self.names, self.mask, strict=True))

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        """`low` and `high`."""
        return self.low, self.high

    def unnormalise(self, values: np.ndarray) -> np.ndarray:
        """Scales normalised values [action_dim] in [-1, 1] to the robot's units, float64, not clipped."""
        scaled = 0.5 * (values + 1) * (self.high - self.low) + self.low
        found = np.where(self.mask, scaled, values)
        found[list(self.switches)] = found[list(self.switches)] > 0.5
        return found

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `unnormalise`; a dimension that never moved in training (high = low) gives 0."""
        width = np.where(self.high > self.low, self.high - self.low, np.inf)
        return np.where(self.mask, 2 * (values - self.low) / width - np.isfinite(width), values)


def select_key(statistics: Mapping[str, Any], unnorm_key: str, where: str = "this checkpoint") -> str:
    """Returns a checked dataset key; an empty one selects the only dataset."""
    known = ", ".join(sorted(statistics)) or "none"
    if not unnorm_key and len(statistics) != 1:
        raise UserError(
            f"{where} has statistics of {len(statistics)} datasets; set unnorm_key to one of: {known} "
            "(--unnorm-key NAME)"
        )
    key = unnorm_key or next(iter(statistics))
    if key not in statistics:
        raise UserError(f"unnorm_key '{key}' is not in {where}; it has: {known}")
    return key


def select_statistics(norm_stats: Mapping[str, Any], unnorm_key: str, kind: str = "action") -> ActionStatistics:
    """The statistics of actions, or of another `kind` of vector, under a key; an empty key selects the only one.

    A fine-tuned LIBERO checkpoint may have `NAME_no_noops` for the suite NAME; that is found too, as in OpenVLA's
    evaluation. Raises UserError for a missing key if there are several, an unknown key, or malformed statistics.
    """
    if unnorm_key not in norm_stats and f"{unnorm_key}_no_noops" in norm_stats:
        unnorm_key = f"{unnorm_key}_no_noops"
    unnorm_key = select_key(norm_stats, unnorm_key)
    where = f"norm_stats[{shown(unnorm_key)}]['{kind}']"
    statistics = norm_stats[unnorm_key]
    action = statistics.get(kind) if isinstance(statistics, Mapping) else None
    if not isinstance(action, Mapping) or not {"q01", "q99"} <= action.keys():
        raise UserError(f"{where} needs the lists q01 and q99")
    low, high = (_numbers(action[name], f"{where}['{name}']") for name in ("q01", "q99"))
    mask = action.get("mask", [True] * len(low))
    if not isinstance(mask, list) or not all(type(each) is bool for each in mask):
        raise UserError(f"{where}['mask'] is {shown(mask)}, but it must be a list of true and false")
    if not len(low) == len(high) == len(mask) > 0:
        raise UserError(f"{where}: q01, q99 and mask must be lists of the same length")
    if not (low <= high).all():
        raise UserError(f"{where}: q01 and q99 must be finite, with q01 <= q99")
    names = action.get("names", [])
    if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
        raise UserError(f"{where}['names'] is {shown(names)}, but it must be a list of names")
    if names and len({*names}) != len(low):
        raise UserError(f"{where}['names'] must be {len(low)} distinct names, one for each number of q01")
    return ActionStatistics(unnorm_key, low, high, np.asarray(mask, dtype=bool), given_names=tuple(names))


def checked_statistics(
    path: Path, norm_stats: Mapping[str, Any], unnorm_key: str, kind: str = "action"
) -> ActionStatistics:
    """Like `select_statistics`, with errors that begin with the checkpoint or file."""
    try:
        return select_statistics(norm_stats, unnorm_key, kind)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _numbers(value: Any, where: str) -> np.ndarray:
    if not isinstance(value, list) or not all(is_number(each) and abs(each) <= MAX_VALUE for each in value):
        raise UserError(
            f"{where} is {shown(value)}, but it must be a list of numbers, finite and at most {MAX_VALUE:g}"
        )
    return np.asarray(value, dtype=np.float64)


def tolerance_in_bins(
    statistics: ActionStatistics, values: int, *, metres: float, radians: float, gripper_bins: int
) -> tuple[int, ...]:
    """Converts physical tolerances to whole bins per dimension, rounded down; 0 is strict.

    Args:
        values: bin centres per dimension (255); a bin is 2 / `values` of half the dimension's range.
        metres, radians: for x, y, z and for roll, pitch, yaw.
        gripper_bins: for the gripper, and dimensions that the statistics do not scale.

    Raises UserError: a tolerance smaller than one bin of its dimension, or statistics with unknown units.
    """
    bins = []
    widths = (statistics.high - statistics.low) / values
    limits = physical_limits(statistics, metres=metres, radians=radians)
    for name, width, tolerance in zip(statistics.names, widths, limits, strict=True):
        unit = "m" if name in _METRES else "rad"
        if tolerance is None:
            bins.append(gripper_bins)
            continue
        if not tolerance or not width:  # a dimension that never moved in training has one value
            bins.append(0)
            continue
        whole = math.floor(tolerance / width * (1 + 1e-12))
        if whole < 1:
            least = _rounded_up(width)
            raise UserError(
                f"acceptance.tolerance_{unit} {tolerance:g} {unit} is smaller than one bin of {name}: "
                f"set it to {least:g} {unit} or more, or to 0 for strict"
            )
        bins.append(min(values - 1, whole))
    return tuple(bins)


def physical_limits(statistics: ActionStatistics, *, metres: float, radians: float) -> list[float | None]:
    """The tolerance of each dimension in its unit; None for the gripper and for dimensions that are not scaled.

    Raises UserError if the dimensions' units are not known.
    """
    if statistics.names != ACTION_NAMES:
        raise UserError(
            "acceptance.tolerance_m and acceptance.tolerance_rad need actions named x y z roll pitch yaw gripper; this "
            f"checkpoint has {len(statistics.low)} dimensions without units: set acceptance.bins instead"
        )
    of_names = [metres if name in _METRES else radians for name in statistics.names]
    return [each if moves else None for each, moves in zip(of_names, statistics.moves, strict=True)]


def _rounded_up(width: float) -> float:
    """Rounds up to four digits, so that the number given in a message is accepted."""
    unit = 10.0 ** (math.floor(math.log10(width)) - 3)
    return math.ceil(width / unit) * unit


def spread_bins(bins: Sequence[int], moves: Sequence[bool], gripper_bins: int) -> tuple[int, ...]:
    """Expands one tolerance to all moving dimensions, or keeps one per dimension; UserError for any other number.

    `moves`: see `ActionStatistics`; the other dimensions take `gripper_bins` if one number is given.
    """
    if len(bins) == 1:
        return tuple(bins[0] if each else gripper_bins for each in moves)
    if len(bins) != len(moves):
        raise UserError(
            f"acceptance.bins has {len(bins)} numbers, but the action has {len(moves)} dimensions: give one, or one "
            "each"
        )
    return tuple(bins)
