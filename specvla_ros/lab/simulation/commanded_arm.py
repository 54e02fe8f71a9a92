# SPDX-License-Identifier: Apache-2.0
"""An arm at the table that obeys motion commands, as commercial arms do."""

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np

from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import Arm, Gripper, joint_indices, joint_model
from specvla_ros.lab.simulation.controllers import (
    CONTROL_DT_S,
    CartesianPose,
    Controller,
    JointState,
    JointTrajectoryController,
    PositionArray,
    TwistServo,
    VelocityArray,
)
from specvla_ros.lab.simulation.world import World

_CONTROLLERS: dict[str, Callable[[World], Controller]] = {
    "pose": lambda world: CartesianPose(ToolKinematics(joint_model(world.model, world.arm))),
    "twist": lambda world: TwistServo(ToolKinematics(joint_model(world.model, world.arm))),
    "joint_trajectory": lambda world: JointTrajectoryController(world.arm.joints),
    "joint_trajectory_chunk": lambda world: JointTrajectoryController(world.arm.joints, from_desired=True),
    "position_array": lambda world: PositionArray(),
    "velocity_array": lambda world: VelocityArray(),
}
COMMANDS = tuple(_CONTROLLERS)
TOOL_COMMANDS = ("pose", "twist")  # of the tool; the others are of the joints

# [1/s²]; critically damped at 150 rad/s. A much slower servo oscillates under a joint_trajectory_controller, whose
# trajectories start from the measured state.
_STIFFNESS = 150.0**2
_DAMPING = 2 * _STIFFNESS**0.5
_LEAD_RAD = 0.1
STEP_S = 0.002  # physics step, short enough for this stiffness


class JointServo:
    """The arm's internal joint control: turns references at 100 Hz into torques at each physics step.

    Inverse dynamics with a PD term (computed torque; Siciliano et al., "Robotics: Modelling, Planning and Control",
    8.5.2), limited to the motors' torques. References are limited to the joints' ranges, speeds and accelerations, as
    in position-controlled arms: a jump becomes a motion at full speed. Against an obstacle the reference does not run
    away.
    """

    def __init__(self, model: mujoco.MjModel, arm: Arm) -> None:
        self._model = model
        self._positions, self._dofs = joint_indices(model, arm.joints)
        self._low, self._high = np.array([model.joint(name).range for name in arm.joints]).T
        motors = [model.actuator(name) for name in arm.motors]
        self._controls = np.array([motor.id for motor in motors])
        self._torque = np.array([motor.ctrlrange[1] for motor in motors])
        self._speed, self._acceleration = np.array(arm.speed), np.array(arm.acceleration)
        self._inertia = np.zeros((model.nv, model.nv))

    def measured(self, data: mujoco.MjData) -> JointState:
        return JointState(data.qpos[self._positions].copy(), data.qvel[self._dofs].copy())

    def reset(self, data: mujoco.MjData) -> None:
        """Sets the reference to the joints' current positions."""
        self._reference = data.qpos[self._positions].copy()
        self._velocity = np.zeros_like(self._reference)
        self._reached_s = float(data.time)

    def follow(self, reference: JointState, data: mujoco.MjData) -> None:
        """Sets the reference at the end of the next CONTROL_DT_S."""
        wanted = np.clip(reference.positions, self._low, self._high)
        # Distance left after the reference's own motion; closed as fast as the joint can still brake.
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


class CommandedGripper:
    """Fingers under position control; the first joint's value sets all of them.

    `array` takes float64 [1] like a forward position controller, and `trajectory` takes trajectories of the first
    joint like a joint_trajectory_controller; the newest command wins. Values are clipped to open and closed.
    """

    def __init__(self, model: mujoco.MjModel, gripper: Gripper) -> None:
        self.array = PositionArray()
        self.trajectory = JointTrajectoryController(gripper.joints[:1])
        self._joint = model.joint(gripper.joints[0])
        self._actuators = np.array([model.actuator(name).id for name in gripper.actuators])
        self._open, self._closed = np.array(gripper.open), np.array(gripper.closed)

    def reset(self) -> None:
        """Opens the gripper."""
        opened = JointState(self._open[:1], np.zeros(1))
        self.array.start(opened)
        self.trajectory.start(opened)
        self._obeyed: Controller = self.array

    def obey(self, controller: Controller, command: Any, now_s: float) -> None:
        """Passes a command to `array` or `trajectory`, which takes over; raises CommandRefusedError if it refuses."""
        controller.take(command, now_s)
        self._obeyed = controller

    def update(self, data: mujoco.MjData, now_s: float) -> None:
        measured = JointState(data.qpos[self._joint.qposadr].copy(), data.qvel[self._joint.dofadr].copy())
        wanted = float(self._obeyed.update(measured, now_s).positions[0])
        share = (wanted - self._closed[0]) / (self._open[0] - self._closed[0])
        data.ctrl[self._actuators] = self._closed + np.clip(share, 0.0, 1.0) * (self._open - self._closed)


class CommandedArm:
    """Moves a world's arm by one of COMMANDS; sets the world's physics step to that of the joint control.

    `controller` takes the arm's commands, `gripper` the gripper's.
    """

    control_dt = CONTROL_DT_S

    def __init__(self, world: World, command: str) -> None:
        self._world = world
        world.model.opt.timestep = STEP_S
        self.controller = _CONTROLLERS[command](world)
        self.gripper = CommandedGripper(world.model, world.arm.gripper)
        self._servo = JointServo(world.model, world.arm)

    def reset(self) -> None:
        """Holds the arm at its current position; call it after the world's reset."""
        self._servo.reset(self._world.data)
        self.controller.start(self._servo.measured(self._world.data))
        self.gripper.reset()

    def advance(self, now_s: float) -> None:
        """Advances the world by `control_dt`; `now_s` is the time on the robot's clock, which stamps commands.

        Raises SimulationDiverged if the world's state is no longer finite.
        """
        data = self._world.data
        self._servo.follow(self.controller.update(self._servo.measured(data), now_s), data)
        self.gripper.update(data, now_s)
        self._world.advance(self._servo.apply, self.control_dt)
