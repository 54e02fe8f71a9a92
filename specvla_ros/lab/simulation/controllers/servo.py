# SPDX-License-Identifier: Apache-2.0
"""Twists, by the rules of MoveIt Servo (moveit2, moveit_ros/moveit_servo, main of August 2026).

- A command counts for as long as the clock is less than `incoming_command_timeout`, 0.1 s, ahead of its stamp, and is
  applied again in each period meanwhile; then the arm halts (servo_node.cpp, processTwistCommand; smoothHalt). So a
  stamp in the future counts for longer: Servo does not ask.
- Its frame must be known, and is not the planning frame's alone: it is turned into that. A frame that is not known, an
  empty one and a NaN make it invalid: it is dropped, and nothing is commanded (command.cpp, jointDeltaFromTwist).
- With `command_in_type: speed_units`, speeds above `scale.linear` 0.4 m/s and `scale.rotational` 0.8 rad/s are scaled
  down, direction kept.
- Near a singularity (condition number above 17) it slows down, and stands at 30; leaving is allowed to be faster.
- Joint velocities are scaled down together to the fastest that each joint allows; when one comes within
  `joint_limit_margins`, 0.1 rad, of its range and moves on, all joints halt (servo.cpp, getNextJointState).
- Positions pass a first-order Butterworth filter of coefficient 1.5 (butterworth_filter.cpp), which makes a halt
  gradual. Each step counts from the filtered position, so a steady twist moves the tool at 4/7 of its speed; users meet
  it as moveit2's issue 2191. Who sends twists must look at where the tool is.

Not here: collision checks against a planning scene; the arm's own collisions are the simulator's. Servo counts on from
the state that it commanded last while it moves, and from the measured one after it stood.
"""

from dataclasses import dataclass

import numpy as np

from specvla_ros.lab.simulation.controllers.controller import (
    BASE_FRAME,
    CONTROL_DT_S,
    TOOL_FRAME,
    ArmKinematics,
    CommandRefusedError,
    JointState,
)

COMMAND_TIMEOUT_S = 0.1
LINEAR_SCALE, ROTATIONAL_SCALE = 0.4, 0.8  # m/s, rad/s
_SLOW_CONDITION, _STOP_CONDITION, _LEAVING = 17.0, 30.0, 2.0
_SINGULARITY_STEP = 0.01
_JOINT_MARGIN_RAD = 0.1
_FILTER = 1.5
_STOPPED_RAD_S = 1e-4


@dataclass(frozen=True)
class Twist:
    """A velocity of the tool.

    Args:
        stamp_s: of its header, seconds.
        frame: of its header.
        linear: float64 [3], m/s.
        angular: float64 [3], rad/s.
    """

    stamp_s: float
    frame: str
    linear: np.ndarray
    angular: np.ndarray


class TwistServo:
    """Follows the newest twist for as long as it is fresh.

    Args:
        kinematics: of the arm.
    """

    def __init__(self, kinematics: ArmKinematics) -> None:
        self._kinematics = kinematics
        self._twist: Twist | None = None
        self._moving = False
        self._stand_at(np.zeros_like(kinematics.low))

    def start(self, measured: JointState) -> None:
        self._twist = None
        self._stand_at(measured.positions)

    def take(self, command: Twist, now_s: float) -> None:
        self._twist = None  # also one that is refused replaces the one before
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
        """The change of the joints in one period."""
        displacement = self._displacement(twist)
        still = np.zeros_like(self._position)
        if not displacement.any():
            return still
        jacobian = self._kinematics.jacobian(self._position)
        step = np.linalg.pinv(jacobian) @ displacement * self._singularity_scale(jacobian, displacement)
        speed = np.abs(step) / CONTROL_DT_S
        step *= min(1.0, float((self._kinematics.speed / np.maximum(speed, 1e-12)).min()))
        reached = self._position + step
        low = (step < 0) & (reached < self._kinematics.low + _JOINT_MARGIN_RAD)
        high = (step > 0) & (reached > self._kinematics.high - _JOINT_MARGIN_RAD)
        return still if (low | high).any() else step

    def _displacement(self, twist: Twist) -> np.ndarray:
        linear = twist.linear * min(1.0, LINEAR_SCALE / max(float(np.linalg.norm(twist.linear)), 1e-12))
        angular = twist.angular * min(1.0, ROTATIONAL_SCALE / max(float(np.linalg.norm(twist.angular)), 1e-12))
        if twist.frame == TOOL_FRAME:
            rotation = self._kinematics.tool(self._position).rotation
            linear, angular = rotation @ linear, rotation @ angular
        return np.concatenate([linear, angular]) * CONTROL_DT_S

    def _singularity_scale(self, jacobian: np.ndarray, displacement: np.ndarray) -> float:
        u, sizes, _ = np.linalg.svd(jacobian, full_matrices=False)
        condition = sizes[0] / max(sizes[-1], 1e-12)
        if condition <= _SLOW_CONDITION:
            return 1.0
        if condition >= _STOP_CONDITION:
            return 0.0
        worst = u[:, -1]  # the direction in which it can move least, its sign unknown
        nearby = self._position + np.linalg.pinv(jacobian) @ (worst * _SINGULARITY_STEP)
        _, next_sizes, _ = np.linalg.svd(self._kinematics.jacobian(nearby))
        towards = worst if next_sizes[0] / max(next_sizes[-1], 1e-12) > condition else -worst
        room = _STOP_CONDITION - _SLOW_CONDITION
        room *= 1.0 if towards @ displacement > 0 else _LEAVING
        return float(1.0 - (condition - _SLOW_CONDITION) / room)
