# SPDX-License-Identifier: Apache-2.0
"""Inputs for the tool's measured pose and the measured joints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from geometry_msgs.msg import PoseStamped
from rclpy.node import Node
from rclpy.time import Time
from sensor_msgs.msg import JointState

from specvla_ros.control.guard.cause import Refusal
from specvla_ros.control.guard.tool_gates import pose_of
from specvla_ros.control.joint_parts import JointParts
from specvla_ros.control.pose import Pose, quaternion_matrix
from specvla_ros.errors import UserError
from specvla_ros.ros.motion_messages import tool_pose
from specvla_ros.ros.qos import STATE

_NS = 1e-9

OnPose = Callable[[float, Pose], None]
OnBad = Callable[[str], None]
OnJoints = Callable[[float, Mapping[str, float]], None]


class JointInput:
    """Measured joints, from `joint_states`: their stamp in seconds and their positions by name.

    As in the guard, only `names` matter, and parts of several publishers are merged, see JointParts. Messages of
    another part of the robot, such as the gripper, are ignored. `lacking` says what a set lacks; empty: nothing.
    """

    def __init__(self, node: Node, names: Sequence[str], on_joints: OnJoints, on_bad: OnBad) -> None:
        self._node, self._parts, self._on_joints, self._on_bad = node, JointParts(names), on_joints, on_bad
        self._subscription = node.create_subscription(JointState, "joint_states", self._on_message, STATE)

    @property
    def lacking(self) -> str:
        return f"joint_states: {self._parts.lacking}" if self._parts.lacking else ""

    def destroy(self) -> None:
        self._node.destroy_subscription(self._subscription)

    def _on_message(self, message: JointState) -> None:
        try:
            complete = self._parts.add(message.name, message.position, Time.from_msg(message.header.stamp).nanoseconds)
        except UserError as error:
            self._on_bad(f"joint_states: {error}")
            return
        if complete:
            stamp_ns, positions = self._parts.take()
            self._on_joints(stamp_ns * _NS, positions)


class PoseTopic:
    """The topic `tool_pose`, PoseStamped in the base frame, read as in the guard."""

    def __init__(self, node: Node, base_frame: str, on_pose: OnPose, on_bad: OnBad) -> None:
        self._node, self._base_frame, self._on_pose, self._on_bad = node, base_frame, on_pose, on_bad
        self._subscription = node.create_subscription(PoseStamped, "tool_pose", self._on_message, STATE)

    def look(self) -> None:
        """Called at the control rate, for sources that poll."""

    def destroy(self) -> None:
        self._node.destroy_subscription(self._subscription)

    def _on_message(self, message: PoseStamped) -> None:
        pose = pose_of(tool_pose(message, None), self._base_frame)
        if isinstance(pose, Refusal):
            self._on_bad(f"tool_pose: {pose.detail}")
        else:
            self._on_pose(Time.from_msg(message.header.stamp).nanoseconds * _NS, pose)


class PoseFromTf:
    """The newest transform from the base frame to the tool's, looked up at the control rate."""

    def __init__(self, node: Node, base_frame: str, tool_frame: str, on_pose: OnPose, on_bad: OnBad) -> None:
        try:
            import tf2_ros
        except ImportError:
            raise UserError(
                "tool_pose_source: tf needs the package tf2_ros, which is not installed; "
                "apt install ros-$ROS_DISTRO-tf2-ros-py, or set tool_pose_source to topic or joint_states"
            ) from None
        self._base_frame, self._tool_frame = base_frame, tool_frame
        self._on_pose, self._on_bad = on_pose, on_bad
        self._error: type[Exception] = tf2_ros.TransformException
        self._buffer: Any = tf2_ros.Buffer()
        self._listener = tf2_ros.TransformListener(self._buffer, node)

    def destroy(self) -> None:
        self._listener.unregister()

    def look(self) -> None:
        try:
            found = self._buffer.lookup_transform(self._base_frame, self._tool_frame, Time())
            place, turn = found.transform.translation, found.transform.rotation
            rotation = quaternion_matrix(turn.w, turn.x, turn.y, turn.z)
        except (self._error, ValueError) as error:
            self._on_bad(f"no transform from '{self._base_frame}' to '{self._tool_frame}': {error}")
            return
        stamp_s = Time.from_msg(found.header.stamp).nanoseconds * _NS
        self._on_pose(stamp_s, Pose(np.array([place.x, place.y, place.z]), rotation))


PoseSource = PoseTopic | PoseFromTf
