# SPDX-License-Identifier: Apache-2.0
"""Whatever is aimed at, and whenever: the motion stays within its limits, and comes to rest."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.control.bounded_motion import (
    Axes,
    BoundedMotion,
    State,
    Target,
    TrackingVelocity,
    shortened,
    tracking_velocity,
)
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.errors import UserError

LIMITS = Limits(
    linear_speed=0.5,
    angular_speed=1.5,
    linear_acceleration=3.0,
    angular_acceleration=10.0,
    linear_jerk=60.0,
    angular_jerk=200.0,
    workspace_min=(-0.3, -0.2, 0.0),
    workspace_max=(0.3, 0.2, 0.4),
)
START = Pose(np.array([0.1, -0.05, 0.1]), rotation_matrix(np.array([0.3, -1.0, 0.4])))
STEP_S = 0.01

coordinates = st.floats(-0.5, 0.5)
goals = st.tuples(
    st.lists(coordinates, min_size=3, max_size=3).map(np.array),
    st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3).map(np.array),
).map(lambda parts: Pose(parts[0], rotation_matrix(parts[1])))
seconds = st.floats(0.0, 0.6)
orders = st.one_of(
    st.tuples(st.just("aim"), goals, seconds, seconds, seconds),
    st.tuples(st.just("pass"), goals, seconds, seconds, seconds),
    st.tuples(st.just("brake"), goals, seconds, seconds, seconds),
)


def resting(limits=LIMITS):
    motion = BoundedMotion(limits)
    motion.rest_at(START)
    return motion


def run(motion, orders, *, tail_s=8.0):
    """Poses and velocities at each step, with the orders given one after the other.

    At the slowest pace the workspace is 6 s long.
    """
    now_s, targets = 10.0, []
    for kind, goal, move_s, turn_s, lasting_s in orders:
        if kind == "brake":
            motion.brake(now_s)
        else:
            onward = (goal.displaced(np.full(6, 0.02)), 0.05) if kind == "pass" else None
            pace = (math.inf, math.inf) if turn_s > 0.3 else (0.1 + move_s, 1.5 + move_s)
            motion.aim(goal, now_s, move_s=move_s, turn_s=turn_s, pace=pace, onward=onward)
        for _ in range(int(lasting_s / STEP_S) + 1):
            targets.append(motion.at(now_s))
            now_s += STEP_S
    for _ in range(int(tail_s / STEP_S)):
        targets.append(motion.at(now_s))
        now_s += STEP_S
    return targets


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(orders, min_size=1, max_size=8))
def test_no_limit_is_ever_broken(orders):
    targets = run(resting(), orders)
    positions = np.array([target.pose.position for target in targets])
    velocities = np.array([target.velocity for target in targets])
    turned = np.array([rotation_vector(b.pose.rotation @ a.pose.rotation.T) for a, b in pairwise(targets)])
    assert (positions >= np.array(LIMITS.workspace_min) - 3e-4).all()
    assert (positions <= np.array(LIMITS.workspace_max) + 3e-4).all()
    assert np.linalg.norm(velocities[:, :3], axis=1).max() <= LIMITS.linear_speed * (1 + 1e-6)
    assert np.linalg.norm(velocities[:, 3:], axis=1).max() <= LIMITS.angular_speed * (1 + 1e-6)
    assert np.linalg.norm(np.diff(velocities[:, :3], axis=0), axis=1).max() / STEP_S <= LIMITS.linear_acceleration * (
        1 + 1e-6
    )
    angular = LIMITS.angular_acceleration + 0.5 * LIMITS.angular_speed**2
    assert np.linalg.norm(np.diff(velocities[:, 3:], axis=0), axis=1).max() / STEP_S <= angular * (1 + 1e-6)
    # The poses are what the velocities say.
    np.testing.assert_allclose(
        np.diff(positions, axis=0), 0.5 * STEP_S * (velocities[1:, :3] + velocities[:-1, :3]), atol=1e-4
    )
    np.testing.assert_allclose(turned, 0.5 * STEP_S * (velocities[1:, 3:] + velocities[:-1, 3:]), atol=1e-3)
    assert not targets[-1].moving


def test_a_brake_in_front_of_the_edge_stays_within_the_workspace():
    """Its axis had been braking for the edge already; held back by another that is faster, it went 1.7 mm beyond."""
    beyond = Pose(np.array([0.21875, 0.0, -0.5]), np.eye(3))
    for lasting_s in np.arange(0.05, 0.8, 0.03):
        targets = run(resting(), [("pass", beyond, 0.0, 0.5, lasting_s), ("brake", beyond, 0.0, 0.0, 0.0)])
        assert min(target.pose.position[2] for target in targets) >= -1e-9


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(orders, min_size=1, max_size=5))
def test_a_brake_ends_all_motion_within_the_stated_time(orders):
    motion = resting()
    run(motion, orders[:-1], tail_s=0.0)
    now_s = 10.0 + sum(int(order[4] / STEP_S) + 1 for order in orders[:-1]) * STEP_S
    motion.brake(now_s)
    assert not motion.at(now_s + LIMITS.stop_s + 1e-6).moving


@settings(deadline=None, max_examples=examples(25))
@given(goals)
def test_a_goal_within_the_workspace_is_reached_exactly(goal):
    motion = resting()
    inside = LIMITS.clamped(goal)
    assert motion.aim(inside, 0.0, move_s=0.3, turn_s=0.3)
    end = motion.at(20.0)
    np.testing.assert_allclose(end.pose.position, inside.position, atol=1e-9)
    assert np.linalg.norm(rotation_vector(end.pose.rotation @ inside.rotation.T)) < 1e-6
    assert not end.moving


def test_time_that_is_given_is_taken_and_no_more():
    motion = resting()
    goal = START.displaced(np.array([0.05, 0.0, 0.0, 0.0, 0.0, 0.2]))
    assert motion.aim(goal, 0.0, move_s=0.4, turn_s=0.8)
    assert motion.at(0.399).velocity[:3].any() and not motion.at(0.401).velocity[:3].any()
    assert motion.at(0.799).velocity[3:].any() and not motion.at(0.801).velocity[3:].any()


def test_a_goal_that_is_passed_is_passed_at_speed_and_braked_behind():
    motion = resting()
    first, second = (START.displaced(np.array([way, 0, 0, 0, 0, 0.0])) for way in (0.05, 0.06))
    assert motion.aim(first, 0.0, move_s=0.5, turn_s=0.5, onward=(second, 0.05))
    np.testing.assert_allclose(motion.at(0.5).pose.position, first.position, atol=1e-6)
    np.testing.assert_allclose(motion.at(0.5).velocity[0], 0.2, atol=1e-6)
    assert not motion.at(0.5 + LIMITS.stop_s + 1e-6).moving


def peak(way, *, pace=math.inf, seconds=0.0):
    """Largest speed, acceleration and jerk on a way, float64 [6] from the middle of a large workspace."""
    wide = replace(LIMITS, workspace_min=(-5.0, -5.0, -5.0), workspace_max=(5.0, 5.0, 5.0))
    motion, step_s = BoundedMotion(wide), 0.001
    motion.rest_at(Pose(np.zeros(3), np.eye(3)))
    goal = Pose(np.zeros(3), np.eye(3)).displaced(np.array(way))
    assert motion.aim(goal, 0.0, move_s=seconds, turn_s=seconds, pace=(pace, pace))
    velocities = np.array([motion.at(time_s).velocity for time_s in np.arange(0.0, 6.0, step_s)])
    part = velocities[:, :3] if np.any(way[:3]) else velocities[:, 3:]
    accelerations = np.diff(part, axis=0) / step_s
    jerks = np.diff(accelerations, axis=0) / step_s
    return [float(np.linalg.norm(each, axis=1).max()) for each in (part, accelerations, jerks)]


@pytest.mark.parametrize("way", [(1.0, 1.0, 1.0, 0, 0, 0), (-1.0, 1.0, -1.0, 0, 0, 0)])
def test_along_a_diagonal_all_of_each_limit_is_used_and_no_more(way):
    limits = (LIMITS.linear_speed, LIMITS.linear_acceleration, LIMITS.linear_jerk)
    np.testing.assert_allclose(peak(way), limits, rtol=1e-3)


def test_along_an_axis_a_share_of_each_limit_is_used():
    limits = np.array([LIMITS.linear_speed, LIMITS.linear_acceleration, LIMITS.linear_jerk])
    np.testing.assert_allclose(peak((2.0, 0, 0, 0, 0, 0)), limits / math.sqrt(3), rtol=1e-3)
    turning = np.array([LIMITS.angular_speed, LIMITS.angular_acceleration, LIMITS.angular_jerk])
    np.testing.assert_allclose(peak((0, 0, 0, 0, 2.5, 0)), turning / math.sqrt(3), rtol=1e-3)


@pytest.mark.parametrize("way", [(0.3, 0.3, 0.3, 0, 0, 0), (0.4, 0.2, 0.15, 0, 0, 0), (0.5, 0, 0, 0, 0, 0)])
def test_a_pace_is_that_of_the_whole_way_whatever_its_direction(way):
    speed, _, _ = peak(way, pace=0.1)
    assert 0.095 < speed <= 0.1 * 1.001


def test_a_pace_that_is_nothing_still_gets_there():
    assert peak((0.001, 0, 0, 0, 0, 0), pace=0.0)[0] > 0


def test_a_rotation_at_a_pace_of_next_to_nothing_still_begins():
    """Actions that hardly turn ask for hours where the tool was turned by hand; ruckig takes two at most."""
    motion = resting()
    goal = START.displaced(np.array([0.05, 0, 0, 0.3, 0, 0]))
    assert motion.aim(goal, 0.0, move_s=0.2, turn_s=1e6, pace=(math.inf, 1e-7))
    assert motion.at(5.0).velocity[3] > 0


def test_a_motion_whose_rotation_cannot_be_planned_moves_nothing(monkeypatch):
    motion = resting()
    monkeypatch.setattr(motion._turn, "to", lambda *asked: ())
    assert not motion.aim(START.displaced(np.array([0.05, 0, 0, 0.3, 0, 0])), 0.0, move_s=0.2, turn_s=0.2)
    np.testing.assert_allclose(motion.at(5.0).pose.position, START.position)


@pytest.mark.parametrize("start", [START, Pose(np.array([0.1, -0.05, 0.1]), np.eye(3))])
def test_a_rotation_turns_at_the_rate_that_it_says(start):
    """Velocities of rotation are the tool's own, however far the plan has turned."""
    motion, step_s = BoundedMotion(LIMITS), 1e-4
    motion.rest_at(start)
    motion.aim(start.displaced(np.array([0, 0, 0, 0.4, 1.5, -0.9])), 0.0, move_s=0.0, turn_s=0.0)
    motion.aim(start.displaced(np.array([0, 0, 0, -0.8, 0.9, 1.2])), 0.6, move_s=0.0, turn_s=0.0)
    for time_s in np.arange(0.65, 2.5, 0.1):
        before, now, after = (motion.at(each) for each in (time_s - step_s, time_s, time_s + step_s))
        measured = rotation_vector(after.pose.rotation @ before.pose.rotation.T) / (2 * step_s)
        np.testing.assert_allclose(now.velocity[3:], measured, atol=1e-4)


