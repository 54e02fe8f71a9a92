# SPDX-License-Identifier: Apache-2.0
"""`twist`: TwistStamped on `~/twist`, for MoveIt Servo and Cartesian velocity controllers.

Servo drops a command whose stamp is older than 0.1 s (`incoming_command_timeout`) and stops then, so twists are
stamped with the present and sent at the control rate, zeros included.
"""

from geometry_msgs.msg import TwistStamped
from rclpy.time import Time

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput
from specvla_ros.ros.motion_messages import twist_message


@ROBOT_OUTPUTS.register("twist", order=20)
class TwistOutput(RobotOutput):
    """The tool's velocity in the base frame: m/s and rad/s (Servo's `command_in_type: speed_units`)."""

    follows_velocity = True

    def __init__(self, context: OutputContext) -> None:
        self._frame = context.base_frame
        self._publisher = context.create_publisher(TwistStamped, "~/twist")

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(twist_message(target.velocity, now.nanoseconds, self._frame))
