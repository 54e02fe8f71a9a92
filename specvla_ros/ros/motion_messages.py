# SPDX-License-Identifier: Apache-2.0
"""Motion messages: the commands that driver and guard send, and readers of the guard's inputs.

Readers check nothing and must not raise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, Header
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.gripper import TRAVEL_S, GripperLimits, GripperOutput
from specvla_ros.control.guard.commands import (
    GripperCommand,
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
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.pose import Pose, quaternion

_NONE = np.zeros((0, 0))


def twist_message(velocity: np.ndarray, stamp_ns: int, frame_id: str) -> TwistStamped:
    """The tool's velocity, float64 [6], to be stamped with the present: Servo drops twists older than 0.1 s."""
    message = TwistStamped(header=_header(stamp_ns, frame_id))
    linear, angular = message.twist.linear, message.twist.angular
    linear.x, linear.y, linear.z, angular.x, angular.y, angular.z = velocity.tolist()
    return message


def pose_message(pose: Pose, stamp_ns: int, frame_id: str) -> PoseStamped:
    """Message of a tool pose in the frame `frame_id`."""
    message = PoseStamped(header=_header(stamp_ns, frame_id))
    position, turn = message.pose.position, message.pose.orientation
    position.x, position.y, position.z = pose.position.tolist()
    turn.w, turn.x, turn.y, turn.z = quaternion(pose.rotation)
    return message


def trajectory_message(
    names: tuple[str, ...],
    positions: np.ndarray,
    velocities: np.ndarray,
    after_s: float = TRAJECTORY_AHEAD_S,
    stamp_ns: int = 0,
) -> JointTrajectory:
    """One point, TRAJECTORY_AHEAD_S ahead of `positions` at `velocities`, float64 [joints], to be reached in `after_s`.

    A nearer point makes an arm swing, as the controller starts each trajectory at the measured joints. The controller
    reads a stamp of zero as "now".
    """
    message = _one_point(names, trajectory_point(positions, velocities).tolist(), after_s)
    message.header = _header(stamp_ns, "")
    return message


def path_message(names: tuple[str, ...], path: JointPath, stamp_ns: int = 0) -> JointTrajectory:
    """All points of a path with velocities; a stamp of zero means "now"."""
    assert path.velocities is not None
    points = zip(path.positions.tolist(), path.velocities.tolist(), path.times_s.tolist(), strict=True)
    message = JointTrajectory(header=_header(stamp_ns, ""), joint_names=list(names))
    message.points = [
        JointTrajectoryPoint(positions=at, velocities=moving, time_from_start=_duration(time_s))
        for at, moving, time_s in points
    ]
    return message


def array_message(values: np.ndarray) -> Float64MultiArray:
    """Message of commanded joint positions or velocities, float64 [joints]."""
    return Float64MultiArray(data=values.tolist())


def gripper_message(position: float, gripper: GripperLimits) -> Float64MultiArray | JointTrajectory:
    """Message of a commanded gripper position, of the type that `gripper.output` requires."""
    if gripper.output == GripperOutput.TRAJECTORY.value:
        return _one_point((gripper.joint,), [position], TRAVEL_S)
    return Float64MultiArray(data=[position])


def _one_point(names: tuple[str, ...], positions: list[float], after_s: float) -> JointTrajectory:
    point = JointTrajectoryPoint(positions=positions, time_from_start=_duration(after_s))
    return JointTrajectory(joint_names=list(names), points=[point])


