# SPDX-License-Identifier: Apache-2.0
"""A chunk is the motion that the driver has planned: nothing in the past, within limits, and at rest at its end."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from control.test_joint_space import ACCELERATION, CONTROL_S, NAMES, SPEED, START, Arm, model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fault_scene import kinematics
from support.nightly import examples

from specvla_ros.control.action_space import ActionRefusedError, ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion, Target
from specvla_ros.control.chunks import _SWING_S, TrajectoryChunks, planned
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.guard.gate import TOLERANCE
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, JointSolver
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, PoseHistory
from specvla_ros.control.robot_model import JointModel
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.controllers import JointState, JointTrajectory, JointTrajectoryController, Point

LONGEST_S = 0.6
NOTHING = np.zeros(0)
# The second joint reaches its speed limit for a moment, within one of the controller's cubics.
PEAKS = ((0.1, 0.05, 0.5), (0.1, 0.3, 0.5), (0.1, 0.221875, 0.5), (0.1, 0.05, 0.75))
SEAM = 1.4  # at a sudden change of plan; the guard follows what exceeds a limit point by point


class Robot:
    """The driver's control, and a controller that obeys its chunks: what arrives of them."""

    def __init__(self):
        arm = planned(model())
        self.arm = Arm(max_speed=arm.max_speed, max_acceleration=arm.max_acceleration)
        self.chunks = TrajectoryChunks(self.arm.kinematics, LONGEST_S, model().stop_s)
        self.controller = JointTrajectoryController(NAMES, from_desired=True)
        self.controller.start(JointState(self.arm.at, np.zeros(3)))
        self.sent, self.reached = [], [self.arm.at]

    def step(self, *, hears=True):
        arm = self.arm
        target = arm.follower.step(arm.now_s)
        path = self.chunks.next(target, arm.follower, arm.now_s)
        if path is not None:
            self.sent.append((arm.now_s, path))
            if hears:
                assert path.velocities is not None
                states = zip(path.times_s.tolist(), path.positions, path.velocities, strict=True)
                points = tuple(Point(*state, NOTHING) for state in states)
                self.controller.take(JointTrajectory(0.0, NAMES, points), arm.now_s)
        self.obey()
        arm.target = target
        arm.history.add(arm.now_s, target.pose)
        arm.now_s = round(arm.now_s + CONTROL_S, 4)

    def obey(self):
        here = JointState(self.reached[-1], np.zeros(3))
        self.reached.append(self.controller.update(here, self.arm.now_s).positions)


positions = st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=3).map(lambda way: START + np.array(way))
chunks = st.lists(positions, min_size=1, max_size=5)
plans = st.lists(st.tuples(chunks, st.integers(0, 20), st.integers(1, 30), st.sampled_from([None, "hold"])), max_size=5)


@settings(deadline=None, max_examples=examples(25))
@given(plans)
@example([([np.array(row) for row in PEAKS], 0, 1, None)])
def test_a_chunk_has_no_point_in_the_past_ends_at_rest_in_time_and_keeps_the_limits(plan):
    robot = Robot()
    for rows, age, steps, what in plan:
        with_age(robot, rows, age)
        for _ in range(steps):
            robot.step()
        if what == "hold":
            robot.arm.follower.hold(robot.arm.now_s)
    for _ in range(200):
        robot.step()
    for _, path in robot.sent:
        assert path.times_s[0] > 0 and (np.diff(path.times_s) > 0).all()
        assert path.end_s <= LONGEST_S
        assert not path.velocities[-1].any()
        _, speeds, _ = path.sampled()
        assert (np.abs(speeds) <= SPEED * (1 + 1e-6)).all()
    moved = np.diff(np.array(robot.reached), axis=0) / CONTROL_S
    assert (np.abs(moved) <= SPEED * (1 + 1e-6)).all()
    assert (np.abs(np.diff(moved, axis=0)) / CONTROL_S <= ACCELERATION * SEAM).all()
    np.testing.assert_allclose(robot.reached[-1], robot.arm.at, atol=1e-6)


