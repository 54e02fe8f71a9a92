# SPDX-License-Identifier: Apache-2.0
"""Motion of a tool within limits of speed, acceleration, jerk and workspace, by jerk-limited trajectories (ruckig).

Ruckig (Berscheid and Kröger 2021, arXiv 2105.04830) bounds each axis by itself. The limits here are of the vector's
length, so each of three axes gets 1/sqrt(3) of them: whatever the axes do at the same time, the length holds. Along
one axis of the base frame 58 % of a limit is used, along the diagonal all of it.

A rotation is planned as the rotation vector from where its plan began. The tool's angular velocity is never larger
than that vector's rate of change, since no singular value of the left Jacobian of SO(3) is larger than one. Its angular
acceleration is the vector's up to half the square of its speed, which is left out of the limit.
"""

import math
from dataclasses import dataclass

import numpy as np
from ruckig import ControlInterface, InputParameter, Result, Ruckig, RuckigError, Synchronization, Trajectory

from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector

_AXIS_SHARE = 3**-0.5
_TOLERANCE_M = 1e-4
_SAMPLE_S, _MAX_SAMPLES = 0.01, 200
_LEAST_SHARE = 0.2
_DUST = 1e-9
_TRACKING_GAIN = 6.0  # 1/s
_REACHED = np.array([1e-3] * 3 + [1e-2] * 3)  # metres, radians
_NO_PACE = (math.inf, math.inf)


@dataclass(frozen=True)
class Target:
    """Where a tool is to be at one moment."""

    pose: Pose  # in the base frame
    velocity: np.ndarray  # float64 [6], m/s and rad/s in the base frame
    passed_s: float = 0.0  # of the motion since the target before; 0: not known

    @property
    def moving(self) -> bool:
        return bool(np.abs(self.velocity).max() > 1e-9)


@dataclass(frozen=True)
class _State:
    """Three axes, float64 [3] each."""

    position: np.ndarray
    velocity: np.ndarray
    acceleration: np.ndarray


_Legs = tuple[Trajectory, ...]  # one after the other; the last one ends at rest
_Onward = tuple[Pose, float] | None  # the goal after a goal, and the seconds from one to the other


class _ThreeAxes:
    """Trajectories of three axes from `begun_s` on, each within its limits."""

    def __init__(self, speed: float, acceleration: float, jerk: float) -> None:
        self._ruckig = Ruckig(3)
        self._speed = speed * _AXIS_SHARE
        self._input = InputParameter(3)
        self._input.max_acceleration = [acceleration * _AXIS_SHARE] * 3
        self._input.max_jerk = [jerk * _AXIS_SHARE] * 3
        self.rest_at(np.zeros(3))

    def rest_at(self, position: np.ndarray) -> None:
        self._legs: _Legs = ()
        self._begun_s = 0.0
        self._rest = _State(position, np.zeros(3), np.zeros(3))

    def follow(self, now_s: float, legs: _Legs) -> None:
        self._legs, self._begun_s = legs, now_s
        self._rest = _State(_end(legs[-1]).position, np.zeros(3), np.zeros(3))

    def at(self, now_s: float) -> _State:
        elapsed_s = max(0.0, now_s - self._begun_s)
        for leg in self._legs:
            if elapsed_s < leg.duration:
                return _State(*(np.array(part) for part in leg.at_time(elapsed_s)[:3]))
            elapsed_s -= leg.duration
        return self._rest

    def to(self, goal: np.ndarray, start: _State, seconds: float, velocity: np.ndarray, speed: float) -> _Legs:
        """A way to a goal in `seconds` or as soon as possible, and to rest behind it; empty: there is none.

        Its own largest speed is shared out among the axes as the way is, with something left for each to brake with.
        """
        way = np.abs(goal - start.position)
        shares = np.maximum(way / max(float(np.linalg.norm(way)), 1e-12), _LEAST_SHARE)
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

    def brake(self, start: _State) -> _Legs:
        """To rest as soon as possible, each axis by itself; empty: there is no way.

        An axis that waited for the slowest would go further than its way did, out of the workspace.
        """
        given = self._given(start, ControlInterface.Velocity)
        given.synchronization = Synchronization.No
        given.max_velocity = [self._speed] * 3
        given.target_velocity = [0.0] * 3
        given.minimum_duration = None
        return self._calculated()

    def _given(self, start: _State, interface: ControlInterface) -> InputParameter:
        given = self._input
        given.control_interface = interface
        given.synchronization = Synchronization.Time
        given.current_position = start.position.tolist()
        given.current_velocity = _without_dust(start.velocity)
        given.current_acceleration = _without_dust(start.acceleration)
        return given

    def _calculated(self) -> _Legs:
        trajectory = Trajectory(3)
        try:
            result = self._ruckig.calculate(self._input, trajectory)
        except RuckigError:  # its solver finds nothing, for the rounding of a number
            return ()
        return (trajectory,) if result in (Result.Working, Result.Finished) else ()


def _without_dust(values: np.ndarray) -> list[float]:
    """Rounding errors as starting velocities make ruckig fail."""
    dusted: list[float] = np.where(np.abs(values) < _DUST, 0.0, values).tolist()
    return dusted


def _end(leg: Trajectory) -> _State:
    return _State(*(np.array(part) for part in leg.at_time(leg.duration)[:3]))


