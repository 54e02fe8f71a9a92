# SPDX-License-Identifier: Apache-2.0
"""A draft model out of a language model's first layers: what it learns from, that it learns, and that it drafts."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.text_models import write_text_model

from benchmarks.papers.smollm_draft import (
    DraftLoss,
    DraftTraining,
    answer_prompts,
    first_layers,
    seeds,
    train_draft_model,
)
from benchmarks.papers.text_target import TextTarget, text_observation
from specvla_ros import Engine, EngineSettings, UserError
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.models.checkpoint import load_target

TRAINING = DraftTraining(layers=1, answers=24, tokens=12, steps=60, batch_size=4, learning_rate=0.01, validate_every=30)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def target(tmp_path: Path) -> TextTarget:
    return load(write_text_model(tmp_path / "target", end=24))


def load(directory: Path) -> TextTarget:
    loaded = load_target(directory, device="cpu")
    assert isinstance(loaded, TextTarget)
    return loaded


def test_answers_are_the_targets_own_with_the_states_that_chose_them(target: TextTarget) -> None:
    found = answer_prompts(target, TRAINING)
    plain = Engine(target, EngineSettings("ar", max_reasoning_tokens=TRAINING.tokens))
    ended = 0
    for number, text in enumerate(seeds(0)[: TRAINING.answers]):
        action = plain.act(text_observation(text, stamp_ns=number + 1))
        assert isinstance(action, Action)
        prompt, length = int(found["prompts"][number]), int(found["lengths"][number])
        prompt_ids, answer = found["ids"][number, :prompt], found["ids"][number, prompt : prompt + length]
        assert prompt_ids.tolist() == target.tokenizer.encode(text).ids
        assert tuple(answer.tolist()) == action.tokens
        assert target.decoder.logits(found["states"][number, :length]).argmax(dim=-1).tolist() == answer.tolist()
        ended += length < TRAINING.tokens
    assert 0 < ended < TRAINING.answers, "all answers end alike: choose another end token"


def test_a_draft_that_is_the_target_has_the_targets_logits(target: TextTarget) -> None:
    found = answer_prompts(target, TRAINING)
    loss = DraftLoss(copy.deepcopy(target.decoder))
    logits, goal = loss.logits(*(found[name] for name in ("ids", "prompts", "lengths", "states")))
    assert len(logits) == int(found["lengths"].sum())
    torch.testing.assert_close(logits, goal, rtol=1e-4, atol=1e-4)


def test_what_was_learnt_is_written_and_drafts(target: TextTarget, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    validations = train_draft_model(target.directory, out, TRAINING)
    assert [each.step for each in validations] == [30, 60]
    assert not (out / "training_state").exists()
    assert json.loads((out / "training.json").read_text())["validation"][-1]["agreement"] == validations[-1].agreement
    untrained = first_layers(target.decoder, 1)
    draft = load(out).decoder
    assert len(draft.layers) == 1
    assert torch.equal(draft.embed_tokens.weight, untrained.embed_tokens.weight)
    found = [answer_prompts(target, TRAINING)[name] for name in ("ids", "prompts", "lengths", "states")]
    with torch.no_grad():
        before, after = (float(DraftLoss(each)(*found)) for each in (untrained, draft))
        least = float(DraftLoss(copy.deepcopy(target.decoder))(*found))  # the entropy of the target itself
    assert least < after < least + 0.5 * (before - least)
    engine = Engine(
        target, engine_settings_from(mode="spec", max_reasoning_tokens=12, draft_head="none", draft_model=str(out))
    )
    assert engine.drafter.sources == ("model",)


def test_what_cannot_be_a_draft_is_refused(target: TextTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the target has 2 layers: a draft of it needs fewer, not 2"):
        train_draft_model(target.directory, tmp_path / "draft", replace(TRAINING, layers=2))
    with pytest.raises(UserError, match="already holds a model"):
        train_draft_model(target.directory, target.directory, TRAINING)
    with pytest.raises(UserError, match="--answers must be at least 1"):
        replace(TRAINING, answers=0)
