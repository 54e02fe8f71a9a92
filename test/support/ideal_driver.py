# SPDX-License-Identifier: Apache-2.0
"""A driver without delays, limits of speed or mistakes: actions to the motion commands of every interface."""

from typing import Any

import numpy as np

from specvla_ros.control.pose import Pose, rotation_vector
from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import joint_model
from specvla_ros.lab.simulation.controllers import BASE_FRAME, JointTrajectory, Point, Twist
from specvla_ros.lab.simulation.world import World

ACTION_DT_S = 0.2
_AHEAD_S = 0.03
_NOTHING = np.zeros(0)


class IdealDriver:
    """Spreads each action evenly over its time.

    Args:
        world: with the arm.
        command: the interface.
    """

    def __init__(self, world: World, command: str) -> None:
        self._world, self._command = world, command
        self._kinematics = ToolKinematics(joint_model(world.model, world.arm))

    def reset(self) -> None:
        """Begins where the arm is."""
        self._goal = self._start = self._world.tool()
        self._joints = self._world.joint_state()[0][: len(self._world.arm.joints)]
        self._values, self._passed_s = np.zeros(7), ACTION_DT_S

    def take(self, values: np.ndarray) -> None:
        """Starts with an action, float64 [7]."""
        self._values, self._start, self._passed_s = values, self._goal, 0.0

    def gripper(self) -> float:
        """The gripper's command."""
        fingers = self._world.arm.gripper
        return fingers.open[0] if self._values[6] > 0.5 else fingers.closed[0]

    def command(self, now_s: float, step_s: float) -> Any:
        """The motion command of the next `step_s`."""
        moving = self._passed_s < ACTION_DT_S
        self._passed_s += step_s
        goal = self._start.displaced(self._values[:6] * min(1.0, self._passed_s / ACTION_DT_S))
        self._goal = Pose(np.clip(goal.position, self._world.arm.low, self._world.arm.high), goal.rotation)
        if self._command == "pose":
            return BASE_FRAME, self._goal
        if self._command == "twist":
            velocity = self._values[:6] / ACTION_DT_S * moving
            return Twist(now_s, BASE_FRAME, velocity[:3], velocity[3:])
        before, self._joints = self._joints, self._solve(self._goal)
        if self._command == "velocity_array":
            measured = self._world.joint_state()[0][: len(self._joints)]
            return (self._joints - before) / step_s + 2.0 * (before - measured)  # slower than the joints follow
        if self._command == "position_array":
            return self._joints
        point = Point(_AHEAD_S, self._joints, _NOTHING, _NOTHING)
        return JointTrajectory(0.0, self._world.arm.joints, (point,))

    def _solve(self, goal: Pose) -> np.ndarray:
        joints = self._joints
        for _ in range(4):
            tool = self._kinematics.pose_at(joints)
            error = [goal.position - tool.position, rotation_vector(goal.rotation @ tool.rotation.T)]
            joints = joints + np.linalg.pinv(self._kinematics.tool_moves(joints)) @ np.concatenate(error)
        return joints
