# SPDX-License-Identifier: Apache-2.0
"""An arm that keeps its own limits of commands, as with ros2_control's `enforce_command_limits`, or its maker's."""

import math

import numpy as np

from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers import _GAIN, CONTROL_DT_S, CartesianPose, JointState, _shortened


class LimitedPose(CartesianPose):
    """With limits of speed and acceleration beside the joints', as pose interfaces of arms' makers have them.

    So do ABB EGM, KUKA RSI and Franka.
    """

    def __init__(self, kinematics: ToolKinematics, limits: Limits) -> None:
        super().__init__(kinematics)
        self._limits = limits

    def start(self, measured: JointState) -> None:
        super().start(measured)
        self._twist = np.zeros(6)

    def _wanted(self, tool: Pose) -> np.ndarray:
        """As fast as may be and can be braked on the way that is left."""
        twist = super()._wanted(tool)
        linear = self._limits.linear_speed, self._limits.linear_acceleration
        angular = self._limits.angular_speed, self._limits.angular_acceleration
        found = []
        for block, (speed, most) in ((0, linear), (3, angular)):
            wanted, before = twist[block : block + 3], self._twist[block : block + 3]
            way = float(np.linalg.norm(wanted)) / _GAIN
            change = _shortened(wanted, min(speed, math.sqrt(most * way))) - before
            found.append(before + _shortened(change, most * CONTROL_DT_S))
        self._twist = np.concatenate(found)
        return self._twist


def limit(arm: CommandedArm, tool: Limits, joints: JointLimits) -> None:
    """Has an arm keep limits, its joints no more than they had, from its next reset on."""
    if isinstance(arm.controller, CartesianPose):
        arm.controller = LimitedPose(arm.controller._kinematics, tool)
    servo = arm._servo
    servo._speed = np.minimum(servo._speed, joints.speeds)
    servo._acceleration = np.minimum(servo._acceleration, joints.accelerations)
