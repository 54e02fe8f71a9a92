# SPDX-License-Identifier: Apache-2.0
"""The launch files in the real launch system, where it is installed."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("launch_ros", reason="launch and launch_ros come with an apt ROS 2, not with wheels")

from launch.actions import IncludeLaunchDescription, OpaqueFunction
from launch.launch_context import LaunchContext

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


@pytest.mark.parametrize(("given", "expected"), [({}, "panda_link0"), ({"base_frame": "world"}, "world")])
def test_the_robots_file_names_the_base_frame_for_the_policy_too(
    tmp_path: Path, given: dict[str, str], expected: str
) -> None:
    robot = tmp_path / "robot.yaml"
    robot.write_text("/**:\n  ros__parameters:\n    base_frame: panda_link0\n")
    context = LaunchContext()
    context.launch_configurations.update({"robot": str(robot), **given})
    entities = description("robot").entities
    names = [getattr(entity, "name", "") for entity in entities]
    assert "robot" in names[: names.index("task") + 1], "the file is declared before it is read"
    share = next(entity for entity in entities if isinstance(entity, OpaqueFunction))
    include = next(entity for entity in entities if isinstance(entity, IncludeLaunchDescription))
    assert entities.index(share) < entities.index(include), "what comes later is too late for the arguments' defaults"
    share.execute(context)
    assert context.launch_configurations["base_frame"] == expected
