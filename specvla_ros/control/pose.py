# SPDX-License-Identifier: Apache-2.0
"""Tool poses, postures of the joints, rotation conversions, and a history of recent poses."""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

_TINY = 1e-15
_UNIT_TOLERANCE = 0.01

Quaternion = tuple[float, float, float, float]  # w, x, y, z


@dataclass(frozen=True)
class Pose:
    """A tool's pose in the base frame."""

    position: np.ndarray  # float64 [3], metres
    rotation: np.ndarray  # float64 [3, 3]

    def displaced(self, displacement: np.ndarray) -> "Pose":
        """The pose after a displacement, float64 [6]: translation in metres, rotation vector in radians, base frame."""
        return Pose(self.position + displacement[:3], rotation_matrix(displacement[3:6]) @ self.rotation)

    def way_to(self, other: "Pose") -> np.ndarray:
        """The displacement to another pose, float64 [6]; see `displaced`."""
        return np.concatenate([other.position - self.position, rotation_vector(other.rotation @ self.rotation.T)])

    def distance(self, other: "Pose") -> tuple[float, float]:
        """Distance to another pose, in metres and radians."""
        way = self.way_to(other)
        return float(np.linalg.norm(way[:3])), float(np.linalg.norm(way[3:]))

    def toward(self, other: "Pose", share: float) -> "Pose":
        """Interpolates to another pose, linearly and by the shortest rotation; share 0 is this pose, 1 the other."""
        return self.displaced(share * self.way_to(other))


@dataclass(frozen=True)
class Posture:
    """The positions of an arm's joints, in the order of the commands."""

    positions: np.ndarray  # float64 [n], radians or metres

    def distance(self, other: "Posture") -> tuple[float, float]:
        """The largest distance of one joint, as the second number, as of a rotation; the first is 0."""
        return 0.0, float(np.abs(other.positions - self.positions).max())

    def toward(self, other: "Posture", share: float) -> "Posture":
        """Interpolates to another posture; share 0 is this one, 1 the other."""
        return Posture(self.positions + share * (other.positions - self.positions))


_Same = TypeVar("_Same")


class Located(Protocol):
    """A `Pose` or a `Posture`, for histories and followers."""

    def distance(self: _Same, other: _Same) -> tuple[float, float]:
        """Distance to another one, in metres and radians."""

    def toward(self: _Same, other: _Same, share: float) -> _Same:
        """Interpolates to another one; share 0 is this one, 1 the other."""


Place = TypeVar("Place", bound=Located)  # where a robot is, in the space of its actions


