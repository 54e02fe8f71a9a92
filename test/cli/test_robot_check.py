# SPDX-License-Identifier: Apache-2.0
"""`specvla robot check`: a line for each check of a robot's file, and what to do where one fails."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.descriptions import PANDA, Z1, Joint, moved, write_urdf
from typer.testing import CliRunner

from specvla_ros.control.guard.settings import GuardParameters
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.files import write_parameters
from specvla_ros.ros.driver.parameters import DriverParameters
from specvla_ros.settings.parameter import with_values
from specvla_ros.settings.profiles import merge_parameters

CONFIG = Path(__file__).resolve().parents[2] / "config"
LIMITS = {
    "limits.linear_speed": 0.25,
    "limits.angular_speed": 1.0,
    "limits.linear_acceleration": 2.0,
    "limits.angular_acceleration": 8.0,
    "limits.linear_jerk": 50.0,
    "limits.angular_jerk": 200.0,
    "limits.workspace_min": [0.35, -0.2, 0.2],
    "limits.workspace_max": [0.5, 0.2, 0.5],
}
GOOD = {"output": "twist", "base_frame": "base_link", **LIMITS}


def joint_output(tmp_path: Path, joints: list[Joint]) -> dict[str, Any]:
    return {
        **GOOD,
        "output": "position_array",
        "joints.names": [each.name for each in moved(joints)],
        "joints.model": str(write_urdf(tmp_path / "robot.urdf", joints)),
        "joints.tool": "tool0",
        "joints.max_acceleration": [20.0],
    }


def check(tmp_path: Path, values: dict[str, Any], *options: object) -> tuple[int, str]:
    write_parameters(tmp_path / "robot.yaml", values)
    return run(tmp_path / "robot.yaml", *options)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["robot", "check", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def wrong(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("wrong")]


def test_a_joint_that_turns_without_end_is_told_where_it_wraps(tmp_path: Path) -> None:
    endless = [replace(PANDA[0], kind="continuous", low=None), *PANDA[1:]]
    _, output = check(tmp_path, joint_output(tmp_path, endless))
    assert "note  model      panda_joint1 are continuous (no limits)" in output and "such as -3.1 and 3.1" in output


# They need a model from another package: test_so101.py, test_aloha.py and test_arms.py in test/lab/simulation.
ELSEWHERE = ("so101.yaml", "aloha.yaml", "panda_joints.yaml", "ur5e_joints.yaml")
ALONE = [file for file in (CONFIG / "robots").glob("*.yaml") if file.name not in ELSEWHERE]


@pytest.mark.parametrize("file", ALONE, ids=lambda file: file.name)
def test_the_robots_that_come_with_the_package_are_right(file: Path) -> None:
    code, output = run(file)
    assert code == 0 and not wrong(output)
    assert "ok    guard      output pose; a stop takes" in output


def test_an_arm_whose_joints_are_commanded_is_checked_to_the_corners_of_its_workspace(tmp_path: Path) -> None:
    code, output = check(tmp_path, joint_output(tmp_path, PANDA), "--profile", "desktop")
    assert code == 0, output
    assert "has panda_joint1, panda_joint2" in output and "the body tool0" in output
    assert "the arm reaches 8 of 8 corners" in output
    assert "ok    profile" in output
    assert "note  order      set joints.controller to the controller's node" in output


def test_what_a_newcomer_gets_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by engineers who wrote a file for their arm from the how-to alone."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    values = {**joint_output(tmp_path, PANDA), "joints.controller": "/position_controller/commands"}
    _, output = check(tmp_path, {**values, "tool_pose_source": "tf", "tool_frame": "hand_tcp"})
    assert "controller's node, not its topic: did you mean /position_controller?" in output
    assert "tool_frame hand_tcp and joints.tool tool0 have different names" in output
    assert "apt install ros-$ROS_DISTRO-tf2-ros" in output
    _, output = check(tmp_path, {**values, "joints.max_acceleration": [5.0]})
    assert "panda_joint5 brakes from 2.61 rad/s with 5 rad/s²" in output
    _, output = check(tmp_path, {**values, "joints.model": "robot.urdf"})
    assert f"there is no file {Path('robot.urdf').absolute()}; give the absolute path" in output
    del values["joints.max_acceleration"]
    _, output = check(tmp_path, values)
    assert (
        "needs joints.max_acceleration, which no robot description contains" in output
        and "joints.max_speed" not in output
    )


def test_the_first_motions_are_a_tenth_as_fast_and_can_be_taken_as_they_are_printed(tmp_path: Path) -> None:
    code, output = check(tmp_path, GOOD)
    assert code == 0
    limits = yaml.safe_load(output[output.index("\nlimits:") :])["limits"]
    given = {name.removeprefix("limits."): value for name, value in LIMITS.items()}
    assert limits == {**given, "linear_speed": 0.025, "angular_speed": 0.1}
    slow = tmp_path / "slow.yaml"
    write_parameters(slow, {**GOOD, **{f"limits.{name}": value for name, value in limits.items()}})
    assert run(slow)[0] == 0


def test_tf_is_told_where_its_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "speed_scale: 0.1 in" in check(tmp_path, GOOD)[1]
    assert "the first motions run at 0.2 of the speed limits" in check(tmp_path, GOOD | {"speed_scale": 0.2})[1]
    find = importlib.util.find_spec
    for there in (False, True):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, there=there: (sys if there else None) if name == "tf2_ros" else find(name),
        )
        code, output = check(tmp_path, GOOD | {"tool_pose_source": "tf"})
        assert code == 0 and ("tf needs the package tf2_ros" in output) is not there


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    values = {**GOOD, "rate_hz": 1e5, "limits.linear_speed": -0.25, "limits.workspace_min": [0.0, 0.0]}
    code, output = check(tmp_path, values)
    assert code == 1
    for line in wrong(output):
        for words in ("'rate_hz' is 100000.0", "'limits.linear_speed' is -0.25"):
            assert words in line
    assert "note  model      not checked, nor what follows, until the parameters above are right" in output
    arm = {**GOOD, "output": "joint_trajectory", "joints.names": ["a", "b"], "joints.max_speed": [1.0, 2.0, 3.0]}
    code, output = check(tmp_path, {**arm, "limits.angular_jerk": 0.0, "gripper.output": "array"})
    (guard,) = (line for line in wrong(output) if line.startswith("wrong guard"))
    for words in (
        "set limits.angular_jerk; and",
        "needs joints.position_min: 2 numbers",
        "needs joints.max_speed: 2 numbers, one for each of joints.names, or one for all; got 3",
        "needs joints.max_acceleration, which no robot description contains",
        "gripper.output: array needs gripper.open_value",
    ):
        assert words in guard
    sections = {**GOOD, "limits.workspace_min": [0.0, 0.0], "joints.names": ["a"], "joints.model_names": ["a", "b"]}
    code, output = check(tmp_path, sections)
    assert len(wrong(output)) == 2
    for line in wrong(output):
        assert "limits.workspace_min must have 3" in line and "joints.model_names has 2" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"limits.linear_sped": 0.1}, "did you mean 'limits.linear_speed'?"),
        ({"limits.linear_speed": 1}, "'limits.linear_speed' is 1, but it must be a float"),
        ({"limits.workspace_max": [1, 1, 1]}, "'limits.workspace_max' is [1, 1, 1], but it must be a list of floats"),
        ({"limits.workspace_max": [1, 1, 1]}, "; write [1.0, 1.0, 1.0]"),
        ({"limits.linear_jerk": 0.0}, "set limits.linear_jerk"),
        ({"limits.linear_speed": 2.0}, "but stop_time_s promises 0.2 s"),
        ({"limits.workspace_min": [0.6, -0.2, 0.2]}, "must be smaller than limits.workspace_max"),
        ({"output": "twists"}, "'output' is 'twists'"),
        ({"gripper.output": "claws"}, "'gripper.output' is 'claws'"),
        ({"gripper.output": "trajectory"}, "gripper.joint"),
        ({"tool_pose_source": "joint_states"}, "set joints.model"),
        ({"output": "joint_trajectory"}, "joints.model"),
        ({"command_timeout_s": 0.01}, "less than two periods of rate_hz"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    code, output = check(tmp_path, {**GOOD, **changes})
    assert code == 1
    assert any(words in line for line in wrong(output)), output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"joints.names": ["elbow"]}, "has no joint 'elbow'"),
        ({"joints.tool": "hand_of_god"}, "has no site or body 'hand_of_god'"),
        ({"joints.max_acceleration": [5.0]}, "but stop_time_s promises 0.2 s"),
        ({"joints.max_acceleration": None}, "joints.max_acceleration"),
        ({"limits.workspace_max": [0.5, 0.2, 1.5]}, "the arm reaches 4 of 8 corners"),
    ],
)
def test_a_model_that_does_not_fit_is_told(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    values = {name: value for name, value in {**joint_output(tmp_path, PANDA), **changes}.items() if value is not None}
    code, output = check(tmp_path, values)
    assert code == 1
    assert any(words in line for line in wrong(output)), output


def test_ranges_wider_than_the_models_are_refused(tmp_path: Path) -> None:
    """Degrees replace the model's radians: the guard would let each joint turn without end."""
    values = joint_output(tmp_path, PANDA)
    count = len(values["joints.names"])
    degrees = {"joints.position_min": [-180.0] * count, "joints.position_max": [180.0] * count}
    code, output = check(tmp_path, values | degrees)
    assert code == 1 and "are -180 to 180 for panda_joint1, but joints.model allows -2.897 to 2.897" in output, output
    arm = moved(PANDA)
    narrow = {
        "joints.position_min": [each.low for each in arm if each.low is not None],
        "joints.position_max": [each.high - 0.01 for each in arm if each.high is not None],
    }
    assert "joints.model allows" not in check(tmp_path, values | narrow)[1]
    endless = [replace(PANDA[0], kind="continuous", low=None), *PANDA[1:]]
    code, output = check(tmp_path, joint_output(tmp_path, endless) | degrees)
    assert code == 1 and "for panda_joint1, more than a turn to one side: give them in radians" in output


