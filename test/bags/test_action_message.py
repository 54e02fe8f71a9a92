# SPDX-License-Identifier: Apache-2.0
"""The mapping fills every field of the messages, and nothing else."""

from pathlib import Path

import pytest
from support.actions import action

from specvla_ros.bags.action_message import decode_stats_fields, vla_action_fields
from specvla_ros.engine.outcome import DropCounter, DropReason

DEFINITIONS = Path(__file__).resolve().parents[2] / "msg"


def fields_of(name: str) -> list[str]:
    lines = (line.split("#")[0].split() for line in (DEFINITIONS / f"{name}.msg").read_text().splitlines())
    return [words[1] for words in lines if words and "=" not in words[1]]


def test_every_field_of_vla_action_is_filled() -> None:
    fields = vla_action_fields(action(), seq=4, action_dt=0.2, publish_s=0.05, latency_s=0.15)
    assert ["header", *fields] == fields_of("VlaAction")
    assert (fields["seq"], fields["epoch"], fields["instruction"]) == (4, 3, "put carrot on plate")
    assert fields["values"] == pytest.approx([-0.5, -1 / 3, -1 / 6, 0, 1 / 6, 1 / 3, 0.5])
    stages = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")
    assert [fields[stage] for stage in stages] == [0.001, 0.01, 0.02, 0.03, 0.04, 0.05, 0.15]


def test_every_field_of_decode_stats_is_filled() -> None:
    drops = DropCounter()
    drops.add(DropReason.STALE)
    fields = decode_stats_fields(action(), seq=4, drop_counts=drops.by_name())
    assert ["header", *fields] == fields_of("DecodeStats")
    assert (fields["forwards"], fields["tau"], fields["tree_nodes"]) == (7, 1.0, [1] * 6)
    assert dict(zip(fields["drop_reasons"], fields["drop_counts"], strict=True)) == drops.by_name()


@pytest.mark.parametrize("name", ["VlaAction", "DecodeStats"])
def test_ros_takes_the_fields_as_they_are(name: str) -> None:
    messages = pytest.importorskip("specvla_ros.msg", reason="the messages are not built: make build")
    fields = {
        "VlaAction": vla_action_fields(action(), seq=4, action_dt=0.2, publish_s=0.05, latency_s=0.15),
        "DecodeStats": decode_stats_fields(action(), seq=4, drop_counts=DropCounter().by_name()),
    }[name]
    message = getattr(messages, name)(**fields)
    assert {field: _plain(getattr(message, field)) for field in fields} == fields


def _plain(value: object) -> object:
    return list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value  # type: ignore[call-overload]
