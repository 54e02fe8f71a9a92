# SPDX-License-Identifier: Apache-2.0
"""A path is where ros2_control's interpolation puts it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.control.joint_path import SAMPLES, JointPath
from specvla_ros.lab.simulation.controllers import JointState, JointTrajectory, JointTrajectoryController, Point

POSITIONS, TIMES_S = np.array([[1.0, 0.0], [2.0, 4.0]]), np.array([0.5, 1.0])
STILL = np.zeros(2)


def test_without_velocities_a_path_is_linear_from_where_it_begins_to_its_end() -> None:
    path = JointPath(TIMES_S, POSITIONS).from_state(STILL, STILL)
    for age_s, position, velocity in (
        (0.0, (0.0, 0.0), (2.0, 0.0)),
        (0.25, (0.5, 0.0), (2.0, 0.0)),
        (0.5, (1.0, 0.0), (2.0, 8.0)),
        (0.75, (1.5, 2.0), (2.0, 8.0)),
        (1.0, (2.0, 4.0), (0.0, 0.0)),
        (9.0, (2.0, 4.0), (0.0, 0.0)),
    ):
        where, speed = path.at(age_s)
        np.testing.assert_allclose(where, position)
        np.testing.assert_allclose(speed, velocity)
    early, still = JointPath(TIMES_S, POSITIONS).at(0.25)
    assert early.tolist() == [1.0, 0.0] and not still.any(), "where it begins is not known: it waits at its first point"


def test_a_path_from_a_state_leads_through_the_points_that_are_still_ahead() -> None:
    here, moving = np.array([7.0, 7.0]), np.array([0.1, 0.2])
    positions, velocities = np.vstack([STILL, POSITIONS]), np.vstack([STILL, POSITIONS])
    path = JointPath(np.array([-0.5, 0.0, 0.5]), positions, velocities).from_state(here, moving)
    assert path.times_s.tolist() == [0.0, 0.5]
    assert path.positions.tolist() == [[7.0, 7.0], [2.0, 4.0]]
    assert path.velocities is not None and path.velocities.tolist() == [[0.1, 0.2], [2.0, 4.0]]
    past = JointPath(np.array([-0.5, 0.0]), POSITIONS)
    assert past.from_state(here, moving) is past, "it has ended"


numbers = st.floats(-2.0, 2.0)
rows = st.lists(st.tuples(st.floats(0.02, 0.5), numbers, numbers), min_size=1, max_size=5)


@settings(deadline=None, max_examples=examples(40))
@given(numbers, numbers, rows, st.booleans())
def test_it_goes_where_a_joint_trajectory_controller_goes(position, velocity, points, moves) -> None:
    """The partner is written from the controller's own documentation and source, not from this class."""
    times_s = np.cumsum([point[0] for point in points])
    positions = np.array([[point[1]] for point in points])
    velocities = np.array([[point[2]] for point in points])
    velocities[-1] = 0.0
    path = JointPath(times_s, positions, velocities if moves else None)
    path = path.from_state(np.array([position]), np.array([velocity]))
    controller, none = JointTrajectoryController(("joint",)), np.zeros(0)
    controller.start(JointState(np.array([position]), np.array([velocity])))
    sent = [
        Point(float(at), where, going if moves else none, none)
        for at, where, going in zip(times_s, positions, velocities, strict=True)
    ]
    controller.take(JointTrajectory(0.0, ("joint",), tuple(sent)), 0.0)
    for step in range(round(times_s[-1] / 0.01) + 3):
        now_s = step * 0.01
        reference = controller.update(JointState(np.array([position]), np.array([velocity])), now_s)
        where, going = path.at(now_s + 0.01)  # the controller's command is one period ahead
        np.testing.assert_allclose(where, reference.positions, atol=1e-9)
        np.testing.assert_allclose(going, reference.velocities, atol=1e-6)


@given(rows, st.floats(0.0, 3.0))
def test_what_is_left_of_a_path_is_the_same_motion(points, passed_s) -> None:
    times_s = np.cumsum([point[0] for point in points])
    path = JointPath(times_s, np.array([[point[1]] for point in points]), np.array([[point[2]] for point in points]))
    left = path.after(passed_s)
    if left is None:
        assert passed_s >= path.end_s
        return
    assert left.times_s[0] > 0 and left.end_s == pytest.approx(path.end_s - passed_s)
    whole = left.from_state(*path.at(passed_s)) if passed_s > times_s[0] else left
    for share in (0.3, 0.7):
        later_s = left.times_s[0] + share * (left.end_s - left.times_s[0])
        np.testing.assert_allclose(whole.at(later_s)[0], path.at(passed_s + later_s)[0], atol=1e-9)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3), st.floats(1.0, 20.0))
def test_braking_is_at_the_acceleration_of_each_joint_until_it_rests(joints, acceleration) -> None:
    position, velocity = np.array(joints).T
    path = JointPath.braking(position, velocity, np.full(len(joints), acceleration))
    for time_s in np.linspace(0.0, path.end_s, 20)[:-1]:
        speed = np.sign(velocity) * np.maximum(0.0, np.abs(velocity) - acceleration * time_s)
        np.testing.assert_allclose(path.at(time_s)[1], speed, atol=1e-4)
    way = velocity * np.abs(velocity) / (2 * acceleration)
    np.testing.assert_allclose(path.at(9.0)[0], position + way, atol=1e-5)


@given(rows)
def test_samples_are_positions_speeds_and_accelerations_at_their_times(points) -> None:
    times_s = np.cumsum([point[0] for point in points])
    path = JointPath(times_s, np.array([[point[1]] for point in points]), np.array([[point[2]] for point in points]))
    path = path.from_state(np.zeros(1), np.zeros(1))
    positions, velocities, accelerations = path.sampled()
    spans = np.diff(path.times_s)
    at_s = (path.times_s[:-1, None] + np.linspace(0, 1, SAMPLES) * spans[:, None]).ravel()
    for time_s, position, velocity, acceleration in zip(at_s, positions, velocities, accelerations, strict=True):
        small_s = 1e-6
        if (np.abs(path.times_s - time_s) < 1e-5).any():
            continue  # between two segments the acceleration jumps
        np.testing.assert_allclose(path.at(time_s)[0], position, atol=1e-9)
        change = (path.at(time_s + small_s)[0] - path.at(time_s - small_s)[0]) / (2 * small_s)
        np.testing.assert_allclose(change, velocity, atol=1e-4)
        bend = (path.at(time_s + small_s)[1] - path.at(time_s - small_s)[1]) / (2 * small_s)
        np.testing.assert_allclose(bend, acceleration, rtol=1e-3, atol=1e-2)