def test_speeds_beyond_the_models_are_told(tmp_path: Path) -> None:
    values = joint_output(tmp_path, PANDA)
    values |= {"joints.max_acceleration": [200.0], "joints.max_jerk": [1e5]}
    _, output = check(tmp_path, values | {"joints.max_speed": [2.5]})
    assert "note  model      joints.max_speed is 2.5 rad/s for panda_joint1, but joints.model has 2.175" in output
    assert "for panda_joint7, but" not in output, "which has 2.61"
    for right in ({}, {"joints.max_speed": [2.0]}, {"joints.max_speed": [2.175] * 4 + [2.61] * 3}):
        assert "joints.max_speed is" not in check(tmp_path, values | right)[1]


def test_a_gripper_that_would_move_the_arm_is_refused(tmp_path: Path) -> None:
    gripper = {"gripper.output": "trajectory", "gripper.joint": "joint6", "gripper.closed_value": 0.01}
    code, output = check(tmp_path, joint_output(tmp_path, Z1) | gripper)
    assert code == 1 and "gripper.joint is joint6, one of the arm's joints" in output, output


def test_values_that_no_node_reads_are_named(tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    write_parameters(file, GOOD)
    shared = file.read_text(encoding="utf-8")
    file.write_text(f"{shared}/left/guardd:\n  ros__parameters:\n    stop_time_s: 1.0\n")
    code, output = run(file)
    assert code == 1 and "section /left/guardd belongs to no node of this package" in wrong(output)[0]
    assert "did you mean /guard?" in output
    file.write_text(f"{shared}/controller_manager:\n  ros__parameters:\n    update_rate: 100\n")
    code, output = run(file)
    assert code == 0 and "note  file       section /controller_manager belongs to no node" in output
    file.write_text(f"{shared}  gripper:\n    output: array\n")
    code, output = run(file)
    assert code == 1 and "/** has 'gripper' beside ros__parameters" in wrong(output)[0]


def test_each_robot_of_a_file_with_namespaces_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    write_parameters(file, GOOD)
    shared = file.read_text(encoding="utf-8")
    left = "/left/driver:\n  ros__parameters:\n    outptu: pose\n"
    right = "/right/guard:\n  ros__parameters:\n    base_frame: world\n"
    file.write_text(shared + left + right)
    code, output = run(file)
    assert code == 1 and len(wrong(output)) == 2
    of_left, of_right = output.split("in the namespace left:")[1].split("in the namespace right:")
    assert "no node has a parameter 'outptu'; did you mean 'output'?" in wrong(of_left)[0]
    assert "base_frame differs: driver base_link, guard world" in wrong(of_right)[0]
    file.write_text("".join(f"/left/{node}:" + shared.partition(":")[2] for node in ("driver", "guard")))
    code, output = run(file)
    assert code == 0 and "in the namespace left:" in output and "ok    driver     output twist" in output


def test_each_of_two_arms_is_checked_with_its_own_sections(tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    write_parameters(file, GOOD)
    shared = file.read_text(encoding="utf-8")
    right = f"{shared}/right/guard:\n  ros__parameters:\n    stop_time_s: 0.15\n"
    code, output = run(file)
    assert code == 0 and "in the namespace" not in output and "publish /guard/enable" in output
    file.write_text(f"{right}/left/driver:\n  ros__parameters:\n    action_prefx: left_\n")
    code, output = run(file)
    assert code == 1 and "no node has a parameter 'action_prefx'; did you mean 'action_prefix'?" in wrong(output)[0]
    left, _, other = output.partition("in the namespace right:")
    assert "in the namespace left:" in left and not wrong(other)
    assert "publish /right/guard/enable" in other and "of the 0.15 s promised" in other
    file.write_text(f"{right}/left/**:\n  ros__parameters:\n    limits:\n      workspace_min: [0.6, -0.2, 0.2]\n")
    code, output = run(file)
    assert code == 1 and "workspace_min" in wrong(output)[0]
    assert not wrong(output.partition("in the namespace right:")[2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"joints.max_acceleration": [573.0]},
            "joints.max_acceleration is 573 rad/s² or m/s², but a Panda has",
        ),
        (
            {"limits.linear_speed": 9.0, "limits.linear_acceleration": 90.0},
            "limits.linear_speed is 9 m/s, but a Panda has",
        ),
        ({"gripper.open_value": 40.0}, "gripper.open_value is 40: a gripper's position is in metres or radians"),
    ],
)
def test_degrees_and_millimetres_are_suspected(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    values = {**joint_output(tmp_path, Z1), "gripper.output": "array", "gripper.open_value": 0.04}
    assert "a Panda has" not in check(tmp_path, values)[1] and "is this in" not in check(tmp_path, values)[1]
    assert f"note  driver     {words}" in check(tmp_path, values | changes)[1]


def test_a_wrong_state_rule_does_not_end_the_check(tmp_path: Path) -> None:
    code, output = check(tmp_path, GOOD | {"robot_states": ["/state"]})
    assert code == 1 and output.count("invalid robot_states rule") == 1 and "timeouts" in output


def test_a_tool_that_is_to_turn_with_more_acceleration_than_a_joint_has_is_told(tmp_path: Path) -> None:
    values = {**joint_output(tmp_path, Z1), "joints.max_acceleration": [20.0, 20.0, 20.0, 20.0, 17.0, 20.0]}
    told = "is 18 rad/s², but joint5 has 17"
    code, output = check(tmp_path, {**values, "limits.angular_acceleration": 18.0})
    assert code == 0 and told in output and "lower it to 17" in output
    assert "angular_acceleration is" not in check(tmp_path, {**values, "limits.angular_acceleration": 17.0})[1]
    of_joints = {**values, "limits.angular_acceleration": 18.0, "action_space": "joints"}
    assert told not in check(tmp_path, of_joints)[1]


def test_a_joint_between_base_and_tool_that_nobody_commands_is_told(tmp_path: Path) -> None:
    values = joint_output(tmp_path, Z1)
    values["joints.names"] = values["joints.names"][1:]
    code, output = check(tmp_path, values)
    assert code == 1 and any("lacks joint1, which the model has before tool0" in line for line in wrong(output)), output


def test_a_joint_that_does_not_move_the_tool_is_told(tmp_path: Path) -> None:
    """A gripper's joint among the arm's, or a tool that is a link in the middle of the arm."""
    code, output = check(tmp_path, joint_output(tmp_path, Z1) | {"joints.tool": "link05"})
    assert code == 1 and any("joint6 does not move link05" in line for line in wrong(output)), output


def test_a_model_that_is_found_from_one_folder_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = joint_output(tmp_path, Z1)
    model = Path(str(values["joints.model"]))
    monkeypatch.chdir(model.parent)
    code, output = check(tmp_path, {**values, "joints.model": model.name})
    assert code == 0 and "give its absolute path" in output, output


def test_a_chunk_needs_time_for_motion_and_for_a_stop(tmp_path: Path) -> None:
    values = {**joint_output(tmp_path, Z1), "output": "joint_trajectory_chunk"}
    code, output = check(tmp_path, values)
    assert code == 1 and any("with 16 rad/s², 0.8 of its acceleration" in line for line in wrong(output)), output
    values["joints.max_acceleration"] = [25.0]
    code, output = check(tmp_path, values)
    assert code == 0 and "trajectories reach" in output, output
    code, output = check(tmp_path, {**values, "joints.chunk_s": 0.2})
    assert code == 1 and any("joints.chunk_s is 0.2 s, but within the limits a stop" in line for line in wrong(output))


def test_another_model_can_be_tried_in_place_of_the_files(tmp_path: Path) -> None:
    values = joint_output(tmp_path, PANDA)
    other = write_urdf(tmp_path / "other.urdf", Z1)
    code, output = check(tmp_path, values, "--urdf", other)
    assert code == 1 and any("other.urdf has no joint 'panda_joint1'" in line for line in wrong(output))


def test_a_policy_that_answers_pictures_which_nobody_follows_is_told(tmp_path: Path) -> None:
    code, output = check(tmp_path, GOOD, "--profile", "cpu")
    (line,) = wrong(output)
    assert code == 1 and "max_image_age_s is 2 s" in line and "max_action_age_s of driver and guard is 1 s" in line
    assert check(tmp_path, {**GOOD, "max_action_age_s": 2.0}, "--profile", "cpu")[0] == 0
    profile = tmp_path / "own.yaml"
    write_parameters(profile, {"max_image_age_s": 0.5})
    assert check(tmp_path, GOOD, "--profile", profile)[0] == 0
    for bad in ("fast", [0.5], 1, float("nan")):
        write_parameters(profile, {"max_image_age_s": bad})
        code, output = check(tmp_path, GOOD, "--profile", profile)
        assert code == 1 and "parameter 'max_image_age_s' is" in wrong(output)[0]
    code, output = check(tmp_path, GOOD, "--profile", "laptop")
    assert code == 1 and "there is no profile 'laptop': give cpu, desktop, orin, or a parameter file" in output


def test_driver_and_guard_that_are_told_different_things_are_told(tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    write_parameters(file, {**GOOD, "max_action_age_s": 3.0})
    shared = file.read_text(encoding="utf-8")
    file.write_text(f"{shared}guard:\n  ros__parameters:\n    base_frame: world\n    max_action_age_s: 1.0\n")
    code, output = run(file)
    assert code == 1 and "base_frame differs: driver base_link, guard world" in output
    assert "the driver follows actions up to 3 s old" in output
    corner = "    limits:\n      workspace_max: [0.4, 0.2, 0.5]\n"
    file.write_text(f"{shared}guard:\n  ros__parameters:\n{corner}")
    assert "limits.workspace_max differs: driver [0.5, 0.2, 0.5], guard [0.4, 0.2, 0.5]" in run(file)[1]


def test_driver_and_guard_must_measure_the_same_point(tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    write_parameters(file, {**GOOD, "tool_pose_source": "tf", "tool_frame": "tool0"})
    shared = file.read_text(encoding="utf-8")
    file.write_text(f"{shared}guard:\n  ros__parameters:\n    tool_frame: flange\n")
    code, output = run(file)
    assert code == 1 and "tool_frame differs: driver tool0, guard flange" in output
    write_parameters(file, joint_output(tmp_path, PANDA))
    shared = file.read_text(encoding="utf-8")
    file.write_text(f"{shared}guard:\n  ros__parameters:\n    joints:\n      tool: panda_link5\n")
    code, output = run(file)
    assert code == 1 and "joints.tool differs: driver tool0, guard panda_link5" in output


def test_a_dry_run_needs_no_guard_and_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    code, output = check(tmp_path, {"output": "none"})
    assert code == 0 and "dry run" in output and "limits:" not in output
    code, output = run(tmp_path / "nowhere.yaml")
    assert code == 1 and "does not exist" in wrong(output)[0]


def test_what_is_checked_is_what_the_nodes_read(tmp_path: Path) -> None:
    """The file that passes here is one that both nodes' settings take whole."""
    write_parameters(tmp_path / "robot.yaml", GOOD)
    assert run(tmp_path / "robot.yaml")[0] == 0
    merged = merge_parameters([tmp_path / "robot.yaml"], {}, node="guard")
    with_values(DriverParameters(), merged).check_complete()
    with_values(GuardParameters(), merged).guard.require()
