# SPDX-License-Identifier: Apache-2.0
"""The policy node on a desktop GPU: bringup with its profile, and all of its other arguments."""

from launch import LaunchDescription
from specvla_ros.ros.bringup import policy_launch


def generate_launch_description() -> LaunchDescription:
    """See `ros2 launch specvla_ros desktop.launch.py --show-args`."""
    return policy_launch("desktop")
