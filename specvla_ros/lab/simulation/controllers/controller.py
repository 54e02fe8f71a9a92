# SPDX-License-Identifier: Apache-2.0
"""What every controller of an arm offers, and the arm's kinematics that they share."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import mujoco
import numpy as np

from specvla_ros.control.pose import Pose
from specvla_ros.lab.simulation.arms import Arm

CONTROL_DT_S = 0.01  # of the controllers: ros2_control's and Servo's common 100 Hz
BASE_FRAME = "base_link"
TOOL_FRAME = "tool0"


@dataclass(frozen=True)
class JointState:
    """Joints, in the order of the arm's `joints`.

    Args:
        positions: float64 [joints], radians.
        velocities: float64 [joints], rad/s.
    """

    positions: np.ndarray
    velocities: np.ndarray


class CommandRefusedError(ValueError):
    """A command that the real interface would not take either; the message says why."""


Command = TypeVar("Command", contravariant=True)


class Controller(Protocol, Generic[Command]):
    """Moves an arm as commands say. Times are seconds on the robot's clock."""

    def start(self, measured: JointState) -> None:
        """Takes the arm over where it is, and forgets all commands."""

    def take(self, command: Command, now_s: float) -> None:
        """Takes a command.

        Raises:
            CommandRefusedError: it is not followed.
        """

    def update(self, measured: JointState, now_s: float) -> JointState:
        """The joints' reference at the end of the next CONTROL_DT_S."""


class ArmKinematics:
    """Where the tool is at given joint positions, and how it moves with them.

    Args:
        model: the world with the arm.
        arm: which joints.
    """

    def __init__(self, model: mujoco.MjModel, arm: Arm) -> None:
        self._model, self._data = model, mujoco.MjData(model)
        joints = [model.joint(name) for name in arm.joints]
        self._positions = np.array([joint.qposadr[0] for joint in joints])
        self._dofs = np.array([joint.dofadr[0] for joint in joints])
        self._site = model.site("pinch").id
        self._jacobian = np.zeros((6, model.nv))
        self.low = np.array([joint.range[0] for joint in joints])  # float64 [joints], radians
        self.high = np.array([joint.range[1] for joint in joints])
        self.speed = np.array(arm.speed)  # float64 [joints], rad/s

    def tool(self, positions: np.ndarray) -> Pose:
        """The tool's pose in the base frame."""
        self._place(positions)
        return Pose(self._data.site_xpos[self._site].copy(), self._data.site_xmat[self._site].reshape(3, 3).copy())

    def jacobian(self, positions: np.ndarray) -> np.ndarray:
        """float64 [6, joints]: the tool's linear and angular velocity in the base frame per joint velocity."""
        self._place(positions)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_jacSite(self._model, self._data, self._jacobian[:3], self._jacobian[3:], self._site)
        return self._jacobian[:, self._dofs]

    def _place(self, positions: np.ndarray) -> None:
        self._data.qpos[self._positions] = positions
        mujoco.mj_kinematics(self._model, self._data)
