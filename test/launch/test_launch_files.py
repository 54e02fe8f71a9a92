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


@pytest.mark.parametrize("name", ["desktop", "orin"])
def test_a_fixed_profile_is_not_offered(name: str) -> None:
    assert "profile" not in {argument.name for argument in description(name).get_launch_arguments()}
    assert "profile" in {argument.name for argument in description("bringup").get_launch_arguments()}


@pytest.mark.parametrize(
    ("name", "ends"), [("bringup", "false"), ("desktop", "false"), ("replay", "true"), ("simulation", "true")]
)
def test_a_policy_that_fails_ends_only_launches_that_are_of_no_use_without_it(name: str, ends: str) -> None:
    arguments = description(name).get_launch_arguments()
    argument = next(each for each in arguments if each.name == "exit_on_failure")
    assert [part.text for part in argument.default_value] == [ends]
