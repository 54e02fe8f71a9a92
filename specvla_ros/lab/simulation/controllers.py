# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the motion interfaces of real arms, with the real ones' rules and their source.

They turn commands into joint references at 100 Hz of simulated time. `commanded_arm.JointServo` turns these into
torques.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specvla_ros.control.bounded_motion import shortened
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics

CONTROL_DT_S = 0.01  # the controllers' period: 100 Hz is common for ros2_control and Servo
BASE_FRAME = "base_link"
TOOL_FRAME = "tool0"
_HELD_RAD = 0.1  # max lead of a velocity's integral over its joint


@dataclass(frozen=True)
class JointState:
    """Positions and velocities, in the order of the arm's `joints`."""

    positions: np.ndarray  # float64 [joints], radians
    velocities: np.ndarray  # float64 [joints], rad/s


class CommandRefusedError(ValueError):
    """Raised for a command that the real interface would refuse too; the message says why."""


class Controller(Protocol):
    """Turns commands into joint references. Times are seconds on the robot's clock."""

    def start(self, measured: JointState) -> None:
        """Takes over the arm at its measured state and forgets all commands."""

    def take(self, command: Any, now_s: float) -> None:
        """Takes a command; raises CommandRefusedError if it is not followed."""

    def update(self, measured: JointState, now_s: float) -> JointState:
        """The joints' reference at the end of the next CONTROL_DT_S."""


class _NewestArray:
    """One value per joint, by the rules of a forward controller (ros2_controllers, forward_controllers_base.cpp).

    - The newest array counts, in the order of the controller's joints, without a timeout.
    - An array with non-finite values is dropped. An array of another length is an error: the controller manager then
      deactivates the real controller; this one drops the array.
    """

    _newest: np.ndarray  # float64 [joints]

    def take(self, command: np.ndarray, now_s: float) -> None:
        if command.shape != self._newest.shape:
            raise CommandRefusedError(f"it has {command.size} values for {self._newest.size} joints")
        if not np.isfinite(command).all():
            raise CommandRefusedError("its values are not all finite")
        self._newest = command.copy()


class PositionArray(_NewestArray):
    """Joint positions, which are the joints' reference, without interpolation: in silence the last one holds.

    The joints' own speed limits and torques soften a jump.
    """

    def start(self, measured: JointState) -> None:
        self._newest = measured.positions.copy()

    def update(self, measured: JointState, now_s: float) -> JointState:
        return JointState(self._newest, np.zeros_like(self._newest))


class VelocityArray(_NewestArray):
    """Joint velocities: in silence the joints keep moving.

    The joints' own position control follows the velocities' integral. It does not run away from joints that are held.
    """

    def start(self, measured: JointState) -> None:
        self._newest, self._position = np.zeros_like(measured.positions), measured.positions.copy()

    def update(self, measured: JointState, now_s: float) -> JointState:
        reached = self._position + self._newest * CONTROL_DT_S
        self._position = np.clip(reached, measured.positions - _HELD_RAD, measured.positions + _HELD_RAD)
        return JointState(self._position, self._newest)


@dataclass(frozen=True)
class Point:
    """A point of a trajectory; arrays are float64 [joints], or [0] if not given."""

    time_s: float  # from the trajectory's start
    positions: np.ndarray
    velocities: np.ndarray
    accelerations: np.ndarray


@dataclass(frozen=True)
class JointTrajectory:
    """A trajectory as received."""

    stamp_s: float  # start time; 0: now
    joints: tuple[str, ...]  # names of the columns
    points: tuple[Point, ...]  # in the order of time


