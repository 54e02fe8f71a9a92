# SPDX-License-Identifier: Apache-2.0
"""Rotations as the rotation group has them."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.control.pose import (
    Pose,
    PoseHistory,
    PoseUnknownError,
    quaternion,
    quaternion_matrix,
    rotation_matrix,
    rotation_vector,
    rpy_matrix,
)

vectors = st.lists(st.floats(-1.8, 1.8), min_size=3, max_size=3).map(np.array)  # no longer than pi


@given(vectors)
def test_a_rotation_vector_comes_back_from_its_matrix(vector):
    matrix = rotation_matrix(vector)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(matrix @ vector, vector, atol=1e-12)
    np.testing.assert_allclose(rotation_vector(matrix), vector, atol=1e-7)


@given(st.floats(-3.1, 3.1), st.integers(0, 2))
def test_a_turn_about_an_axis_is_the_textbook_one(angle, axis):
    matrix = rotation_matrix(angle * np.eye(3)[axis])
    first, second = (axis + 1) % 3, (axis + 2) % 3
    expected = np.eye(3)
    expected[first, first] = expected[second, second] = np.cos(angle)
    expected[second, first], expected[first, second] = np.sin(angle), -np.sin(angle)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)


unit_quaternions = (
    st.lists(st.floats(-1.0, 1.0), min_size=4, max_size=4)
    .map(np.array)
    .filter(lambda parts: np.linalg.norm(parts) > 0.1)
    .map(lambda parts: parts / np.linalg.norm(parts))
)


@given(unit_quaternions)
def test_a_quaternion_comes_back_from_its_matrix(parts):
    found = np.array(quaternion(quaternion_matrix(*parts)))
    assert min(np.abs(found - parts).max(), np.abs(found + parts).max()) < 1e-9
    assert abs(np.linalg.norm(found) - 1) < 1e-12


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("angle", [np.pi, np.pi - 1e-6, 2.5, 1e-8])
def test_half_a_turn_and_hardly_any_keep_their_digits(axis, angle):
    vector = angle * np.eye(3)[axis]
    found = rotation_vector(rotation_matrix(vector))
    assert min(np.abs(found - vector).max(), np.abs(found + vector).max() if angle == np.pi else 1.0) < 1e-9


@pytest.mark.parametrize("axis", [(0.8, 0.5, -0.3), (-0.3, 0.8, 0.5), (0.5, -0.3, 0.8), (-0.5, -0.3, 0.8)])
@pytest.mark.parametrize("angle", [0.4, 2.0, 2.9, -2.9])
def test_whichever_part_of_a_quaternion_is_largest_it_comes_back(axis, angle):
    vector = angle * np.array(axis) / np.linalg.norm(axis)
    parts = np.array([np.cos(angle / 2), *(np.sin(angle / 2) * vector / angle)])
    found = np.array(quaternion(rotation_matrix(vector)))
    np.testing.assert_allclose(found * np.sign(found @ parts), parts, atol=1e-12)
    np.testing.assert_allclose(rotation_vector(rotation_matrix(vector)), vector, atol=1e-9)


def test_a_quaternion_is_the_textbook_one():
    half = np.sqrt(0.5)
    np.testing.assert_allclose(quaternion_matrix(half, 0, 0, half) @ [1, 0, 0], [0, 1, 0], atol=1e-12)
    np.testing.assert_allclose(quaternion_matrix(half, half, 0, 0) @ [0, 1, 0], [0, 0, 1], atol=1e-12)
    np.testing.assert_allclose(quaternion_matrix(1.0, 0, 0, 0), np.eye(3))
    np.testing.assert_allclose(quaternion_matrix(-1.0, 0, 0, 0), np.eye(3))


@pytest.mark.parametrize(
    ("size", "fits"), [(0.989, False), (0.991, True), (1.009, True), (1.011, False), (np.nan, False)]
)
def test_a_quaternion_is_of_unit_length_up_to_a_hundredth(size, fits):
    parts = size * np.array([0.5, 0.5, 0.5, 0.5])
    if fits:
        np.testing.assert_allclose(quaternion_matrix(*parts), quaternion_matrix(0.5, 0.5, 0.5, 0.5), atol=1e-12)
    else:
        with pytest.raises(ValueError, match="unit length"):
            quaternion_matrix(*parts)


@given(vectors)
def test_rpy_is_yaw_after_pitch_after_roll(rpy):
    x, y, z = (rotation_matrix(angle * axis) for angle, axis in zip(rpy, np.eye(3), strict=True))
    np.testing.assert_allclose(rpy_matrix(rpy), z @ y @ x, atol=1e-12)


displacements = st.lists(st.floats(-1.5, 1.5), min_size=6, max_size=6).map(np.array)


@given(displacements, displacements)
def test_the_way_to_a_pose_ends_at_it(first, second):
    here = Pose(first[:3], rotation_matrix(first[3:]))
    there = Pose(second[:3], rotation_matrix(second[3:]))
    way = here.way_to(there)
    arrived = here.displaced(way)
    np.testing.assert_allclose(arrived.position, there.position, atol=1e-9)
    np.testing.assert_allclose(arrived.rotation, there.rotation, atol=1e-7)
    assert here.distance(there) == (pytest.approx(np.linalg.norm(way[:3])), pytest.approx(np.linalg.norm(way[3:])))


def test_halfway_to_a_pose_is_half_the_way_and_half_the_turn():
    here, way = Pose(np.array([0.1, 0.2, 0.3]), rotation_matrix(np.array([0.1, -0.2, 0.3]))), np.arange(1, 7) * 0.1
    there = here.displaced(way)
    for share in (0.0, 0.25, 1.0):
        np.testing.assert_allclose(here.way_to(here.toward(there, share)), share * way, atol=1e-9)


def history(*stamps_s, **settings):
    made = PoseHistory[Pose](**settings)
    for stamp_s in stamps_s:
        assert made.add(stamp_s, Pose(np.full(3, stamp_s), np.eye(3)))
    return made


def test_the_rate_of_poses_is_their_mean():
    assert history().per_s == history(1.0).per_s == 0.0
    assert history(1.0, 1.1, 1.2, 1.3).per_s == pytest.approx(10.0)


def test_a_pose_between_two_is_interpolated_and_the_newest_holds_for_a_gap():
    poses = history(1.0, 1.1, 1.2, 1.6)
    for stamp_s, where in ((1.0, 1.0), (1.03, 1.03), (1.1, 1.1), (1.17, 1.17), (1.6, 1.6), (1.84, 1.6)):
        np.testing.assert_allclose(poses.at(stamp_s).position, where, atol=1e-12)
    for stamp_s, words in ((0.9, "is 0.100 s newer"), (1.3, "measured for 0.400 s"), (1.86, "is 0.260 s older")):
        with pytest.raises(PoseUnknownError, match=words):
            poses.at(stamp_s)


def test_a_history_takes_what_is_newer_and_tells_the_newest():
    poses = history()
    assert poses.newest is None
    with pytest.raises(PoseUnknownError, match="no pose has been measured yet"):
        poses.at(0.0)
    poses = history(0.0, 0.1)
    assert not poses.add(0.1, Pose(np.zeros(3), np.eye(3))) and not poses.add(0.05, Pose(np.zeros(3), np.eye(3)))
    assert poses.newest is not None and poses.newest[0] == 0.1 and poses.newest[1].position[0] == 0.1
    poses.clear()
    assert poses.newest is None


def test_a_history_forgets_what_is_older_than_it_reaches_but_two():
    poses = history(*np.arange(0.0, 3.0, 0.1), kept_s=1.0)
    np.testing.assert_allclose(poses.at(2.05).position, 2.05)
    with pytest.raises(PoseUnknownError):
        poses.at(1.75)
    far = history(0.0, 5.0, kept_s=1.0, gap_s=10.0)
    np.testing.assert_allclose(far.at(2.0).position, 2.0)


def test_control_needs_neither_ros_nor_a_simulator_nor_torch():
    code = (
        "import sys, specvla_ros.control.driver; "
        "sys.exit(any(name in sys.modules for name in ('mujoco', 'rclpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
