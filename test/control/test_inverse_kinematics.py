# SPDX-License-Identifier: Apache-2.0
"""Joints that follow a tool, on the Panda's kinematics, without ROS."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fault_scene import kinematics

from specvla_ros.control.bounded_motion import BoundedMotion, Target
from specvla_ros.control.guard.commands import Instant, JointCommand, JointPositions, SentJoints, Stamp, ToolPose
from specvla_ros.control.guard.guard import Guard, State
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.inverse_kinematics import JointSolver, UnreachableError, trajectory_point
from specvla_ros.control.limits import JointLimits, Joints, Limits
from specvla_ros.control.pose import Pose, quaternion
from specvla_ros.control.robot_model import JointModel, ToolKinematics, load_joint_model
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import TABLE_ARM

PERIOD_S = 0.01
LIMITS = Limits(0.25, 1.0, 2.0, 8.0, 50.0, 200.0, (-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
PANDA = JointLimits(
    names=TABLE_ARM.joints,
    position_min=(-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    position_max=(2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    max_speed=(1.0,),
    max_acceleration=(8.0,),
)
GUARDED = GuardSettings(output="position_array", limits=LIMITS, joints=PANDA, require_enable=False)


@pytest.fixture
def start() -> dict[str, float]:
    return dict(zip(TABLE_ARM.joints, TABLE_ARM.home, strict=False))


@pytest.fixture
def solver(start: dict[str, float]) -> JointSolver:
    made = JointSolver(
        JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", np.array(TABLE_ARM.speed)), PERIOD_S
    )
    made.start(start)
    return made


def swung(
    solver: JointSolver, start: dict[str, float], *, lasts_s: float = 3.0, way_m: float = 0.1, turn_rad: float = 0.3
) -> tuple[np.ndarray, np.ndarray]:
    """Joints that follow a tool from goal to goal, [steps, 7], and how far from there the tool is, [steps]."""
    motion, here, draw = BoundedMotion(LIMITS), solver.pose_of(start), np.random.default_rng(0)
    motion.rest_at(here)
    positions, away_m = [], []
    for step in range(round(lasts_s / PERIOD_S)):
        now_s = step * PERIOD_S
        if step % 20 == 0 and now_s < lasts_s - 1:
            way = np.concatenate([draw.uniform(-way_m, way_m, 3), draw.uniform(-turn_rad, turn_rad, 3)])
            motion.aim(here.displaced(way), now_s, move_s=0.2, turn_s=0.2)
        at = motion.at(now_s + PERIOD_S)
        sent, _ = solver.follow(Target(at.pose, at.velocity, PERIOD_S))
        positions.append(sent)
        away_m.append(solver.pose_at(sent).distance(at.pose)[0])
    return np.array(positions), np.array(away_m)


@pytest.mark.parametrize(
    ("speed", "acceleration", "most_m"), [(2.0, 20.0, 0.002), (1.0, 20.0, 0.01), (1.0, 12.0, 0.03)]
)
def test_joints_are_held_to_their_accelerations_and_jerks_and_the_tool_still_gets_there(
    start: dict[str, float], speed: float, acceleration: float, most_m: float
) -> None:
    limits: dict[str, Any] = {"max_acceleration": np.full(7, acceleration), "max_jerk": np.full(7, acceleration / 0.04)}
    model = JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", np.full(7, speed))
    bounded, free = JointSolver(replace(model, **limits), PERIOD_S), JointSolver(model, PERIOD_S)
    largest = {}
    for solver in (bounded, free):
        solver.start(start)
        positions, away_m = swung(solver, start)
        velocities = np.diff(positions, axis=0) / PERIOD_S
        changes = np.diff(velocities, axis=0) / PERIOD_S
        largest[solver] = (
            np.abs(velocities).max(),
            np.abs(changes).max(),
            np.abs(np.diff(changes, axis=0)).max() / PERIOD_S,
        )
        assert away_m[-1] < 2e-4
        assert np.abs(velocities[-1]).max() < 0.05, "joints do not swing about a tool that stands"
        assert solver is free or away_m.max() < most_m
    assert (np.array(largest[bounded]) <= np.array([speed, acceleration, acceleration / 0.04]) * 1.01).all()
    assert speed > 1.5 or largest[free][1] > 1.4 * acceleration, "where a joint reached its speed"


def test_joints_do_not_swing_around_one_that_cannot_accelerate_enough_for_the_tool(start: dict[str, float]) -> None:
    """Swinging joints leave the tool where it belongs, but not when each of them is stopped by itself."""
    limits: dict[str, Any] = {"max_acceleration": np.full(7, 15.0), "max_jerk": np.full(7, 375.0)}
    model = JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", np.full(7, 1.0), **limits)
    solver = JointSolver(model, PERIOD_S)
    solver.start(start)
    positions, away_m = swung(solver, start, lasts_s=10.0, way_m=0.05, turn_rad=0.05)
    velocities = np.diff(positions, axis=0) / PERIOD_S
    moves = [solver.tool_moves(at) for at in positions[1:]]
    swings = [v - np.linalg.pinv(move) @ move @ v for v, move in zip(velocities, moves, strict=True)]
    assert np.linalg.norm(swings, axis=1).max() < 0.2, "rad/s that do not move the tool"
    assert away_m.max() < 0.002


def test_a_bounded_joint_brakes_before_it_ends_and_comes_back(arm: Path) -> None:
    """The hand slides out and is sent past its end, 5 cm further."""
    model = replace(
        model_of(arm, ["shoulder", "slide"], "tip", [1.0]), max_acceleration=np.full(2, 5.0), max_jerk=np.full(2, 125.0)
    )
    model.model.joint("slide").range, model.model.jnt_limited[model.model.joint("slide").id] = (-0.1, 0.1), True
    solver = JointSolver(model, PERIOD_S)
    solver.start({"shoulder": 0.0, "slide": 0.0})
    here, slides = solver.pose_of({"shoulder": 0.0, "slide": 0.0}), []
    for step in range(250):
        out_m = 0.12 * min(1.0, step / 100) if step < 150 else 0.08
        positions, _ = solver.follow(Target(here.displaced(np.array([out_m, 0, 0, 0, 0, 0.0])), np.zeros(6), PERIOD_S))
        slides.append(positions[1])
    assert 0.09 < max(slides) < 0.1005
    assert slides[-1] == pytest.approx(0.08, abs=0.01)
    assert np.abs(np.diff(slides, 2)).max() / PERIOD_S**2 < 5.05


@pytest.mark.parametrize("late_s", [0.02, 0.03, 0.05])
def test_a_late_loop_makes_no_joint_faster(solver: JointSolver, start: dict[str, float], late_s: float) -> None:
    motion, here = BoundedMotion(LIMITS), solver.pose_of(start)
    motion.rest_at(here)
    motion.aim(Pose(here.position + np.array([0.0, -0.1, 0.05]), here.rotation), 0.0, move_s=0.8, turn_s=0.8)
    now_s, before_s, speeds = 0.0, 0.0, []
    for step in range(60):
        now_s += late_s if step == 30 else PERIOD_S
        at = motion.at(now_s)
        _, velocity = solver.follow(Target(at.pose, at.velocity, now_s - before_s))
        before_s = now_s
        speeds.append(np.abs(velocity).max())
    assert speeds[30] < 1.1 * max(speeds[20:30])


def test_a_target_that_does_not_say_how_long_it_took_is_one_of_a_period(
    solver: JointSolver, start: dict[str, float]
) -> None:
    here = solver.pose_of(start)
    wanted = Pose(here.position + np.array([0.001, 0.0, 0.0]), here.rotation)
    positions, velocities = solver.follow(Target(wanted, np.zeros(6)))
    np.testing.assert_allclose(positions - list(start.values())[: len(positions)], velocities * PERIOD_S, atol=1e-9)


def late_once(output: str, late_s: float, held: bool) -> tuple[Guard, np.ndarray]:
    """A guard that passes joints of a driver whose loop comes late once, to an arm that is where it was sent.

    Returns also the tool's speeds, m/s, [ticks].
    """
    settings = replace(GUARDED, output=output)
    bounds: dict[str, Any] = {"max_acceleration": PANDA.accelerations, "max_jerk": PANDA.jerks} if held else {}
    model = JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", PANDA.speeds, **bounds)
    solver, guard = JointSolver(model, PERIOD_S), Guard(settings, ToolKinematics(model))
    at = np.array(TABLE_ARM.home[:7])
    solver.start(dict(zip(TABLE_ARM.joints, at, strict=True)))
    motion, here = BoundedMotion(LIMITS), solver.pose_at(at)
    motion.rest_at(here)
    motion.aim(Pose(here.position + np.array([0.0, -0.15, 0.05]), here.rotation), 0.0, move_s=0.9, turn_s=0.9)
    moved_s, driven, due = 0.0, 0, 0
    tools = [here.position]
    for tick in range(160):
        now = Instant(0.01 * tick, 10**12 + tick * 10**7)
        stamp, tool = Stamp(now.clock_ns, settings.base_frame), solver.pose_at(at)
        guard.tool(ToolPose(stamp, tool.position, quaternion(tool.rotation)), now)
        guard.joints(JointPositions(stamp, TABLE_ARM.joints, at), now)
        guard.action(stamp, "lift", now)
        if tick >= due:
            passed_s, driven = min(0.01 * (tick - driven), 0.05), tick
            moved_s += passed_s if guard.state is State.PASSING else 0.0
            wanted = motion.at(moved_s)
            positions, velocities = solver.follow(Target(wanted.pose, wanted.velocity, passed_s))
            ahead = (0.0, positions) if output == "position_array" else (0.06, trajectory_point(positions, velocities))
            guard.command(JointCommand(stamp, None, ahead[1][None], np.array(ahead[:1])), now)
            late = moved_s > 0.5 and late_s > 0
            due, late_s = (tick + round(late_s / PERIOD_S), 0.0) if late else (tick + 1, late_s)
        sent = guard.tick(now).sent
        at = sent.positions if isinstance(sent, SentJoints) else at
        tools.append(solver.pose_at(at).position)
    assert moved_s > 0.6
    return guard, np.linalg.norm(np.diff(tools, axis=0), axis=1) / 0.01


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("late_s", [0.02, 0.03, 0.05, 0.08])
@pytest.mark.parametrize("output", ["joint_trajectory", "position_array"])
def test_a_driver_that_is_late_once_stops_no_arm(output: str, late_s: float, held: bool) -> None:
    guard, speeds = late_once(output, late_s, held)
    assert guard.state is State.PASSING
    assert not any(cause.latches for cause in guard.tally.counts)
    in_time = late_once(output, 0.0, held)[1].max()
    assert speeds.max() < 1.2 * in_time, "nor does the tool catch up at half as much again"


@pytest.mark.parametrize(("apart_m", "fits"), [(0.0, True), (0.003, True), (0.01, False), (0.04, False)])
def test_a_measured_tool_at_another_point_than_the_models_is_told_with_both(
    solver: JointSolver, start: dict[str, float], apart_m: float, fits: bool
) -> None:
    there = solver.pose_of(start)
    measured = Pose(there.position + np.array([0.0, 0.0, apart_m]), there.rotation)
    said = solver.mismatch(start, measured)
    assert (said == "") is fits
    if not fits:
        assert f"{apart_m:.3f} m and 0.000 rad apart" in said and "joints.tool 'pinch' is at" in said


ARM = """<mujoco><compiler angle="radian"/><worldbody>
<body name="upper"><joint name="shoulder" axis="0 0 1" range="-1 1" limited="true"/><geom size="0.1"/>
<body name="lower" pos="0.5 0 0"><joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1"/>
<body name="hand" pos="0.3 0 0"><joint name="wrist" type="ball"/><geom size="0.1"/><site name="tip"/></body>
</body></body>
</worldbody></mujoco>"""


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    (tmp_path / "arm.xml").write_text(ARM)
    return tmp_path / "arm.xml"


def model_of(arm: Path, names: list[str], tool: str, speeds: list[float]) -> JointModel:
    return load_joint_model(Joints(names=tuple(names), model=str(arm), max_speed=tuple(speeds), tool=tool))


@pytest.mark.parametrize(("tool", "kind"), [("tip", "site"), ("hand", "body")])
def test_a_model_is_read_with_its_tool_and_one_speed_for_all_joints(arm: Path, tool: str, kind: str) -> None:
    model = model_of(arm, ["slide", "shoulder"], tool, [2.0])
    assert model.tool_kind == kind and model.max_speed.tolist() == [2.0, 2.0]
    solver = JointSolver(model, PERIOD_S)
    assert solver.ranges.tolist() == [[-np.inf, np.inf], [-1.0, 1.0]]
    np.testing.assert_allclose(
        solver.pose_of({"slide": 0.1, "shoulder": np.pi / 4}).position, [0.9 * 0.5**0.5] * 2 + [0]
    )


@pytest.mark.parametrize(
    ("joints", "tool", "speeds", "words"),
    [
        (["elbow"], "tip", [1.0], "no joint 'elbow'; it has: shoulder, slide, wrist"),
        (["wrist"], "tip", [1.0], "'wrist' .* neither turns nor slides"),
        (["shoulder"], "claw", [1.0], "no site or body 'claw'; sites: tip; bodies: world, upper, lower, hand"),
        (["shoulder", "slide"], "tip", [1.0, 1.0, 1.0], "3 numbers for 2 joints"),
        (["shoulder"], "tip", [0.0], "larger than 0"),
    ],
)
def test_what_a_model_lacks_is_told_with_what_it_has(
    arm: Path, joints: list[str], tool: str, speeds: list[float], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        model_of(arm, joints, tool, speeds)


@pytest.mark.parametrize(("position", "fits"), [(1.0005, True), (1.002, False), (-1.0005, True), (-1.002, False)])
def test_a_joint_that_is_measured_out_of_its_range_is_told(arm: Path, position: float, fits: bool) -> None:
    solver = JointSolver(model_of(arm, ["shoulder", "slide"], "tip", [1.0]), PERIOD_S)
    if fits:
        solver.start({"shoulder": position, "slide": 0.0})
    else:
        with pytest.raises(UserError, match="out of its range -1 to 1"):
            solver.start({"shoulder": position, "slide": 0.0})
    with pytest.raises(UserError, match=r"-1 to 1; joint_states are in radians .*: is this in degrees"):
        solver.start({"shoulder": -20.0, "slide": 0.0})
    with pytest.raises(UserError, match="joint_states has no 'slide'; it has: shoulder"):
        solver.start({"shoulder": 0.0})


def test_the_tool_is_known_at_any_positions_also_out_of_their_range_and_nowhere_at_nan(arm: Path) -> None:
    tool = ToolKinematics(model_of(arm, ["slide", "shoulder"], "tip", [1.0]))
    np.testing.assert_allclose(tool.pose_at(np.array([0.1, np.pi / 2])).position, [0, 0.9, 0], atol=1e-12)
    assert np.isnan(tool.pose_at(np.array([np.nan, 0.0])).position).any()
    np.testing.assert_allclose(tool.pose_at(np.array([0.0, 0.0])).position, [0.8, 0, 0], atol=1e-12)


def test_what_each_joint_does_to_the_tool_is_how_its_place_changes(
    solver: JointSolver, start: dict[str, float]
) -> None:
    at = np.array([start[name] for name in TABLE_ARM.joints])
    moves = solver.tool_moves(at)[:3]
    for joint, step in enumerate(1e-6 * np.eye(len(at))):
        way = solver.pose_at(at + step).position - solver.pose_at(at - step).position
        np.testing.assert_allclose(moves[:, joint], way / 2e-6, atol=1e-6)


@pytest.mark.parametrize("away", [(0.3, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)])
def test_a_target_that_the_joints_cannot_keep_up_with_is_told(
    solver: JointSolver, start: dict[str, float], away: tuple[float, ...]
) -> None:
    target = solver.pose_of(start).displaced(np.array(away))
    with pytest.raises(UnreachableError, match="behind the tool's target"):
        solver.follow(Target(target, np.zeros(6), PERIOD_S))
