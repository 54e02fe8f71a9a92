# SPDX-License-Identifier: Apache-2.0
"""The demo does not start beside a robot's own nodes."""

from collections.abc import Iterator

import pytest
import rclpy
from rich.console import Console

from specvla_ros.errors import UserError
from specvla_ros.lab.ros.demo.run import refuse_others


@pytest.fixture(autouse=True)
def ros() -> Iterator[None]:
    rclpy.init()
    yield
    rclpy.try_shutdown()


def test_a_guard_that_runs_already_would_get_the_demos_enable_signal() -> None:
    console = Console(quiet=True)
    refuse_others(console)
    guard, other = rclpy.create_node("guard"), rclpy.create_node("camera")
    with pytest.raises(UserError, match=r"^/guard already run in this ROS domain, .* such as ROS_DOMAIN_ID=77$"):
        refuse_others(console, patience_s=0.0)
    guard.destroy_node()
    refuse_others(console, patience_s=10.0)
    other.destroy_node()
