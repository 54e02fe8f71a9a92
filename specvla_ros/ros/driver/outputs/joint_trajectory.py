# SPDX-License-Identifier: Apache-2.0
"""`joint_trajectory`: JointTrajectory on `~/joint_trajectory`, for ros2_control's joint_trajectory_controller.

A trajectory of one point, a little ahead, replaced at each control step: the controller interpolates to it from where
it is, and holds it when no other comes. Its header stamp is zero, which the controller reads as "now".
"""

from collections.abc import Mapping

from builtin_interfaces.msg import Duration
from rclpy.time import Time
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput

_AHEAD = Duration(sec=0, nanosec=round(TRAJECTORY_AHEAD_S * 1e9))


@ROBOT_OUTPUTS.register("joint_trajectory", order=30)
class JointTrajectoryOutput(RobotOutput):
    """The joints' positions, to be reached a few periods from now."""

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("joint_trajectory")
        self._joints = list(context.joints)
        self._publisher = context.create_publisher(JointTrajectory, "~/joint_trajectory")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target, now: Time) -> None:
        ahead = trajectory_point(*self._solver.follow(target.pose))
        point = JointTrajectoryPoint(positions=ahead.tolist(), time_from_start=_AHEAD)
        self._publisher.publish(JointTrajectory(joint_names=self._joints, points=[point]))
