# SPDX-License-Identifier: Apache-2.0
"""The engine: plain decoding equals a full recompute, and every frame ends once, for a named reason."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import load_openvla, write_checkpoint
from support.nightly import examples

from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation

INSTRUCTION = "put carrot on plate"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> OpenVLATarget:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=3)
    return load_openvla(directory, device="cpu")


@pytest.fixture
def engine(policy: OpenVLATarget) -> Engine:
    return Engine(policy, EngineSettings("ar"))


def frame(stamp_ns: int, *, seed: int | None = None, instruction: str = INSTRUCTION) -> Observation:
    rng = np.random.default_rng(stamp_ns if seed is None else seed)
    return Observation(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8), instruction, stamp_ns)


def decode_from_scratch(policy: OpenVLATarget, observation: Observation) -> list[int]:
    """Greedy decoding without a cache: every token from the whole sequence."""
    prompt = policy.prompt_embeddings(observation, policy.prompt.ids(observation.instruction))
    tokens: list[int] = []
    for _ in range(len(policy.codec.names)):
        ids = torch.tensor(tokens, dtype=torch.int64)
        sequence = torch.cat((prompt, policy.decoder.embed_tokens(ids)))
        cache = new_cache(policy.decoder, slots=1, slot_rows=len(sequence))
        logits = packed_forward(policy.decoder, [Segment(0, 0, sequence)], cache).logits
        tokens.append(int(logits[0].argmax()))
    return tokens


def all_outcomes(engine: Engine) -> list:
    outcomes = []
    while engine.busy:
        outcomes += engine.tick()
    return outcomes


def test_plain_decoding_equals_a_full_recompute(policy: OpenVLATarget, engine: Engine) -> None:
    answers = set()
    for stamp in range(1, 7):
        observation = frame(stamp, instruction=f"{INSTRUCTION} {stamp}")
        action = engine.act(observation)
        assert isinstance(action, Action)
        assert list(action.tokens) == decode_from_scratch(policy, observation)
        answers.add(action.tokens)
    assert len(answers) > 1, "the random policy must depend on its input for this test to mean anything"


def test_an_action_carries_its_observation_and_its_record(engine: Engine) -> None:
    observation = frame(5)
    action = engine.act(observation)
    assert isinstance(action, Action)
    assert action.observation is observation
    assert action.names == ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    assert action.record.mode == "ar"
    assert action.record.forwards == 7
    assert action.record.tokens_per_forward == (1,) * 7
    assert action.record.accept_lengths == (0,) * 6
    assert action.record.tau == 1.0
    timings = action.timings
    assert timings.vision_s > 0
    assert timings.prefill_s > 0
    assert timings.decode_s > 0
    assert timings.vision_s + timings.prefill_s == pytest.approx(action.record.tick_s[0])
    assert timings.decode_s == pytest.approx(sum(action.record.tick_s[1:]))


def test_no_moment_is_booked_to_two_stages(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    target = type(engine.target)
    lay_out = target.prompt_layout

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.05)  # as on a busy machine, between the tick's beginning and admission
        return lay_out(*arguments)

    monkeypatch.setattr(target, "prompt_layout", slowly)
    received_ns = time.monotonic_ns()
    action = engine.act(replace(frame(5, instruction="flip the pot"), received_ns=received_ns))
    assert isinstance(action, Action)
    timings = action.timings
    assert timings.wait_s >= 0.05
    total_s = (action.finished_ns - received_ns) * 1e-9
    assert timings.wait_s + timings.vision_s + timings.prefill_s + timings.decode_s <= total_s


def test_the_newest_frame_wins(engine: Engine) -> None:
    assert engine.submit(frame(1)) == []
    [drop] = engine.submit(frame(2))
    assert (drop.observation.stamp_ns, drop.reason) == (1, DropReason.SUPERSEDED)
    [action] = all_outcomes(engine)
    assert action.observation.stamp_ns == 2


def test_a_frame_that_comes_during_decoding_waits_for_the_slot(engine: Engine) -> None:
    engine.submit(frame(1))
    assert engine.tick() == []
    engine.submit(frame(2))
    assert [outcome.observation.stamp_ns for outcome in all_outcomes(engine)] == [1, 2]


@pytest.mark.parametrize("stamp", [10, 9])
def test_a_frame_not_newer_than_the_last_is_dropped(engine: Engine, stamp: int) -> None:
    engine.act(frame(10))
    outcome = engine.act(frame(stamp))
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.OUT_OF_ORDER


def test_a_flush_empties_the_engine_at_once_and_keeps_the_order(engine: Engine) -> None:
    engine.submit(frame(1))
    engine.tick()
    engine.submit(frame(2))
    drops = engine.flush()
    assert [(d.observation.stamp_ns, d.reason) for d in drops] == [
        (1, DropReason.EPOCH_CHANGED),
        (2, DropReason.EPOCH_CHANGED),
    ]
    assert not engine.busy
    assert engine.submit(frame(2))[0].reason is DropReason.OUT_OF_ORDER
    assert isinstance(engine.act(frame(3)), Action)


def test_a_reset_takes_any_stamp_next(engine: Engine) -> None:
    first = engine.act(frame(10, seed=1))
    engine.reset()
    second = engine.act(frame(2, seed=1))
    assert isinstance(first, Action)
    assert isinstance(second, Action)
    assert first.tokens == second.tokens


def test_a_stale_frame_is_dropped_at_admission(policy: OpenVLATarget) -> None:
    now = 1_000_000_000
    engine = Engine(policy, EngineSettings("ar", max_image_age_s=0.5), now_ns=lambda: now)
    drop = engine.act(frame(400_000_000))
    assert isinstance(drop, Drop)
    assert drop.reason is DropReason.STALE
    assert isinstance(engine.act(frame(600_000_000)), Action)


def test_a_staleness_limit_needs_a_clock(policy: OpenVLATarget) -> None:
    with pytest.raises(UserError, match="clock of the stamps"):
        Engine(policy, EngineSettings("ar", max_image_age_s=0.5))
    engine = Engine(policy, EngineSettings("ar"))
    for limited in (engine.set_max_image_age, lambda limit: engine.switch(EngineSettings("ar", max_image_age_s=limit))):
        with pytest.raises(UserError, match="clock of the stamps"):
            limited(0.5)
        assert engine.settings.max_image_age_s == 0.0
    engine.set_max_image_age(0.0)


@pytest.mark.parametrize("instruction", ["", "  \n", "x" * 10_240])
def test_an_instruction_that_cannot_be_asked_is_refused_and_gives_no_action(engine: Engine, instruction: str) -> None:
    with pytest.raises(UserError, match=r"instruction"):
        engine.check_instruction(instruction)
    outcome = engine.act(frame(1, instruction=instruction))
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.BAD_INSTRUCTION
    assert isinstance(engine.act(frame(2)), Action)


def test_a_fault_inside_a_tick_drops_its_requests_and_the_engine_goes_on(
    engine: Engine, policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    for owner, name in ((type(policy.decoder), "forward"), (type(policy), "assemble")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            drop = engine.act(frame(engine.mailbox.last_stamp_ns + 1))
        assert isinstance(drop, Drop)
        assert drop.reason is DropReason.ENGINE_FAULT
        assert "fell off the bus" in drop.detail
        assert not engine.busy
        assert isinstance(engine.act(frame(engine.mailbox.last_stamp_ns + 1)), Action)


def test_nan_in_the_weights_gives_no_action(policy: OpenVLATarget, engine: Engine) -> None:
    weight = policy.decoder.norm.weight
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        outcome = engine.act(frame(1))
    finally:
        weight.copy_(kept)
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.NOT_FINITE
    assert isinstance(engine.act(frame(2)), Action)


def test_a_token_that_is_no_action_gives_no_action(policy: OpenVLATarget, engine: Engine) -> None:
    head = policy.decoder.lm_head.weight
    kept = head.clone()
    head.zero_()  # all logits tie at 0: the lowest id wins, which is no action token
    try:
        outcome = engine.act(frame(1))
    finally:
        head.copy_(kept)
    assert isinstance(outcome, Drop)
    assert outcome.reason is DropReason.NOT_AN_ACTION


def test_warm_up_leaves_no_trace(engine: Engine) -> None:
    engine.warm_up()
    assert not engine.busy
    assert isinstance(engine.act(frame(1)), Action)


def test_a_slot_longer_than_the_model_is_refused(policy: OpenVLATarget) -> None:
    with pytest.raises(UserError, match=r"lower decode\.max_text_tokens"):
        Engine(policy, EngineSettings("ar", max_text_tokens=4096))


@pytest.mark.parametrize("arguments", [dict(mode="fast"), dict(max_text_tokens=0), dict(max_image_age_s=float("nan"))])
def test_settings_out_of_range_are_refused(arguments: dict) -> None:
    with pytest.raises(UserError):
        EngineSettings(**arguments)


@pytest.mark.parametrize("stamp", [0, -5, float("nan"), 1.5])
def test_an_observation_needs_a_whole_positive_stamp(stamp: float) -> None:
    with pytest.raises(UserError, match="stamp"):
        Observation(np.zeros((4, 4, 3), np.uint8), INSTRUCTION, stamp)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 4), (4, 4, 4)])
def test_an_observation_needs_an_rgb_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="RGB"):
        Observation(np.zeros(shape, np.uint8), INSTRUCTION, 1)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from(["submit", "repeat", "tick", "flush", "reset"]), max_size=40))
def test_every_frame_ends_exactly_once_and_no_slot_leaks(policy: OpenVLATarget, steps: list[str]) -> None:
    engine = Engine(policy, EngineSettings("ar"))
    submitted: list[Observation] = []
    ended: list[Observation] = []
    stamp = 0
    for step in steps:
        if step in ("submit", "repeat"):
            stamp += step == "submit"
            submitted.append(frame(max(stamp, 1), seed=7))
            ended += [drop.observation for drop in engine.submit(submitted[-1])]
        elif step == "tick":
            ended += [outcome.observation for outcome in engine.tick()]
        else:
            ended += [drop.observation for drop in (engine.flush() if step == "flush" else engine.reset())]
    ended += [outcome.observation for outcome in all_outcomes(engine)]
    assert sorted(map(id, ended)) == sorted(map(id, submitted))
    assert engine.cache.free_slots == 1
