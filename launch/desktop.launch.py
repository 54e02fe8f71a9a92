# SPDX-License-Identifier: Apache-2.0
"""The policy node on a desktop GPU: bringup with the profile desktop, and with all other arguments of bringup."""

from launch import LaunchDescription
from specvla_ros.ros.bringup import policy_launch


def generate_launch_description() -> LaunchDescription:
    """See `ros2 launch specvla_ros desktop.launch.py --show-args`."""
    return policy_launch("desktop")
