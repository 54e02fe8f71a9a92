# SPDX-License-Identifier: Apache-2.0
"""Chunks of actions averaged where they overlap, against VLA-0's arithmetic written out action by action."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import load_openvla, write_checkpoint

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.ensemble import ChunkEnsemble
from specvla_ros.engine.outcome import Action, DecodeRecord, Drop, DropReason, StageTimings
from specvla_ros.models.codecs.codec import Codec

NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
HORIZON, STEP_NS = 5, 100_000_000
LOW, HIGH = np.array([-1.0] * 6 + [0.0]), np.ones(7)
RECORD = DecodeRecord("ar", "strict", (1,), (), (), (), (), (0.0,), 1)


class Chunks:
    """What is asked of a codec."""

    names, horizon, action_range = NAMES, HORIZON, (LOW, HIGH)


def ensemble(answers: int, step_s: float = STEP_NS * 1e-9) -> ChunkEnsemble:
    codec: Any = Chunks()
    return ChunkEnsemble(codec, answers, step_s)


def action(seed: int, stamp_ns: int, epoch: int = 1) -> Action:
    seen = Observation(np.zeros((2, 2, 3), np.uint8), "lift", stamp_ns, epoch=epoch)
    chunk = np.random.default_rng(seed).uniform(LOW, HIGH, (HORIZON, 7))
    return Action(seen, NAMES, chunk, (), StageTimings(0.0, 0.0, 0.0, 0.0), RECORD, 0)


def plain_average(chunks: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """The newest fully, each before it half; the gripper open or closed. Chunks by the step that they begin at."""
    start, newest = chunks[-1]
    found = []
    for row in range(HORIZON):
        total, weight = newest[row].copy(), 1.0
        for begun, chunk in chunks[:-1]:
            if start + row - begun < HORIZON:
                total, weight = total + 0.5 * chunk[start + row - begun], weight + 0.5
        mean = total / weight
        mean[-1] = 1.0 if mean[-1] > 0.5 else 0.0
        found.append(mean)
    return np.array(found)


@given(answers=st.integers(2, 6), gaps=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_every_action_is_the_mean_of_the_answers_that_speak_of_its_time(answers: int, gaps: list[int]) -> None:
    made = ensemble(answers)
    given_: list[tuple[int, np.ndarray]] = []
    step = 10
    for seed, gap in enumerate(gaps):
        step += gap
        raw = action(seed, step * STEP_NS)
        given_.append((step, raw.actions))
        (out,) = made.averaged([raw])
        assert isinstance(out, Action) and out.tokens == raw.tokens and out.observation is raw.observation
        np.testing.assert_allclose(out.actions, plain_average(given_[-answers:]), atol=1e-12)


@pytest.mark.parametrize(("gap", "steps"), [(0.4, 0), (0.6, 1), (1.4, 1), (1.6, 2)])
def test_steps_between_pictures_are_rounded(gap: float, steps: int) -> None:
    first, second = action(1, 10 * STEP_NS), action(2, round((10 + gap) * STEP_NS))
    *_, out = ensemble(2).averaged([first, second])
    assert isinstance(out, Action)
    expected = plain_average([(0, first.actions), (steps, second.actions)])
    np.testing.assert_allclose(out.actions, expected, atol=1e-12)


def test_without_a_step_an_action_passes_from_answer_to_answer() -> None:
    made = ensemble(8, step_s=0.0)
    raw = [action(seed, stamp) for seed, stamp in enumerate((5, 700, 701), start=1)]
    outs = made.averaged(raw)
    expected = plain_average([(number, each.actions) for number, each in enumerate(raw)])
    assert isinstance(outs[-1], Action)
    np.testing.assert_allclose(outs[-1].actions, expected, atol=1e-12)


def test_an_epoch_and_a_reset_begin_anew_and_drops_pass() -> None:
    made = ensemble(8)
    first, second, third = action(1, STEP_NS), action(2, 2 * STEP_NS, epoch=2), action(3, 3 * STEP_NS, epoch=2)
    made.averaged([first])
    drop = Drop(first.observation, DropReason.STALE)
    out = made.averaged([drop, second])
    assert out[0] is drop and isinstance(out[1], Action)
    np.testing.assert_allclose(out[1].actions, plain_average([(2, second.actions)]))
    made.forget()
    (alone,) = made.averaged([third])
    assert isinstance(alone, Action)
    np.testing.assert_allclose(alone.actions, plain_average([(3, third.actions)]))


@pytest.mark.parametrize("answers", [0, 1])
def test_without_it_an_answer_is_its_own(answers: int) -> None:
    made = ensemble(answers)
    for stamp in (1, 2):
        raw = action(stamp, stamp * STEP_NS)
        assert made.averaged([raw]) == [raw]


def test_answers_of_one_action_have_nothing_to_average(tmp_path: Path) -> None:
    policy = load_openvla(write_checkpoint(tmp_path / "openvla"), device="cpu")
    with pytest.raises(UserError, match=r"decode.ensemble needs a policy that answers with several actions"):
        Engine(policy, EngineSettings("ar", ensemble=8))


def test_the_engine_averages_what_it_lets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_openvla(write_checkpoint(tmp_path / "openvla"), device="cpu")
    monkeypatch.setattr(type(policy.codec), "horizon", 2)
    codec: Codec = policy.codec
    spread = {1: np.zeros((2, 7)), 2: np.ones((2, 7))}
    images = {stamp: np.full((48, 64, 3), 80 * stamp, np.uint8) for stamp in (1, 2)}
    engine = Engine(policy, EngineSettings("ar", ensemble=4))
    shown = iter(spread.values())
    monkeypatch.setattr(type(codec), "decode", lambda *_: next(shown).copy())
    outs = [engine.act(Observation(images[stamp], "put carrot on plate", stamp)) for stamp in (1, 2)]
    assert all(isinstance(out, Action) for out in outs)
    np.testing.assert_allclose(outs[1].actions[:, 0], [(1 + 0.5 * 0) / 1.5, 1.0])  # type: ignore[union-attr]


def test_what_is_averaged_keeps_its_record() -> None:
    made = ensemble(3)
    raw = replace(action(1, STEP_NS), tokens=(4, 5))
    (out,) = made.averaged([raw])
    assert isinstance(out, Action) and out.record is raw.record and out.tokens == (4, 5)
