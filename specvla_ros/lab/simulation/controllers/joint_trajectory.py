# SPDX-License-Identifier: Apache-2.0
"""Joint trajectories, by the rules of joint_trajectory_controller (ros2_controllers, its defaults).

- A trajectory is refused unless it names each joint of the controller once, has a point, times that increase
  strictly, as many positions as joints in each point, velocities and accelerations as many or none, no velocity at its
  end and, with a stamp, an end that has not passed (validate_trajectory_msg). A refused one changes nothing.
- A stamp of zero means: from now. The newest trajectory replaces the one before at once.
- It begins at the measured state (`interpolate_from_desired_state: false`): linear between points without velocities,
  cubic with them, quintic with accelerations too (trajectory.cpp, interpolate_between_points). So a stream of single
  points is followed with a lag: each begins anew at what the arm has reached.
- What is commanded is the trajectory one control period ahead (`command_next_`).
- After its last point the arm holds that (`cmd_timeout: 0`).

Values that are not finite are refused here; the real one does not look. Joint limits are the robot's.
"""

import math
from dataclasses import dataclass

import numpy as np

from specvla_ros.lab.simulation.controllers.controller import CONTROL_DT_S, CommandRefusedError, JointState


@dataclass(frozen=True)
class Point:
    """A point of a trajectory; empty arrays where nothing is said.

    Args:
        time_s: from the trajectory's start.
        positions: float64 [joints].
        velocities: float64 [joints] or [0].
        accelerations: float64 [joints] or [0].
    """

    time_s: float
    positions: np.ndarray
    velocities: np.ndarray
    accelerations: np.ndarray


@dataclass(frozen=True)
class JointTrajectory:
    """A trajectory as it arrives.

    Args:
        stamp_s: when it begins; 0: now.
        joints: names of the columns.
        points: in the order of time.
    """

    stamp_s: float
    joints: tuple[str, ...]
    points: tuple[Point, ...]


class JointTrajectoryController:
    """Follows the newest trajectory.

    Args:
        joints: names of the controller's joints.
    """

    def __init__(self, joints: tuple[str, ...]) -> None:
        self._joints = joints

    def start(self, measured: JointState) -> None:
        self._points: tuple[Point, ...] = (_at_rest(0.0, measured.positions),)
        self._begun_s = 0.0
        self._waiting: JointTrajectory | None = None

    def take(self, command: JointTrajectory, now_s: float) -> None:
        _check(command, self._joints, now_s)
        order = [command.joints.index(name) for name in self._joints]
        points = tuple(_ordered(point, order) for point in command.points)
        self._waiting = JointTrajectory(command.stamp_s, self._joints, points)

    def update(self, measured: JointState, now_s: float) -> JointState:
        if self._waiting is not None:
            self._begun_s = self._waiting.stamp_s or now_s
            before = Point(now_s - self._begun_s, measured.positions, measured.velocities, np.zeros(0))
            self._points = (before, *self._waiting.points)
            self._waiting = None
        return self._sample(now_s - self._begun_s + CONTROL_DT_S)

    def _sample(self, time_s: float) -> JointState:
        # What has passed is dropped; the point before the present one stays, to interpolate from.
        while len(self._points) > 1 and self._points[1].time_s <= time_s:
            self._points = self._points[1:]
        if len(self._points) == 1:
            last = self._points[0].positions
            return JointState(last, np.zeros_like(last))
        return _interpolated(self._points[0], self._points[1], time_s)


def _check(command: JointTrajectory, joints: tuple[str, ...], now_s: float) -> None:
    if sorted(command.joints) != sorted(joints):
        raise CommandRefusedError(f"its joints are {list(command.joints)}, the controller's {list(joints)}")
    if not command.points:
        raise CommandRefusedError("it has no points")
    before_s = -math.inf
    for index, point in enumerate(command.points):
        if index and point.time_s <= before_s:
            raise CommandRefusedError(f"the time of point {index} is not after that of the point before it")
        before_s = point.time_s
        for name, needed in (("positions", True), ("velocities", False), ("accelerations", False)):
            values = getattr(point, name)
            if len(values) != len(joints) and (needed or len(values)):
                raise CommandRefusedError(f"point {index} has {len(values)} {name} for {len(joints)} joints")
            if not np.isfinite(values).all():
                raise CommandRefusedError(f"the {name} of point {index} are not all finite")
    if (np.abs(command.points[-1].velocities) > np.finfo(np.float32).eps).any():
        raise CommandRefusedError("it does not end at rest")
    if command.stamp_s and command.stamp_s + command.points[-1].time_s < now_s:
        raise CommandRefusedError("it ended in the past")


def _at_rest(time_s: float, positions: np.ndarray) -> Point:
    return Point(time_s, positions.copy(), np.zeros(0), np.zeros(0))


def _ordered(point: Point, order: list[int]) -> Point:
    return Point(
        point.time_s,
        point.positions[order],
        point.velocities[order] if len(point.velocities) else point.velocities,
        point.accelerations[order] if len(point.accelerations) else point.accelerations,
    )


def _interpolated(start: Point, end: Point, time_s: float) -> JointState:
    duration = end.time_s - start.time_s
    elapsed = min(max(0.0, time_s - start.time_s), duration)
    conditions = [start.positions, end.positions]
    if len(start.velocities) and len(end.velocities):
        conditions += [start.velocities, end.velocities]
        if len(end.accelerations):
            begun = start.accelerations if len(start.accelerations) else np.zeros_like(start.positions)
            conditions += [begun, end.accelerations]
    coefficients = _polynomial(conditions, duration)
    powers = np.arange(len(coefficients))
    position = (elapsed**powers) @ coefficients
    velocity = (powers[1:] * elapsed ** powers[:-1]) @ coefficients[1:]
    return JointState(position, velocity)


def _polynomial(conditions: list[np.ndarray], duration: float) -> np.ndarray:
    """Coefficients [order + 1, joints] from values and derivatives at both ends, in turn."""
    size = len(conditions)
    rows = []
    for derivative in range(size // 2):
        factors = np.array([math.perm(power, derivative) for power in range(size)], dtype=float)
        exponents = np.maximum(np.arange(size) - derivative, 0)
        rows += [factors * 0.0**exponents, factors * duration**exponents]
    return np.linalg.solve(np.array(rows), np.array(conditions))
