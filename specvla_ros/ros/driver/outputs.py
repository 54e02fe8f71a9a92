# SPDX-License-Identifier: Apache-2.0
"""Robot outputs: motion commands of a robot's interface from bounded targets.

Another package adds one by an entry point of the group `specvla_ros.robot_outputs`; docs/how-to/add-a-robot-output.md.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.lifecycle import LifecycleNode
from rclpy.time import Time
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.gripper import GripperOutput, GripperSettings
from specvla_ros.control.inverse_kinematics import JointSolver
from specvla_ros.errors import UserError
from specvla_ros.ros.motion_messages import (
    GRIPPERS,
    array_message,
    gripper_message,
    pose_message,
    trajectory_message,
    twist_message,
)
from specvla_ros.ros.qos import COMMAND
from specvla_ros.settings.registry import Registry

ROBOT_OUTPUTS = Registry("specvla_ros.robot_outputs", ())
_REPEAT_S = 0.5  # of a gripper's command that does not change


@dataclass(frozen=True)
class OutputContext:
    """What an output is made with."""

    node: LifecycleNode
    base_frame: str  # of the targets
    joints: tuple[str, ...] = ()  # names of the arm's joints, in the order of the commands; empty: none are named
    solver: JointSolver | None = None  # inverse kinematics; None: no model of the robot is given
    publishers: list[Any] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)  # what else ends when the driver is cleaned up

    def create_publisher(self, kind: type, topic: str) -> Any:
        """A publisher that is silent while the driver is not active."""
        self.publishers.append(self.node.create_lifecycle_publisher(kind, topic, COMMAND))
        return self.publishers[-1]

    def close(self) -> None:
        self.ending.close()
        while self.publishers:
            self.node.destroy_lifecycle_publisher(self.publishers.pop())

    @property
    def heard(self) -> bool:
        """Whether anybody subscribes to what is sent."""
        return any(publisher.get_subscription_count() for publisher in self.publishers)

    def require_solver(self, output: str) -> JointSolver:
        """The inverse kinematics; raises UserError where there is no model to compute it with."""
        if self.solver is None:
            raise UserError(
                f"output: {output} needs the robot's kinematics; set joints.model to its MJCF or URDF, joints.names, "
                "joints.tool and joints.max_speed"
            )
        return self.solver


class RobotOutput(Protocol):
    """Commands of one interface; registered as what makes one from an `OutputContext`: its class, or a function.

    Attributes:
        follows_velocity: whether the robot is sent velocities, so that where it is must be measured again and again;
            otherwise it is sent to positions.
        by_order: whether joints are sent without their names, so that their order must be the controller's.
    """

    follows_velocity: bool = False
    by_order: bool = False

    def start(self, joint_positions: Mapping[str, float]) -> None:
        """Begins at the robot's present joints, or raises UserError where they are not known; sends nothing yet."""

    def send(self, target: Target, now: Time) -> None:
        """Sends the command of one control step, or raises UnreachableError."""

    def send_positions(self, positions: np.ndarray) -> None:
        """Sends joints' positions, float64 [n], as they are; of outputs that are `by_order`."""


@ROBOT_OUTPUTS.register("none", order=0)
class DryRun(RobotOutput):
    """A dry run: everything is computed and reported, and nothing is sent."""

    def __init__(self, context: OutputContext) -> None:
        pass

    def send(self, target: Target, now: Time) -> None:
        pass


@ROBOT_OUTPUTS.register("pose", order=10)
class PoseOutput(RobotOutput):
    """PoseStamped on `~/pose`, for MoveIt Servo's pose target and Cartesian controllers.

    The tool's target in the base frame, at the control rate; the last one again when it stands still.
    """

    def __init__(self, context: OutputContext) -> None:
        self._frame = context.base_frame
        self._publisher = context.create_publisher(PoseStamped, "~/pose")

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(pose_message(target.pose, now.nanoseconds, self._frame))


@ROBOT_OUTPUTS.register("twist", order=20)
class TwistOutput(RobotOutput):
    """TwistStamped on `~/twist`, for MoveIt Servo and Cartesian velocity controllers.

    The tool's velocity in the base frame: m/s and rad/s (Servo's `command_in_type: speed_units`). Servo drops a command
    whose stamp is older than 0.1 s (`incoming_command_timeout`) and stops then, so twists are stamped with the present
    and sent at the control rate, zeros included.
    """

    follows_velocity = True

    def __init__(self, context: OutputContext) -> None:
        self._frame = context.base_frame
        self._publisher = context.create_publisher(TwistStamped, "~/twist")

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(twist_message(target.velocity, now.nanoseconds, self._frame))


@ROBOT_OUTPUTS.register("joint_trajectory", order=30)
class JointTrajectoryOutput(RobotOutput):
    """JointTrajectory on `~/joint_trajectory`, for ros2_control's joint_trajectory_controller.

    The joints' positions in a trajectory of one point, a few periods ahead, replaced at each control step: the
    controller interpolates to it from where it is, and holds it when no other comes.
    """

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("joint_trajectory")
        self._joints = context.joints
        self._publisher = context.create_publisher(JointTrajectory, "~/joint_trajectory")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(trajectory_message(self._joints, *self._solver.follow(target)))


@ROBOT_OUTPUTS.register("position_array", order=40)
class PositionArrayOutput(RobotOutput):
    """Float64MultiArray on `~/joint_positions`, for ros2_control's forward position controllers.

    The joints' positions in the order of `joints.names`, at the control rate.
    """

    by_order = True

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("position_array")
        self._publisher = context.create_publisher(Float64MultiArray, "~/joint_positions")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target, now: Time) -> None:
        self.send_positions(self._solver.follow(target)[0])

    def send_positions(self, positions: np.ndarray) -> None:
        self._publisher.publish(array_message(positions))


class GripperCommands:
    """Sends a gripper's position when it changes, and again twice a second: a lost command must not stay lost.

    An array, of which the guard makes an action's goal where it is asked to, or a trajectory.

    Raises UserError where a trajectory's joint, or the gripper's range, is not given.
    """

    def __init__(self, context: OutputContext, settings: GripperSettings) -> None:
        settings.require()
        self._settings, output = settings, GripperOutput(settings.output)
        self._publisher: Any = None
        if output is not GripperOutput.NONE:
            name, kind, _ = GRIPPERS[output]
            self._publisher = context.create_publisher(kind, f"~/{name}")
        self._sent: float | None = None
        self._sent_s = 0.0

    def command(self, position: float | None, now_s: float) -> None:
        """Sends a position in the robot's unit; None: nothing, and the next one whatever it is. `now_s`: steady."""
        if position is None:
            self._sent = None
            return
        if position == self._sent and now_s - self._sent_s < _REPEAT_S:
            return
        self._sent, self._sent_s = position, now_s
        if self._publisher is not None:
            self._publisher.publish(gripper_message(position, self._settings))
