# SPDX-License-Identifier: Apache-2.0
"""The policy node with a profile's parameters, configured and activated."""

from launch import LaunchDescription
from specvla_ros.ros.bringup import policy_launch


def generate_launch_description() -> LaunchDescription:
    """See `ros2 launch specvla_ros bringup.launch.py --show-args`."""
    return policy_launch()
