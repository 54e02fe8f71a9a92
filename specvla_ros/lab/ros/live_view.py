# SPDX-License-Identifier: Apache-2.0
"""The node `live_view`: shows a policy's images, instructions, actions and timing in Rerun's viewer, or records them.

It only subscribes, in its own process: a slow or crashed viewer does not affect the robot.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.node import Node
from rclpy.time import Time
from sensor_msgs.msg import CompressedImage, Image

from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, quaternion_matrix
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import rgb_from_message
from specvla_ros.lab.evaluation.rerun_recording import PoseSpeed, RerunRecording, RerunSettings, speed_curves
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.msg import DecodeStats, VlaAction
from specvla_ros.ros.node import run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters
from specvla_ros.ros.qos import ACTION, DIAGNOSTICS, NEWEST_IMAGE, STATE
from specvla_ros.settings.parameter import section


@dataclass(frozen=True)
class LiveViewParameters:
    """Every parameter of the live view; the limits are those of driver and guard, from the robot's file."""

    shown: RerunSettings = section(RerunSettings)
    limits: Limits = section(Limits)


class LiveView(Node):
    """Shows a policy, and driver and guard if they run; raises UserError for bad parameters or Rerun's errors."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("live_view", **node_arguments)
        with parameters_declared(self, LiveViewParameters):
            chosen = read_parameters(self, LiveViewParameters)
            self._recording = RerunRecording(chosen.shown)
        self._limits = chosen.limits
        self._listen(Image, "image", NEWEST_IMAGE, self._on_image)
        self._listen(CompressedImage, "image/compressed", NEWEST_IMAGE, self._on_image)
        self._listen(VlaAction, "policy/action", ACTION, self._on_action)
        self._listen(DecodeStats, "policy/decode_stats", ACTION, self._recording.add_stats)
        for who in ("driver", "guard"):
            self._listen(PoseStamped, f"{who}/pose", STATE, self._on_pose(who))
            self._listen(TwistStamped, f"{who}/twist", STATE, self._on_twist(who))
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)

    def close(self) -> bool:
        if lost := self._recording.close():
            self.get_logger().warning(lost)
        return True

    def _listen(self, kind: Any, topic: str, qos: Any, show: Callable[[int, Any], None]) -> None:
        def on_message(message: Any) -> None:
            try:
                show(stamp_ns(message.header), message)
            except (UserError, ValueError) as error:
                self.get_logger().warning(f"a message on {topic} is not shown: {error}", throttle_duration_sec=5.0)

        self.create_subscription(kind, topic, on_message, qos)

    def _on_image(self, stamp: int, message: Any) -> None:
        self._recording.add_image(stamp, rgb_from_message(message))

    def _on_action(self, stamp: int, action: VlaAction) -> None:
        self._recording.add_action(stamp, action)
        limits = self._limits
        if not limits.missing:
            self._recording.add_curves(stamp, speed_curves("limit", limits.linear_speed, limits.angular_speed))

    def _on_pose(self, who: str) -> Callable[[int, PoseStamped], None]:
        speed = PoseSpeed()

        def show(stamp: int, message: PoseStamped) -> None:
            position, turn = message.pose.position, message.pose.orientation
            rotation = quaternion_matrix(turn.w, turn.x, turn.y, turn.z)
            moved = speed.add(stamp, Pose(np.array([position.x, position.y, position.z]), rotation))
            if moved is not None:
                self._recording.add_curves(stamp, speed_curves(who, *moved))

        return show

    def _on_twist(self, who: str) -> Callable[[int, TwistStamped], None]:
        def show(stamp: int, message: TwistStamped) -> None:
            axes = (message.twist.linear, message.twist.angular)
            speeds = (float(np.linalg.norm([axis.x, axis.y, axis.z])) for axis in axes)
            self._recording.add_curves(stamp, speed_curves(who, *speeds))

        return show

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        stamp = Time.from_msg(message.header.stamp).nanoseconds
        for status in message.status:
            who = status.name.partition(":")[0].rpartition("/")[2]
            if stamp and status.name.endswith((": gate", ": motion")):  # stamp 0: no /clock received yet
                self._recording.add_state(stamp, f"state/{who}", status.message)


def main() -> None:
    """Runs the node; the exit code is 2 for a parameter that the user can fix."""
    sys.exit(run_node("live_view", LiveView, close=LiveView.close))