def with_age(robot, rows, age):
    values = np.array(rows)
    # Rows that a policy could mean: a speed that the joints have.
    values = robot.arm.at + np.clip(np.cumsum(np.clip(values - START, -0.1, 0.1), axis=0), -0.5, 0.5)
    # Rows are due between two control steps: of a row that is due in one, rounding decides.
    age_s = min((age + 0.5) * CONTROL_S, robot.arm.now_s - 100.0 - 0.5 * CONTROL_S)
    if robot.arm.now_s - age_s > robot.arm.follower._last_stamp_s + 1e-6:
        with suppress(ActionRefusedError):  # for a motion that nothing keeps within the limits
            robot.arm.take(values, age_s=age_s)


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.tuples(chunks, st.integers(1, 10), st.floats(0.06, 0.4)), min_size=2, max_size=6))
def test_a_loop_that_stands_still_while_actions_arrive_sends_no_motion_beyond_the_limits(plan):
    """Meanwhile the controller goes on along the last plan, and the driver's own motion stays behind."""
    robot = Robot()
    for rows, steps, late_s in plan:
        with_age(robot, rows, 0)
        for _ in range(steps):
            robot.step()
        for _ in range(round(late_s / CONTROL_S)):
            robot.obey()
            robot.arm.now_s = round(robot.arm.now_s + CONTROL_S, 4)
    for _ in range(200):
        robot.step()
    for _, path in robot.sent:
        _, speeds, accelerations = path.sampled()
        assert (np.abs(speeds) <= SPEED * TOLERANCE).all()
        assert (np.abs(accelerations) <= ACCELERATION * SEAM).all()
        assert not path.velocities[-1].any()
    np.testing.assert_allclose(robot.reached[-1], robot.arm.at, atol=1e-3)


@settings(deadline=None, max_examples=examples(25))
@given(chunks, st.integers(0, 10))
@example([*(START + 0.25 * np.array([[-1, 1, -1], [0, -1, 1], [1, 1, 0]]))], 2)  # a tool at its limit of speed
def test_what_is_coming_comes_and_looking_ahead_changes_nothing(rows, age):
    robot = Robot()
    with_age(robot, rows, age)
    robot.step()
    follower, now_s = robot.arm.follower, robot.arm.now_s - CONTROL_S
    gripper = robot.arm.gripper.position
    coming = follower.coming(now_s, 2 * CONTROL_S, 9.0)
    again = follower.coming(now_s, 2 * CONTROL_S, 9.0)
    for first, second in zip(coming, again, strict=True):
        np.testing.assert_array_equal(first.pose.positions, second.pose.positions)
    assert robot.arm.gripper.position == gripper
    for target in coming:
        robot.step()
        robot.step()
        np.testing.assert_allclose(robot.arm.at, target.pose.positions, atol=1e-9)


def test_a_controller_that_hears_nothing_more_comes_to_rest_on_its_way():
    robot = Robot()
    robot.arm.take(START + 0.08 * np.arange(1, 9)[:, None])
    for _ in range(20):
        robot.step()
    assert np.abs(robot.reached[-1] - robot.reached[-2]).max() > 0.003, "it moves"
    for _ in range(round(LONGEST_S / CONTROL_S) + 1):
        robot.step(hears=False)
    silent = np.array(robot.reached[-3:])
    np.testing.assert_array_equal(silent, silent[:1].repeat(3, axis=0))
    moved = np.diff(np.array(robot.reached), axis=0) / CONTROL_S
    assert (np.abs(np.diff(moved, axis=0)) / CONTROL_S <= ACCELERATION * (1 + 1e-6)).all()


def test_messages_that_are_lost_between_do_not_matter():
    robot, other = Robot(), Robot()
    for each in (robot, other):
        each.arm.take(START + 0.05 * np.arange(1, 9)[:, None])
    for _ in range(60):
        robot.step()
        other.step(hears=len(other.sent) % 3 == 0)  # a message in three arrives
    np.testing.assert_allclose(other.reached, robot.reached, atol=2e-3)


def test_a_newer_action_replaces_what_was_planned_at_once():
    robot = Robot()
    robot.arm.take(START + 0.05 * np.arange(1, 9)[:, None])
    for _ in range(21):
        robot.step()
    before_s, before = robot.sent[-1]
    robot.arm.take(robot.arm.at - 0.05 * np.arange(1, 9)[:, None])
    robot.step()
    now_s, path = robot.sent[-1]
    assert now_s == pytest.approx(robot.arm.now_s - CONTROL_S) and now_s > before_s, "in the step after it"
    assert (path.positions[-1] < before.positions[-1]).all()


