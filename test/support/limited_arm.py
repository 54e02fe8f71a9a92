# SPDX-License-Identifier: Apache-2.0
"""An arm that keeps its own limits of commands, as with ros2_control's `enforce_command_limits`, or its maker's."""

import math

import numpy as np

from specvla_ros.control.bounded_motion import shortened
from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose, rotation_vector
from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.commanded_arm import CommandedArm, JointServo
from specvla_ros.lab.simulation.controllers import _GAIN, CONTROL_DT_S, CartesianPose, JointState

_OFF = 0.25  # of a limit of speed
_HERE_M, _HERE_RAD, _HERE_STEPS = 0.001, 0.01, 20


class LimitedPose(CartesianPose):
    """With limits of speed and acceleration beside the joints', as pose interfaces of arms' makers have them.

    So do ABB EGM, KUKA RSI and Franka. Each step starts from what the joints could follow of the one before. Where the
    tool does not move as it should since a joint is at its limit, as near a singularity, the arm halts with an error,
    and follows again once it is sent to where it stands.

    Attributes:
        halts: how often it did.
    """

    def __init__(self, kinematics: ToolKinematics, limits: Limits, servo: JointServo) -> None:
        super().__init__(kinematics)
        self._limits, self._servo = limits, servo
        self.halts = 0
        self._rest: np.ndarray | None = None
        self._twist = np.zeros(6)  # of the tool, as it should be

    def start(self, measured: JointState) -> None:
        super().start(measured)
        self._rest, self._twist = None, np.zeros(6)

    def update(self, measured: JointState, now_s: float) -> JointState:
        self._position = self._servo._reference
        if self._rest is not None and self._is_recovered():
            self._rest, self._posture, self._twist = None, self._position, np.zeros(6)
        if self._rest is None:
            if not self._is_off_its_way():
                return super().update(measured, now_s)
            self._rest, self._here_steps = nearest_rest(self._servo, self._position), 0
            self.halts += 1
        return JointState(self._rest, np.zeros_like(self._rest))

    def _is_off_its_way(self) -> bool:
        off = self._kinematics.tool_moves(self._position) @ self._servo._velocity - self._twist
        linear, angular = float(np.linalg.norm(off[:3])), float(np.linalg.norm(off[3:]))
        return linear > _OFF * self._limits.linear_speed or angular > _OFF * self._limits.angular_speed

    @property
    def halted(self) -> bool:
        """Whether it does not follow now."""
        return self._rest is not None

    def _is_recovered(self) -> bool:
        """Whether it has been sent to where it stands for a while."""
        tool = self._kinematics.pose_at(self._position)
        away_m = np.linalg.norm(self._target.position - tool.position)
        away_rad = np.linalg.norm(rotation_vector(self._target.rotation @ tool.rotation.T))
        self._here_steps = self._here_steps + 1 if away_m < _HERE_M and away_rad < _HERE_RAD else 0
        return self._here_steps > _HERE_STEPS

    def _wanted(self, tool: Pose) -> np.ndarray:
        """As fast as may be and can be braked on the way that is left."""
        wanted, limits = super()._wanted(tool), self._limits
        way_m, way_rad = (float(np.linalg.norm(block)) / _GAIN for block in (wanted[:3], wanted[3:]))
        linear = min(limits.linear_speed, math.sqrt(limits.linear_acceleration * way_m))
        angular = min(limits.angular_speed, math.sqrt(limits.angular_acceleration * way_rad))
        change = shortened(wanted, linear, angular) - self._twist
        steps = limits.linear_acceleration * CONTROL_DT_S, limits.angular_acceleration * CONTROL_DT_S
        self._twist = self._twist + shortened(change, *steps)
        return self._twist


def nearest_rest(servo: JointServo, position: np.ndarray) -> np.ndarray:
    """Where joints at a position can soonest be at rest, float64 [joints]."""
    velocity = servo._velocity
    return np.array(position + velocity * np.abs(velocity) / (2 * servo._acceleration))


def limit(arm: CommandedArm, tool: Limits, joints: JointLimits) -> None:
    """Has an arm keep limits, from its next reset on: of the tool by poses, else its joints', no more than they had."""
    servo = arm._servo
    if isinstance(arm.controller, CartesianPose):
        arm.controller = LimitedPose(arm.controller._kinematics, tool, servo)
        return
    servo._speed = np.minimum(servo._speed, joints.speeds)
    servo._acceleration = np.minimum(servo._acceleration, joints.accelerations)
