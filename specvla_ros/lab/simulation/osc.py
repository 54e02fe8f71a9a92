# SPDX-License-Identifier: Apache-2.0
"""Operational-space control of the arm's pose: from 7 values in [-1, 1] to joint torques.

The convention is robosuite's OSC_POSE, which LIBERO uses too: three translations (±1 is ±0.05 m) and three rotations
(axis-angle, ±1 is ±0.5 rad) per control step in the base frame, then the gripper (+1 closes, -1 opens), at 20 Hz.
Torques follow Khatib (1987), "A unified approach for motion and force control of robot manipulators", section III:
the task-space inertia makes the directions independent of each other.
"""

import mujoco
import numpy as np

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.lab.simulation.arms import Arm, joint_indices

POSITION_SCALE_M, ROTATION_SCALE_RAD = 0.05, 0.5
SCALE = np.array([POSITION_SCALE_M] * 3 + [ROTATION_SCALE_RAD] * 3)
CONTROL_HZ = 20
_STIFFNESS = 1500.0  # [1/s²]; critically damped: the hand lags its goal by 50 ms
_NULLSPACE_STIFFNESS = 20.0
# The goal may lead the hand by this much: against an obstacle it must not run away and then leap.
_LEAD_M, _LEAD_RAD = 0.06, 0.4


class OscPose:
    """Moves the hand's pinch site to `goal`, a pose that each control step displaces within the arm's reach."""

    def __init__(self, model: mujoco.MjModel, arm: Arm) -> None:
        self._model = model
        self._low, self._high = np.array(arm.low), np.array(arm.high)
        self._site = model.site("pinch").id
        self._positions, self._dofs = joint_indices(model, arm.joints)
        self._limit = np.array([model.actuator(name).ctrlrange[1] for name in arm.motors])
        self._arm_controls = np.array([model.actuator(name).id for name in arm.motors])
        self._fingers = np.array([model.actuator(name).id for name in arm.gripper.actuators])
        self._open, self._closed = np.array(arm.gripper.open), np.array(arm.gripper.closed)
        self._jacobian = np.zeros((6, model.nv))
        self._inertia = np.zeros((model.nv, model.nv))

    def reset(self, data: mujoco.MjData) -> None:
        """Takes the present pose as the goal, and opens the gripper."""
        self.goal = Pose(data.site_xpos[self._site].copy(), data.site_xmat[self._site].reshape(3, 3).copy())
        self._rest = data.qpos[self._positions].copy()
        data.ctrl[self._fingers] = self._open

    def displace(self, data: mujoco.MjData, action: np.ndarray) -> None:
        """Moves the goal by one control step's action, float [7], clipped to [-1, 1]."""
        action = np.clip(action, -1.0, 1.0)
        goal = self.goal.displaced(SCALE * action[:6])
        position = data.site_xpos[self._site]
        lead = np.clip(goal.position, position - _LEAD_M, position + _LEAD_M)
        rotation = data.site_xmat[self._site].reshape(3, 3)
        turn = rotation_vector(goal.rotation @ rotation.T)
        size = np.linalg.norm(turn)
        wanted = rotation_matrix(turn * (_LEAD_RAD / size)) @ rotation if size > _LEAD_RAD else goal.rotation
        self.goal = Pose(np.clip(lead, self._low, self._high), wanted)
        data.ctrl[self._fingers] = self._closed if action[6] > 0 else self._open

    def apply(self, data: mujoco.MjData) -> None:
        """Sets the arm's torques for the next physics step."""
        model, jacobian = self._model, self._jacobian
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self._site)
        mujoco.mj_fullM(model, self._inertia, data.qM)
        j = jacobian[:, self._dofs]
        inertia = self._inertia[np.ix_(self._dofs, self._dofs)]
        velocity = data.qvel[self._dofs]
        inverse_j = np.linalg.solve(inertia, j.T)
        task_inertia = np.linalg.inv(j @ inverse_j + 1e-6 * np.eye(6))
        rotation = data.site_xmat[self._site].reshape(3, 3)
        error = np.concatenate(
            [self.goal.position - data.site_xpos[self._site], rotation_vector(self.goal.rotation @ rotation.T)]
        )
        force = task_inertia @ (_STIFFNESS * error - 2 * _STIFFNESS**0.5 * (j @ velocity))
        posture = _NULLSPACE_STIFFNESS * (self._rest - data.qpos[self._positions])
        posture -= 2 * _NULLSPACE_STIFFNESS**0.5 * velocity
        free = inertia @ (posture - inverse_j @ (task_inertia @ (j @ posture)))
        torque = j.T @ force + free + data.qfrc_bias[self._dofs]
        data.ctrl[self._arm_controls] = np.clip(torque, -self._limit, self._limit)
