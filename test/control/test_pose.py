# SPDX-License-Identifier: Apache-2.0
"""Rotations as the rotation group has them."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.control.pose import rotation_matrix, rotation_vector

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


def test_control_needs_neither_ros_nor_a_simulator_nor_torch():
    code = (
        "import sys, specvla_ros.control.driver; "
        "sys.exit(any(name in sys.modules for name in ('mujoco', 'rclpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
