# SPDX-License-Identifier: Apache-2.0
"""The packages, found in their two folders; everything else is in setup.cfg."""

from setuptools import find_packages, setup

PACKAGES = find_packages(include=["specvla_ros", "specvla_ros.*"]) + find_packages("kernels")

setup(packages=[*PACKAGES, "specvla_ros.definitions"])
