# SPDX-License-Identifier: Apache-2.0
"""Trajectories of an arm's joints over the motion that is planned, for a controller that follows them by itself.

A new action, a hold or another speed replaces the trajectory. Until then the rest of it is repeated, in case a message
was lost; points whose time has passed are left out.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.guard.gate import TOLERANCE
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, JointSolver
from specvla_ros.control.joint_path import REPEAT_S, JointPath
from specvla_ros.control.joint_space import JointKinematics
from specvla_ros.control.robot_model import JointModel
from specvla_ros.errors import UserError

_STEP_S = 0.02  # between two points
# Share of the acceleration that is planned: the controller's cubic to the first point needs more than the plan.
_PLANNED_ACCELERATION = 0.75
_LEAD_S = TRAJECTORY_AHEAD_S  # to the first point
# Of any motion whose speed and acceleration are limited, a cubic with the same positions and velocities at its ends is
# faster than that limit by at most the acceleration limit times this.
_SWING_S = _LEAD_S / 22.9
_ROUNDING = 1e-9
_DEPARTED = 0.01  # rad or m, of the plan from the motion: a new plan is made
_MISSED = 1e-4  # the same at rest
_SEAM = 1.8  # limit, where a plan joins the one before, as a factor on the planned acceleration
_LEAST_SPEED = 0.5  # share of a joint's speed that is planned at least: no such cubic is faster than twice the plan
_JOINED_S = 0.15  # after which a new plan is followed as it is


def planned(model: JointModel) -> JointModel:
    """The arm with the speeds and accelerations that its chunks are planned with: the controller's cubics need more."""
    if model.max_acceleration is None:
        return model
    acceleration = _PLANNED_ACCELERATION * model.max_acceleration
    speed = np.maximum(model.max_speed - _SWING_S * acceleration, _LEAST_SPEED * model.max_speed)
    return replace(model, max_speed=speed, max_acceleration=acceleration)


def _speed_limit(planned_speed: np.ndarray, acceleration: np.ndarray) -> np.ndarray:
    """The joints' speed limits from what `planned` made of them, float64 [joints] each."""
    limit: np.ndarray = np.minimum(planned_speed + _SWING_S * acceleration, planned_speed / _LEAST_SPEED)
    return limit


def horizon_s(longest_s: float, stop_s: float) -> float:
    """Seconds of motion in a chunk before it brakes; raises UserError if there is not enough time for both."""
    horizon = longest_s - stop_s - 2 * _STEP_S  # a step more or less, and the joints' last one
    if horizon >= 2 * _STEP_S:
        return horizon
    raise UserError(
        f"joints.chunk_s is {longest_s:g} s, but within the limits a stop alone takes {stop_s:.2f} s; set it to "
        f"{stop_s + 0.3:.1f} or more, or raise the limits of acceleration and jerk"
    )


