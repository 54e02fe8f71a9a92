# SPDX-License-Identifier: Apache-2.0
"""Joint actions of the scripted experts: where the joints are at the expert's goal, by inverse kinematics.

An arm that cannot bring its tool into any orientation goes to the goal's position, in any orientation.

A redundant arm takes, of all postures at the goal, the one nearest its home. The hand points straight down there. So
the goal decides the joints, whatever the posture they come from.
"""

from typing import Any

import numpy as np

from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import Arm, joint_model
from specvla_ros.lab.simulation.world import pointing_down

_STEPS = 30
_LONGEST_STEP = 0.3  # rad, of any joint; a full Newton step from afar may leave the branch
_NEAR = 1e-5  # rad


class JointGoals:
    """Turns an expert's displacements of the tool into displacements of the joints.

    Args:
        model: MuJoCo model with the arm.
    """

    def __init__(self, model: Any, arm: Arm) -> None:
        self._bound = slice(6 if arm.takes_poses else 3)  # rows of a pose: position, then rotation
        self._tool, self._home = ToolKinematics(joint_model(model, arm)), np.array(arm.home)

    def displacement(self, action: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """An expert's action, float64 [7], as displacements of the joints and the gripper, float64 [n + 1].

        `positions`, float64 [n]: the joints now.
        """
        goal = self._tool.pose_at(positions).displaced(action[:6])
        return np.append(self.posture(_straightened(goal), positions) - positions, action[6])

    def posture(self, goal: Pose, start: np.ndarray) -> np.ndarray:
        """The joints at a tool's pose, float64 [n]: nearest the home posture, or nearest the pose if out of reach.

        Newton's method on the pose, with the way home projected into the null space of the Jacobian (Siciliano et al.,
        "Robotics: Modelling, Planning and Control", 3.5.1). `start`, float64 [n], only decides the time it takes.
        """
        joints = start.copy()
        for _ in range(_STEPS):
            moves = self._tool.tool_moves(joints)[self._bound]
            inverse = np.linalg.pinv(moves, rcond=1e-3)
            home = self._home - joints
            way = self._tool.pose_at(joints).way_to(goal)[self._bound]
            step = inverse @ way + home - inverse @ (moves @ home)
            step *= min(1.0, _LONGEST_STEP / max(float(np.abs(step).max()), 1e-12))
            joints = np.clip(joints + step, *self._tool.ranges.T)
            if np.abs(step).max() < _NEAR:
                break
        return joints


def _straightened(pose: Pose) -> Pose:
    """The pose without the hand's tilt. A policy of joints sees its own tilt, and cannot see the tool's."""
    yaw = float(np.arctan2(pose.rotation[1, 0], pose.rotation[0, 0]))
    return Pose(pose.position, pointing_down(yaw))
