# SPDX-License-Identifier: Apache-2.0
"""The guard between the driver's commands and a simulated arm, in simulation time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specvla_ros.control.gripper import GripperLimits
from specvla_ros.control.guard.commands import (
    Command,
    GripperCommand,
    Instant,
    JointCommand,
    JointPositions,
    JointVelocities,
    Sent,
    SentTwist,
    SentVelocities,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.guard import Guard, State
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose, quaternion
from specvla_ros.control.robot_model import JointModel, ToolKinematics
from specvla_ros.lab.simulation.arm import Arm
from specvla_ros.lab.simulation.controllers import BASE_FRAME, JointTrajectory, Point, Twist
from specvla_ros.lab.simulation.world import World

_STOP_TIME_S = 0.5  # from full speed with the driver's acceleration
_FASTER = 1.2  # of the guard's speed limits, against the driver's


@dataclass(frozen=True)
class Passed:
    """The commands that reach the arm in one step; None: no new one."""

    command: Any
    gripper: float | None


class ArmGuard:
    """Guards an arm; the operator holds the switch all the time.

    Args:
        model: kinematics and limits of the driver's motion; `limits`: those of the tool.
        output: the command interface. Those of joints need a model with limits of acceleration.
    """

    def __init__(self, arm: Arm, model: JointModel, limits: Limits, output: str) -> None:
        kinematics, fingers = ToolKinematics(model), arm.gripper
        settings = GuardSettings(
            output=output,
            base_frame=BASE_FRAME,
            limits=limits,
            joints=_joint_limits(arm, model, kinematics.ranges) if Output(output).of_joints else JointLimits(),
            gripper=GripperLimits("array", fingers.joints[0], fingers.open[0], fingers.closed[0]),
            stop_time_s=_STOP_TIME_S,
        )
        self._settings, self._kinematics = settings, kinematics

    def start(self, instruction: str) -> None:
        """Begins an episode: the guard holds until all its conditions have been met for a while."""
        self._guard, self._instruction = Guard(self._settings, self._kinematics), instruction
        self._guard.instruction(instruction)

    @property
    def passing(self) -> bool:
        return self._guard.state is State.PASSING

    @property
    def reason(self) -> str:
        """The causes that block motion, in words; empty while it passes."""
        return self._guard.reason

    def act(self, stamp_s: float, now_s: float) -> None:
        """Hears that an action was published."""
        self._guard.action(Stamp(round(stamp_s * 1e9), BASE_FRAME), self._instruction, _instant(now_s))

    def step(self, world: World, command: Any, gripper: float | None, now_s: float) -> Passed:
        """Measures the arm, takes the driver's commands if there are any, and runs one tick."""
        guard, now = self._guard, _instant(now_s)
        stamp, tool = Stamp(now.clock_ns, BASE_FRAME), world.tool()
        guard.tool(ToolPose(stamp, tool.position, quaternion(tool.rotation)), now)
        guard.joints(JointPositions(stamp, world.arm.joint_names, world.joint_state()[0]), now)
        guard.enable(True, now)
        if command is not None:
            guard.command(self._command(stamp, command), now)
        if gripper is not None:
            guard.gripper(GripperCommand(None, np.array([gripper])), now)
        outcome = guard.tick(now)
        return Passed(None if outcome.sent is None else self._robots(outcome.sent, now_s), outcome.gripper)

    def _command(self, stamp: Stamp, command: Any) -> Command:
        """The driver's command, as its output makes it; see `DrivenRobot`."""
        if isinstance(command, Twist):
            return TwistCommand(stamp, np.concatenate([command.linear, command.angular]))
        if isinstance(command, tuple):
            frame, pose = command
            return ToolPose(Stamp(stamp.ns, frame), pose.position, quaternion(pose.rotation))
        if isinstance(command, JointTrajectory):
            return _trajectory_command(stamp, command)
        if self._settings.kind is Output.VELOCITY_ARRAY:
            return JointVelocities(stamp, command)
        return JointCommand(stamp, None, command[None], np.zeros(1))

    def _robots(self, sent: Sent, now_s: float) -> Any:
        """The guard's message as the arm's controller takes it; None: the controller has it already."""
        if isinstance(sent, Pose):
            return BASE_FRAME, sent
        if isinstance(sent, SentTwist):
            return Twist(now_s, BASE_FRAME, sent.velocity[:3], sent.velocity[3:])
        if isinstance(sent, SentVelocities):
            return sent.velocities
        if sent.sent_before:
            return None
        if self._settings.kind is Output.POSITION_ARRAY:
            return sent.positions
        ahead, names = trajectory_point(sent.positions, sent.velocities), self._settings.joints.names
        return trajectory(names, sent.path or JointPath(np.array([TRAJECTORY_AHEAD_S]), ahead[None]))


def _joint_limits(arm: Arm, model: JointModel, ranges: np.ndarray) -> JointLimits:
    assert model.max_acceleration is not None
    return JointLimits(
        names=arm.joints,
        position_min=tuple(ranges[:, 0].tolist()),
        position_max=tuple(ranges[:, 1].tolist()),
        max_speed=tuple((_FASTER * model.max_speed).tolist()),
        max_acceleration=tuple((2 * model.max_acceleration).tolist()),
    )


def trajectory(names: tuple[str, ...], path: JointPath) -> JointTrajectory:
    """A path as the arm's controller takes it."""
    nothing = np.zeros(0)
    moving = [nothing] * len(path.times_s) if path.velocities is None else path.velocities
    states = zip(path.times_s.tolist(), path.positions, moving, strict=True)
    return JointTrajectory(0.0, names, tuple(Point(*state, nothing) for state in states))


def _trajectory_command(stamp: Stamp, command: JointTrajectory) -> JointCommand:
    points = command.points
    moving = np.array([point.velocities for point in points]) if len(points[0].velocities) else None
    positions, times_s = np.array([point.positions for point in points]), np.array([point.time_s for point in points])
    return JointCommand(stamp, command.joints, positions, times_s, moving)


def _instant(now_s: float) -> Instant:
    return Instant(now_s, round(now_s * 1e9))
