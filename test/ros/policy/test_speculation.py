# SPDX-License-Identifier: Apache-2.0
"""Speculation on the node: how it decodes is told per action, and the acceptance changes while it runs."""

import time
from pathlib import Path
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.parameter import Parameter
from support.ros import Robot, rgb_image, robot, stamps

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop, Outcome
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.models.observation import Observation
from specvla_ros.msg import DecodeStats

INSTRUCTION = "put carrot on plate"


def change(r: Robot, **values: object) -> tuple[bool, str]:
    """Sets acceptance parameters together, as a client of the service does."""
    parameters = [Parameter(f"acceptance.{name}", value=value) for name, value in values.items()]
    result = r.policy.set_parameters_atomically(parameters)
    return result.successful, result.reason


def stats_of_next_action(r: Robot, seed: int) -> DecodeStats:
    before = len(r.stats)
    r.act(rgb_image(r.now_ns(), seed=seed))
    r.until(lambda: len(r.stats) > before)
    return r.stats[-1]


def said(r: Robot) -> dict[str, str]:
    """What /diagnostics says of the policy."""
    return {each.key: each.value for each in r.diagnosis("model").values}


def test_the_acceptance_changes_within_bounds_while_the_node_runs(checkpoint: Path) -> None:
    speculation: dict[str, Any] = {"decode.mode": "spec", "draft.temporal": True, "draft.nodes": 16}
    with robot(checkpoint, instruction=INSTRUCTION, **speculation) as r:
        r.start()
        first, again = (stats_of_next_action(r, seed=1) for _ in range(2))
        assert (first.mode, first.acceptance, first.forwards) == ("spec", "strict", 7)
        assert list(again.tokens_per_forward) == [7], "the same picture again is decoded in its own prefill"
        assert set(again.why[:-1]) == {DecodeStats.EXACT} and set(again.bins_off) == {0}

        assert change(r, rule="bin_distance", bins=[3])[0]
        assert stats_of_next_action(r, seed=2).acceptance == "bin_distance"
        for wrong, reason in (
            (dict(bins=[300]), ""),
            (dict(bins=[-1]), ""),
            (dict(rule="kind"), "one of"),
            (dict(bins=[1, 2]), "7 dimensions"),
            (dict(bins=[0], tolerance_m=1e-6), "smaller than one bin of x"),
            (dict(tolerance_m=0.01), "are exclusive"),
        ):
            successful, said = change(r, **wrong)
            assert not successful and reason in said, (wrong, said)
        assert stats_of_next_action(r, seed=3).acceptance == "bin_distance", "what is refused changes nothing"
        assert change(r, rule="strict")[0]
        assert stats_of_next_action(r, seed=4).acceptance == "strict"
        successful, why = change(r, bins=[0], tolerance_m=1e-6)
        assert not successful and "smaller than one bin of x" in why, "drafting may count on what strict does not use"


def test_without_a_draft_the_node_decodes_plainly_and_says_so_where_that_is_allowed(checkpoint: Path) -> None:
    missing: dict[str, Any] = {"decode.mode": "spec", "draft.head": str(checkpoint / "nowhere")}
    with robot(checkpoint, instruction=INSTRUCTION, **missing) as r:
        assert r.policy.trigger_configure().name != "SUCCESS"
    with robot(checkpoint, instruction=INSTRUCTION, **(missing | {"draft.fallback_to_ar": True})) as r:
        r.start()
        assert stats_of_next_action(r, seed=1).mode == "ar"
        r.until(lambda: r.diagnostics and "decoding plainly" in r.diagnosis("model").message)
        assert r.diagnosis("model").level == DiagnosticStatus.WARN
        assert "does not exist" in said(r)["decode.fallback"]


def test_the_mode_changes_while_the_node_runs(checkpoint: Path) -> None:
    drafting: dict[str, Any] = {"draft.temporal": True, "draft.nodes": 16}
    with robot(checkpoint, instruction=INSTRUCTION, **drafting) as r:
        r.start()
        assert stats_of_next_action(r, seed=1).mode == "auto"
        for mode in ("specpipe", "pipeline", "spec"):
            result = r.policy.set_parameters_atomically([Parameter("decode.mode", value=mode)])
            assert result.successful, result.reason
            assert stats_of_next_action(r, seed=1).mode == mode
        r.until(lambda: r.diagnostics and said(r).get("decode.mode") == "spec")
        assert not r.policy.set_parameters_atomically([Parameter("decode.mode", value="fast")]).successful
        assert not r.policy.set_parameters_atomically([Parameter("decode.max_in_flight", value=65)]).successful
        assert stats_of_next_action(r, seed=2).mode == "spec"
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        result = r.policy.set_parameters_atomically([Parameter("decode.mode", value="spec")])
        assert not result.successful and "has no drafter" in result.reason
        assert stats_of_next_action(r, seed=1).mode == "auto", "it goes on as before"


def test_several_frames_in_flight_leave_in_order_each_with_its_own_action(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(1, 13)
    tick = Engine.tick

    def tick_of_a_large_policy(engine: Engine) -> list[Outcome]:
        time.sleep(0.02)  # longer than a frame takes to come, so that frames meet on any machine
        return tick(engine)

    received: list[int] = []
    submit = Engine.submit

    def receive(engine: Engine, observation: Observation) -> list[Drop]:
        received.append(observation.stamp_ns)
        return submit(engine, observation)

    monkeypatch.setattr(Engine, "tick", tick_of_a_large_policy)
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        plain = {seed: tuple(r.act(rgb_image(r.now_ns(), seed=seed)).tokens) for seed in seeds}
    chosen: dict[str, Any] = {"decode.mode": "pipeline", "decode.prefill_chunks": 2, "decode.in_order": True}
    with robot(checkpoint, instruction=INSTRUCTION, **chosen) as r:
        r.start()
        monkeypatch.setattr(Engine, "submit", receive)
        sent = {}
        for seed in seeds:
            image = rgb_image(r.now_ns(), seed=seed)
            sent[stamp_ns(image.header)] = seed
            r.images.publish(image)
            r.spin(0.01)
            r.until(lambda: len(received) == len(sent))
        r.until(lambda: len(r.actions) + sum(r.drops().values()) == len(seeds))
        answered = stamps(r.actions)
        assert answered == sorted(set(answered)) and len(answered) > 2
        for action in r.actions:
            assert tuple(action.tokens) == plain[sent[stamp_ns(action.header)]]
        r.until(lambda: len(r.stats) == len(r.actions))
        assert max(each.in_flight for each in r.stats) > 1
        assert all(list(each.tokens_per_forward) == [0, 1, 1, 1, 1, 1, 1, 1] for each in r.stats)
