# SPDX-License-Identifier: Apache-2.0
"""The table: physics, pictures, tasks and experts."""

import gc
import subprocess
import sys

import numpy as np
import pytest
from support.gl import needs_gl

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation import choose_gl, require_gl
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.robot import DisplacementFollower, TableRobot
from specvla_ros.lab.simulation.tasks import CUBES, TASKS, acted_on, choose_tasks, draw_layout
from specvla_ros.lab.simulation.world import CONTROL_HZ, SCALE, SimulationDiverged, World

OPEN, CLOSED = -1.0, 1.0


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_expert_does_every_task_although_it_is_disturbed(world, task):
    follower = DisplacementFollower(CONTROL_HZ, SCALE)
    rng = np.random.default_rng(1)
    for seed in range(6):
        world.reset(draw_layout(seed))
        follower.reset()
        for _ in range(task.max_steps):
            noise = rng.normal(size=7) * [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0]
            follower.take(demonstrate(task, world.state()) + noise, 0.2)
            for _ in range(4):
                world.control_step(follower.next())
            if task.succeeded(world.state()):
                break
        else:
            pytest.fail(f"not done from seed {seed}")


def test_nothing_is_done_at_the_start(world):
    for seed in range(30):
        world.reset(draw_layout(seed))
        assert not any(task.succeeded(world.state()) for task in TASKS)


@pytest.mark.parametrize("axis", range(3))
def test_displacement_moves_the_hand_by_its_length(world, axis):
    world.reset(draw_layout(0))
    follower = DisplacementFollower(CONTROL_HZ, SCALE)
    start = world.state().hand
    for _ in range(3):
        move = np.zeros(7)
        move[axis], move[6] = (0.02, 1.0)
        follower.take(move, 0.2)
        for _ in range(4):
            world.control_step(follower.next())
    for _ in range(10):
        world.control_step(follower.next())
    moved = world.state().hand - start
    assert moved[axis] == pytest.approx(0.06, abs=0.002)
    assert np.abs(np.delete(moved, axis)).max() < 0.004


def test_more_actions_do_not_make_the_arm_faster():
    slow, fast = DisplacementFollower(CONTROL_HZ, SCALE), DisplacementFollower(CONTROL_HZ, SCALE)
    move = np.array([0.04, 0, 0, 0, 0, 0.1, 1.0])
    moved = {}
    for name, follower, every in (("slow", slow, 4), ("fast", fast, 1)):
        total = np.zeros(6)
        for step in range(20):
            if step % every == 0:
                follower.take(move, 0.2)
            total += follower.next()[:6]
        moved[name] = total
    np.testing.assert_allclose(moved["fast"], moved["slow"])
    assert moved["slow"][0] * 0.05 == pytest.approx(5 * 0.04)  # metres in five dataset steps


def test_without_a_new_action_the_arm_holds_still():
    follower = DisplacementFollower(CONTROL_HZ, SCALE)
    follower.take(np.array([0.04, 0, 0, 0, 0, 0, 0.0]), 0.2)
    steps = [follower.next() for _ in range(6)]
    assert all(step[0] > 0 for step in steps[:4]) and all(step[0] == 0 for step in steps[4:])
    assert all(step[6] == CLOSED for step in steps)  # and does not let go


def test_world_that_diverges_says_so(world):
    world.reset(draw_layout(0))
    with pytest.raises(SimulationDiverged, match="not finite"):
        world.control_step(np.full(7, np.nan))
    world.data.qvel[:] = np.nan
    with pytest.raises(SimulationDiverged, match="diverged"):
        world.control_step(np.zeros(7))
    world.reset(draw_layout(0))
    world.control_step(np.zeros(7))


def test_control_step_takes_its_time(world):
    world.reset(draw_layout(0))
    for _ in range(20):
        world.control_step(np.zeros(7))
    assert world.time_s == pytest.approx(1.0)


def test_seeds_decide_the_start():
    same, other = draw_layout(5), draw_layout(6)
    assert draw_layout(5).poses == same.poses != other.poses
    assert set(CUBES) < set(same.poses)


def test_acted_on_names_the_cube_that_moved(world):
    world.reset(draw_layout(3))
    start = world.state()
    assert acted_on(start, world.state()) is None
    world.data.joint(int(world.model.body("blue_cube").jntadr[0])).qpos[0] += 0.05
    import mujoco

    mujoco.mj_forward(world.model, world.data)
    assert acted_on(start, world.state()) == "blue_cube"


def test_unknown_task_is_named_with_those_there_are():
    with pytest.raises(UserError, match="no task 'fly'; the tasks are: lift_red"):
        choose_tasks(["fly"])


def test_machine_without_opengl_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert choose_gl({}) is None
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(UserError, match="apt-get install libosmesa6"):
        require_gl()


def test_opengl_that_draws_on_a_screen_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="MUJOCO_GL=glfw needs a display, but none is available"):
        require_gl()
    monkeypatch.setenv("DISPLAY", ":0")
    assert require_gl() == "glfw"


def test_opengl_of_the_user_is_kept():
    environ = {"MUJOCO_GL": "EGL"}
    assert choose_gl(environ) == "egl" and environ == {"MUJOCO_GL": "EGL"}


@needs_gl
def test_pictures_show_the_world_and_its_changes():
    robot = TableRobot(image_size=96)
    try:
        robot.reset("lift_red", 0)
        first = robot.look()
        assert first.shape == (96, 96, 3) and first.dtype == np.uint8 and first.std() > 10
        np.testing.assert_array_equal(first, robot.look())
        robot.take(np.array([0.05, 0.05, 0, 0, 0, 0, 1.0]))
        for _ in range(4):
            robot.advance()
        assert (robot.look() != first).any()
        # A second reset must not leave stale pictures; the same start gives the same one.
        robot.reset("lift_red", 1)
        assert (robot.look() != first).any()
        robot.reset("put_red", 0)
        np.testing.assert_array_equal(robot.look(), first)
    finally:
        robot.close()


@needs_gl
def test_camera_that_goes_leaves_the_pictures_of_others_alone():
    robots = [TableRobot(image_size=48) for _ in range(3)]
    pictures = []
    for robot in robots:
        robot.reset("lift_red", 0)
        pictures.append(robot.look())
    robots[0].close()
    robots.pop(1)  # left to the garbage collector
    gc.collect()
    assert all((picture == pictures[0]).all() for picture in pictures)
    np.testing.assert_array_equal(robots[-1].look(), pictures[0])
    robots[-1].close()


@needs_gl
def test_process_with_an_open_camera_ends_without_a_word():
    code = (
        "import weakref; weakref.finalize(weakref, str)\n"  # as a temporary directory does, before OpenGL
        "from specvla_ros.lab.simulation.robot import TableRobot\n"
        "robot = TableRobot(); robot.reset('lift_red', 0); robot.look()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
