# SPDX-License-Identifier: Apache-2.0
"""`position_array`: Float64MultiArray on `~/joint_positions`, for ros2_control's forward position controllers."""

from collections.abc import Mapping

import numpy as np
from rclpy.time import Time
from std_msgs.msg import Float64MultiArray

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput
from specvla_ros.ros.motion_messages import array_message


@ROBOT_OUTPUTS.register("position_array", order=40)
class PositionArrayOutput(RobotOutput):
    """The joints' positions in the order of `joints.names`, at the control rate."""

    by_order = True

    def __init__(self, context: OutputContext) -> None:
        self._solver = context.require_solver("position_array")
        self._publisher = context.create_publisher(Float64MultiArray, "~/joint_positions")

    def start(self, joint_positions: Mapping[str, float]) -> None:
        self._solver.start(joint_positions)

    def send(self, target: Target, now: Time) -> None:
        self.send_positions(self._solver.follow(target)[0])

    def send_positions(self, positions: np.ndarray) -> None:
        self._publisher.publish(array_message(positions))