class BoundedMotion:
    """Moves a tool from goal to goal, at rest at each unless a newer one comes; never faster than its limits.

    All times are seconds on one clock, which does not go back between two calls. Raises UserError for a missing limit.
    """

    def __init__(self, limits: Limits) -> None:
        limits.require("motion")
        self._limits = limits
        self._way = _ThreeAxes(limits.linear_speed, limits.linear_acceleration, limits.linear_jerk)
        self._turn = _ThreeAxes(limits.angular_speed, limits.angular_acceleration, limits.angular_jerk)
        self._turned_from = np.eye(3)

    def rest_at(self, pose: Pose) -> None:
        """Forgets all motion: the tool is here, and stays."""
        self._way.rest_at(pose.position.copy())
        self._turned_from = pose.rotation.copy()
        self._turn.rest_at(np.zeros(3))

    def at(self, now_s: float) -> Target:
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
        onward: _Onward = None,
    ) -> bool:
        """Sets out for a goal.

        Args:
            goal: taken into the workspace where it is outside.
            move_s, turn_s: of translation and rotation; longer where the limits or the pace ask for it.
            pace: m/s and rad/s that are not to be exceeded on this way, beside the limits.
            onward: the goal is then passed at that speed, and the tool comes to rest behind it should nobody aim again.
                Without it the tool comes to rest there.

        Returns:
            False when a way there would leave the workspace: the motion goes on as it was, within it.
        """
        moves = self._move(goal, now_s, move_s, pace[0], onward)
        return moves and self._rotate(goal, now_s, turn_s, pace[1], onward)

    def brake(self, now_s: float) -> None:
        """Comes to rest as soon as the limits allow."""
        present = self._way.at(now_s)
        legs = self._way.brake(present)
        if legs:
            self._way.follow(now_s, legs)
        else:
            self._way.rest_at(present.position)
        if not self._rotate(None, now_s):
            self._turned_from = self.at(now_s).pose.rotation
            self._turn.rest_at(np.zeros(3))

    def _move(self, goal: Pose, now_s: float, seconds: float, pace: float, onward: _Onward) -> bool:
        start, wanted = self._way.at(now_s), self._limits.clamped(goal).position
        velocity = np.zeros(3)
        if onward is not None:
            velocity = (self._limits.clamped(onward[0]).position - wanted) / onward[1]
        # A slow way may swing out further than the fastest one, which brakes at once.
        for attempt in ((seconds, velocity), (seconds, np.zeros(3)), (0.0, np.zeros(3))):
            legs = self._way.to(wanted, start, *attempt, pace)
            if legs and self._stays(legs, start.position):
                self._way.follow(now_s, legs)
                return True
        return False

    def _rotate(
        self, goal: Pose | None, now_s: float, seconds: float = 0.0, pace: float = math.inf, onward: _Onward = None
    ) -> bool:
        """Counts rotation from the present one, where a rotation vector's rates are the tool's own; no goal: brakes."""
        present = self._turn.at(now_s)
        turned_from = rotation_matrix(present.position) @ self._turned_from
        velocity = _angular_velocity(present.position, present.velocity)
        start = _State(np.zeros(3), velocity, present.acceleration)
        if goal is None:
            legs = self._turn.brake(start)
        else:
            wanted = rotation_vector(goal.rotation @ turned_from.T)
            rate = np.zeros(3)
            if onward is not None:
                rate = rotation_vector(onward[0].rotation @ goal.rotation.T) / onward[1]
            legs = self._turn.to(wanted, start, seconds, rate, pace)
        if not legs:
            return False
        self._turned_from = turned_from
        self._turn.follow(now_s, legs)
        return True

    def _stays(self, legs: _Legs, start: np.ndarray) -> bool:
        """Whether a way stays in the workspace, or, where it starts outside, goes no further out."""
        # Sampled: ruckig's own extrema leave out the part in which a way that starts too fast slows down.
        places = np.array([leg.at_time(time_s)[0] for leg in legs for time_s in _samples(leg.duration)])
        low, high = places.min(axis=0), places.max(axis=0)
        allowed_low = np.minimum(self._limits.workspace_min, start) - _TOLERANCE_M
        allowed_high = np.maximum(self._limits.workspace_max, start) + _TOLERANCE_M
        return bool((low >= allowed_low).all() and (high <= allowed_high).all())


def tracking_velocity(target: Target, measured: Pose, limits: Limits, speed_scale: float = 1.0) -> np.ndarray:
    """What to send to a robot that takes velocities, so that it is where its target is.

    A velocity interface answers late and with an error of its own (MoveIt Servo's filter makes a tool 4/7 as fast as it
    is told), so what is missing is added to the target's velocity, within the limits of speed.

    Returns:
        float64 [6], m/s and rad/s; zeros for a target at rest that is reached.
    """
    missing = measured.way_to(target.pose)
    if not target.moving and (np.abs(missing) < _REACHED).all():
        return np.zeros(6)
    speeds = limits.linear_speed * speed_scale, limits.angular_speed * speed_scale
    return shortened(target.velocity + _TRACKING_GAIN * missing, *speeds)


def shortened(vector: np.ndarray, linear: float, angular: float) -> np.ndarray:
    """The vector, float64 [6], with translation and rotation each no longer than this; their directions stay."""
    lengths = np.array([np.linalg.norm(vector[:3]), np.linalg.norm(vector[3:])])
    shares = np.minimum(1.0, np.array([linear, angular]) / np.maximum(lengths, 1e-12))
    return vector * shares.repeat(3)


def _samples(duration: float) -> np.ndarray:
    return np.linspace(0.0, duration, min(_MAX_SAMPLES, 2 + math.ceil(duration / _SAMPLE_S)))


def _angular_velocity(vector: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Of a rotation vector [3] that changes by `rate`: the left Jacobian of SO(3) times the rate."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-9:
        return rate
    axis = vector / angle
    along = axis * (axis @ rate)
    across = rate - along
    return along + np.sin(angle) / angle * across + (1 - np.cos(angle)) / angle * np.cross(axis, rate)
