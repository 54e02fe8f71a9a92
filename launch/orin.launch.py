# SPDX-License-Identifier: Apache-2.0
"""The policy node on a Jetson AGX Orin: bringup with the profile orin, and with all other arguments of bringup."""

from launch import LaunchDescription
from specvla_ros.ros.bringup import policy_launch


def generate_launch_description() -> LaunchDescription:
    """See `ros2 launch specvla_ros orin.launch.py --show-args`."""
    return policy_launch("orin")
