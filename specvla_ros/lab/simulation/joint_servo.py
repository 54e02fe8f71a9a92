# SPDX-License-Identifier: Apache-2.0
"""The arm's own joint control: from references at 100 Hz to torques at each physics step.

Inverse dynamics with a PD term (computed torque; Siciliano et al., "Robotics: Modelling, Planning and Control", 8.5.2)
within the motors' torques. References are kept within the joints' ranges, speeds and accelerations, as arms do that
are sent positions: a leap becomes a motion at full speed. Against an obstacle the reference does not run away.
"""

import mujoco
import numpy as np

from specvla_ros.lab.simulation.arms import Arm
from specvla_ros.lab.simulation.controllers.controller import CONTROL_DT_S, JointState

# [1/s²]; critically damped at 150 rad/s: streams that begin at the measured state, as a joint_trajectory_controller has
# them, swing on anything much slower.
_STIFFNESS = 150.0**2
_DAMPING = 2 * _STIFFNESS**0.5
_LEAD_RAD = 0.1
STEP_S = 0.002  # of physics, for which this is stiff enough


class JointServo:
    """Makes an arm's joints follow references.

    Args:
        model: the world with the arm.
        arm: its joints, motors and speeds.
    """

    def __init__(self, model: mujoco.MjModel, arm: Arm) -> None:
        self._model = model
        joints = [model.joint(name) for name in arm.joints]
        self._positions = np.array([joint.qposadr[0] for joint in joints])
        self._dofs = np.array([joint.dofadr[0] for joint in joints])
        self._low, self._high = (np.array([joint.range[end] for joint in joints]) for end in (0, 1))
        motors = [model.actuator(name) for name in arm.motors]
        self._controls = np.array([motor.id for motor in motors])
        self._torque = np.array([motor.ctrlrange[1] for motor in motors])
        self._speed, self._acceleration = np.array(arm.speed), np.array(arm.acceleration)
        self._inertia = np.zeros((model.nv, model.nv))

    def measured(self, data: mujoco.MjData) -> JointState:
        """Where the joints are."""
        return JointState(data.qpos[self._positions].copy(), data.qvel[self._dofs].copy())

    def reset(self, data: mujoco.MjData) -> None:
        """The reference is where the joints are."""
        self._reference = data.qpos[self._positions].copy()
        self._velocity = np.zeros_like(self._reference)
        self._reached_s = float(data.time)

    def follow(self, reference: JointState, data: mujoco.MjData) -> None:
        """Sets the reference at the end of the next CONTROL_DT_S."""
        wanted = np.clip(reference.positions, self._low, self._high)
        # What is left once it moves as the reference does is made up for as fast as it can still be braked.
        left = wanted - self._reference - reference.velocities * CONTROL_DT_S
        gaining = np.minimum(np.sqrt(2 * self._acceleration * np.abs(left)), np.abs(left) / CONTROL_DT_S)
        velocity = np.clip(reference.velocities + np.sign(left) * gaining, -self._speed, self._speed)
        change = self._acceleration * CONTROL_DT_S
        self._velocity = np.clip(velocity, self._velocity - change, self._velocity + change)
        measured = data.qpos[self._positions]
        reached = self._reference + self._velocity * CONTROL_DT_S
        self._reference = np.clip(reached, measured - _LEAD_RAD, measured + _LEAD_RAD)
        self._reached_s = float(data.time) + CONTROL_DT_S

    def apply(self, data: mujoco.MjData) -> None:
        """Sets the arm's torques for the next physics step."""
        mujoco.mj_fullM(self._model, self._inertia, data.qM)
        inertia = self._inertia[np.ix_(self._dofs, self._dofs)]
        left_s = max(0.0, self._reached_s - data.time)
        error = self._reference - self._velocity * left_s - data.qpos[self._positions]
        rate = self._velocity - data.qvel[self._dofs]
        torque = inertia @ (_STIFFNESS * error + _DAMPING * rate) + data.qfrc_bias[self._dofs]
        data.ctrl[self._controls] = np.clip(torque, -self._torque, self._torque)
