# SPDX-License-Identifier: Apache-2.0
"""Position arrays as forward position controllers take them."""

import numpy as np
import pytest

from specvla_ros.lab.simulation.controllers import CommandRefusedError, JointState, PositionArray

START = JointState(np.array([0.1, -0.2, 0.3]), np.zeros(3))


def test_the_newest_array_is_the_reference_at_once_and_for_ever():
    one = PositionArray()
    one.start(START)
    one.take(np.array([1.0, 1.0, 1.0]), 1.0)
    one.take(np.array([2.0, -2.0, 2.0]), 1.0)
    for now_s in (1.0, 1.01, 1000.0):
        np.testing.assert_array_equal(one.update(START, now_s).positions, [2.0, -2.0, 2.0])


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_another_length_is_refused(length):
    one = PositionArray()
    one.start(START)
    with pytest.raises(CommandRefusedError, match=f"{length} values for 3 joints"):
        one.take(np.ones(length), 1.0)
    np.testing.assert_array_equal(one.update(START, 1.0).positions, START.positions)


def test_a_caller_that_changes_its_array_changes_nothing():
    one, given = PositionArray(), np.array([1.0, 1.0, 1.0])
    one.start(START)
    one.take(given, 1.0)
    given[:] = 5.0
    np.testing.assert_array_equal(one.update(START, 1.0).positions, [1.0, 1.0, 1.0])
