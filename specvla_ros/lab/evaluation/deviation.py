# SPDX-License-Identifier: Apache-2.0
"""The distance between two settings' actions of a tool, in millimetres, degrees and gripper commands."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.errors import UserError
from specvla_ros.lab.tally import percentiles

_OPEN = 0.5  # threshold between the two gripper commands


@dataclass(frozen=True)
class Distances:
    """The distances of one setting's actions from another's, for frames with both."""

    mm: np.ndarray  # float64 [frames], between the two displacements
    degrees: np.ndarray  # float64 [frames], length of the difference of roll, pitch, yaw
    flipped: np.ndarray  # bool [frames], True where the gripper's commands differ
    lost_share: float  # share of frames for which either had no action


def distances(
    plain: Sequence[np.ndarray], other: Sequence[np.ndarray], names: Sequence[str] = ACTION_NAMES
) -> Distances:
    """Compares actions frame by frame: float64 [7] in metres, radians, gripper in [0, 1]; NaN without an action.

    Raises UserError if `names`, those of the values, are not a tool's: seven may also be joints.
    """
    first, second = np.array(plain), np.array(other)
    if tuple(names) != ACTION_NAMES or first.shape[1] != len(names):
        what = f"{first.shape[1]} values" if tuple(names) == ACTION_NAMES else f"the values {' '.join(names)}"
        raise UserError(
            f"the policy's actions have {what}: their deviation in mm and degrees is not known, only that of "
            f"{' '.join(ACTION_NAMES)}"
        )
    both = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    difference = (second - first)[both]
    return Distances(
        mm=1e3 * np.linalg.norm(difference[:, :3], axis=1),
        degrees=np.degrees(np.linalg.norm(difference[:, 3:6], axis=1)),
        flipped=(first[both, 6] > _OPEN) != (second[both, 6] > _OPEN),
        lost_share=float(1 - both.mean()),
    )


@dataclass(frozen=True)
class Deviation:
    """The deviation of one setting's actions from another's, over frames."""

    p95_mm: float = 0.0  # distance between the two displacements
    largest_mm: float = 0.0
    p95_deg: float = 0.0  # length of the difference of roll, pitch, yaw
    largest_deg: float = 0.0
    gripper_share: float = 0.0  # share of frames with a different gripper command
    lost_share: float = 0.0  # share of frames for which either had no action

    @property
    def words(self) -> str:
        """Its distances and gripper commands, in words."""
        return (
            f"{self.p95_mm:.2f} mm and {self.p95_deg:.2f} degrees (95th percentile), at most {self.largest_mm:.2f} mm "
            f"and {self.largest_deg:.2f} degrees; {self.gripper_share:.1%} have another gripper command"
        )


def deviation(
    plain: Sequence[np.ndarray], other: Sequence[np.ndarray], names: Sequence[str] = ACTION_NAMES
) -> Deviation:
    """Compares actions as `distances` does."""
    found = distances(plain, other, names)
    if not len(found.mm):
        return Deviation(lost_share=1.0)
    return Deviation(
        p95_mm=percentiles(found.mm)["p95"],
        largest_mm=float(found.mm.max()),
        p95_deg=percentiles(found.degrees)["p95"],
        largest_deg=float(found.degrees.max()),
        gripper_share=float(found.flipped.mean()),
        lost_share=found.lost_share,
    )
