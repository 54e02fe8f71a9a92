# SPDX-License-Identifier: Apache-2.0
"""`pose`: PoseStamped on `~/pose`, for MoveIt Servo's pose target and Cartesian controllers."""

from geometry_msgs.msg import PoseStamped
from rclpy.time import Time

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput
from specvla_ros.ros.motion_messages import pose_message


@ROBOT_OUTPUTS.register("pose", order=10)
class PoseOutput(RobotOutput):
    """The tool's target in the base frame, at the control rate; the last one again when it stands still."""

    def __init__(self, context: OutputContext) -> None:
        self._frame = context.base_frame
        self._publisher = context.create_publisher(PoseStamped, "~/pose")

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(pose_message(target.pose, now.nanoseconds, self._frame))