class JointTrajectoryController:
    """Joint trajectories, by the rules of joint_trajectory_controller (ros2_controllers, its defaults).

    - A trajectory is refused, without effect, unless it names each joint of the controller once, has at least one
      point, strictly increasing times, one position per joint in each point, as many velocities and accelerations or
      none, zero velocity at its end and, with a stamp, an end that has not passed (validate_trajectory_msg).
    - A stamp of zero means now. The newest trajectory replaces the previous one at once.
    - It starts at the measured state (`interpolate_from_desired_state: false`): linear between points without
      velocities, cubic with them, quintic with accelerations too (trajectory.cpp, interpolate_between_points). A
      stream of single points is therefore followed with a lag: each restarts at the state that the arm has reached.
    - With `from_desired` (`interpolate_from_desired_state: true`) it starts at its own last command instead.
    - The command is the trajectory one control period ahead (`command_next_`).
    - After its last point the arm holds that point (`cmd_timeout: 0`).

    Non-finite values are refused; the real controller does not check. Joint limits are enforced by the robot.
    """

    def __init__(self, joints: tuple[str, ...], *, from_desired: bool = False) -> None:
        self._joints, self._from_desired = joints, from_desired

    def start(self, measured: JointState) -> None:
        self._desired = measured
        self._points: tuple[Point, ...] = (Point(0.0, measured.positions.copy(), np.zeros(0), np.zeros(0)),)
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
            state = self._desired if self._from_desired else measured
            before = Point(now_s - self._begun_s, state.positions, state.velocities, np.zeros(0))
            self._points = (before, *self._waiting.points)
            self._waiting = None
        time_s = now_s - self._begun_s + CONTROL_DT_S
        # Drops passed points, except the last one, to interpolate from.
        while len(self._points) > 1 and self._points[1].time_s <= time_s:
            self._points = self._points[1:]
        last = self._points[0].positions
        self._desired = JointState(last, np.zeros_like(last))
        if len(self._points) > 1:
            self._desired = _interpolated(self._points[0], self._points[1], time_s)
        return self._desired


def _check(command: JointTrajectory, joints: tuple[str, ...], now_s: float) -> None:
    if sorted(command.joints) != sorted(joints):
        raise CommandRefusedError(f"its joints are {list(command.joints)}, but the controller's are {list(joints)}")
    if not command.points:
        raise CommandRefusedError("it has no points")
    before_s = -math.inf
    for index, point in enumerate(command.points):
        if index and point.time_s <= before_s:
            raise CommandRefusedError(f"the time of point {index} is not after that of the previous point")
        before_s = point.time_s
        for name in ("positions", "velocities", "accelerations"):
            values = getattr(point, name)
            if len(values) != len(joints) and (name == "positions" or len(values)):
                raise CommandRefusedError(f"point {index} has {len(values)} {name} for {len(joints)} joints")
            if not np.isfinite(values).all():
                raise CommandRefusedError(f"the {name} of point {index} are not all finite")
    if (np.abs(command.points[-1].velocities) > np.finfo(np.float32).eps).any():
        raise CommandRefusedError("it does not end at rest")
    if command.stamp_s and command.stamp_s + command.points[-1].time_s < now_s:
        raise CommandRefusedError("it ended in the past")


