# SPDX-License-Identifier: Apache-2.0
"""Whatever is aimed at, and whenever: the motion stays within its limits, and comes to rest."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.control.bounded_motion import BoundedMotion
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
