# SPDX-License-Identifier: Apache-2.0
"""Trajectories as joint_trajectory_controller takes them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.lab.simulation.controllers import (
    CONTROL_DT_S,
    CommandRefusedError,
    JointState,
    JointTrajectory,
    JointTrajectoryController,
    Point,
)

JOINTS = ("a", "b")
START = JointState(np.array([0.1, -0.2]), np.zeros(2))
NOTHING = np.zeros(0)


def point(time_s: float, positions=(0.5, 0.5), velocities=(), accelerations=()) -> Point:
    return Point(time_s, np.array(positions), np.array(velocities, dtype=float), np.array(accelerations, dtype=float))


def trajectory(*points: Point, stamp_s: float = 0.0, joints=JOINTS) -> JointTrajectory:
    return JointTrajectory(stamp_s, joints, points)


def controller() -> JointTrajectoryController:
    made = JointTrajectoryController(JOINTS)
    made.start(START)
    return made


def run(one: JointTrajectoryController, start_s: float, seconds: float) -> list[JointState]:
    """An arm that is where it is told to be."""
    states, state = [], START
    for step in range(round(seconds / CONTROL_DT_S)):
        state = one.update(state, start_s + step * CONTROL_DT_S)
        states.append(state)
    return states


WRONG = {
    "unknown joint": (trajectory(point(1.0), joints=("a", "c")), "its joints are"),
    "missing joint": (trajectory(point(1.0, (0.5,)), joints=("a",)), "its joints are"),
    "joint named twice": (trajectory(point(1.0), joints=("a", "a")), "its joints are"),
    "no points": (trajectory(), "no points"),
    "same time": (trajectory(point(1.0), point(1.0)), "not after"),
    "back in time": (trajectory(point(1.0), point(0.5)), "not after"),
    "too few positions": (trajectory(point(1.0, (0.5,))), "1 positions for 2 joints"),
    "no positions": (trajectory(point(1.0, ())), "0 positions"),
    "too many velocities": (trajectory(point(1.0, velocities=(0.0,) * 3)), "3 velocities"),
    "too few accelerations": (trajectory(point(1.0, accelerations=(0.0,))), "1 accelerations"),
    "moving at its end": (trajectory(point(1.0, velocities=(0.0, 0.1))), "end at rest"),
    "over already": (trajectory(point(1.0), stamp_s=5.0), "in the past"),
    "not finite": (trajectory(point(1.0, (0.5, np.nan))), "not all finite"),
}


@pytest.mark.parametrize(("wrong", "why"), WRONG.values(), ids=WRONG)
def test_wrong_trajectories_are_refused_and_the_one_before_goes_on(wrong, why):
    one, other = controller(), controller()
    for each in (one, other):
        each.take(trajectory(point(0.3, (1.0, 0.0))), 10.0)
    with pytest.raises(CommandRefusedError, match=why):
        one.take(wrong, 10.0)
    for mine, reference in zip(run(one, 10.0, 0.5), run(other, 10.0, 0.5), strict=True):
        np.testing.assert_array_equal(mine.positions, reference.positions)


def test_times_count_from_now_without_a_stamp_and_from_the_stamp_with_one():
    for stamp_s, reached_s in ((0.0, 10.5), (10.2, 10.7)):
        one = controller()
        one.take(trajectory(point(0.5, (1.0, 1.0)), stamp_s=stamp_s), 10.0)
        for step, state in enumerate(run(one, 10.0, 1.0)):
            there = np.allclose(state.positions, 1.0)
            assert there == (10.0 + (step + 1) * CONTROL_DT_S >= reached_s - 1e-9), step


def test_columns_are_taken_by_name():
    one = controller()
    one.take(trajectory(point(0.1, (1.0, 2.0)), joints=("b", "a")), 10.0)
    np.testing.assert_allclose(run(one, 10.0, 0.2)[-1].positions, [2.0, 1.0])


def test_the_newest_replaces_the_one_before_from_where_the_arm_is():
    one = controller()
    one.take(trajectory(point(1.0, (1.0, 1.0))), 10.0)
    before = run(one, 10.0, 0.5)[-1]
    one.take(trajectory(point(1.0, (0.0, 0.0))), 10.5)
    after = one.update(before, 10.5)
    np.testing.assert_allclose(after.positions, before.positions * (1 - CONTROL_DT_S), atol=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), derivatives=st.integers(0, 2))
def test_every_point_is_passed_at_its_time_and_the_last_is_held(data, derivatives):
    count = data.draw(st.integers(1, 4))
    steps = [data.draw(st.integers(5, 60)) for _ in range(count)]
    numbers = st.floats(-2.0, 2.0)
    points = []
    for index, time_s in enumerate(np.cumsum(steps) * CONTROL_DT_S):
        values = [tuple(data.draw(numbers) for _ in JOINTS) for _ in range(1 + derivatives)]
        if index == count - 1 and derivatives:
            values[1] = (0.0, 0.0)
        points.append(point(float(time_s), *values))
    one = controller()
    one.take(trajectory(*points), 10.0)
    states = run(one, 10.0, float(sum(steps)) * CONTROL_DT_S + 0.3)
    for each, index in zip(points, np.cumsum(steps) - 1, strict=True):
        np.testing.assert_allclose(states[index].positions, each.positions, atol=1e-6)
    np.testing.assert_allclose(states[-1].positions, points[-1].positions)
    assert not states[-1].velocities.any()


def test_positions_alone_are_joined_by_straight_lines():
    one = controller()
    one.take(trajectory(point(0.5, (0.6, -0.2)), point(1.0, (0.6, 0.3))), 10.0)
    states = run(one, 10.0, 1.0)
    np.testing.assert_allclose(states[24].positions, [0.35, -0.2], atol=1e-9)
    np.testing.assert_allclose(states[24].velocities, [1.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(states[74].positions, [0.6, 0.05], atol=1e-9)


def test_velocities_are_those_of_the_points():
    one = controller()
    points = (point(0.5, (0.6, 0.0), (0.4, -0.3)), point(1.0, (0.7, 0.1), (0.0, 0.0)))
    one.take(trajectory(*points), 10.0)
    states = run(one, 10.0, 1.0)
    np.testing.assert_allclose(states[49].velocities, points[0].velocities, atol=1e-6)
    replaced = controller()
    replaced.take(trajectory(*(replace(each, accelerations=np.zeros(2)) for each in points)), 10.0)
    smooth = run(replaced, 10.0, 1.0)
    np.testing.assert_allclose(smooth[49].velocities, points[0].velocities, atol=1e-6)
    assert abs(smooth[50].velocities - smooth[48].velocities).max() < 0.05
