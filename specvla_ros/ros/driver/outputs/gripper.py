# SPDX-License-Identifier: Apache-2.0
"""The gripper's command: an array, a trajectory, or a goal of the `control_msgs` action where that is installed."""

from collections.abc import Callable
from typing import Any

from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.gripper import GripperOutput, GripperSettings
from specvla_ros.errors import UserError
from specvla_ros.ros.driver.outputs.robot_output import OutputContext
from specvla_ros.ros.motion_messages import gripper_trajectory_message

_REPEAT_S = 0.5


class GripperCommands:
    """Sends a gripper's position when it changes, and again twice a second: a lost command must not stay lost.

    Raises:
        UserError: the action is not installed, or the joint is not named.
    """

    def __init__(self, context: OutputContext, settings: GripperSettings) -> None:
        kind = GripperOutput(settings.output)
        self._send = _SENDERS[kind](context, settings.joint)
        self._repeats = kind in (GripperOutput.ARRAY, GripperOutput.TRAJECTORY)
        self._sent: float | None = None
        self._sent_s = 0.0

    def command(self, position: float | None, now_s: float) -> None:
        """Sends a position in the robot's unit; None: nothing, and the next one whatever it is. `now_s`: steady."""
        if position is None:
            self._sent = None
            return
        if position == self._sent and not (self._repeats and now_s - self._sent_s >= _REPEAT_S):
            return
        self._sent, self._sent_s = position, now_s
        self._send(position)


def _array(context: OutputContext, joint: str) -> Callable[[float], None]:
    publisher = context.create_publisher(Float64MultiArray, "~/gripper")
    return lambda position: publisher.publish(Float64MultiArray(data=[position]))


def _trajectory(context: OutputContext, joint: str) -> Callable[[float], None]:
    if not joint:
        raise UserError("gripper.output: trajectory needs the name of the gripper's joint; set gripper.joint")
    publisher = context.create_publisher(JointTrajectory, "~/gripper_trajectory")
    return lambda position: publisher.publish(gripper_trajectory_message(position, joint))


def _action(context: OutputContext, joint: str) -> Callable[[float], None]:
    try:
        from control_msgs.action import GripperCommand
    except ImportError:
        raise UserError(
            "gripper.output: action needs the package control_msgs, which is not installed; "
            "apt install ros-$ROS_DISTRO-control-msgs, or set gripper.output to array or trajectory"
        ) from None
    from rclpy.action import ActionClient

    client: Any = ActionClient(context.node, GripperCommand, "~/gripper_command")

    def send(position: float) -> None:
        goal = GripperCommand.Goal()
        goal.command.position = position
        client.send_goal_async(goal)

    return send


_SENDERS: dict[GripperOutput, Callable[[OutputContext, str], Callable[[float], None]]] = {
    GripperOutput.NONE: lambda context, joint: lambda position: None,
    GripperOutput.ARRAY: _array,
    GripperOutput.TRAJECTORY: _trajectory,
    GripperOutput.ACTION: _action,
}
