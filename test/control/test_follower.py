# SPDX-License-Identifier: Apache-2.0
"""Actions are followed once, from their picture, at their pace, however they come."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.control.action_space import ActionRefusedError, RefusalReason, ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion
from specvla_ros.control.convention import (
    ActionConvention,
    ActionFrame,
    GripperSign,
    Reference,
    Rotation,
    StampedAction,
)
from specvla_ros.control.follower import ActionFollower, Compensation
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, PoseHistory, rotation_matrix, rotation_vector, rpy_matrix

LIMITS = Limits(
    linear_speed=1.5,
    angular_speed=6.0,
    linear_acceleration=30.0,
    angular_acceleration=100.0,
    linear_jerk=3000.0,
    angular_jerk=10_000.0,
    workspace_min=(-1.0, -1.0, -1.0),
    workspace_max=(1.0, 1.0, 1.0),
)
DT_S = 0.2
CONTROL_S = 0.01
BASE = ActionConvention(DT_S)
ABSOLUTE = ActionConvention(DT_S, reference=Reference.ABSOLUTE)
START = Pose(np.array([0.1, 0.0, 0.2]), rotation_matrix(np.array([2.0, 0.5, 0.0])))
MOVE = np.array([0.05, -0.02, 0.01, 0.1, 0.0, -0.2, 1.0])


class Arm:
    """A tool that is exactly where it is sent, on a clock that the test moves."""

    def __init__(self, compensation=Compensation.IMAGE_GOAL):
        self.history, self.now_s = PoseHistory[Pose](), 100.0
        motion = BoundedMotion(LIMITS)
        self.gripper = Gripper(GripperSettings(open_value=0.08, closed_value=0.0))
        self.follower = ActionFollower(ToolSpace(LIMITS), motion, self.gripper, self.history, compensation=compensation)
        self.follower.rest_at(START)
        self.poses = {}
        self.run(0.1)

    def run(self, seconds, speed_scale=1.0):
        for _ in range(round(seconds / CONTROL_S)):
            self.target = self.follower.step(self.now_s, speed_scale)
            self.history.add(self.now_s, self.target.pose)
            self.poses[round(self.now_s, 4)] = self.target.pose
            self.now_s = round(self.now_s + CONTROL_S, 4)

    def take(self, values=MOVE, *, age_s=0.0, convention=BASE):
        stamp_s = self.now_s - age_s
        self.follower.take(StampedAction(stamp_s, np.atleast_2d(values), convention), self.now_s)
        return stamp_s

    def refused(self, values=MOVE, **how):
        with pytest.raises(ActionRefusedError) as why:
            self.take(values, **how)
        return why.value.refusal


def assert_at(pose, goal, tolerance=1e-4):
    np.testing.assert_allclose(pose.position, goal.position, atol=tolerance)
    assert np.linalg.norm(rotation_vector(pose.rotation @ goal.rotation.T)) < tolerance


ages = st.integers(0, 30).map(lambda steps: steps * CONTROL_S)
moves = st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=6).map(lambda parts: np.array([*parts, 1.0]))


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.tuples(moves, ages, st.integers(1, 25)), min_size=1, max_size=8))
def test_the_tool_ends_where_the_newest_picture_meant(actions):
    arm = Arm()
    goal, newest_s = START, -math.inf
    for move, age_s, steps in actions:
        stamp_s = arm.now_s - age_s
        if stamp_s <= newest_s or stamp_s < min(arm.poses):
            assert arm.refused(move, age_s=age_s) in (RefusalReason.NOT_NEWER, RefusalReason.NO_POSE)
        else:
            arm.take(move, age_s=age_s)
            newest_s, goal = stamp_s, arm.history.at(stamp_s).displaced(move[:6])
        arm.run(steps * CONTROL_S)
    arm.run(8.0)
    assert_at(arm.target.pose, goal)


def test_an_action_in_time_is_done_at_the_end_of_its_period():
    arm = Arm()
    arm.take()
    arm.run(DT_S)
    assert arm.target.moving
    arm.run(2 * CONTROL_S)
    assert not arm.target.moving
    assert_at(arm.target.pose, START.displaced(MOVE[:6]))


@pytest.mark.parametrize("age_s", [0.0, 0.05, 0.15, 0.2, 0.6])
@pytest.mark.parametrize("period_s", [0.03, 0.1, 0.2])
def test_speed_is_the_training_datas_however_often_and_late_actions_come(period_s, age_s):
    """A policy that wants to go on for ever, 5 cm in 0.2 s: 0.25 m/s, and never faster than half as much again."""
    arm = Arm()
    arm.run(1.0)
    move = np.array([0.05, 0, 0, 0, 0, 0, 1.0])
    begun_s, begun = arm.now_s, arm.target.pose.position[0]
    fastest = 0.0
    for _ in range(round(1.2 / period_s)):
        arm.take(move, age_s=age_s)
        for _ in range(round(period_s / CONTROL_S)):
            arm.run(CONTROL_S)
            fastest = max(fastest, float(np.linalg.norm(arm.target.velocity[:3])))
    speed = (arm.target.pose.position[0] - begun) / (arm.now_s - begun_s)
    wanted = move[0] / DT_S
    assert speed <= 1.1 * wanted
    assert fastest <= 1.5 * wanted + 1e-9
    if age_s + period_s <= DT_S:
        assert speed >= 0.75 * wanted


def test_without_compensation_the_same_way_counts_again():
    distances = {}
    for compensation in Compensation:
        arm = Arm(compensation)
        for _ in range(3):
            arm.take(age_s=0.08)
            arm.run(0.02)
        arm.run(2.0)
        distances[compensation] = np.linalg.norm(arm.target.pose.position - START.position)
    assert distances[Compensation.IMAGE_GOAL] == pytest.approx(np.linalg.norm(MOVE[:3]), rel=0.15)
    assert distances[Compensation.NONE] > 1.1 * distances[Compensation.IMAGE_GOAL]


def test_a_chunk_is_followed_row_by_row_without_a_stop_between():
    arm = Arm()
    chunk = np.tile([0.01, 0, 0, 0, 0, 0.0], (8, 1))
    arm.take(chunk, convention=ActionConvention(0.05))
    arm.run(0.1)
    speeds = []
    for _ in range(25):
        arm.run(CONTROL_S)
        speeds.append(arm.target.velocity[0])
    assert min(speeds) > 0.15 and max(speeds) < 0.3
    arm.run(0.3)
    assert_at(arm.target.pose, START.displaced(np.array([0.08, 0, 0, 0, 0, 0])))


@pytest.mark.parametrize(("age_s", "left"), [(0.04, 4), (0.12, 2), (0.17, 1), (0.22, 1)])
def test_rows_of_a_late_chunk_that_have_passed_are_skipped_and_their_way_counts(age_s, left):
    arm = Arm()
    arm.run(0.4)
    chunk = np.tile([0.01, 0, 0, 0, 0, 0.0], (4, 1))
    arm.take(chunk, age_s=age_s, convention=ActionConvention(0.05))
    assert len(arm.follower._steps) == left, "the last row counts, however late it is"
    arm.run(1.0)
    assert_at(arm.target.pose, START.displaced(np.array([0.04, 0, 0, 0, 0, 0])))


def begun(arm, rows, stamp_s, *, partial):
    chunk = np.tile([0.01, 0, 0, 0, 0, 0.0], (rows, 1))
    arm.follower.take(StampedAction(stamp_s, chunk, ActionConvention(0.05), partial=partial), arm.now_s)


@pytest.mark.parametrize("compensation", Compensation)
def test_a_chunk_that_comes_in_parts_ends_where_the_whole_would(compensation):
    arm, whole = Arm(compensation), Arm(compensation)
    stamp_s = arm.now_s - 0.04
    for part in (1, 3, 6):
        begun(arm, part, stamp_s, partial=part < 6)
        if part == 1:
            begun(whole, 6, stamp_s, partial=False)
        arm.run(0.06)
        whole.run(0.06)
    arm.run(1.0)
    whole.run(1.0)
    assert_at(arm.target.pose, whole.target.pose)
    assert_at(arm.target.pose, START.displaced(np.array([0.06, 0, 0, 0, 0, 0])))


def test_only_more_of_the_same_chunk_goes_on_with_it():
    arm = Arm()
    stamp_s = arm.now_s
    begun(arm, 2, stamp_s, partial=True)
    arm.run(0.02)
    for rows, stamp in ((2, stamp_s), (1, stamp_s), (4, stamp_s - 0.01)):
        with pytest.raises(ActionRefusedError) as why:
            begun(arm, rows, stamp, partial=True)
        assert why.value.refusal is RefusalReason.NOT_NEWER
    begun(arm, 4, stamp_s, partial=False)
    with pytest.raises(ActionRefusedError):
        begun(arm, 5, stamp_s, partial=False)


def test_what_follows_a_chunk_that_was_blocked_counts_from_its_own_picture(monkeypatch):
    arm = Arm()
    begun(arm, 1, arm.now_s, partial=True)
    arm.run(0.5)
    stamp_s, here = arm.now_s, arm.target.pose
    with monkeypatch.context() as blocked, pytest.raises(ActionRefusedError):
        blocked.setattr(arm.follower._motion, "aim", lambda *goal, **how: False)
        begun(arm, 1, stamp_s, partial=True)
    begun(arm, 3, stamp_s, partial=False)
    arm.run(1.0)
    assert_at(arm.target.pose, here.displaced(np.array([0.03, 0, 0, 0, 0, 0])))


@pytest.mark.parametrize("drop", ["hold", "return_to", "rest_at"])
def test_what_follows_a_chunk_that_was_dropped_is_refused(drop):
    arm = Arm()
    stamp_s = arm.now_s
    begun(arm, 1, stamp_s, partial=True)
    arm.run(0.02)
    {
        "hold": lambda: arm.follower.hold(arm.now_s),
        "return_to": lambda: arm.follower.return_to(START, arm.now_s),
        "rest_at": lambda: arm.follower.rest_at(arm.target.pose),
    }[drop]()
    with pytest.raises(ActionRefusedError) as why:
        begun(arm, 3, stamp_s, partial=False)
    assert why.value.refusal is RefusalReason.NOT_NEWER
    begun(arm, 3, arm.now_s, partial=False)


def test_a_newer_chunk_replaces_what_is_left_of_the_one_before():
    arm = Arm()
    arm.take(np.tile([0.01, 0, 0, 0, 0, 0.0], (8, 1)), convention=ActionConvention(0.05))
    arm.run(0.1)
    here = arm.history.at(arm.now_s)
    arm.take(np.tile([0.0, 0.01, 0, 0, 0, 0.0], (4, 1)), convention=ActionConvention(0.05))
    arm.run(1.0)
    assert_at(arm.target.pose, here.displaced(np.array([0, 0.04, 0, 0, 0, 0])))


@pytest.mark.parametrize(
    ("convention", "goal"),
    [
        (BASE, Pose(START.position + MOVE[:3], rotation_matrix(MOVE[3:6]) @ START.rotation)),
        (
            ActionConvention(DT_S, rotation=Rotation.RPY),
            Pose(START.position + MOVE[:3], rpy_matrix(MOVE[3:6]) @ START.rotation),
        ),
        (
            ActionConvention(DT_S, frame=ActionFrame.TOOL),
            Pose(START.position + START.rotation @ MOVE[:3], START.rotation @ rotation_matrix(MOVE[3:6])),
        ),
        (ABSOLUTE, Pose(MOVE[:3], rotation_matrix(MOVE[3:6]))),
    ],
)
def test_each_convention_means_what_it_says(convention, goal):
    arm = Arm()
    arm.take(convention=convention)
    arm.run(8.0)
    assert_at(arm.target.pose, goal)


@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_slow_motion_takes_the_same_way_and_moves_the_gripper_at_the_same_place(scale):
    """Rows of a chunk that fell due by the clock would cut its corner, and grasp where the arm is not yet."""
    rows = np.zeros((8, 7))
    rows[:4, 0], rows[4:, 1], rows[:4, 6] = 0.02, 0.02, 1.0

    def way(speed_scale):
        arm = Arm()
        arm.run(0.5, speed_scale)
        arm.take(rows)
        places, closed = [], None
        for _ in range(round(2.5 / speed_scale / CONTROL_S)):
            arm.run(CONTROL_S, speed_scale)
            places.append(arm.target.pose.position)
            if closed is None and arm.gripper.position == 0.0:
                closed = arm.target.pose.position
        return np.array(places), closed

    (fast, fast_closed), (slow, slow_closed) = way(1.0), way(scale)
    assert max(np.linalg.norm(fast - place, axis=1).min() for place in slow) < 2e-3
    assert np.linalg.norm(fast_closed - slow_closed) < 2e-3
    np.testing.assert_allclose(slow[-1], START.position + np.array([0.08, 0.08, 0.0]), atol=1e-3)


def test_rpy_turns_about_the_fixed_axes_x_then_y_then_z():
    quarter = math.pi / 2
    np.testing.assert_allclose(rpy_matrix(np.array([quarter, 0, quarter])) @ [0, 0, 1.0], [1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(rpy_matrix(np.array([quarter, quarter, 0])) @ [0, 1.0, 0], [1, 0, 0], atol=1e-12)


def test_the_gripper_opens_and_closes_at_the_edges_only():
    arm = Arm()
    assert arm.gripper.position is None
    positions: list[float | None] = []
    for number in (0.9, 0.55, 0.45, 0.41, 0.3, 0.55, 0.61):
        arm.take(np.array([0, 0, 0, 0, 0, 0, number]))
        arm.run(0.05)
        positions.append(arm.gripper.position)
    assert positions == [0.08, 0.08, 0.08, 0.08, 0.0, 0.0, 0.08]
    arm.take(np.array([0, 0, 0, 0, 0, 0, 1.0]), convention=ActionConvention(DT_S, gripper=GripperSign.CLOSE_HIGH))
    assert arm.gripper.position == 0.0
    arm.run(0.05)
    arm.take(np.array([0, 0, 0, 0, 0, 0, 0.0]), convention=ActionConvention(DT_S, gripper=GripperSign.NONE))
    assert arm.gripper.position == 0.0


@pytest.mark.parametrize(
    ("values", "how", "refusal"),
    [
        (np.array([math.nan, *MOVE[1:]]), {}, RefusalReason.NOT_FINITE),
        (np.array([*MOVE[:6], math.inf]), {}, RefusalReason.NOT_FINITE),
        (MOVE[:5], {}, RefusalReason.WRONG_SHAPE),
        (np.zeros((0, 7)), {}, RefusalReason.WRONG_SHAPE),
        (MOVE, {"age_s": 1.01}, RefusalReason.TOO_OLD),
        (MOVE, {"age_s": -0.11}, RefusalReason.FROM_THE_FUTURE),
        (MOVE, {"age_s": 0.5}, RefusalReason.NO_POSE),
        (10 * MOVE, {}, RefusalReason.TOO_LARGE),
        (np.array([0, 0, 0, 4.0, 0, 0, 0]), {}, RefusalReason.TOO_LARGE),
        (MOVE, {"convention": ActionConvention(0.0)}, RefusalReason.NOT_FINITE),
        (MOVE, {"convention": ActionConvention(math.nan)}, RefusalReason.NOT_FINITE),
    ],
)
def test_what_cannot_be_followed_is_refused_and_moves_nothing(values, how, refusal):
    arm = Arm()
    assert arm.refused(values, **how) is refusal
    arm.run(0.3)
    assert_at(arm.target.pose, START, 1e-12)


@pytest.mark.parametrize(
    ("values", "how"),
    [
        (MOVE, {"age_s": 0.99}),
        (MOVE, {"age_s": -0.09}),
        (MOVE[:6], {}),
        (np.array([0.299, 0, 0, 0, 0, 0, 0]), {}),
        (np.array([0, 0, 0, 0, 0, 3.1, 0]), {}),
        (np.array([0.38, 0.1, 0.2, 0, 0, 0, 0]), {"convention": ABSOLUTE}),
    ],
)
def test_what_is_just_within_the_bounds_is_followed(values, how):
    arm = Arm()
    arm.run(1.0)
    arm.take(values, **how)
    arm.run(0.05)
    assert arm.target.moving


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        (np.array([0.301, 0, 0, 0, 0, 0, 0]), RefusalReason.TOO_LARGE),
        (np.array([0.2, 0.2, 0.2, 0, 0, 0, 0]), RefusalReason.TOO_LARGE),
        (
            np.tile([0.01, 0, 0, 0, 0, 0, 0], (3, 1)) + np.array([[0], [0.3], [0]]) * np.eye(7)[0],
            RefusalReason.TOO_LARGE,
        ),
        (np.zeros((1, 8)), RefusalReason.WRONG_SHAPE),
        (np.zeros((1, 1, 7)), RefusalReason.WRONG_SHAPE),
    ],
)
def test_what_is_just_beyond_the_bounds_is_refused(values, refusal):
    arm = Arm()
    with pytest.raises(ActionRefusedError) as why:
        arm.follower.take(StampedAction(arm.now_s, np.array(values, ndmin=2), BASE), arm.now_s)
    assert why.value.refusal is refusal


@pytest.mark.parametrize(
    "rows",
    [
        [[0.401, 0, 0.2, 0, 0, 0]],  # START is at 0.1, 0, 0.2
        [[100.0, 0, 200.0, 0, 0, 0]],  # its place in millimetres
        [[0.2, 0, 0.2, 0, 0, 0], [0.2, 0.31, 0.2, 0, 0, 0]],
    ],
)
def test_an_absolute_pose_further_than_a_step_from_the_image_or_the_row_before_is_refused(rows):
    arm = Arm()
    assert arm.refused(np.array(rows), convention=ABSOLUTE) is RefusalReason.TOO_LARGE
    arm.run(0.3)
    assert_at(arm.target.pose, START, 1e-12)


def test_other_ages_are_in_force_from_the_next_action_on():
    arm = Arm()
    arm.run(1.0)
    arm.follower.set_ages(0.1, 0.0)
    assert arm.refused(age_s=0.11) is RefusalReason.TOO_OLD
    assert arm.refused(age_s=-0.01) is RefusalReason.FROM_THE_FUTURE
    arm.take(age_s=0.09)


@pytest.mark.parametrize(
    ("pushed", "counts_from_measured"),
    [((0.029, 0.0), False), ((0.031, 0.0), True), ((0.0, 0.19), False), ((0.0, 0.21), True)],
)
def test_an_action_counts_from_where_the_tool_was_sent_unless_it_was_far_from_there(pushed, counts_from_measured):
    arm = Arm()
    there = START.displaced(np.array([0, 0, pushed[0], pushed[1], 0, 0]))
    for _ in range(30):
        arm.follower.step(arm.now_s)
        arm.history.add(arm.now_s, there)
        arm.now_s = round(arm.now_s + CONTROL_S, 4)
    arm.take(age_s=0.05)
    arm.run(3.0)
    assert_at(arm.target.pose, (there if counts_from_measured else START).displaced(MOVE[:6]))


def test_what_is_dropped_is_not_followed_again():
    chunk = np.tile([0.01, 0, 0, 0, 0, 0.0], (20, 1))
    for drop in ("rest_at", "return_to", "hold"):
        arm = Arm()
        arm.take(chunk, convention=ActionConvention(0.05))
        arm.run(0.2)
        here = arm.target.pose
        if drop == "rest_at":
            arm.follower.rest_at(here)
        elif drop == "return_to":
            arm.follower.return_to(START, arm.now_s)
        else:
            arm.follower.hold(arm.now_s)
        arm.run(2.0)
        assert not arm.target.moving
        assert_at(arm.target.pose, START if drop == "return_to" else here, 0.02 if drop == "hold" else 1e-6)


def test_a_tool_that_was_put_elsewhere_counts_from_there():
    arm = Arm()
    elsewhere = START.displaced(np.array([0.0, 0.02, 0, 0, 0, 0]))
    arm.follower.rest_at(elsewhere)
    stamp_s = arm.now_s
    arm.run(0.1)
    arm.follower.take(StampedAction(stamp_s, MOVE[None], BASE), arm.now_s)
    arm.run(3.0)
    assert_at(arm.target.pose, elsewhere.displaced(MOVE[:6]))


def test_a_tool_that_was_turned_by_hand_follows_actions_that_hardly_turn():
    arm = Arm()
    turned = START.displaced(np.array([0, 0, 0, 0, 0.3, 0]))
    for _ in range(20):
        arm.follower.step(arm.now_s)
        arm.history.add(arm.now_s, turned)
        arm.now_s = round(arm.now_s + CONTROL_S, 4)
    arm.take(np.array([0.01, 0, 0, 1e-7, 0, 0, 1.0]))
    arm.run(1.0)
    np.testing.assert_allclose(arm.target.pose.position, START.position + np.array([0.01, 0, 0]), atol=1e-6)
    assert arm.target.velocity[4] > 0, "it turns to where it was turned by hand"


def test_a_way_that_is_blocked_is_refused_and_the_one_before_goes_on(monkeypatch):
    arm = Arm()
    arm.take()
    arm.run(0.05)
    with monkeypatch.context() as blocked:
        blocked.setattr(arm.follower._motion, "aim", lambda *goal, **how: False)
        assert arm.refused(-MOVE) is RefusalReason.BLOCKED
    arm.run(2.0)
    assert_at(arm.target.pose, START.displaced(MOVE[:6]))


def test_a_blocked_way_leaves_the_gripper_as_it_is(monkeypatch):
    arm = Arm()
    monkeypatch.setattr(arm.follower._motion, "aim", lambda *goal, **how: False)
    assert arm.refused() is RefusalReason.BLOCKED
    assert arm.gripper.position is None


def test_the_gripper_is_told_each_rows_number_when_its_turn_comes():
    arm = Arm()
    chunk = np.zeros((4, 7))
    chunk[:, 6] = (1.0, 0.0, 1.0, 0.0)
    arm.take(chunk, convention=ActionConvention(0.1))
    positions = []
    for _ in range(4):
        arm.run(0.05)
        positions.append(arm.gripper.position)
        arm.run(0.05)
    assert positions == [0.08, 0.0, 0.08, 0.0]
    arm.follower.forget_gripper()
    assert arm.gripper.position is None


def test_a_row_without_a_grippers_number_leaves_it_as_it_is():
    arm = Arm()
    arm.take(MOVE[:6])
    assert arm.gripper.position is None


def test_a_target_says_how_much_of_the_motion_passed():
    arm = Arm()
    arm.run(CONTROL_S)
    assert arm.target.passed_s == pytest.approx(CONTROL_S)
    arm.now_s = round(arm.now_s + 0.5, 4)
    arm.run(CONTROL_S)
    assert arm.target.passed_s == pytest.approx(0.05), "no more than a late loop may make up for"
    arm.now_s = round(arm.now_s - 0.3, 4)
    arm.target = arm.follower.step(arm.now_s)
    assert arm.target.passed_s == 0.0, "nor does a clock that goes back undo any"


def late_speeds(pause_s):
    """A slow action, a pause, and then one that is slow and late: how fast the tool is in the end."""
    arm = Arm()
    arm.take(np.array([0.06, 0, 0, 0, 0, 0, 1.0]))
    arm.run(pause_s)
    arm.take(np.array([0.01, 0, 0, 0, 0, 0, 1.0]), age_s=0.25)
    fastest = 0.0
    for _ in range(60):
        arm.run(CONTROL_S)
        fastest = max(fastest, float(np.linalg.norm(arm.target.velocity[:3])))
    return fastest


def test_the_pace_is_that_of_the_fastest_action_of_the_last_two_seconds():
    assert late_speeds(1.9) > 2 * late_speeds(2.1)
    assert late_speeds(2.1) <= 1.5 * 0.05 + 1e-6


def test_actions_of_another_epoch_set_no_pace():
    arm = Arm()
    arm.take(np.array([0.06, 0, 0, 0, 0, 0, 1.0]))
    arm.run(1.0)
    arm.follower.forget()
    arm.take(np.array([0.01, 0, 0, 0, 0, 0, 1.0]), age_s=0.25)
    fastest = 0.0
    for _ in range(60):
        arm.run(CONTROL_S)
        fastest = max(fastest, float(np.linalg.norm(arm.target.velocity[:3])))
    assert fastest <= 1.5 * 0.05 + 1e-6


def test_repeated_and_overtaken_actions_are_refused_until_a_new_epoch():
    arm = Arm()
    arm.run(0.2)
    arm.take(age_s=0.1)
    assert arm.refused(age_s=0.1) is RefusalReason.NOT_NEWER
    assert arm.refused(age_s=0.15) is RefusalReason.NOT_NEWER
    arm.follower.forget()
    arm.take(age_s=0.15)


def test_hold_drops_what_is_followed():
    arm = Arm()
    arm.take(np.tile([0.01, 0, 0, 0, 0, 0.0], (20, 1)), convention=ActionConvention(0.05))
    arm.run(0.2)
    arm.follower.hold(arm.now_s)
    stopped_after = LIMITS.stop_s + CONTROL_S
    arm.run(stopped_after)
    assert not arm.target.moving
    here = arm.target.pose
    arm.run(2.0)
    assert_at(arm.target.pose, here, 1e-12)


def test_a_control_loop_that_comes_late_does_not_leap():
    arm = Arm()
    arm.take(np.array([0.1, 0, 0, 0, 0, 0, 1.0]), convention=ActionConvention(1.0))
    arm.run(0.3)
    before = arm.target.pose.position[0]
    arm.now_s = round(arm.now_s + 0.5, 4)  # nothing runs meanwhile
    arm.run(CONTROL_S)
    assert 0 < arm.target.pose.position[0] - before < 0.05 * 0.15 + 1e-9
    arm.run(2.0)
    assert_at(arm.target.pose, START.displaced(np.array([0.1, 0, 0, 0, 0, 0])))


def test_poses_around_a_gap_say_nothing_of_it():
    history = PoseHistory[Pose](kept_s=2.0, gap_s=0.25)
    with pytest.raises(LookupError):
        history.at(0.0)
    for stamp_s in (0.0, 0.1, 0.5):
        assert history.add(stamp_s, Pose(np.full(3, stamp_s), np.eye(3)))
    assert not history.add(0.5, START)
    np.testing.assert_allclose(history.at(0.05).position, 0.05)
    np.testing.assert_allclose(history.at(0.7).position, 0.5)
    for unknown_s in (-0.1, 0.3, 0.8):
        with pytest.raises(LookupError):
            history.at(unknown_s)
    history.add(3.0, START)
    with pytest.raises(LookupError):
        history.at(0.05)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.0])
def test_a_share_of_the_speed_slows_the_whole_motion_without_a_jump(share):
    arm = Arm()
    arm.take(np.array([0.3, 0, 0, 0, 0, 0, 1.0]), convention=replace(BASE, dt_s=1.0))
    found = []
    for step in range(250):
        target = arm.follower.step(arm.now_s, 1.0 if step < 40 else share)
        arm.history.add(arm.now_s, target.pose)
        arm.now_s = round(arm.now_s + CONTROL_S, 4)
        found.append((target.pose.position[0], target.velocity[0]))
    places, speeds = np.array(found).T
    assert speeds[39] > 0.2
    assert np.abs(np.diff(speeds[40:])).max() <= LIMITS.linear_acceleration * CONTROL_S
    np.testing.assert_allclose(np.diff(places)[40:], CONTROL_S * (speeds[40:-1] + speeds[41:]) / 2, atol=2e-4)
    slow = speeds[100:]  # the share is reached, and the way is not done
    assert slow.max() <= share * speeds.max() + 1e-9 and (slow.max() > 0) == (share > 0)


@pytest.mark.parametrize("share", [1.0, 0.8, 0.2, 0.1])
def test_what_is_coming_brakes_in_full_motion_as_soon_as_in_slow_motion(share):
    """A slow motion's time is stopped, too: braking at a fifth of the speed would take five times as long."""
    arm, period_s, steps = Arm(), 0.02, 5
    arm.take(np.array([0.3, 0, 0, 0, 0, 0, 1.0]), convention=replace(BASE, dt_s=1.0))
    for _ in range(40):
        target = arm.follower.step(arm.now_s, share)
        arm.history.add(arm.now_s, target.pose)
        arm.now_s = round(arm.now_s + CONTROL_S, 4)
    targets = arm.follower.coming(arm.now_s - CONTROL_S, period_s, steps * period_s)
    assert targets[steps - 1].moving and not targets[-1].moving
    assert len(targets) <= 2 * steps


def test_what_is_coming_ends_as_the_motion_comes_to_rest():
    arm = Arm()
    arm.take(MOVE)
    arm.run(2 * CONTROL_S)
    targets = arm.follower.coming(arm.now_s - CONTROL_S, 0.02, 9.0)
    assert [target.moving for target in targets] == [True] * (len(targets) - 1) + [False]
