# SPDX-License-Identifier: Apache-2.0
"""Tool motion within limits of speed, acceleration, jerk and workspace, as jerk-limited trajectories (ruckig).

Ruckig (Berscheid and Kröger 2021, arXiv 2105.04830) bounds each axis separately. The limits here apply to the vector's
length, so each of three axes gets 1/sqrt(3) of them, which bounds the length for any combination of axes. Motion along
one axis of the base frame uses 58 % of a limit, motion along the diagonal all of it.

A rotation is planned as the rotation vector from the orientation at the plan's start. The tool's angular velocity never
exceeds that vector's rate of change, since no singular value of the left Jacobian of SO(3) exceeds one. Its angular
acceleration differs from the vector's by up to half the square of its speed, which the limit ignores.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Generic

import numpy as np
from ruckig import ControlInterface, InputParameter, Result, Ruckig, RuckigError, Synchronization, Trajectory

from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Place, Pose, rotation_matrix, rotation_vector

_AXIS_SHARE = 3**-0.5
_TOLERANCE_M = 1e-4
_SAMPLE_S, _MAX_SAMPLES = 0.01, 200
_LEAST_SHARE = 0.2
_NEAR_ZERO = 1e-9
_LESS_JERK = 1 - 1e-6
_TRACKING_GAIN = 6.0  # 1/s
_REACHED = np.array([1e-3] * 3 + [1e-2] * 3)  # metres, radians
_NO_PACE = (math.inf, math.inf)


@dataclass(frozen=True)
class Target(Generic[Place]):
    """Desired pose and velocity of a tool, or of an arm's joints, at one moment."""

    pose: Place  # a tool's in the base frame
    velocity: np.ndarray  # float64 [6], m/s and rad/s in the base frame; or [n], of each joint
    passed_s: float = 0.0  # motion time since the previous target; 0: unknown

    @property
    def moving(self) -> bool:
        return bool(np.abs(self.velocity).max() > 1e-9)


@dataclass(frozen=True)
class State:
    """State of several axes, float64 [axes] each."""

    position: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray


Legs = tuple[Trajectory, ...]  # consecutive; the last one ends at rest
Onward = tuple[Place, float] | None  # the goal after the current one, and the seconds between them


class Axes:
    """Trajectories of several axes, each within its limits.

    Args:
        speed, acceleration, jerk: float64 [axes], limits of each axis.
        order: of the norm by which a pace holds: 2 for the length of a vector, infinite for the fastest of the axes.
    """

    def __init__(self, speed: np.ndarray, acceleration: np.ndarray, jerk: np.ndarray, order: float = 2) -> None:
        self._count, self._speed, self._order = len(speed), speed, order
        self._ruckig = Ruckig(self._count)
        self._input = InputParameter(self._count)
        self._input.max_acceleration, self._jerk = acceleration.tolist(), jerk
        self.rest_at(np.zeros(self._count))

    def rest_at(self, position: np.ndarray) -> None:
        self._legs: Legs = ()
        self._begun_s = 0.0
        self._rest = State(position, *np.zeros((2, self._count)))

    def follow(self, now_s: float, legs: Legs) -> None:
        self._legs, self._begun_s = legs, now_s
        self._rest = State(_end(legs[-1]).position, *np.zeros((2, self._count)))

    def stop(self, now_s: float) -> None:
        """Comes to rest as soon as the limits allow."""
        present = self.at(now_s)
        if legs := self.brake(present):
            self.follow(now_s, legs)
        else:
            self.rest_at(present.position)

    def at(self, now_s: float) -> State:
        elapsed_s = max(0.0, now_s - self._begun_s)
        for leg in self._legs:
            if elapsed_s < leg.duration:
                return State(*(np.array(part) for part in leg.at_time(elapsed_s)[:3]))
            elapsed_s -= leg.duration
        return self._rest

    def to(self, goal: np.ndarray, start: State, seconds: float, velocity: np.ndarray, speed: float) -> Legs:
        """Legs to a goal in `seconds` or as soon as possible, then to rest beyond it; empty if there are none.

        `speed` is divided among the axes in proportion to their distances, with a minimum share for braking.
        """
        way = np.abs(goal - start.position)
        shares = np.maximum(way / max(float(np.linalg.norm(way, self._order)), 1e-12), _LEAST_SHARE)
        fastest = np.minimum(self._speed, np.maximum(speed * shares, self._speed * 1e-3))
        given = self._given(start, ControlInterface.Position)
        given.max_velocity = fastest.tolist()
        given.target_position = goal.tolist()
        given.target_velocity = np.clip(velocity, -fastest, fastest).tolist()
        given.minimum_duration = seconds if seconds > 0 else None
        legs = self._calculated()
        if not legs or not velocity.any():
            return legs
        brake = self.brake(_end(legs[0]))
        return (*legs, *brake) if brake else ()

    def brake(self, start: State) -> Legs:
        """Legs to rest as soon as possible, each axis independently; empty if there are none.

        An axis that waited for the slowest one would travel further than planned, possibly out of the workspace.
        """
        given = self._given(start, ControlInterface.Velocity)
        given.synchronization = Synchronization.No
        given.max_velocity = self._speed.tolist()
        given.target_velocity = [0.0] * self._count
        given.minimum_duration = None
        return self._calculated()

    def _given(self, start: State, interface: ControlInterface) -> InputParameter:
        given = self._input
        given.control_interface = interface
        given.synchronization = Synchronization.Time
        given.current_position = start.position.tolist()
        given.current_velocity = _flushed_to_zero(start.velocity)
        given.current_acceleration = _flushed_to_zero(start.acceleration)
        return given

    def _calculated(self) -> Legs:
        # Ruckig fails where rounding decides between two shapes of a motion, as over 2 a^3 / j^2: a little less jerk
        # moves these distances away.
        for share in (1.0, _LESS_JERK):
            self._input.max_jerk = (share * self._jerk).tolist()
            trajectory = Trajectory(self._count)
            with suppress(RuckigError, ValueError):  # ValueError: longer than 7600 s, which has no code in Python
                if self._ruckig.calculate(self._input, trajectory) in (Result.Working, Result.Finished):
                    return (trajectory,)
        return ()