def test_a_goal_outside_of_the_workspace_is_its_nearest_place_inside():
    motion = resting()
    assert motion.aim(Pose(np.array([0.5, 0.0, 0.2]), START.rotation), 0.0, move_s=0.0, turn_s=0.0)
    np.testing.assert_allclose(motion.at(20.0).pose.position, [0.3, 0.0, 0.2], atol=1e-9)


def test_a_tool_that_is_outside_may_come_back_and_go_no_further_out():
    motion = BoundedMotion(LIMITS)
    motion.rest_at(Pose(np.array([0.32, 0.0, 0.2]), np.eye(3)))
    assert motion.aim(Pose(np.array([0.1, 0.0, 0.2]), np.eye(3)), 0.0, move_s=0.3, turn_s=0.3)
    assert max(motion.at(time_s).pose.position[0] for time_s in np.arange(0.0, 1.0, 0.01)) <= 0.32 + 1e-9


def test_what_is_passed_too_near_to_the_edge_is_stopped_at():
    """To come to rest behind the goal would lead out: the tool comes to rest at it."""
    motion = resting()
    edge, beyond = (Pose(np.array([x, 0.0, 0.1]), START.rotation) for x in (0.29, 0.5))
    assert motion.aim(edge, 0.0, move_s=0.8, turn_s=0.8, onward=(beyond, 0.05))
    furthest = max(motion.at(time_s).pose.position[0] for time_s in np.arange(0.0, 3.0, 0.01))
    assert furthest <= LIMITS.workspace_max[0] + 1e-4