def test_no_point_is_beyond_the_range_of_a_joint_that_goes_to_its_end():
    robot, high = Robot(), 3.0
    for _ in range(120):
        robot.arm.take(np.array([min(high, robot.arm.at[0] + 0.2), *START[1:]]))
        for _ in range(7):
            robot.step()
    assert robot.arm.at[0] == pytest.approx(high)
    assert max(path.positions[:, 0].max() for _, path in robot.sent) <= high


def test_the_controllers_cubic_needs_no_more_speed_than_is_left_to_it():
    """The motion with the worst cubic is at its limit but for a rise before and a fall after, all within 1 s here."""
    rises_s, share = np.linspace(0.0, 0.5, 101), np.linspace(0.0, 1.0, 101)
    before, after, at = rises_s[:, None, None], rises_s[None, :, None], share[None, None]
    mean = -(before**2 + after**2) / 2
    ends = -before * (1 - at) * (1 - 3 * at) - after * at * (3 * at - 2)
    worst = (ends + 6 * mean * at * (1 - at)).max()
    assert worst == pytest.approx(_SWING_S / TRAJECTORY_AHEAD_S, rel=0.01) and worst <= _SWING_S / TRAJECTORY_AHEAD_S
    arm = planned(model(max_speed=np.array([2.0, 0.5, 0.01])))
    assert arm.max_acceleration is not None
    limit = arm.max_speed + _SWING_S * arm.max_acceleration
    np.testing.assert_allclose(limit[:2], [2.0, 0.5])
    assert arm.max_speed[2] == 0.005, "no cubic between speeds below a limit is twice as fast as the limit"


def test_a_chunk_too_short_to_stop_in_is_refused():
    with pytest.raises(UserError, match=r"joints.chunk_s is 0.2 s, but within the limits a stop alone takes 0.\d\d s"):
        TrajectoryChunks(Robot().arm.kinematics, 0.2, model().stop_s)


def test_a_tools_motion_becomes_joints_by_the_inverse_kinematics_that_the_other_outputs_use():
    solver = JointSolver(model(), CONTROL_S)
    solver.start(dict(zip(NAMES, START.tolist(), strict=True)))
    there = solver.pose_at(START + 0.02)
    targets = [Target(there, np.zeros(6), 0.04)] * 20
    planned, speeds = solver.plan(targets)
    np.testing.assert_array_equal(solver.positions, START)
    followed = [solver.follow(target) for target in targets]
    np.testing.assert_allclose(planned, [positions for positions, _ in followed], atol=1e-9)
    np.testing.assert_allclose(speeds, [moving for _, moving in followed], atol=1e-9)


def test_new_plans_for_a_tool_continue_the_one_before_within_the_joints_speeds():
    """A tool pose has many postures: which one is solved for depends on the steps before."""
    speed, draw = 0.05 * np.array(TABLE_ARM.acceleration), np.random.default_rng(1)
    acceleration = 0.5 * np.array(TABLE_ARM.acceleration)
    bounds: dict[str, Any] = {"max_acceleration": acceleration, "max_jerk": 25 * acceleration}
    solver = JointSolver(planned(JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", speed, **bounds)), 0.01)
    limits = Limits(0.25, 0.75, 3.0, 6.0, 75.0, 150.0, (-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
    solver.start(dict(zip(TABLE_ARM.joints, TABLE_ARM.home, strict=False)))
    history = PoseHistory[Pose]()
    gripper = Gripper(GripperSettings(open_value=0.08, closed_value=0.0))
    follower = ActionFollower(ToolSpace(limits, 0.3, 1.5), BoundedMotion(limits), gripper, history)
    follower.rest_at(solver.pose_at(solver.positions))
    chunks = TrajectoryChunks(solver, LONGEST_S, limits.stop_s)
    for step in range(400):
        now_s = 100.0 + 0.01 * step
        target = follower.step(now_s)
        history.add(now_s, target.pose)
        path = chunks.next(target, follower, now_s)
        if path is not None:
            speeds = np.abs(np.diff(path.positions, axis=0)) / np.diff(path.times_s)[:, None]
            assert (speeds <= speed * TOLERANCE).all(), f"step {step}: {(speeds / speed).max():.3f}"
        if step % 25 == 0:
            way = np.concatenate([draw.uniform(-0.08, 0.08, 3), draw.uniform(-0.3, 0.3, 3), [1.0]])
            with suppress(ActionRefusedError):
                follower.take(StampedAction(now_s, way[None], ActionConvention(0.2)), now_s)