def _flushed_to_zero(values: np.ndarray) -> list[float]:
    """Sets rounding errors to zero: ruckig fails on them as initial velocities."""
    flushed: list[float] = np.where(np.abs(values) < _NEAR_ZERO, 0.0, values).tolist()
    return flushed


def _end(leg: Trajectory) -> State:
    return State(*(np.array(part) for part in leg.at_time(leg.duration)[:3]))


class BoundedMotion:
    """Moves a tool from goal to goal within its limits. It comes to rest at each goal unless a newer one arrives.

    All times are seconds on one clock, which never goes back between calls. Raises UserError for a missing limit.
    """

    def __init__(self, limits: Limits) -> None:
        limits.require("motion")
        self._limits = limits
        linear = limits.linear_speed, limits.linear_acceleration, limits.linear_jerk
        angular = limits.angular_speed, limits.angular_acceleration, limits.angular_jerk
        self._way, self._turn = (Axes(*np.outer(sizes, np.full(3, _AXIS_SHARE))) for sizes in (linear, angular))
        self._turned_from = np.eye(3)

    def rest_at(self, pose: Pose) -> None:
        """Drops all motion; the tool is at this pose and stays there."""
        self._way.rest_at(pose.position.copy())
        self._turned_from = pose.rotation.copy()
        self._turn.rest_at(np.zeros(3))

    def at(self, now_s: float) -> Target[Pose]:
        way, turn = self._way.at(now_s), self._turn.at(now_s)
        pose = Pose(way.position, rotation_matrix(turn.position) @ self._turned_from)
        return Target(pose, np.concatenate([way.velocity, _angular_velocity(turn.position, turn.velocity)]))

    def aim(
        self,
        goal: Pose,
        now_s: float,
        *,
        move_s: float,
        turn_s: float,
        pace: tuple[float, float] = _NO_PACE,
        onward: Onward[Pose] = None,
    ) -> bool:
        """Plans the motion to a goal.

        Args:
            goal: clamped to the workspace.
            move_s, turn_s: durations of translation and rotation; longer if the limits or the pace require it.
            pace: maximum m/s and rad/s of this motion, in addition to the limits.
            onward: next goal. The tool passes the goal at the speed that this implies, and comes to rest beyond it
                unless `aim` is called again. Without it the tool comes to rest at the goal.

        Returns:
            False if every motion to the goal would leave the workspace; the previous motion then continues.
        """
        before = copy(self._way)
        if not self._move(goal, now_s, move_s, pace[0], onward):
            return False
        if self._rotate(goal, now_s, turn_s, pace[1], onward):
            return True
        self._way = before
        return False

    def brake(self, now_s: float) -> None:
        """Brings the tool to rest as soon as the limits allow."""
        self._way.stop(now_s)
        if not self._rotate(None, now_s):
            self._turned_from = self.at(now_s).pose.rotation
            self._turn.rest_at(np.zeros(3))

    def copy(self) -> "BoundedMotion":
        """A motion that begins as this one, and then goes its own way."""
        other = copy(self)
        other._way, other._turn = copy(self._way), copy(self._turn)
        return other

    def _move(self, goal: Pose, now_s: float, seconds: float, pace: float, onward: Onward[Pose]) -> bool:
        start, wanted = self._way.at(now_s), self._limits.clamped(goal).position
        velocity = np.zeros(3)
        if onward is not None:
            velocity = (self._limits.clamped(onward[0]).position - wanted) / onward[1]
        # A slow motion may swing out further than the fastest one, which brakes immediately.
        for attempt in ((seconds, velocity), (seconds, np.zeros(3)), (0.0, np.zeros(3))):
            legs = self._way.to(wanted, start, *attempt, pace)
            if legs and self._stays(legs, start.position):
                self._way.follow(now_s, legs)
                return True
        return False

    def _rotate(
        self, goal: Pose | None, now_s: float, seconds: float = 0.0, pace: float = math.inf, onward: Onward[Pose] = None
    ) -> bool:
        """Plans from the current rotation, where a rotation vector's rate is the tool's; brakes without a goal."""
        present = self._turn.at(now_s)
        turned_from = rotation_matrix(present.position) @ self._turned_from
        velocity = _angular_velocity(present.position, present.velocity)
        start = State(np.zeros(3), velocity, present.acceleration)
        if goal is None:
            legs = self._turn.brake(start)
        else:
            wanted = rotation_vector(goal.rotation @ turned_from.T)
            rate = still = np.zeros(3)
            if onward is not None:
                rate = rotation_vector(onward[0].rotation @ goal.rotation.T) / onward[1]
            # A duration that ruckig does not take, as that of a tiny pace, must not keep the tool from its goal.
            legs = self._turn.to(wanted, start, seconds, rate, pace) or self._turn.to(wanted, start, 0.0, still, pace)
        if not legs:
            return False
        self._turned_from = turned_from
        self._turn.follow(now_s, legs)
        return True

    def _stays(self, legs: Legs, start: np.ndarray) -> bool:
        """True if a motion stays in the workspace or, from a start outside, goes no further out."""
        # Sampled: ruckig's own extrema omit the phase in which a motion that starts too fast slows down.
        places = sampled(legs)
        low, high = places.min(axis=0), places.max(axis=0)
        allowed_low = np.minimum(self._limits.workspace_min, start) - _TOLERANCE_M
        allowed_high = np.maximum(self._limits.workspace_max, start) + _TOLERANCE_M
        return bool((low >= allowed_low).all() and (high <= allowed_high).all())