@pytest.mark.parametrize("ulps", range(-20, 21))
def test_a_distance_where_the_shape_of_the_motion_changes_is_travelled_all_the_same(ulps):
    """Over 0.025 the acceleration just reaches its limit, where rounding decides."""
    axes = Axes(np.array([2.0]), np.array([20.0]), np.array([800.0]))
    goal = np.array([0.025 * (1 + ulps * np.finfo(float).eps)])
    (leg,) = axes.to(goal, State(*np.zeros((3, 1))), 0.0, np.zeros(1), math.inf)
    assert leg.duration == pytest.approx(0.1)
    np.testing.assert_allclose(leg.at_time(leg.duration)[0], goal, rtol=1e-9)
    accelerations = np.array([leg.at_time(at_s)[2] for at_s in np.linspace(0.0, leg.duration, 1001)])
    assert np.abs(accelerations).max() <= 20.0 * (1 + 1e-9)
    assert np.abs(np.diff(accelerations, axis=0)).max() <= 800.0 * leg.duration / 1000 * (1 + 1e-6)


def test_a_way_to_nowhere_is_one_of_no_motion():
    motion = resting()
    assert motion.aim(START, 0.0, move_s=0.0, turn_s=0.0)
    assert not motion.at(0.01).moving and not motion.at(1.0).moving


HERE = Pose(np.array([0.1, 0.0, 0.1]), np.eye(3))


