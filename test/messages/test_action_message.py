# SPDX-License-Identifier: Apache-2.0
"""The mapping fills every field of the messages, and nothing else."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from support.actions import MEANING, NAMES, action

from specvla_ros.engine.outcome import DropCounter, DropReason
from specvla_ros.messages.action_message import decode_stats_fields, vla_action_fields

DEFINITIONS = Path(__file__).resolve().parents[2] / "msg"


def fields_of(name: str) -> list[str]:
    lines = (line.split("#")[0].split() for line in (DEFINITIONS / f"{name}.msg").read_text().splitlines())
    return [words[1] for words in lines if words and "=" not in words[1]]


def test_every_field_of_vla_action_is_filled() -> None:
    fields = vla_action_fields(action(), MEANING, seq=4, publish_s=0.05, latency_s=0.15)
    assert ["header", *fields] == fields_of("VlaAction")
    assert (fields["seq"], fields["epoch"], fields["instruction"]) == (4, 3, "put carrot on plate")
    assert fields["values"] == pytest.approx([-0.5, -1 / 3, -1 / 6, 0, 1 / 6, 1 / 3, 0.5])
    stages = ("receive_s", "wait_s", "vision_s", "prefill_s", "decode_s", "publish_s", "latency_s")
    assert [fields[stage] for stage in stages] == [0.001, 0.01, 0.02, 0.03, 0.04, 0.05, 0.15]


def test_a_message_says_what_its_numbers_mean() -> None:
    fields = vla_action_fields(action(), MEANING, seq=4, publish_s=0.05, latency_s=0.15)
    said = ("mode", "reference", "action_frame", "rotation", "gripper", "unnorm_key", "action_dt")
    assert [fields[name] for name in said] == ["ar", "absolute", "tool", "rpy", "close_high", "some_dataset", 0.05]


@pytest.mark.parametrize("horizon", [1, 3])
def test_all_rows_of_a_chunk_are_in_the_message_the_first_row_first(horizon: int) -> None:
    fields = vla_action_fields(action(horizon=horizon), MEANING, seq=4, publish_s=0.05, latency_s=0.15)
    assert fields["horizon"] == horizon
    rows = np.array(fields["values"]).reshape(horizon, len(NAMES))
    assert rows.tolist() == action(horizon=horizon).actions.tolist()
    assert len(fields["tokens"]) == horizon * len(NAMES)


def test_every_field_of_decode_stats_is_filled() -> None:
    drops = DropCounter()
    drops.add(DropReason.STALE)
    fields = decode_stats_fields(action(), seq=4, drop_counts=drops.by_name())
    assert ["header", *fields] == fields_of("DecodeStats")
    assert (fields["forwards"], fields["tau"], fields["tree_nodes"]) == (7, 1.0, [1] * 6)
    assert dict(zip(fields["drop_reasons"], fields["drop_counts"], strict=True)) == drops.by_name()


@pytest.mark.parametrize("name", ["VlaAction", "DecodeStats"])
def test_ros_takes_the_fields_as_they_are(name: str) -> None:
    pytest.importorskip("specvla_ros.msg._vla_action", reason="the messages are not built: make build")
    messages = import_module("specvla_ros.msg")
    fields = {
        "VlaAction": vla_action_fields(action(horizon=2), MEANING, seq=4, publish_s=0.05, latency_s=0.15),
        "DecodeStats": decode_stats_fields(action(), seq=4, drop_counts=DropCounter().by_name()),
    }[name]
    message = getattr(messages, name)(**fields)
    assert {field: _plain(getattr(message, field)) for field in fields} == fields


def _plain(value: object) -> object:
    return list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value  # type: ignore[call-overload]
