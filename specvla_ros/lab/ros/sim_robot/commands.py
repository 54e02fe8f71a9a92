# SPDX-License-Identifier: Apache-2.0
"""The topics by which the simulated arm is commanded: messages to commands of its controllers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.node import Node
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory as JointTrajectoryMessage

from specvla_ros.control.pose import Pose, quaternion_matrix
from specvla_ros.lab.simulation.commanded_arm import CommandedArm
from specvla_ros.lab.simulation.controllers.controller import CommandRefusedError
from specvla_ros.lab.simulation.controllers.joint_trajectory import JointTrajectory, Point
from specvla_ros.lab.simulation.controllers.servo import Twist
from specvla_ros.ros.qos import ACTION


class CommandInput:
    """Hands commands to the arm, and says why it does not take the rest.

    Args:
        node: the node that subscribes.
        arm: takes the commands.
        command: which interface; one of COMMANDS.
        now_s: the robot's clock.
        obeys: whether the arm's controllers are on; a command that comes while they are off is dropped.
        on_command: called after each that was taken.
        on_refused: called after each that was not.
    """

    def __init__(
        self,
        node: Node,
        arm: CommandedArm,
        command: str,
        *,
        now_s: Callable[[], float],
        obeys: Callable[[], bool],
        on_command: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._logger = node.get_logger()
        self._now_s, self._obeys = now_s, obeys
        self._on_command, self._on_refused = on_command, on_refused
        gripper = arm.gripper

        def listen(kind: Any, name: str, take: Callable[[Any, float], None]) -> Any:
            def on_message(message: Any) -> None:
                self._take(name, lambda: take(message, self._now_s()))

            return node.create_subscription(kind, f"~/command/{name}", on_message, ACTION)

        kind, name, read = _INTERFACES[command]
        self._motion = listen(kind, name, lambda message, now_s: arm.controller.take(read(message), now_s))
        self._gripper = [
            listen(
                Float64MultiArray,
                "gripper",
                lambda message, now_s: gripper.obey(gripper.array, np.array(message.data), now_s),
            ),
            listen(
                JointTrajectoryMessage,
                "gripper_trajectory",
                lambda message, now_s: gripper.obey(gripper.trajectory, _trajectory(message), now_s),
            ),
        ]

    @property
    def topic(self) -> str:
        """The motion commands' topic, as remapped."""
        return str(self._motion.topic_name)

    def _take(self, name: str, take: Callable[[], None]) -> None:
        if not self._obeys():
            return
        try:
            take()
        except CommandRefusedError as why:
            self._logger.error(f"a command on {name} was refused: {why}", throttle_duration_sec=5.0)
            self._on_refused()
        else:
            self._on_command()


def _pose(message: PoseStamped) -> tuple[str, Pose]:
    place, turn = message.pose.position, message.pose.orientation
    parts = np.array([turn.w, turn.x, turn.y, turn.z])
    size = float(np.linalg.norm(parts))
    rotation = quaternion_matrix(*(parts / size)) if 0.0 < size < np.inf else np.full((3, 3), np.nan)
    return message.header.frame_id, Pose(np.array([place.x, place.y, place.z]), rotation)


def _twist(message: TwistStamped) -> Twist:
    linear, angular = message.twist.linear, message.twist.angular
    return Twist(
        _seconds(message.header.stamp),
        message.header.frame_id,
        np.array([linear.x, linear.y, linear.z]),
        np.array([angular.x, angular.y, angular.z]),
    )


def _trajectory(message: JointTrajectoryMessage) -> JointTrajectory:
    points = tuple(
        Point(
            _seconds(point.time_from_start),
            np.array(point.positions),
            np.array(point.velocities),
            np.array(point.accelerations),
        )
        for point in message.points
    )
    return JointTrajectory(_seconds(message.header.stamp), tuple(message.joint_names), points)


def _seconds(time: Time | Duration) -> float:
    return time.sec + time.nanosec * 1e-9


_INTERFACES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "pose": (PoseStamped, "pose", _pose),
    "twist": (TwistStamped, "twist", _twist),
    "joint_trajectory": (JointTrajectoryMessage, "joint_trajectory", _trajectory),
    "position_array": (Float64MultiArray, "joint_positions", lambda message: np.array(message.data)),
}
