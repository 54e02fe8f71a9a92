# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with several requests in flight: it costs the frames that it hits, and no others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.draft_heads import policy_with_random_head
from support.pipelines import fed

from specvla_ros.engine import engine as engines
from specvla_ros.engine import kv_cache as slot_ring
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import DraftSettings

SMALL_TREE = DraftSettings(nodes=8, top_k=3, depth=3)
PIPELINED = [
    EngineSettings("pipeline", prefill_chunks=2),
    EngineSettings("specpipe", draft=SMALL_TREE),
    EngineSettings("specpipe", draft=SMALL_TREE, prefill_chunks=3, in_order=True),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    return policy_with_random_head(tmp_path_factory.mktemp("checkpoint"), seed=9, hidden_size=64, layers=2)


def frame(stamp_ns: int) -> Observation:
    image = np.random.default_rng(stamp_ns).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns)


@pytest.mark.parametrize("chosen", PIPELINED, ids=str)
def test_a_frame_of_nan_is_dropped_alone_and_its_slot_is_clean_again(
    policy: OpenVLATarget, chosen: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [frame(stamp) for stamp in range(1, 13)]
    plain = Engine(policy, EngineSettings("ar"))
    right = {each.stamp_ns: plain.act(each) for each in frames}
    embed = type(policy).assemble
    calls = 0

    def every_third_is_nan(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        rows: torch.Tensor = embed(*arguments)  # type: ignore[arg-type]
        return torch.full_like(rows, torch.nan) if calls % 3 == 0 else rows

    monkeypatch.setattr(type(policy), "assemble", every_third_is_nan)
    engine = Engine(policy, chosen)
    ended = fed(engine, frames)
    reasons = {each.observation.stamp_ns: each.reason for each in ended if isinstance(each, Drop)}
    assert {stamp for stamp, reason in reasons.items() if reason is DropReason.NOT_FINITE} == {3, 6, 9, 12}
    for action in (each for each in ended if isinstance(each, Action)):
        expected = right[action.observation.stamp_ns]
        assert isinstance(expected, Action) and action.tokens == expected.tokens
    assert engine.cache.free_slots == chosen.slots


def test_a_switch_drops_what_is_in_flight_and_keeps_what_waits(policy: OpenVLATarget) -> None:
    engine = Engine(policy, EngineSettings("pipeline"))
    plain = Engine(policy, EngineSettings("ar"))
    for stamp, mode in enumerate(("specpipe", "ar", "pipeline", "spec"), start=1):
        begun, waits = frame(10 * stamp), frame(10 * stamp + 1)
        engine.submit(begun)
        engine.tick()
        engine.submit(waits)
        drops = engine.switch(EngineSettings(mode, draft=SMALL_TREE))
        assert [(drop.observation, drop.reason) for drop in drops] == [(begun, DropReason.MODE_CHANGED)]
        ended: list[Outcome] = []
        while engine.busy:
            ended += engine.tick()
        (action,) = ended
        expected = plain.act(waits)
        assert isinstance(action, Action) and isinstance(expected, Action)
        assert action.observation is waits and action.tokens == expected.tokens
        assert action.record.mode == engine.settings.mode == mode


def test_a_switch_that_does_not_fit_changes_nothing(policy: OpenVLATarget, tmp_path: Path) -> None:
    engine = Engine(policy, EngineSettings("pipeline"))
    engine.submit(frame(1))
    engine.tick()
    with pytest.raises(UserError, match="does not exist"):
        engine.switch(EngineSettings("specpipe", draft=DraftSettings(head=str(tmp_path / "none"))))
    assert (engine.settings.mode, len(engine.scheduler.requests)) == ("pipeline", 1)
    outcomes: list[Outcome] = []
    while engine.busy:
        outcomes = engine.tick()
        assert len(outcomes) <= 1
    assert outcomes and isinstance(outcomes[0], Action)


def test_slots_that_do_not_fit_the_memory_are_refused_with_their_size(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(slot_ring, "new_cache", full)
    with pytest.raises(UserError, match=r"64 KV slots of \d+ rows take \d+\.\d\d GiB.*lower decode\.max_in_flight"):
        Engine(policy, EngineSettings("pipeline", max_in_flight=64))


def test_a_prompt_that_cannot_be_laid_out_costs_its_own_frame_alone(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(policy, EngineSettings("pipeline"))
    first, second = frame(1), frame(2)
    engine.submit(first)
    assert engine.tick() == []
    with monkeypatch.context() as patch:
        patch.setattr(type(policy), "prompt_layout", lambda *_: 1 / 0)
        engine.submit(second)
        (drop,) = engine.tick()
    assert isinstance(drop, Drop) and drop.observation is second
    assert drop.reason is DropReason.ENGINE_FAULT and drop.detail.startswith("ZeroDivisionError")
    ended: list[Outcome] = []
    while engine.busy:
        ended += engine.tick()
    assert [outcome.observation for outcome in ended] == [first] and isinstance(ended[0], Action)


@pytest.mark.parametrize("where", ["prompt_embeddings", "forward"])
def test_a_lost_gpu_is_asked_once_and_every_frame_says_what_to_do(
    policy: OpenVLATarget, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an illegal access, or where the driver is gone: nothing runs on CUDA in this process again."""
    engine = Engine(policy, PIPELINED[1])
    assert isinstance(engine.act(frame(1)), Action)
    calls = 0

    def gone(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error: unspecified launch failure")

    if where == "forward":
        monkeypatch.setattr(engine.runner, "run", gone)
    else:
        monkeypatch.setattr(engine.runner, "embed", gone)
    monkeypatch.setattr(engines, "device_fault", lambda _: "cuda:0 has failed (CUDA error): restart this process")
    for stamp in range(2, 7):
        outcome = engine.act(frame(stamp))
        assert isinstance(outcome, Drop) and outcome.reason is DropReason.ENGINE_FAULT
        assert "restart this process" in outcome.detail
        assert not engine.busy, "nobody has a reason to tick again"
    assert calls == 1
    assert sum("all further frames are dropped" in record.message for record in caplog.records) == 1
    assert "restart this process" in engine.describe()["fault"]


def test_a_fault_that_leaves_the_gpu_alive_costs_its_frame_alone(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(policy, EngineSettings("ar"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda *_: 1 / 0)
        assert isinstance(engine.act(frame(1)), Drop)
    assert isinstance(engine.act(frame(2)), Action) and "fault" not in engine.describe()


def test_a_first_frame_without_memory_says_what_to_lower(
    policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine = Engine(policy, EngineSettings("ar"))
    monkeypatch.setattr(engine.runner, "run", full)
    with pytest.raises(UserError, match=r"CUDA out of memory.*Lower decode\.max_in_flight.*model\.quantization"):
        engine.warm_up()