@pytest.mark.parametrize(
    ("missing", "sent"),
    [
        ((0.0009, 0, 0, 0, 0, 0.009), (0.0,) * 6),
        ((0.002, 0, 0, 0, 0, 0), (0.012, 0, 0, 0, 0, 0)),
        ((0.0, 0, 0, 0, 0, 0.02), (0, 0, 0, 0, 0, 0.12)),
        ((0.3, 0.4, 0, 0, 0, 0), (0.3, 0.4, 0, 0, 0, 0)),  # no faster than 0.5 m/s
        ((0, 0, 0, 0, 1.0, 0), (0, 0, 0, 0, 1.5, 0)),
    ],
)
def test_a_target_at_rest_is_gone_to_until_it_is_reached(missing, sent):
    target = Target(HERE.displaced(np.array(missing)), np.zeros(6))
    np.testing.assert_allclose(tracking_velocity(target, HERE, LIMITS), sent, atol=1e-9)


def test_a_target_that_moves_is_followed_with_its_velocity_and_what_is_missing():
    velocity = np.array([0.1, 0, 0, 0, 0, 0.2])
    target = Target(HERE.displaced(np.array([0.0005, 0, 0, 0, 0, 0])), velocity)
    np.testing.assert_allclose(tracking_velocity(target, HERE, LIMITS), [0.103, 0, 0, 0, 0, 0.2], atol=1e-9)


def test_while_no_pose_is_measured_the_velocity_slews_to_the_targets_within_the_acceleration():
    wanted = np.array([0.3, 0.4, 0.0, 0.0, 0.0, 1.0])
    target, tracking = Target(HERE, wanted), TrackingVelocity(LIMITS)
    for steps in (1, 2):  # 3 m/s² and 10 rad/s² for 0.02 s
        sent = tracking.next(target, None, 0.02, 1.0)
        np.testing.assert_allclose(sent, steps * np.array([0.036, 0.048, 0, 0, 0, 0.2]))
    np.testing.assert_allclose(tracking.next(target, None, 1.0, 1.0), wanted)
    tracking.rest()
    np.testing.assert_allclose(tracking.next(target, None, 0.02, 1.0), [0.036, 0.048, 0, 0, 0, 0.2])


def test_a_measured_pose_is_tracked_at_once_and_slewing_goes_on_from_there():
    target, tracking = Target(HERE.displaced(np.array([0.3, 0.4, 0, 0, 0, 0])), np.zeros(6)), TrackingVelocity(LIMITS)
    np.testing.assert_allclose(tracking.next(target, HERE, 0.02, 0.5), [0.15, 0.2, 0, 0, 0, 0])
    np.testing.assert_allclose(tracking.next(target, None, 0.02, 0.5), [0.114, 0.152, 0, 0, 0, 0])


def test_translation_and_rotation_are_shortened_each_by_itself():
    vector = np.array([3.0, 4.0, 0.0, 0.0, 0.0, 0.5])
    np.testing.assert_allclose(shortened(vector, 1.0, 1.0), [0.6, 0.8, 0, 0, 0, 0.5])
    np.testing.assert_allclose(shortened(vector, 10.0, 0.1), [3.0, 4.0, 0, 0, 0, 0.1])
    np.testing.assert_allclose(shortened(np.zeros(6), 1.0, 1.0), np.zeros(6))


def test_limits_that_are_not_set_are_named():
    with pytest.raises(UserError, match=r"set limits\.linear_jerk, limits\.workspace_min"):
        BoundedMotion(
            Limits(
                linear_speed=1.0,
                angular_speed=1.0,
                linear_acceleration=1.0,
                angular_acceleration=1.0,
                angular_jerk=1.0,
            )
        )


@pytest.mark.parametrize(
    "change",
    [
        {"linear_speed": -0.1},
        {"linear_speed": float("nan")},
        {"workspace_min": (0.0, 0.0)},
        {"workspace_min": (0.4, -0.2, 0.0)},
        {"workspace_max": (0.3, float("inf"), 0.4)},
    ],
)
def test_limits_that_make_no_sense_are_refused(change):
    with pytest.raises(UserError, match="limits"):
        Limits(**{"workspace_min": LIMITS.workspace_min, "workspace_max": LIMITS.workspace_max, **change})


def test_a_motion_that_would_take_hours_is_refused_and_ends_nothing() -> None:
    """Ruckig's Python module raises for one that is too long, since it has no name for that result."""
    axes = Axes(np.ones(3), np.ones(3), np.ones(3))
    start = State(*np.zeros((3, 3)))
    assert axes.to(np.full(3, 0.1), start, 8000.0, np.zeros(3), 1.0) == ()
    assert axes.to(np.full(3, 0.1), start, 1.0, np.zeros(3), 1.0)
