# SPDX-License-Identifier: Apache-2.0
"""An arm at the table that obeys motion commands, as the arms do that are sold."""

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np

from specvla_ros.lab.simulation.arms import Gripper
from specvla_ros.lab.simulation.controllers.cartesian_pose import CartesianPose
from specvla_ros.lab.simulation.controllers.controller import CONTROL_DT_S, ArmKinematics, Controller, JointState
from specvla_ros.lab.simulation.controllers.joint_trajectory import JointTrajectoryController
from specvla_ros.lab.simulation.controllers.position_array import PositionArray
from specvla_ros.lab.simulation.controllers.servo import TwistServo
from specvla_ros.lab.simulation.joint_servo import STEP_S, JointServo
from specvla_ros.lab.simulation.world import World

_CONTROLLERS: dict[str, Callable[[World], Controller[Any]]] = {
    "pose": lambda world: CartesianPose(ArmKinematics(world.model, world.arm)),
    "twist": lambda world: TwistServo(ArmKinematics(world.model, world.arm)),
    "joint_trajectory": lambda world: JointTrajectoryController(world.arm.joints),
    "position_array": lambda world: PositionArray(),
}
COMMANDS = tuple(_CONTROLLERS)


class CommandedGripper:
    """Fingers that go where they are told: one value for all of them, that of the first joint.

    It takes arrays as a forward position controller does and trajectories as a joint_trajectory_controller does; the
    newest of either holds. Values beyond open and closed are taken as these.

    Args:
        model: the world with the gripper.
        gripper: its joints and actuators.

    Attributes:
        array: takes float64 [1].
        trajectory: takes trajectories of the first joint.
    """

    def __init__(self, model: mujoco.MjModel, gripper: Gripper) -> None:
        self.array = PositionArray()
        self.trajectory = JointTrajectoryController(gripper.joints[:1])
        self._joint = model.joint(gripper.joints[0])
        self._actuators = np.array([model.actuator(name).id for name in gripper.actuators])
        self._open, self._closed = np.array(gripper.open), np.array(gripper.closed)

    def reset(self) -> None:
        """Opens it."""
        opened = JointState(self._open[:1], np.zeros(1))
        self.array.start(opened)
        self.trajectory.start(opened)
        self._obeyed: Controller[Any] = self.array

    def obey(self, controller: Controller[Any], command: Any, now_s: float) -> None:
        """Hands a command to `array` or `trajectory`, which holds from now on.

        Raises:
            CommandRefusedError: it is not followed.
        """
        controller.take(command, now_s)
        self._obeyed = controller

    def update(self, data: mujoco.MjData, now_s: float) -> None:
        """Sets the fingers' actuators."""
        measured = JointState(data.qpos[self._joint.qposadr].copy(), data.qvel[self._joint.dofadr].copy())
        wanted = float(self._obeyed.update(measured, now_s).positions[0])
        share = (wanted - self._closed[0]) / (self._open[0] - self._closed[0])
        data.ctrl[self._actuators] = self._closed + np.clip(share, 0.0, 1.0) * (self._open - self._closed)


class CommandedArm:
    """Moves a world's arm by one command interface; the world's physics step becomes that of the joint control.

    Args:
        world: with the arm.
        command: one of COMMANDS.

    Attributes:
        controller: takes the commands.
        gripper: takes the gripper's.
    """

    control_dt = CONTROL_DT_S

    def __init__(self, world: World, command: str) -> None:
        self._world = world
        world.model.opt.timestep = STEP_S
        self.controller = _CONTROLLERS[command](world)
        self.gripper = CommandedGripper(world.model, world.arm.gripper)
        self._servo = JointServo(world.model, world.arm)

    def reset(self) -> None:
        """Holds the arm where it is, after the world's reset."""
        self._servo.reset(self._world.data)
        self.controller.start(self._servo.measured(self._world.data))
        self.gripper.reset()

    def advance(self, now_s: float) -> None:
        """Lets `control_dt` pass.

        Args:
            now_s: seconds on the robot's clock, on which commands are stamped.

        Raises:
            SimulationDiverged: the world is not finite any more.
        """
        data = self._world.data
        self._servo.follow(self.controller.update(self._servo.measured(data), now_s), data)
        self.gripper.update(data, now_s)
        self._world.advance(self._servo.apply, self.control_dt)
