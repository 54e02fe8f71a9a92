# SPDX-License-Identifier: Apache-2.0
"""A node's process ends as it should when a signal comes while the node is being made."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rclpy
from rclpy.node import Node

from specvla_ros.ros.node import run_node

SOURCES = os.pathsep.join(str(Path(__file__).resolve().parents[2] / folder) for folder in ("", "kernels"))
SIGNALLED = """
import os, sys, time
import rclpy
from specvla_ros.ros.node import run_node

def make():
    os.kill(os.getpid(), {number})
    while rclpy.ok():  # rclpy ends it from a thread of its own
        time.sleep(0.01)
    return rclpy.create_node("late")

sys.exit(run_node("late", make, close=lambda node: True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_node_is_made_ends_the_process_in_peace(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED.format(number=int(number))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": SOURCES}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_goes_wrong_in_a_nodes_making_without_a_signal_is_told() -> None:
    def make() -> Node:
        raise RuntimeError("no signal came")

    try:
        with pytest.raises(RuntimeError, match="no signal came"):
            run_node("broken", make, close=lambda node: True)
    finally:
        rclpy.try_shutdown()
