# SPDX-License-Identifier: Apache-2.0
"""The launch files in the real launch system, where it is installed."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("launch_ros", reason="launch and launch_ros come with an apt ROS 2, not with wheels")

from launch.actions import IncludeLaunchDescription, LogInfo, OpaqueFunction
from launch.launch_context import LaunchContext
from launch_ros.actions import Node
from launch_ros.utilities import evaluate_parameters

from specvla_ros.errors import UserError

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
    context.launch_configurations.update({"robot": str(robot), "task": "false", **given})
    entities = description("robot").entities
    names = [getattr(entity, "name", "") for entity in entities]
    assert "robot" in names[: names.index("task") + 1], "the file is declared before it is read"
    read, include = of_kind(entities, OpaqueFunction), of_kind(entities, IncludeLaunchDescription)
    assert entities.index(read) < entities.index(include), "what comes later is too late for the arguments' defaults"
    read.execute(context)
    assert context.launch_configurations["base_frame"] == expected


def test_a_wrong_robots_file_is_told_before_any_process_starts(tmp_path: Path) -> None:
    robot = tmp_path / "robot.yaml"
    robot.write_text("/**: {ros__parameters: {output: pose}}\nguard: {ros__parameters: {stop_time_s: }}\n")
    context = LaunchContext()
    context.launch_configurations.update({"robot": str(robot), "task": "false"})
    with pytest.raises(UserError, match="'stop_time_s' is None"):
        of_kind(description("robot").entities, OpaqueFunction).execute(context)


def defaults(name: str) -> dict[str, str]:
    """The defaults of a launch file's arguments."""
    arguments = description(name).get_launch_arguments()
    return {each.name: "".join(part.text for part in each.default_value or ()) for each in arguments}


def robot_entities(tmp_path: Path, parameters: str, **arguments: str) -> list:
    """What robot.launch.py adds to bringup."""
    robot = tmp_path / "robot.yaml"
    robot.write_text(f"/**: {{ros__parameters: {{{parameters}}}}}\n")
    context = LaunchContext()
    context.launch_configurations.update(defaults("robot"))
    context.launch_configurations.update({"robot": str(robot), "autostart": "false", **arguments})
    *_, start = (entity for entity in description("robot").entities if isinstance(entity, OpaqueFunction))
    return start.execute(context)


def robot_nodes(tmp_path: Path, output: str, **arguments: str) -> dict[str, Node]:
    """Nodes among them, by executable."""
    entities = robot_entities(tmp_path, f"output: {output}", **arguments)
    return {entity.node_executable: entity for entity in entities if isinstance(entity, Node)}


@pytest.mark.parametrize(("given", "followed"), [("", True), ("false", False), ("true", True)])
def test_the_files_clock_is_followed_unless_the_launch_names_one(tmp_path: Path, given: str, followed: bool) -> None:
    nodes = robot_nodes(tmp_path, "pose, use_sim_time: true", use_sim_time=given, profile="cpu")
    context = LaunchContext()
    context.launch_configurations.update(defaults("bringup"))
    context.launch_configurations.update(
        {"params_file": str(tmp_path / "robot.yaml"), "use_sim_time": given, "autostart": "false"}
    )
    policy, *_ = of_kind(description("bringup").entities, OpaqueFunction).execute(context)
    for node in (nodes["driver"], nodes["guard"], policy):
        *_, last = evaluate_parameters(context, node._Node__parameters)
        assert last["use_sim_time"] is followed


@pytest.mark.parametrize(
    ("parameters", "arguments", "told"),
    [
        ("output: pose", {"profile": "cpu"}, True),
        ("output: pose, max_action_age_s: 2.0", {"profile": "cpu"}, False),
        ("output: pose", {"profile": "desktop"}, False),
        ("output: pose", {"profile": "cpu", "policy": "false"}, False),
    ],
)
def test_pictures_that_are_answered_and_not_followed_are_told_before_anything_starts(
    tmp_path: Path, parameters: str, arguments: dict[str, str], told: bool
) -> None:
    entities = robot_entities(tmp_path, parameters, **arguments)
    said = ["".join(part.text for part in each.msg) for each in entities if isinstance(each, LogInfo)]
    assert [("max_image_age_s" in line, "max_action_age_s" in line) for line in said] == [(True, True)] * told


def test_a_dry_run_starts_no_guard(tmp_path: Path) -> None:
    assert set(robot_nodes(tmp_path, "none")) == {"driver"}
    assert set(robot_nodes(tmp_path, "pose", task="true")) == {"driver", "guard", "task"}


def test_a_guard_that_died_stays_dead(tmp_path: Path) -> None:
    """One that was started again would not know that somebody had pressed stop."""
    nodes = robot_nodes(tmp_path, "pose", task="true", respawn="true")
    assert {name: node._ExecuteLocal__respawn for name, node in nodes.items()} == {
        "driver": True,
        "guard": False,
        "task": True,
    }


@pytest.mark.parametrize(("code", "ends"), [(2, True), (0, False), (1, False), (-9, False)])
def test_a_guard_that_refuses_its_file_ends_the_launch_with_one_sentence(tmp_path: Path, code: int, ends: bool) -> None:
    ended = robot_nodes(tmp_path, "pose")["guard"]._ExecuteLocal__on_exit
    context = LaunchContext()
    context.launch_configurations["robot"] = "my_robot.yaml"
    with pytest.raises(RuntimeError, match=r"the guard refused my_robot\.yaml") if ends else nullcontext():
        ended(SimpleNamespace(returncode=code), context)


def of_kind(entities, kind):
    return next(entity for entity in entities if isinstance(entity, kind))
