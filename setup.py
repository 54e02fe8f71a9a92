# SPDX-License-Identifier: Apache-2.0
"""The pip side of the package: the library and the specvla command, without messages, nodes or launch files.

Metadata and dependencies are in setup.cfg, which can name the packages of one folder only. On ROS 2 colcon builds the
package from CMakeLists.txt.
"""

from setuptools import find_packages, setup

DEFINITIONS = "specvla_ros.lab.bags.definitions"  # the messages: bags are read and written without ROS

setup(
    packages=[*find_packages(include=["specvla_ros*"]), "specvla_kernels", DEFINITIONS],
    package_dir={"specvla_kernels": "kernels/specvla_kernels", DEFINITIONS: "msg"},
)
