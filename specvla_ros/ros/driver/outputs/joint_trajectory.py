# SPDX-License-Identifier: Apache-2.0
"""`joint_trajectory`: JointTrajectory on `~/joint_trajectory`, for ros2_control's joint_trajectory_controller.

A trajectory of one point, a little ahead, replaced at each control step: the controller interpolates to it from where
it is, and holds it when no other comes.
"""

from collections.abc import Mapping

from rclpy.time import Time
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput
from specvla_ros.ros.motion_messages import trajectory_message


@ROBOT_OUTPUTS.register("joint_trajectory", order=30)
class JointTrajectoryOutput(RobotOutput):
    """The joints' positions, to be reached a few periods from now."""

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("joint_trajectory")
        self._joints = context.joints
        self._publisher = context.create_publisher(JointTrajectory, "~/joint_trajectory")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target, now: Time) -> None:
        self._publisher.publish(trajectory_message(self._joints, *self._solver.follow(target)))
