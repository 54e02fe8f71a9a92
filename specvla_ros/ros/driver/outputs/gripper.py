# SPDX-License-Identifier: Apache-2.0
"""The gripper's command: an array, of which the guard makes an action's goal where it is asked to, or a trajectory."""

from typing import Any

from specvla_ros.control.gripper import GripperOutput, GripperSettings
from specvla_ros.ros.driver.outputs.robot_output import OutputContext
from specvla_ros.ros.motion_messages import GRIPPERS, gripper_message

_REPEAT_S = 0.5


class GripperCommands:
    """Sends a gripper's position when it changes, and again twice a second: a lost command must not stay lost.

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