@dataclass(frozen=True)
class _Plan:
    path: JointPath
    begun_s: float
    made_for: tuple[object, ...]  # state of the follower
    renewed_s: float  # time for a new plan, since this one brakes before the motion ends

    def departs(self, positions: np.ndarray, now_s: float) -> bool:
        """True if the motion is no longer the planned one, or is planned no further."""
        passed_s = now_s - self.begun_s
        if now_s >= self.renewed_s or passed_s < REPEAT_S:
            return now_s >= self.renewed_s
        allowed = _DEPARTED if passed_s < self.path.end_s else _MISSED
        return bool(np.abs(self.path.at(passed_s)[0] - positions).max() > allowed)

    def state(self, now_s: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, velocities and coming accelerations, float64 [joints] each."""
        position, velocity = self.path.at(now_s - self.begun_s)
        return position, velocity, (self.path.at(now_s - self.begun_s + _STEP_S)[1] - velocity) / _STEP_S

    def left(self, now_s: float) -> JointPath:
        """The path from now, by its own points: others would make other cubics."""
        passed_s = now_s - self.begun_s
        coming = self.path.delayed(-passed_s)
        later = coming.points(int(np.searchsorted(coming.times_s, _LEAD_S + _STEP_S / 4)))
        left = later.begun_at(_LEAD_S, *self.path.at(passed_s + _LEAD_S))
        assert left.velocities is not None
        left.velocities[-1] = 0.0  # but for rounding
        return left


class TrajectoryChunks:
    """Makes trajectories of coming targets.

    Args:
        longest_s: of a trajectory, its braking included.
        stop_s: time for braking.

    Raises UserError if there is not enough time for both.
    """

    def __init__(self, commands: JointSolver | JointKinematics, longest_s: float, stop_s: float) -> None:
        self._commands, self._horizon_s = commands, horizon_s(longest_s, stop_s)
        self.start()

    def start(self) -> None:
        """Forgets the last trajectory; the next step makes one."""
        self._plan: _Plan | None = None
        self._sent_s = -np.inf

    def next(self, target: Target[Any], follower: ActionFollower[Any], now_s: float) -> JointPath | None:
        """The trajectory to send after a control step, its times from now; None: none this time.

        Raises UnreachableError.
        """
        here, moving = self._commands.follow(target)
        plan = self._plan
        if plan is None or plan.made_for != _state(follower) or plan.departs(here, now_s):
            if plan is not None:
                here, moving = self._commands.resume(*plan.state(now_s))
            path, whole = self._path(follower, here, moving, now_s)
            if plan is not None:
                path = self._joined(path, follower, *plan.path.at(now_s - plan.begun_s))
            renewed_s = np.inf if whole else now_s + self._horizon_s / 2
            self._plan = plan = _Plan(path, now_s, _state(follower), renewed_s)
            self._sent_s = -np.inf
        if now_s - self._sent_s < REPEAT_S - _ROUNDING:
            return None
        self._sent_s = now_s
        left = plan.left(now_s)  # the cubics between points may swing a little out of a joint's range
        return replace(left, positions=np.clip(left.positions, *self._commands.ranges.T))

    def _path(
        self, follower: ActionFollower[Any], here: np.ndarray, moving: np.ndarray, now_s: float
    ) -> tuple[JointPath, bool]:
        """The path of the coming targets; False: it brakes although there are more."""
        targets = follower.coming(now_s, _STEP_S, self._horizon_s)
        positions, velocities = self._commands.plan(targets)
        # With inverse kinematics the joints still move a little when the tool is at rest.
        rest = positions[-1] + velocities[-1] * _STEP_S / 2
        stays = max(1, math.ceil(_JOINED_S / _STEP_S) - len(targets))
        positions = np.vstack([positions, *[rest] * stays])
        velocities = np.vstack([velocities, np.zeros((stays, len(rest)))])
        path = JointPath(_STEP_S * np.arange(1, len(positions) + 1), positions, velocities)
        return path.from_state(here, moving), len(targets) * _STEP_S <= self._horizon_s

    def _joined(
        self, path: JointPath, follower: ActionFollower[Any], position: np.ndarray, velocity: np.ndarray
    ) -> JointPath:
        """The path from the state of the one before it; or a braking path, if the limits do not allow that.

        While the control loop stalls, the arm continues along its plan, and the motion falls behind. If it is too far
        behind, it starts from scratch where the arm comes to rest.
        """
        commands, joined = self._commands, _from_state(path, position, velocity)
        resumed = np.abs(path.positions[0] - position).max() <= _ROUNDING  # inverse kinematics started there
        if resumed or commands.max_acceleration is None or self._fits(joined, commands.max_acceleration):
            return joined
        braking = JointPath.braking(position, velocity, commands.max_acceleration)
        end = dict(zip(commands.joints, np.clip(braking.positions[-1], *commands.ranges.T).tolist(), strict=True))
        commands.start(end)
        follower.rest_at(commands.place_of(end))
        return braking

    def _fits(self, path: JointPath, max_acceleration: np.ndarray) -> bool:
        _, speeds, accelerations = path.sampled()
        fast = np.abs(speeds) > _speed_limit(self._commands.max_speed, max_acceleration) * TOLERANCE
        return not (fast.any() or (np.abs(accelerations) > _SEAM * max_acceleration).any())


def _state(follower: ActionFollower[Any]) -> tuple[object, ...]:
    """State of the follower for which a plan is made."""
    return follower.changes, round(follower.scale, 1)


def _from_state(path: JointPath, position: np.ndarray, velocity: np.ndarray) -> JointPath:
    """A path that begins where the one before it is, so that the robot's motion is continuous.

    An uneven control loop leads a little away from what was planned.
    """
    assert path.velocities is not None
    still = np.zeros_like(position)
    apart = np.stack([position - path.positions[0], still]), np.stack([velocity - path.velocities[0], still])
    offset = JointPath(np.array([0.0, _JOINED_S]), *apart)
    positions, velocities = zip(*map(offset.at, path.times_s), strict=True)
    return JointPath(path.times_s, path.positions + positions, path.velocities + velocities)
