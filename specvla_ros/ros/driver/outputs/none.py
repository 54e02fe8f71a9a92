# SPDX-License-Identifier: Apache-2.0
"""`none`: a dry run. Everything is computed and reported, and nothing is sent."""

from rclpy.time import Time

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput


@ROBOT_OUTPUTS.register("none", order=0)
class DryRun(RobotOutput):
    """Sends nothing."""

    def __init__(self, context: OutputContext) -> None:
        pass

    def send(self, target: Target, now: Time) -> None:
        pass