def tracking_velocity(target: Target[Pose], measured: Pose, limits: Limits, speed_scale: float = 1.0) -> np.ndarray:
    """Velocity command that keeps a velocity-controlled robot at its target.

    A velocity interface responds late and inexactly (MoveIt Servo's filter makes a tool 4/7 as fast as commanded), so a
    correction proportional to the pose error is added to the target's velocity, within the speed limits.

    Returns:
        float64 [6], m/s and rad/s; zeros once a target at rest is reached.
    """
    missing = measured.way_to(target.pose)
    if not target.moving and (np.abs(missing) < _REACHED).all():
        return np.zeros(6)
    speeds = limits.linear_speed * speed_scale, limits.angular_speed * speed_scale
    return shortened(target.velocity + _TRACKING_GAIN * missing, *speeds)


class TrackingVelocity:
    """Velocities for a robot that takes no positions: the target's, corrected by the pose error, within the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.rest()

    def rest(self) -> None:
        self._velocity = np.zeros(6)  # sent last

    def next(self, target: Target[Pose], measured: Pose | None, passed_s: float, speed_scale: float) -> np.ndarray:
        """float64 [6], m/s and rad/s; with an unknown error (None) it slews to the uncorrected velocity."""
        limits = self._limits
        if measured is not None:
            self._velocity = tracking_velocity(target, measured, limits, speed_scale)
        else:
            change = target.velocity - self._velocity
            most = limits.linear_acceleration * passed_s, limits.angular_acceleration * passed_s
            self._velocity = self._velocity + shortened(change, *most)
        return self._velocity


def shortened(vector: np.ndarray, linear: float, angular: float) -> np.ndarray:
    """Limits the lengths of a float64 [6] vector's translation and rotation; keeps their directions."""
    lengths = np.array([np.linalg.norm(vector[:3]), np.linalg.norm(vector[3:])])
    shares = np.minimum(1.0, np.array([linear, angular]) / np.maximum(lengths, 1e-12))
    return vector * shares.repeat(3)


def sampled(legs: Sequence[Trajectory]) -> np.ndarray:
    """Positions along a motion, float64 [samples, axes]."""
    return np.array([leg.at_time(time_s)[0] for leg in legs for time_s in _samples(leg.duration)])


def _samples(duration: float) -> np.ndarray:
    return np.linspace(0.0, duration, min(_MAX_SAMPLES, 2 + math.ceil(duration / _SAMPLE_S)))


def _angular_velocity(vector: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Angular velocity of a rotation vector [3] that changes at `rate`: the left Jacobian of SO(3) times the rate."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-9:
        return rate
    axis = vector / angle
    along = axis * (axis @ rate)
    across = rate - along
    return along + np.sin(angle) / angle * across + (1 - np.cos(angle)) / angle * np.cross(axis, rate)
