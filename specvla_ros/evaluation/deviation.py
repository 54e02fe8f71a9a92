"""How far a relaxed setting's actions lie from those of plain decoding on the same images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specvla_ros.errors import UserError

_P95 = 95.0
_ACTION_DIM = 7
_OPEN = 0.5  # a gripper value beyond is one command, below it the other


@dataclass(frozen=True)
class Deviation:
    """Over the frames.

    Args:
        p95_mm, largest_mm: distance between the two displacements.
        p95_deg, largest_deg: length of the difference of roll, pitch, yaw.
        gripper_share: frames on which the gripper is told something else.
        lost_share: frames for which one of the two had no action.
    """

    p95_mm: float = 0.0
    largest_mm: float = 0.0
    p95_deg: float = 0.0
    largest_deg: float = 0.0
    gripper_share: float = 0.0
    lost_share: float = 0.0

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def deviation(plain: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Deviation:
    """Compares actions frame by frame.

    Args:
        plain: float64 [7] each: metres, radians, gripper in [0, 1]; NaN where there was none.
        other: as many.

    Raises:
        UserError: actions that are not x y z roll pitch yaw gripper.
    """
    first, second = np.array(plain), np.array(other)
    if first.shape[1] != _ACTION_DIM:
        raise UserError(
            f"the policy's actions have {first.shape[1]} values: their deviation in mm and degrees is not known, only "
            "that of x y z roll pitch yaw gripper"
        )
    there = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    if not there.any():
        return Deviation(lost_share=1.0)
    apart = (second - first)[there]
    mm = 1e3 * np.linalg.norm(apart[:, :3], axis=1)
    degrees = np.degrees(np.linalg.norm(apart[:, 3:6], axis=1))
    flipped = (first[there, 6] > _OPEN) != (second[there, 6] > _OPEN)
    return Deviation(
        p95_mm=float(np.percentile(mm, _P95)),
        largest_mm=float(mm.max()),
        p95_deg=float(np.percentile(degrees, _P95)),
        largest_deg=float(degrees.max()),
        gripper_share=float(flipped.mean()),
        lost_share=float(1 - there.mean()),
    )
