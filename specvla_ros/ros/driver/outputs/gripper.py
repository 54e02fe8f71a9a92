# SPDX-License-Identifier: Apache-2.0
"""The gripper's command: an array, of which the guard makes an action's goal where it is asked to, or a trajectory."""

from collections.abc import Callable

from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.gripper import GripperOutput, GripperSettings
from specvla_ros.errors import UserError
from specvla_ros.ros.driver.outputs.robot_output import OutputContext
from specvla_ros.ros.motion_messages import gripper_trajectory_message

_REPEAT_S = 0.5


class GripperCommands:
    """Sends a gripper's position when it changes, and again twice a second: a lost command must not stay lost.

    Raises UserError where a trajectory's joint is not named.
    """

    def __init__(self, context: OutputContext, settings: GripperSettings) -> None:
        kind = GripperOutput(settings.output)
        self._send = _SENDERS[kind](context, settings.joint)
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
        self._send(position)


def _array(context: OutputContext, joint: str) -> Callable[[float], None]:
    publisher = context.create_publisher(Float64MultiArray, "~/gripper")
    return lambda position: publisher.publish(Float64MultiArray(data=[position]))


def _trajectory(context: OutputContext, joint: str) -> Callable[[float], None]:
    if not joint:
        raise UserError("gripper.output: trajectory needs the name of the gripper's joint; set gripper.joint")
    publisher = context.create_publisher(JointTrajectory, "~/gripper_trajectory")
    return lambda position: publisher.publish(gripper_trajectory_message(position, joint))


_SENDERS: dict[GripperOutput, Callable[[OutputContext, str], Callable[[float], None]]] = {
    GripperOutput.NONE: lambda context, joint: lambda position: None,
    GripperOutput.ARRAY: _array,
    GripperOutput.TRAJECTORY: _trajectory,
    GripperOutput.ACTION: _array,
}
