# SPDX-License-Identifier: Apache-2.0
"""The launch files in the real launch system, where it is installed."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("launch_ros", reason="launch and launch_ros come with an apt ROS 2, not with wheels")

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def description(name: str):
    spec = importlib.util.spec_from_file_location(name.replace(".", "_"), LAUNCH / f"{name}.launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generate_launch_description()


@pytest.mark.parametrize("name", ["bringup", "desktop", "orin", "replay", "robot", "simulation"])
def test_every_argument_is_described(name: str) -> None:
    arguments = description(name).get_launch_arguments()
    assert {"checkpoint", "instruction", "params_file", "image_topic"} <= {argument.name for argument in arguments}
    assert all(argument.description for argument in arguments)
