# SPDX-License-Identifier: Apache-2.0
"""The arms that can stand at the table: what is true of each of them, and what a user is told."""

import importlib.metadata
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.gl import needs_gl
from support.nightly import nightly_but
from typer.testing import CliRunner

from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.simulation.arm import TABLE_ARM, joint_model
from specvla_ros.lab.simulation.arms import ARMS, PANDA, ROBOSUITE, UR5E, choose_arm
from specvla_ros.lab.simulation.collect import bag_name, demonstrate
from specvla_ros.lab.simulation.robot import DisplacementFollower, TableRobot
from specvla_ros.lab.simulation.tasks import TASKS, draw_layout
from specvla_ros.lab.simulation.world import CONTROL_HZ, SCALE, World, upright_error

CONFIG = Path(__file__).parents[3] / "config" / "robots"
HAS_MODELS = importlib.util.find_spec("robosuite") is not None
OPEN, CLOSE = -1.0, 1.0


def _name(arm):
    return arm.name


@pytest.fixture(scope="module", params=ARMS, ids=_name)
def world(request):
    if request.param is not TABLE_ARM and not HAS_MODELS:
        pytest.skip("needs requirements/robots.txt")
    return World(request.param)


def go(world: World, goal: np.ndarray, gripper: float = OPEN, steps: int = 60) -> float:
    """Moves the tool towards a goal [3] in metres; returns how far off it ends."""
    for _ in range(steps):
        away = goal - world.state().hand
        world.control_step(np.array([*np.clip(away / 0.05, -0.4, 0.4), 0, 0, 0, gripper]))
    return float(np.linalg.norm(goal - world.state().hand))


def test_tool_points_down_at_home_and_its_fingers_open_along_y(world):
    world.reset(draw_layout(0))
    state = world.state()
    assert np.linalg.norm(upright_error(state.rotation, 0.0)) < 0.02
    left, right = (world.data.geom(pad).xpos for pad in world.arm.gripper.pads)
    across = state.rotation.T @ (left - right)
    assert np.abs(across[[0, 2]]).max() < 0.003 < abs(across[1])


def test_gripper_opens_wider_than_a_cube_and_closes(world):
    world.reset(draw_layout(0))
    for gripper, low, high in ((CLOSE, -0.003, 0.005), (OPEN, 0.075, 0.12), (CLOSE, -0.003, 0.005)):
        for _ in range(CONTROL_HZ):
            world.control_step(np.array([0, 0, 0, 0, 0, 0, gripper]))
        assert low < world.state().opening < high


@pytest.mark.parametrize("world", nightly_but(lambda arm: arm is TABLE_ARM, ARMS), indirect=True, ids=_name)
def test_tool_goes_wherever_a_task_wants_it_and_never_touches_the_table(world):
    names = {int(world.model.geom(index).id): world.model.geom(index).name for index in range(world.model.ngeom)}
    low, high = np.array([0.32, -0.25, world.arm.low[2]]), np.array([0.70, 0.25, 0.20])
    assert (low >= world.arm.low).all() and (high <= world.arm.high).all()
    world.reset(draw_layout(0))
    for corner in itertools.product((0, 1), repeat=3):
        goal = np.where(corner, high, low)
        go(world, np.array([*goal[:2], 0.2]), CLOSE)  # over what lies about
        assert go(world, goal, CLOSE) < 0.012, goal
        touched = {frozenset((names[c.geom1], names[c.geom2])) for c in world.data.contact}
        things = {"red_cube", "green_cube", "blue_cube", "cylinder", "prism", "block"}
        assert not [pair for pair in touched if "table" in pair and not pair & things], corner


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_expert_does_every_task_with_every_arm(world, task):
    follower = DisplacementFollower(CONTROL_HZ, SCALE)
    for seed in range(2):
        world.reset(draw_layout(seed))
        follower.reset()
        for _ in range(task.max_steps):
            follower.take(demonstrate(task, world.state()), 0.2)
            for _ in range(4):
                world.control_step(follower.next())
            if task.succeeded(world.state()):
                break
        else:
            pytest.fail(f"not done from seed {seed}")


def test_kinematics_alone_are_those_of_the_arm_at_the_table(world):
    import mujoco  # not before the simulation, which chooses its OpenGL

    arm = world.arm
    alone = mujoco.MjModel.from_xml_string(arm.kinematics())
    data, rng = mujoco.MjData(alone), np.random.default_rng(0)
    table = ToolKinematics(joint_model(world.model, arm))
    for _ in range(20):
        positions = rng.uniform(*table.ranges.T)
        for name, position in zip(arm.joints, positions, strict=True):
            data.joint(name).qpos = position
        mujoco.mj_kinematics(alone, data)
        np.testing.assert_allclose(data.site("pinch").xpos, table.pose_at(positions).position, atol=1e-9)
    assert [alone.joint(name).range.tolist() for name in arm.joints] == [
        world.model.joint(name).range.tolist() for name in arm.joints
    ]


