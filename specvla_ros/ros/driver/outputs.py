# SPDX-License-Identifier: Apache-2.0
"""Robot outputs: turn bounded targets into motion commands of a robot's interface.

Other packages add outputs by the entry point group `specvla_ros.robot_outputs`; see docs/how-to/add-a-robot-output.md.
"""

from collections.abc import Callable, Mapping
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
from specvla_ros.control.chunks import TrajectoryChunks
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import GripperOutput, GripperSettings
from specvla_ros.control.guard.settings import JOINT_OUTPUTS
from specvla_ros.control.inverse_kinematics import JointSolver, UnreachableError, kept_in
from specvla_ros.control.joint_space import JointKinematics
from specvla_ros.control.joint_velocity import JointTracking
from specvla_ros.errors import UserError
from specvla_ros.ros.motion_messages import (
    GRIPPERS,
    array_message,
    gripper_message,
    path_message,
    pose_message,
    trajectory_message,
    twist_message,
)
from specvla_ros.ros.qos import COMMAND
from specvla_ros.settings.registry import Registry

ROBOT_OUTPUTS = Registry("specvla_ros.robot_outputs", ())
_REPEAT_S = 0.5  # period at which an unchanged gripper command is repeated


@dataclass(frozen=True)
class OutputContext:
    """The constructor argument of an output."""

    node: LifecycleNode
    base_frame: str  # of the targets
    joints: tuple[str, ...] = ()  # names of the arm's joints, in the order of the commands; empty: none given
    # The joints of targets: by inverse kinematics, or the targets themselves; None: no robot model given.
    solver: JointSolver | JointKinematics | None = None
    # The joints' positions by name; None while they are unknown, or motion is blocked.
    measured: Callable[[], Mapping[str, float] | None] = lambda: None
    period_s: float = 0.01  # of the control steps
    chunk_s: float = 0.5  # longest trajectory that is sent ahead, its braking included
    stop_s: float = 0.2  # duration of braking from full speed
    publishers: list[Any] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack)  # further callbacks at the driver's cleanup

    def create_publisher(self, kind: type, topic: str) -> Any:
        """Creates a publisher that is silent while the driver is not active."""
        self.publishers.append(self.node.create_lifecycle_publisher(kind, topic, COMMAND))
        return self.publishers[-1]

    def close(self) -> None:
        self.ending.close()
        while self.publishers:
            self.node.destroy_lifecycle_publisher(self.publishers.pop())

    @property
    def heard(self) -> bool:
        """True if any command has a subscriber."""
        return any(publisher.get_subscription_count() for publisher in self.publishers)

    def require_tool(self, output: str) -> None:
        """Raises UserError if targets are joints' and not the tool's."""
        if isinstance(self.solver, JointKinematics):
            raise UserError(
                f"output: {output} commands the tool, but with action_space: joints the actions name joint positions; "
                f"set output to one of {', '.join(JOINT_OUTPUTS)}"
            )

    def require_solver(self, output: str) -> JointSolver | JointKinematics:
        """Returns what makes joint commands of targets; raises UserError without a robot model."""
        if self.solver is None:
            raise UserError(
                f"output: {output} needs the robot's kinematics; set joints.model to its MJCF or URDF, joints.names, "
                "joints.tool and joints.max_speed"
            )
        return self.solver


class RobotOutput(Protocol):
    """Commands of one robot interface. A class, or a function, that takes an `OutputContext` is registered.

    Attributes:
        follows_velocity: True if velocities are sent, so that the robot must be measured continuously; otherwise
            positions are sent.
        by_order: True if joints are sent without names, so that their order must be the controller's.
        tries_order: True if small motions may find out the order of such joints.
        measures_joints: True if the joints must be measured while it moves, whatever measures the tool.
    """

    follows_velocity: bool = False
    by_order: bool = False
    tries_order: bool = True
    measures_joints: bool = False

    def connect(self, follower: ActionFollower[Any]) -> None:
        """Takes the follower whose targets are sent, when the driver is activated; it tells what comes next."""

    def start(self, joint_positions: Mapping[str, float]) -> None:
        """Starts at the robot's present joints and sends nothing yet. Raises UserError if they are not known."""

    def send(self, target: Target[Any], now: Time) -> None:
        """Sends the command of one control step, or raises UnreachableError."""

    def stop(self, now: Time) -> None:
        """Sends zeros if the robot keeps its last velocity: no further command may follow, and no guard is there."""

    def send_positions(self, positions: np.ndarray) -> None:
        """Sends joint positions, float64 [n], unchanged; only for outputs that are `by_order` and `tries_order`."""


@ROBOT_OUTPUTS.register("none", order=0)
class DryRun(RobotOutput):
    """A dry run: everything is computed and reported, but nothing is sent."""

    def __init__(self, context: OutputContext) -> None:
        pass

    def send(self, target: Target[Any], now: Time) -> None:
        pass


@ROBOT_OUTPUTS.register("pose", order=10)
class PoseOutput(RobotOutput):
    """PoseStamped on `~/pose`, for MoveIt Servo's pose target and Cartesian controllers.

    The tool's target pose in the base frame, at the control rate. At rest the last one is repeated.
    """

    def __init__(self, context: OutputContext) -> None:
        context.require_tool("pose")
        self._frame = context.base_frame
        self._publisher = context.create_publisher(PoseStamped, "~/pose")

    def send(self, target: Target[Any], now: Time) -> None:
        self._publisher.publish(pose_message(target.pose, now.nanoseconds, self._frame))


