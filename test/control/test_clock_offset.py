# SPDX-License-Identifier: Apache-2.0
"""The policy's clock against the robot's: the true offset lies within what is said."""

import numpy as np
import pytest

from specvla_ros.control.driver import ClockOffset


@pytest.mark.parametrize("ahead_s", [0.0, 0.4, -0.03])
def test_the_true_offset_is_within_the_error(ahead_s: float) -> None:
    clocks, generator = ClockOffset(), np.random.default_rng(3)
    assert clocks.best is None
    for _ in range(200):
        there_s, thinking_s, back_s = generator.exponential([0.02, 0.2, 0.01])
        clocks.add(
            receive_s=there_s + ahead_s,
            latency_s=there_s + thinking_s + ahead_s,
            age_s=there_s + thinking_s + back_s,
        )
        best = clocks.best
        assert best is not None and abs(best.ahead_s - ahead_s) <= best.error_s + 1e-12
    assert best is not None and (abs(best.ahead_s) > best.error_s) == (ahead_s != 0.0)


def test_no_error_is_negative() -> None:
    """Rounding, or a simulated clock that stands still, can make the ways seem negative."""
    clocks = ClockOffset()
    clocks.add(receive_s=0.0, latency_s=0.1 + 1e-9, age_s=0.1)
    assert clocks.best is not None and str(clocks.best.error_s) == "0.0"


def test_the_shortest_of_the_newest_ways_counts() -> None:
    clocks = ClockOffset()
    clocks.add(receive_s=0.001, latency_s=0.101, age_s=0.102)
    clocks.add(receive_s=0.5, latency_s=0.6, age_s=0.7)
    assert clocks.best is not None and clocks.best.error_s == pytest.approx(0.001)
    for _ in range(8):
        clocks.add(receive_s=0.01, latency_s=0.11, age_s=0.12)
    assert clocks.best.error_s == pytest.approx(0.01), "the first is forgotten"