def _ordered(point: Point, order: list[int]) -> Point:
    columns = (point.positions, point.velocities, point.accelerations)
    return Point(point.time_s, *(values[order] if len(values) else values for values in columns))


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
    """Coefficients [order + 1, joints] from values and derivatives at both ends, alternating."""
    size = len(conditions)
    rows = []
    for derivative in range(size // 2):
        factors = np.array([math.perm(power, derivative) for power in range(size)], dtype=float)
        exponents = np.maximum(np.arange(size) - derivative, 0)
        rows += [factors * 0.0**exponents, factors * duration**exponents]
    return np.linalg.solve(np.array(rows), np.array(conditions))


_GAIN = 20.0  # 1/s
_MAX_ERROR_M, _MAX_ERROR_RAD = 1.0, 1.0
_DAMPING = 0.02
_POSTURE_GAIN = 1.0  # 1/s


class CartesianPose:
    """Poses, by the rules of FZI's cartesian_controllers (cartesian_motion_controller.cpp).

    - The newest target is followed, whatever its stamp; without a new one the arm moves to it and stays there.
    - Targets with NaN, or in a frame other than the base's, are ignored; the previous target stays.
    - The gain alone sets the speed, up to the joints' limits: the arm moves to a distant target at once, without error.

    FZI's controller simulates a mass; this one uses the Jacobian's damped inverse. Both behave alike: the error decays
    with a time constant, here 1/20 s, without jumps at singularities.
    """

    def __init__(self, kinematics: ToolKinematics) -> None:
        self._kinematics = kinematics

    def start(self, measured: JointState) -> None:
        self._position = self._posture = measured.positions.copy()
        self._target = self._kinematics.pose_at(self._position)

    def take(self, command: tuple[str, Pose], now_s: float) -> None:
        """Takes a target; `command` holds the frame and the pose."""
        frame, pose = command
        if not (np.isfinite(pose.position).all() and np.isfinite(pose.rotation).all()):
            raise CommandRefusedError("its values are not all finite, or its quaternion is zero")
        if frame != BASE_FRAME:
            raise CommandRefusedError(f"its frame is '{frame}', not '{BASE_FRAME}'")
        self._target = pose

    def update(self, measured: JointState, now_s: float) -> JointState:
        tool, jacobian = self._kinematics.pose_at(self._position), self._kinematics.tool_moves(self._position)
        damped = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + _DAMPING**2 * np.eye(6))
        velocity = damped @ self._wanted(tool)
        free = np.eye(len(velocity)) - damped @ jacobian
        velocity += free @ (_POSTURE_GAIN * (self._posture - self._position))
        velocity *= min(1.0, float((self._kinematics.max_speed / np.maximum(np.abs(velocity), 1e-12)).min()))
        reached = np.clip(self._position + velocity * CONTROL_DT_S, *self._kinematics.ranges.T)
        velocity, self._position = (reached - self._position) / CONTROL_DT_S, reached
        return JointState(reached, velocity)

    def _wanted(self, tool: Pose) -> np.ndarray:
        """The tool's velocity, float64 [6], m/s and rad/s."""
        return _GAIN * shortened(tool.way_to(self._target), _MAX_ERROR_M, _MAX_ERROR_RAD)


COMMAND_TIMEOUT_S = 0.1
LINEAR_SCALE, ROTATIONAL_SCALE = 0.4, 0.8  # m/s, rad/s
_SLOW_CONDITION, _STOP_CONDITION, _LEAVING = 17.0, 30.0, 2.0
_SINGULARITY_STEP = 0.01
_JOINT_MARGIN_RAD = 0.1
_FILTER = 1.5
_STOPPED_RAD_S = 1e-4


@dataclass(frozen=True)
class Twist:
    """A velocity of the tool, with the stamp and frame of its header."""

    stamp_s: float
    frame: str
    linear: np.ndarray  # float64 [3], m/s
    angular: np.ndarray  # float64 [3], rad/s


