# SPDX-License-Identifier: Apache-2.0
"""Counts of accepted tokens, by hand."""

import json

import pytest

from specvla_ros.engine.outcome import DecodeRecord
from specvla_ros.lab.tally import DecodeTally

FIRST = DecodeRecord(
    "spec",
    tokens_per_forward=(1, 3, 3),
    accept_lengths=(2, 2),
    bins_off=(0, 0, 2, 0, 0, 1, 0),
    why=(0, 1, 2, 0, 1, 2, 0),
)
SECOND = DecodeRecord("spec", tokens_per_forward=(4, 3), accept_lengths=(3, 2), bins_off=(0,) * 7, why=(1,) * 7)


def tally() -> DecodeTally:
    result = DecodeTally()
    result.add(FIRST)
    result.add(SECOND)
    return result


def test_places_and_lengths() -> None:
    counted = tally()
    assert dict(counted.accepted) == {(1, 2): 1, (4, 2): 2, (0, 3): 1}
    assert counted.by_position() == {0: 3.0, 1: 2.0, 4: 2.0}
    assert counted.by_length() == {2: 0.75, 3: 0.25}
    assert counted.tau == pytest.approx((3 + 3 + 4 + 3) / 4)
    assert counted.forwards_per_action == 2.5
    assert counted.bins_off[2, 2] == counted.bins_off[5, 1] == 1


def test_json_and_sums_keep_everything() -> None:
    again = DecodeTally.of_json(json.loads(json.dumps(tally().as_json())))
    assert again == tally()
    parts = []
    for record in (FIRST, SECOND):
        part = DecodeTally()
        part.add(record)
        parts.append(part)
    assert DecodeTally.sum(parts) == tally()
    assert DecodeTally.sum([]).tau == 0.0
