# SPDX-License-Identifier: Apache-2.0
"""Rates, silence and time of a task are those of the actions that came."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.ros.task import Progress

GAPS = st.lists(st.floats(0.001, 3.0), min_size=1, max_size=60)


@given(GAPS)
def test_the_rate_counts_the_actions_of_the_last_two_seconds(gaps: list[float]) -> None:
    progress, now_s, arrivals = Progress(60.0, 0.0, 0.0), 0.0, []
    for gap in gaps:
        now_s += gap
        progress.add_action(0.1, now_s)
        arrivals.append(now_s)
    recent = sum(now_s - arrival <= 2.0 for arrival in arrivals)
    assert progress.rate_hz(now_s) == pytest.approx(recent / min(2.0, now_s))
    assert progress.actions == len(gaps)
    assert progress.silence_s(now_s + 1.5) == pytest.approx(1.5)
    assert progress.rate_hz(now_s + 10.0) == 0.0


@given(st.floats(0.1, 100.0), st.floats(-50.0, 200.0))
def test_elapsed_and_left_make_up_the_limit_and_are_never_negative(limit_s: float, later_s: float) -> None:
    progress = Progress(limit_s, 1000.0, 0.0)
    elapsed_s, left_s = progress.elapsed_s(1000.0 + later_s), progress.left_s(1000.0 + later_s)
    assert elapsed_s >= 0 and 0 <= left_s <= limit_s
    assert (left_s == 0) == (later_s >= limit_s) or math.isclose(later_s, limit_s)


def test_before_the_first_action_there_is_no_latency_and_silence_counts_from_the_beginning() -> None:
    progress = Progress(60.0, 5.0, 7.0)
    assert math.isnan(progress.latency_s) and progress.rate_hz(8.0) == 0.0
    assert progress.silence_s(9.0) == 2.0


def test_a_part_of_an_action_ends_silence_and_is_not_counted() -> None:
    progress = Progress(60.0, 5.0, 7.0)
    assert not progress.acted
    progress.add_part(16.0)
    assert progress.acted and progress.silence_s(17.0) == 1.0
    assert progress.actions == 0 and progress.rate_hz(17.0) == 0.0