class TwistServo:
    """Twists, by the rules of MoveIt Servo (moveit2, moveit_ros/moveit_servo, main of August 2026).

    - A command is applied in each period until its stamp is `incoming_command_timeout`, 0.1 s, old; then the arm halts
      (servo_node.cpp, processTwistCommand; smoothHalt). A stamp in the future is therefore valid for longer: Servo does
      not check.
    - It is rotated from its frame into the planning frame. A command with NaN, or with an unknown or empty frame, is
      invalid: it is dropped, and nothing is commanded (command.cpp, jointDeltaFromTwist).
    - With `command_in_type: speed_units`, speeds above `scale.linear` 0.4 m/s and `scale.rotational` 0.8 rad/s are
      scaled down, direction kept.
    - Near a singularity (condition number above 17) the arm slows down, and it stops at 30; it may leave faster.
    - Joint velocities are scaled down together until each joint is within its limit. When a joint moves closer than
      `joint_limit_margins`, 0.1 rad, to the end of its range, all joints halt (servo.cpp, getNextJointState).
    - Positions pass a first-order Butterworth filter of coefficient 1.5 (butterworth_filter.cpp), which makes a halt
      gradual. Each step starts from the filtered position, so a steady twist moves the tool at 4/7 of its speed
      (moveit2's issue 2191): a sender of twists must monitor the tool's pose.

    Collisions are not checked against a planning scene; the simulator handles the arm's own. While it moves, Servo
    continues from the state that it commanded last; after a halt it starts from the measured state.
    """

    def __init__(self, kinematics: ToolKinematics) -> None:
        self._kinematics = kinematics
        self._twist: Twist | None = None
        self._moving = False
        self._stand_at(np.zeros(len(kinematics.ranges)))

    def start(self, measured: JointState) -> None:
        self._twist = None
        self._stand_at(measured.positions)

    def take(self, command: Twist, now_s: float) -> None:
        self._twist = None  # even a refused command replaces the previous one
        if command.frame not in (BASE_FRAME, TOOL_FRAME):
            raise CommandRefusedError(
                f"its frame '{command.frame}' is not known; the frames are {BASE_FRAME} and {TOOL_FRAME}"
            )
        if not (np.isfinite(command.linear).all() and np.isfinite(command.angular).all()):
            raise CommandRefusedError("its velocities are not all finite")
        self._twist = command

    def update(self, measured: JointState, now_s: float) -> JointState:
        if self._twist is not None and now_s - self._twist.stamp_s < COMMAND_TIMEOUT_S:
            if not self._moving:
                self._stand_at(measured.positions)
                self._moving = True
            return self._filtered(self._position + self._step(self._twist))
        self._twist = None
        if not self._moving:
            return JointState(self._position, np.zeros_like(self._position))
        halted = self._filtered(self._position)
        self._moving = bool(np.abs(halted.velocities).max() > _STOPPED_RAD_S)
        return halted

    def _stand_at(self, positions: np.ndarray) -> None:
        self._moving = False
        self._position: np.ndarray = positions.copy()
        self._raw: np.ndarray = self._position

    def _filtered(self, wanted: np.ndarray) -> JointState:
        position = (wanted + self._raw - (1.0 - _FILTER) * self._position) / (1.0 + _FILTER)
        velocity = (position - self._position) / CONTROL_DT_S
        self._raw, self._position = wanted, position
        return JointState(position, velocity)

    def _step(self, twist: Twist) -> np.ndarray:
        displacement = self._displacement(twist)
        still = np.zeros_like(self._position)
        if not displacement.any():
            return still
        jacobian = self._kinematics.tool_moves(self._position)
        step = np.linalg.pinv(jacobian) @ displacement * self._singularity_scale(jacobian, displacement)
        speed = np.abs(step) / CONTROL_DT_S
        step *= min(1.0, float((self._kinematics.max_speed / np.maximum(speed, 1e-12)).min()))
        reached = self._position + step
        low, high = self._kinematics.ranges.T
        below = (step < 0) & (reached < low + _JOINT_MARGIN_RAD)
        above = (step > 0) & (reached > high - _JOINT_MARGIN_RAD)
        return still if (below | above).any() else step

    def _displacement(self, twist: Twist) -> np.ndarray:
        moved = shortened(np.concatenate([twist.linear, twist.angular]), LINEAR_SCALE, ROTATIONAL_SCALE) * CONTROL_DT_S
        if twist.frame != TOOL_FRAME:
            return moved
        rotation = self._kinematics.pose_at(self._position).rotation
        return np.concatenate([rotation @ moved[:3], rotation @ moved[3:]])

    def _singularity_scale(self, jacobian: np.ndarray, displacement: np.ndarray) -> float:
        u, sizes, _ = np.linalg.svd(jacobian, full_matrices=False)
        condition = sizes[0] / max(sizes[-1], 1e-12)
        if condition <= _SLOW_CONDITION:
            return 1.0
        if condition >= _STOP_CONDITION:
            return 0.0
        worst = u[:, -1]  # the direction in which the tool can move least; its sign is unknown
        nearby = self._position + np.linalg.pinv(jacobian) @ (worst * _SINGULARITY_STEP)
        _, next_sizes, _ = np.linalg.svd(self._kinematics.tool_moves(nearby))
        towards = worst if next_sizes[0] / max(next_sizes[-1], 1e-12) > condition else -worst
        room = _STOP_CONDITION - _SLOW_CONDITION
        room *= 1.0 if towards @ displacement > 0 else _LEAVING
        return float(1.0 - (condition - _SLOW_CONDITION) / room)