@ROBOT_OUTPUTS.register("twist", order=20)
class TwistOutput(RobotOutput):
    """TwistStamped on `~/twist`, for MoveIt Servo and Cartesian velocity controllers.

    The tool's velocity in the base frame: m/s and rad/s (Servo's `command_in_type: speed_units`). Servo drops a command
    whose stamp is older than 0.1 s (`incoming_command_timeout`) and then stops. So twists get the present stamp and are
    sent at the control rate, zeros included.
    """

    follows_velocity = True

    def __init__(self, context: OutputContext) -> None:
        context.require_tool("twist")
        self._frame = context.base_frame
        self._publisher = context.create_publisher(TwistStamped, "~/twist")

    def send(self, target: Target[Any], now: Time) -> None:
        self._publisher.publish(twist_message(target.velocity, now.nanoseconds, self._frame))

    def stop(self, now: Time) -> None:
        self._publisher.publish(twist_message(np.zeros(6), now.nanoseconds, self._frame))


@ROBOT_OUTPUTS.register("joint_trajectory", order=30)
class JointTrajectoryOutput(RobotOutput):
    """JointTrajectory on `~/joint_trajectory`, for ros2_control's joint_trajectory_controller.

    Each control step sends a new trajectory of one point, a few periods ahead. The controller interpolates to it from
    its present positions, and holds it if no other arrives.
    """

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("joint_trajectory")
        self._joints = context.joints
        self._publisher = context.create_publisher(JointTrajectory, "~/joint_trajectory")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target[Any], now: Time) -> None:
        positions, velocities = self._solver.follow(target)
        low, high = self._solver.ranges.T
        velocities = kept_in(low, high, positions, velocities)
        message = trajectory_message(self._joints, positions, velocities, stamp_ns=now.nanoseconds)
        self._publisher.publish(message)


@ROBOT_OUTPUTS.register("joint_trajectory_chunk", order=35)
class TrajectoryChunkOutput(RobotOutput):
    """JointTrajectory on `~/joint_trajectory`, of all the motion that is planned, up to `joints.chunk_s`.

    The controller follows it by itself: late messages do not matter, and it comes to rest at its end. It is sent when
    the plan changes, and 20 times a second.
    """

    def __init__(self, context: OutputContext) -> None:
        solver = context.require_solver("joint_trajectory_chunk")
        self._solver, self._joints = solver, context.joints
        self._chunks = TrajectoryChunks(solver, context.chunk_s, context.stop_s)
        self._publisher = context.create_publisher(JointTrajectory, "~/joint_trajectory")

    def connect(self, follower: ActionFollower[Any]) -> None:
        self._follower = follower

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)
        self._chunks.start()

    def send(self, target: Target[Any], now: Time) -> None:
        path = self._chunks.next(target, self._follower, now.nanoseconds * 1e-9)
        if path is not None:
            self._publisher.publish(path_message(self._joints, path, now.nanoseconds))


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

    def send(self, target: Target[Any], now: Time) -> None:
        self.send_positions(self._solver.follow(target)[0])

    def send_positions(self, positions: np.ndarray) -> None:
        self._publisher.publish(array_message(positions))


@ROBOT_OUTPUTS.register("velocity_array", order=50)
class VelocityArrayOutput(RobotOutput):
    """Float64MultiArray on `~/joint_velocities`, for ros2_control's forward velocity controllers.

    The joints' velocities in the order of `joints.names`, at the control rate, zeros at rest. The controller keeps the
    last ones: a driver that is killed leaves the arm in motion.
    """

    by_order, tries_order = True, False  # a trial that breaks off would leave a joint in motion
    measures_joints = True

    def __init__(self, context: OutputContext) -> None:
        self._solver, self._context = context.require_solver("velocity_array"), context
        self._tracking = JointTracking(self._solver)
        self._publisher = context.create_publisher(Float64MultiArray, "~/joint_velocities")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)
        self._tracking.rest()

    def send(self, target: Target[Any], now: Time) -> None:
        measured, period_s = self._context.measured(), self._context.period_s
        try:
            velocities = self._tracking.next(target, measured, period_s)
        except UnreachableError:
            self._publisher.publish(array_message(self._tracking.brake(period_s)))
            raise
        self._publisher.publish(array_message(velocities))

    def stop(self, now: Time) -> None:
        self._tracking.rest()
        self._publisher.publish(array_message(np.zeros(len(self._context.joints))))


class GripperCommands:
    """Sends a gripper's position when it changes, and again twice a second in case a command was lost.

    It is sent as a trajectory or an array; with `output: action` the guard turns the array into an action's goal.

    Raises UserError if a trajectory's joint, or the gripper's range, is not given.
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
        """Sends a position in the robot's unit; after None the next one is always sent. `now_s`: steady time."""
        if position is None:
            self._sent = None
            return
        if position == self._sent and now_s - self._sent_s < _REPEAT_S:
            return
        self._sent, self._sent_s = position, now_s
        if self._publisher is not None:
            self._publisher.publish(gripper_message(position, self._settings))
