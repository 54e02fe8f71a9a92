# SPDX-License-Identifier: Apache-2.0
"""`none`: a dry run. Everything is computed and reported, and nothing is sent."""

from collections.abc import Mapping

from rclpy.time import Time

from specvla_ros.control.bounded_motion import Target
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext


class DryRun:
    """Sends nothing."""

    follows_velocity = False

    def start(self, joint_positions: Mapping[str, float]) -> None:
        pass

    def send(self, target: Target, now: Time) -> None:
        pass


@ROBOT_OUTPUTS.register("none", order=0)
def make_none(context: OutputContext) -> DryRun:
    """See the module."""
    return DryRun()