def rotation_matrix(vector: np.ndarray) -> np.ndarray:
    """Rotation vector [3] in radians to a matrix [3, 3]."""
    angle = float(np.linalg.norm(vector))
    sine = math.sin(0.5 * angle)
    x, y, z = (float(axis) * sine for axis in (vector / angle if angle > 0 else np.zeros(3)))
    w = math.cos(0.5 * angle)
    return np.array(
        [
            [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
        ]
    )


def rpy_matrix(rpy: np.ndarray) -> np.ndarray:
    """Roll, pitch and yaw [3] in radians about the fixed axes x, y, z, in this order, to a matrix [3, 3]."""
    roll, pitch, yaw = (float(angle) for angle in rpy)
    axes = np.eye(3)
    return rotation_matrix(yaw * axes[2]) @ rotation_matrix(pitch * axes[1]) @ rotation_matrix(roll * axes[0])


def quaternion_matrix(w: float, x: float, y: float, z: float) -> np.ndarray:
    """A quaternion to a rotation matrix [3, 3]; raises ValueError if its length is off 1 by more than 1 %."""
    size = math.sqrt(w * w + x * x + y * y + z * z)
    if not abs(size - 1) <= _UNIT_TOLERANCE:
        raise ValueError(f"the quaternion w x y z {w:g} {x:g} {y:g} {z:g} is not of unit length")
    axis = np.array([x, y, z])
    length = float(np.linalg.norm(axis))
    return rotation_matrix(axis * (2 * math.atan2(length, w) / length)) if length > 0 else np.eye(3)


def rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """Rotation matrix [3, 3] to a rotation vector [3] in radians, no longer than pi."""
    w, x, y, z = quaternion(matrix)
    sine = math.sqrt(x * x + y * y + z * z)
    if sine < _TINY:
        return np.zeros(3)
    angle = 2 * math.atan2(sine, w)
    angle = angle - 2 * math.pi if angle > math.pi else angle
    return np.array([x, y, z]) * (1 / sine) * angle


def quaternion(matrix: np.ndarray) -> Quaternion:
    """Rotation matrix [3, 3] to the unit quaternion w x y z."""
    # Divides by the largest of the four components, as Shepperd (1978) does: near pi the others lose digits.
    (m00, m01, m02), (m10, m11, m12), (m20, m21, m22) = matrix.tolist()
    if m00 + m11 + m22 > 0:
        w = 0.5 * math.sqrt(1 + m00 + m11 + m22)
        parts = (w, 0.25 * (m21 - m12) / w, 0.25 * (m02 - m20) / w, 0.25 * (m10 - m01) / w)
    elif m00 > m11 and m00 > m22:
        x = 0.5 * math.sqrt(1 + m00 - m11 - m22)
        parts = (0.25 * (m21 - m12) / x, x, 0.25 * (m10 + m01) / x, 0.25 * (m02 + m20) / x)
    elif m11 > m22:
        y = 0.5 * math.sqrt(1 - m00 + m11 - m22)
        parts = (0.25 * (m02 - m20) / y, 0.25 * (m10 + m01) / y, y, 0.25 * (m21 + m12) / y)
    else:
        z = 0.5 * math.sqrt(1 - m00 - m11 + m22)
        parts = (0.25 * (m10 - m01) / z, 0.25 * (m02 + m20) / z, 0.25 * (m21 + m12) / z, z)
    size = math.sqrt(sum(part * part for part in parts))
    scale = 1 / size if abs(size - 1) > _TINY else 1.0
    w, x, y, z = (part * scale for part in parts)
    return w, x, y, z


class PoseUnknownError(LookupError):
    """The pose at that time is unknown."""


class PoseHistory(Generic[Place]):
    """Poses of the tool or of the joints by stamp, interpolated in between: an action counts from that in its image.

    Args:
        kept_s: length of the history.
        gap_s: two poses further apart in time than this are not interpolated.
    """

    def __init__(self, kept_s: float = 2.0, gap_s: float = 0.25) -> None:
        self._kept_s, self._gap_s = kept_s, gap_s
        self._poses: deque[tuple[float, Place]] = deque()

    @property
    def newest(self) -> tuple[float, Place] | None:
        """Stamp in seconds and pose of the newest entry; None if empty."""
        return self._poses[-1] if self._poses else None

    @property
    def per_s(self) -> float:
        """Mean rate of the poses; 0 if unknown."""
        span_s = self._poses[-1][0] - self._poses[0][0] if self._poses else 0.0
        return (len(self._poses) - 1) / span_s if span_s > 0 else 0.0

    def clear(self) -> None:
        """Drops all poses, as after a clock jump."""
        self._poses.clear()

    def add(self, stamp_s: float, pose: Place) -> bool:
        """Adds a pose; returns False and ignores it if it is not newer than the last one."""
        if self._poses and stamp_s <= self._poses[-1][0]:
            return False
        self._poses.append((stamp_s, pose))
        while stamp_s - self._poses[0][0] > self._kept_s and len(self._poses) > 2:
            self._poses.popleft()
        return True

    def at(self, stamp_s: float) -> Place:
        """The pose at a time, or PoseUnknownError; the newest pose stays valid for `gap_s`."""
        if not self._poses:
            raise PoseUnknownError("no pose has been measured yet")
        first_s, last_s = self._poses[0][0], self._poses[-1][0]
        if stamp_s < first_s:
            raise PoseUnknownError(f"the oldest known pose is {first_s - stamp_s:.3f} s newer")
        if stamp_s >= last_s:
            if stamp_s - last_s > self._gap_s:
                raise PoseUnknownError(f"the newest pose is {stamp_s - last_s:.3f} s older")
            return self._poses[-1][1]
        after = bisect_right(self._poses, stamp_s, key=lambda each: each[0])
        (earlier_s, earlier), (later_s, later) = self._poses[after - 1], self._poses[after]
        if later_s - earlier_s > self._gap_s:
            raise PoseUnknownError(f"no pose was measured for {later_s - earlier_s:.3f} s around that time")
        return earlier.toward(later, (stamp_s - earlier_s) / (later_s - earlier_s))
