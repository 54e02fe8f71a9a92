# SPDX-License-Identifier: Apache-2.0
"""Blocks of velocities within their limits, and the window that tells how fast commands go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.control.guard.gate import (
    Bounds,
    Window,
    braked,
    lengths,
    shortened_to,
    slewed,
    stopping_way,
    toward,
)

BOUNDS = Bounds(np.array([0.25, 1.0]), np.array([2.0, 8.0]))
DT_S = 0.01
blocks = st.lists(st.floats(-2.0, 2.0), min_size=6, max_size=6).map(lambda parts: np.array(parts).reshape(2, 3))
slow_blocks = blocks.map(lambda each: shortened_to(each, BOUNDS.speed))


def test_a_blocks_length_is_that_of_its_vector() -> None:
    np.testing.assert_allclose(lengths(np.array([[3.0, 4.0, 0.0], [0.0, -2.0, 0.0]])), [5.0, 2.0])


@given(blocks)
def test_a_block_is_shortened_to_its_limit_and_keeps_its_direction(given_blocks: np.ndarray) -> None:
    short = shortened_to(given_blocks, BOUNDS.speed)
    np.testing.assert_allclose(lengths(short), np.minimum(lengths(given_blocks), BOUNDS.speed), atol=1e-9)
    np.testing.assert_allclose(np.cross(short, given_blocks), 0.0, atol=1e-9)
    assert ((short * given_blocks).sum(axis=1) >= 0).all()


@given(slow_blocks, blocks)
def test_a_slew_goes_as_far_as_the_acceleration_lets_it(velocity: np.ndarray, wanted: np.ndarray) -> None:
    after, goal = slewed(velocity, wanted, BOUNDS, DT_S), shortened_to(wanted, BOUNDS.speed)
    left, way = lengths(goal - after), lengths(goal - velocity)
    np.testing.assert_allclose(left, np.maximum(0.0, way - BOUNDS.acceleration * DT_S), atol=1e-9)
    assert (lengths(after) <= BOUNDS.speed + 1e-9).all()


@given(blocks)
def test_braking_takes_off_what_the_acceleration_allows_and_turns_nothing(velocity: np.ndarray) -> None:
    after = braked(velocity, BOUNDS, DT_S)
    expected = np.maximum(0.0, lengths(velocity) - BOUNDS.acceleration * DT_S)
    np.testing.assert_allclose(lengths(after), expected, atol=1e-9)
    np.testing.assert_allclose(np.cross(after, velocity), 0.0, atol=1e-9)
    assert ((after * velocity).sum(axis=1) >= 0).all()


def test_the_way_of_a_stop_is_where_braking_ends() -> None:
    velocity = np.array([[0.2, 0.1, 0.0], [0.0, 0.5, -0.5]])
    there, steps = np.zeros((2, 3)), velocity
    for _ in range(2000):
        after = braked(steps, BOUNDS, 1e-4)
        there, steps = there + 0.5e-4 * (steps + after), after
    np.testing.assert_allclose(stopping_way(velocity, BOUNDS), there, atol=1e-6)


@pytest.mark.parametrize("far", [1e-4, 0.003, 0.02, 0.3])
@pytest.mark.parametrize("dt_s", [0.005, 0.01, 0.05])
def test_what_follows_a_place_arrives_and_does_not_swing_beyond(far: float, dt_s: float) -> None:
    velocity, here = np.zeros((2, 3)), np.array([[-far, 0.0, 0.0], [0.0, -far, 0.0]])
    beyond = 0.0
    for _ in range(round(8.0 / dt_s)):
        velocity = toward(velocity, -here, np.zeros((2, 3)), BOUNDS, dt_s)
        here = here + velocity * dt_s
        beyond = max(beyond, float(here.max()))
    assert lengths(here).max() < 1e-6
    assert beyond <= max(0.05 * far, 1e-4)


def test_what_follows_a_moving_place_goes_at_its_speed() -> None:
    feed = np.array([[0.1, 0.0, 0.0], [0.0, 0.2, 0.0]])
    np.testing.assert_allclose(toward(feed, np.zeros((2, 3)), feed, BOUNDS, DT_S), feed)


def test_an_error_is_closed_at_twenty_times_its_length_a_second_where_the_limits_allow_it() -> None:
    error = np.array([[1e-4, 0.0, 0.0], [0.0, 2e-4, 0.0]])
    np.testing.assert_allclose(toward(np.zeros((2, 3)), error, np.zeros((2, 3)), BOUNDS, DT_S), 20 * error)
    np.testing.assert_allclose(toward(np.zeros((2, 3)), error, np.zeros((2, 3)), BOUNDS, 0.1), 10 * error)


def test_a_far_place_is_approached_no_faster_than_can_be_braked_on_the_way() -> None:
    error = np.array([[0.02, 0.0, 0.0], [0.0, 0.05, 0.0]])
    velocity = toward(np.zeros((2, 3)), error, np.zeros((2, 3)), Bounds(np.full(2, 9.0), BOUNDS.acceleration), 0.05)
    wanted = np.sqrt(BOUNDS.acceleration * lengths(error))
    np.testing.assert_allclose(lengths(velocity), np.minimum(wanted, BOUNDS.acceleration * 0.05))


def test_a_window_tells_the_oldest_of_fifty_milliseconds_and_the_mean_period() -> None:
    window: Window[int] = Window()
    assert window.add(0.0, 0) is None
    for index in range(1, 20):
        found = window.add(0.011 * index, index)
        assert found is not None
        oldest, span_s, period_s = found
        assert oldest == max(0, index - 4)
        assert span_s == pytest.approx(0.011 * min(index, 4)) and period_s == pytest.approx(0.011)
    window.forget()
    assert window.add(1.0, 20) is None


def test_a_window_compares_with_the_one_before_however_long_ago_that_was() -> None:
    window: Window[str] = Window()
    window.add(0.0, "first")
    assert window.add(3.0, "second") == ("first", 3.0, 3.0)
    assert window.add(3.0, "at once") == ("second", 1e-3, 1e-3), "no time at all is a millisecond"
