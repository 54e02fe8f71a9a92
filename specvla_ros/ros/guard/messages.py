# SPDX-License-Identifier: Apache-2.0
"""ROS messages to what the guard judges, and back. Nothing is checked here, and nothing may raise."""

import numpy as np
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, Header
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.gripper import TRAVEL_S
from specvla_ros.control.guard.commands import (
    JointCommand,
    JointPositions,
    Sent,
    SentJoints,
    SentPose,
    SentTwist,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.guard import GripperCommand
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.pose import quaternion

_NONE = np.zeros((0, 0))


def stamp_of(header: Header, sent_ns: int | None = None) -> Stamp:
    """Of a message; where it has none (0 means "now" to trajectory controllers), when it was sent."""
    ns = header.stamp.sec * 10**9 + header.stamp.nanosec
    return Stamp(ns if ns else sent_ns, header.frame_id)


def twist_command(message: TwistStamped, sent_ns: int | None) -> TwistCommand:
    """A velocity of the tool. A stamp of 0 is a stamp here: Servo takes it for one."""
    linear, angular = message.twist.linear, message.twist.angular
    velocity = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
    return TwistCommand(Stamp(_ns(message.header), message.header.frame_id), velocity)


def tool_pose(message: PoseStamped, sent_ns: int | None) -> ToolPose:
    """Where the tool is, or is to be."""
    position, turn = message.pose.position, message.pose.orientation
    return ToolPose(
        Stamp(_ns(message.header), message.header.frame_id),
        np.array([position.x, position.y, position.z]),
        (turn.w, turn.x, turn.y, turn.z),
    )


def trajectory_command(message: JointTrajectory, sent_ns: int | None) -> JointCommand:
    """Where joints are to be, and when."""
    rows = [list(point.positions) for point in message.points]
    positions = np.array(rows) if rows and len({len(row) for row in rows}) == 1 else _NONE
    times_s = np.array([_seconds(point.time_from_start) for point in message.points])
    return JointCommand(stamp_of(message.header, sent_ns), tuple(message.joint_names), positions, times_s)


def array_command(message: Float64MultiArray, sent_ns: int | None) -> JointCommand:
    """Where joints are to be, in the order of the parameters."""
    return JointCommand(Stamp(sent_ns), None, np.array([message.data]), np.zeros(1))


def joint_positions(message: JointState) -> JointPositions:
    """Where joints were measured."""
    return JointPositions(stamp_of(message.header), tuple(message.name), np.array(message.position))


def gripper_array(message: Float64MultiArray) -> GripperCommand:
    """Where a gripper is to be."""
    return GripperCommand(None, np.array(message.data))


def gripper_trajectory(message: JointTrajectory) -> GripperCommand:
    """Where a gripper is to be at its trajectory's end."""
    positions = message.points[-1].positions if message.points else ()
    return GripperCommand(tuple(message.joint_names), np.array(positions))


def twist_message(sent: SentTwist, stamp_ns: int, frame_id: str) -> TwistStamped:
    """What goes out, stamped now: Servo drops what is older than 0.1 s."""
    message = TwistStamped(header=_header(stamp_ns, frame_id))
    linear, angular = message.twist.linear, message.twist.angular
    linear.x, linear.y, linear.z, angular.x, angular.y, angular.z = sent.velocity.tolist()
    return message


def pose_message(sent: SentPose, stamp_ns: int, frame_id: str) -> PoseStamped:
    """What goes out, stamped now."""
    message = PoseStamped(header=_header(stamp_ns, frame_id))
    position, turn = message.pose.position, message.pose.orientation
    position.x, position.y, position.z = sent.position.tolist()
    turn.w, turn.x, turn.y, turn.z = quaternion(sent.rotation)
    return message


def trajectory_message(sent: SentJoints, names: tuple[str, ...]) -> JointTrajectory:
    """What goes out: one point, as the driver sends it.

    A nearer one makes an arm swing: the controller begins each trajectory at the joints as it measured them.
    """
    ahead = trajectory_point(sent.positions, sent.velocities)
    point = JointTrajectoryPoint(positions=ahead.tolist(), time_from_start=_duration(TRAJECTORY_AHEAD_S))
    return JointTrajectory(joint_names=list(names), points=[point])


def array_message(sent: SentJoints) -> Float64MultiArray:
    """What goes out."""
    return Float64MultiArray(data=sent.positions.tolist())


def gripper_trajectory_message(position: float, joint: str) -> JointTrajectory:
    """What goes out."""
    point = JointTrajectoryPoint(positions=[position], time_from_start=_duration(TRAVEL_S))
    return JointTrajectory(joint_names=[joint], points=[point])


def robot_message(
    sent: Sent, stamp_ns: int, frame_id: str, names: tuple[str, ...], *, as_array: bool
) -> TwistStamped | PoseStamped | JointTrajectory | Float64MultiArray:
    """What goes out, of any kind."""
    if isinstance(sent, SentTwist):
        return twist_message(sent, stamp_ns, frame_id)
    if isinstance(sent, SentPose):
        return pose_message(sent, stamp_ns, frame_id)
    return array_message(sent) if as_array else trajectory_message(sent, names)


def _header(stamp_ns: int, frame_id: str) -> Header:
    return Header(stamp=Time(nanoseconds=stamp_ns).to_msg(), frame_id=frame_id)


def _ns(header: Header) -> int:
    stamp: int = header.stamp.sec * 10**9 + header.stamp.nanosec
    return stamp


def _seconds(duration: Duration) -> float:
    return float(duration.sec) + duration.nanosec * 1e-9


def _duration(seconds: float) -> Duration:
    ns = round(seconds * 1e9)
    return Duration(sec=ns // 10**9, nanosec=ns % 10**9)
