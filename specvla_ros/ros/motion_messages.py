# SPDX-License-Identifier: Apache-2.0
"""Messages of motion: commands to a robot as driver and guard send them, and what the guard reads.

Reading checks nothing, and may not raise.
"""

from collections.abc import Callable
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
    Sent,
    SentTwist,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.settings import GuardSettings, Output
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.pose import Pose, quaternion

_NONE = np.zeros((0, 0))


def twist_message(velocity: np.ndarray, stamp_ns: int, frame_id: str) -> TwistStamped:
    """A velocity of the tool, float64 [6], stamped now: Servo drops what is older than 0.1 s."""
    message = TwistStamped(header=_header(stamp_ns, frame_id))
    linear, angular = message.twist.linear, message.twist.angular
    linear.x, linear.y, linear.z, angular.x, angular.y, angular.z = velocity.tolist()
    return message


def pose_message(pose: Pose, stamp_ns: int, frame_id: str) -> PoseStamped:
    """Where the tool is to be."""
    message = PoseStamped(header=_header(stamp_ns, frame_id))
    position, turn = message.pose.position, message.pose.orientation
    position.x, position.y, position.z = pose.position.tolist()
    turn.w, turn.x, turn.y, turn.z = quaternion(pose.rotation)
    return message


def trajectory_message(
    names: tuple[str, ...], positions: np.ndarray, velocities: np.ndarray, after_s: float = TRAJECTORY_AHEAD_S
) -> JointTrajectory:
    """One point where joints get within TRAJECTORY_AHEAD_S, float64 [joints] each, to be reached after `after_s`.

    A nearer one makes an arm swing: the controller begins each trajectory at the joints as it measured them. The stamp
    is zero, which it reads as "now".
    """
    return _one_point(names, trajectory_point(positions, velocities).tolist(), after_s)


def array_message(positions: np.ndarray) -> Float64MultiArray:
    """Where joints are to be, float64 [joints]."""
    return Float64MultiArray(data=positions.tolist())


def gripper_message(position: float, gripper: GripperLimits) -> Float64MultiArray | JointTrajectory:
    """Where a gripper is to be."""
    if gripper.output == GripperOutput.TRAJECTORY.value:
        return _one_point((gripper.joint,), [position], TRAVEL_S)
    return Float64MultiArray(data=[position])


def _one_point(names: tuple[str, ...], positions: list[float], after_s: float) -> JointTrajectory:
    ns = round(after_s * 1e9)
    after = Duration(sec=ns // 10**9, nanosec=ns % 10**9)
    return JointTrajectory(
        joint_names=list(names), points=[JointTrajectoryPoint(positions=positions, time_from_start=after)]
    )


def _header(stamp_ns: int, frame_id: str) -> Header:
    return Header(stamp=Time(nanoseconds=stamp_ns).to_msg(), frame_id=frame_id)


def stamp_of(header: Header, sent_ns: int | None = None) -> Stamp:
    """Of a message; where it has none (0 means "now" to trajectory controllers), when it was sent."""
    return Stamp(_ns(header) or sent_ns, header.frame_id)


def _ns(header: Header) -> int:
    stamp: int = header.stamp.sec * 10**9 + header.stamp.nanosec
    return stamp


def twist_command(message: TwistStamped, sent_ns: int | None) -> TwistCommand:
    """A velocity of the tool. A stamp of 0 is a stamp here: Servo takes it for one."""
    linear, angular = message.twist.linear, message.twist.angular
    velocity = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
    return TwistCommand(Stamp(_ns(message.header), message.header.frame_id), velocity)


def tool_pose(message: PoseStamped, sent_ns: int | None) -> ToolPose:
    """Where the tool is, or is to be; a stamp of 0 is one."""
    place, turn = message.pose.position, message.pose.orientation
    stamp = Stamp(_ns(message.header), message.header.frame_id)
    return ToolPose(stamp, np.array([place.x, place.y, place.z]), (turn.w, turn.x, turn.y, turn.z))


def trajectory_command(message: JointTrajectory, sent_ns: int | None) -> JointCommand:
    """Where joints are to be, and when."""
    rows = [list(point.positions) for point in message.points]
    positions = np.array(rows) if rows and len({len(row) for row in rows}) == 1 else _NONE
    times_s = np.array([_seconds(point.time_from_start) for point in message.points])
    return JointCommand(stamp_of(message.header, sent_ns), tuple(message.joint_names), positions, times_s)


def _seconds(duration: Duration) -> float:
    return float(duration.sec) + duration.nanosec * 1e-9


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


def sent_message(
    sent: Sent, settings: GuardSettings, stamp_ns: int
) -> TwistStamped | PoseStamped | JointTrajectory | Float64MultiArray:
    """What the guard sends, as its output's message."""
    if isinstance(sent, SentTwist):
        return twist_message(sent.velocity, stamp_ns, settings.base_frame)
    if isinstance(sent, Pose):
        return pose_message(sent, stamp_ns, settings.base_frame)
    if settings.kind is Output.POSITION_ARRAY:
        return array_message(sent.positions)
    return trajectory_message(settings.joints.names, sent.positions, sent.velocities, sent.after_s)


# Of each output: its topic, its message and what reads it.
COMMANDS: dict[Output, tuple[str, type, Callable[..., Any]]] = {
    Output.POSE: ("pose", PoseStamped, tool_pose),
    Output.TWIST: ("twist", TwistStamped, twist_command),
    Output.JOINT_TRAJECTORY: ("joint_trajectory", JointTrajectory, trajectory_command),
    Output.POSITION_ARRAY: ("joint_positions", Float64MultiArray, array_command),
}
GRIPPERS: dict[GripperOutput, tuple[str, type, Callable[..., Any]]] = {
    GripperOutput.ARRAY: ("gripper", Float64MultiArray, gripper_array),
    GripperOutput.TRAJECTORY: ("gripper_trajectory", JointTrajectory, gripper_trajectory),
    GripperOutput.ACTION: ("gripper", Float64MultiArray, gripper_array),
}