@pytest.mark.skipif(not HAS_MODELS, reason="needs requirements/robots.txt")
@pytest.mark.parametrize("arm, prefix, tool", [(PANDA, "panda_", "panda_hand_tcp"), (UR5E, "", "tool0")])
def test_the_parameter_file_of_a_real_arm_fits_its_kinematics(arm, prefix, tool, tmp_path):
    model = re.sub(r'"(joint\d)"', rf'"{prefix}\1"', arm.kinematics()).replace('"pinch"', f'"{tool}"')
    (tmp_path / "arm.xml").write_text(model)
    file = CONFIG / f"{arm.name}_joints.yaml"
    done = CliRunner().invoke(app, ["robot", "check", str(file), "--urdf", str(tmp_path / "arm.xml")])
    assert done.exit_code == 0, done.output
    assert not re.search("^wrong", done.output, re.MULTILINE)
    assert "8 of 8 corners" in done.output


def test_resting_arm_rests(world):
    still = np.array([0, 0, 0, 0, 0, 0, OPEN])
    world.reset(draw_layout(1))
    for _ in range(CONTROL_HZ):  # what the reset left of motion
        world.control_step(still)
    start = world.state().hand
    for _ in range(2 * CONTROL_HZ):
        world.control_step(still)
    assert np.linalg.norm(world.state().hand - start) < 0.002
    positions, velocities = world.joint_state()
    assert len(positions) == len(world.arm.joint_names) and np.abs(velocities).max() < 0.02


@needs_gl
def test_arms_look_different_at_the_same_table():
    if not HAS_MODELS:
        pytest.skip("needs requirements/robots.txt")
    pictures = []
    for arm in ARMS:
        robot = TableRobot(64, arm)
        robot.reset("lift_red", 0)
        pictures.append(robot.look().astype(int))
        robot.close()
    for one, other in itertools.combinations(pictures, 2):
        assert np.abs(one - other).mean() > 2
        # The lower half shows the table, which is the same.
        assert np.abs(one - other)[40:].mean() < np.abs(one - other)[:40].mean()


@needs_gl
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_fingers_are_seen_apart_from_hand_cube_and_shadow(arm):
    if arm is not TABLE_ARM and not HAS_MODELS:
        pytest.skip("needs requirements/robots.txt")
    robot = TableRobot(112, arm)
    robot.reset("lift_red", 0)

    def fingers() -> np.ndarray:
        """Columns of the picture in which something is as green as it is blue, and hardly red."""
        red, green, blue = np.moveaxis(robot.look().astype(int), -1, 0)
        return np.flatnonzero(((green > 2 * red) & (blue > 2 * red) & (green > 60)).any(axis=0))

    opened = np.ptp(fingers())
    for _ in range(CONTROL_HZ):
        robot.world.control_step(np.array([0, 0, 0, 0, 0, 0, CLOSE]))
    assert opened > np.ptp(fingers()) + 5
    robot.close()


def test_models_are_read_without_importing_their_package():
    if not HAS_MODELS:
        pytest.skip("needs requirements/robots.txt")
    script = (
        "import sys; from specvla_ros.lab.simulation.arms import PANDA; PANDA.model(); "
        "print('robosuite' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def test_missing_models_are_told_with_the_line_that_installs_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install --no-deps robosuite=={ROBOSUITE}"):
        World(PANDA)


def test_models_of_another_version_are_refused(monkeypatch):
    if not HAS_MODELS:
        pytest.skip("needs requirements/robots.txt")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.4.0")
    with pytest.raises(UserError, match=f"robosuite 1.4.0 is installed.*robosuite=={ROBOSUITE}"):
        World(PANDA)


def test_pinned_version_is_the_one_that_was_tried(pytestconfig):
    assert f"robosuite=={ROBOSUITE}" in (pytestconfig.rootpath / "requirements" / "robots.txt").read_text().split()


def test_unknown_robot_is_named_with_those_there_are():
    with pytest.raises(UserError, match="no robot 'r2d2'; the robots are: table, panda, ur5e"):
        choose_arm("r2d2")


def test_bags_of_two_robots_have_two_names():
    names = {bag_name(arm.name, "lift_red", 1_000_000) for arm in ARMS}
    assert names == {"lift_red-1000000", "panda-lift_red-1000000", "ur5e-lift_red-1000000"}
