# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` counts: answers by the time that they took, drops by reason, and who found no room."""

from types import SimpleNamespace
from typing import Any

import pytest

from specvla_ros.engine.outcome import DropReason
from specvla_ros.serving.server import Metrics, NoRoomError, ServeSettings, Sessions

LIMITS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


def sessions(**settings: Any) -> Sessions:
    thread: Any = SimpleNamespace(call=lambda change: None, close=lambda name: None)
    return Sessions(thread, ServeSettings(**settings), 2.0)


def numbers(metrics: Metrics, of: Sessions) -> dict[str, float]:
    lines = [line for line in metrics.text(of).splitlines() if not line.startswith("#")]
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)}


def test_a_histogram_counts_each_answer_up_to_the_limits_that_it_kept() -> None:
    metrics, took_s = Metrics(), (0.005, 0.01, 0.02, 0.3, 3.0, 9.0)
    for seconds in took_s:
        metrics.took(seconds)
    found = numbers(metrics, sessions())
    for limit in LIMITS_S:
        assert found[f'specvla_request_seconds_bucket{{le="{limit}"}}'] == sum(each <= limit for each in took_s)
    assert found['specvla_request_seconds_bucket{le="+Inf"}'] == found["specvla_request_seconds_count"] == len(took_s)
    assert found["specvla_request_seconds_sum"] == pytest.approx(sum(took_s))
    assert sum("bucket" in name for name in found) == len(LIMITS_S) + 1


def test_drops_are_counted_by_reason_and_who_finds_no_room_too() -> None:
    of, metrics = sessions(sessions=1), Metrics()
    first = of.open("first", lasting=True)
    assert of.open("first", lasting=True) is first and len(of) == 1
    for _ in range(2):
        with pytest.raises(NoRoomError, match=r"all 1 sessions are in use \(--robots\)"):
            of.open("second", lasting=False)
    of.count(SimpleNamespace(reason=DropReason.STALE))  # type: ignore[arg-type]
    metrics.refused, metrics.abandoned = 3, 4
    found = numbers(metrics, of)
    drops = {each.value: found[f'specvla_drops_total{{reason="{each.value}"}}'] for each in DropReason}
    assert {name: number for name, number in drops.items() if number} == {
        DropReason.TOO_MANY_STREAMS.value: 2,
        DropReason.STALE.value: 1,
    }
    assert (found["specvla_requests_refused_total"], found["specvla_requests_abandoned_total"]) == (3, 4)
    assert (found["specvla_sessions"], found["specvla_actions_total"]) == (1, 0)
    of.close(first)
    assert len(of) == 0 and of.open("second", lasting=False) is not first