def _duration(seconds: float) -> Duration:
    ns = round(seconds * 1e9)
    return Duration(sec=ns // 10**9, nanosec=ns % 10**9)


def _header(stamp_ns: int, frame_id: str) -> Header:
    return Header(stamp=Time(nanoseconds=stamp_ns).to_msg(), frame_id=frame_id)


def stamp_of(header: Header, sent_ns: int | None = None) -> Stamp:
    """The header's stamp, or the time of sending if it is 0 ("now" to trajectory controllers)."""
    return Stamp(_ns(header) or sent_ns, header.frame_id)


def _ns(header: Header) -> int:
    stamp: int = header.stamp.sec * 10**9 + header.stamp.nanosec
    return stamp


def twist_command(message: TwistStamped, sent_ns: int | None) -> TwistCommand:
    """The tool's commanded velocity. A stamp of 0 is taken literally, as Servo does."""
    linear, angular = message.twist.linear, message.twist.angular
    velocity = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
    return TwistCommand(Stamp(_ns(message.header), message.header.frame_id), velocity)


def tool_pose(message: PoseStamped, sent_ns: int | None) -> ToolPose:
    """The tool's measured or commanded pose. A stamp of 0 is taken literally."""
    place, turn = message.pose.position, message.pose.orientation
    stamp = Stamp(_ns(message.header), message.header.frame_id)
    return ToolPose(stamp, np.array([place.x, place.y, place.z]), (turn.w, turn.x, turn.y, turn.z))


def trajectory_command(message: JointTrajectory, sent_ns: int | None) -> JointCommand:
    """Commanded joint positions, their times, and their velocities if any point has some."""
    positions = _table([point.positions for point in message.points])
    moves = any(len(point.velocities) for point in message.points)
    velocities = _table([point.velocities for point in message.points]) if moves else None
    times_s = np.array([_seconds(point.time_from_start) for point in message.points])
    return JointCommand(stamp_of(message.header, sent_ns), tuple(message.joint_names), positions, times_s, velocities)


def _table(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([list(row) for row in rows]) if len({len(row) for row in rows}) == 1 else _NONE


def _seconds(duration: Duration) -> float:
    return float(duration.sec) + duration.nanosec * 1e-9


def array_command(message: Float64MultiArray, sent_ns: int | None) -> JointCommand:
    """Commanded joint positions, in the order of the parameters."""
    return JointCommand(Stamp(sent_ns), None, np.array([message.data]), np.zeros(1))


def velocities_command(message: Float64MultiArray, sent_ns: int | None) -> JointVelocities:
    """Commanded joint velocities, in the order of the parameters."""
    return JointVelocities(Stamp(sent_ns), np.array(message.data))


def joint_positions(message: JointState) -> JointPositions:
    """Measured joint positions."""
    return JointPositions(stamp_of(message.header), tuple(message.name), np.array(message.position))


def gripper_array(message: Float64MultiArray) -> GripperCommand:
    """Commanded gripper position."""
    return GripperCommand(None, np.array(message.data))


def gripper_trajectory(message: JointTrajectory) -> GripperCommand:
    """Commanded gripper position: the trajectory's last point."""
    positions = message.points[-1].positions if message.points else ()
    return GripperCommand(tuple(message.joint_names), np.array(positions))


def sent_message(
    sent: Sent, settings: GuardSettings, stamp_ns: int
) -> TwistStamped | PoseStamped | JointTrajectory | Float64MultiArray:
    """The guard's command as a message of its output."""
    if isinstance(sent, SentTwist):
        return twist_message(sent.velocity, stamp_ns, settings.base_frame)
    if isinstance(sent, Pose):
        return pose_message(sent, stamp_ns, settings.base_frame)
    if isinstance(sent, SentVelocities):
        return array_message(sent.velocities)
    if settings.kind is Output.POSITION_ARRAY:
        return array_message(sent.positions)
    if sent.path is not None:
        return path_message(settings.joints.names, sent.path)
    return trajectory_message(settings.joints.names, sent.positions, sent.velocities, sent.after_s)


# Topic, message type and reader of each output.
COMMANDS: dict[Output, tuple[str, type, Callable[..., Any]]] = {
    Output.POSE: (Output.POSE.topic, PoseStamped, tool_pose),
    Output.TWIST: (Output.TWIST.topic, TwistStamped, twist_command),
    Output.JOINT_TRAJECTORY: (Output.JOINT_TRAJECTORY.topic, JointTrajectory, trajectory_command),
    Output.JOINT_TRAJECTORY_CHUNK: (Output.JOINT_TRAJECTORY_CHUNK.topic, JointTrajectory, trajectory_command),
    Output.POSITION_ARRAY: (Output.POSITION_ARRAY.topic, Float64MultiArray, array_command),
    Output.VELOCITY_ARRAY: (Output.VELOCITY_ARRAY.topic, Float64MultiArray, velocities_command),
}
GRIPPERS: dict[GripperOutput, tuple[str, type, Callable[..., Any]]] = {
    GripperOutput.ARRAY: ("gripper", Float64MultiArray, gripper_array),
    GripperOutput.TRAJECTORY: ("gripper_trajectory", JointTrajectory, gripper_trajectory),
    GripperOutput.ACTION: ("gripper", Float64MultiArray, gripper_array),
}
