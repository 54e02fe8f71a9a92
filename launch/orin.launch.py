# SPDX-License-Identifier: Apache-2.0
"""The policy node on a Jetson AGX Orin: bringup with profile:=orin, and all of its other arguments."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    """Arguments given to this file reach bringup."""
    bringup = Path(get_package_share_directory("specvla_ros"), "launch", "bringup.launch.py")
    source = PythonLaunchDescriptionSource(str(bringup))
    return LaunchDescription([IncludeLaunchDescription(source, launch_arguments={"profile": "orin"}.items())])
