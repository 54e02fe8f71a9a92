# SPDX-License-Identifier: Apache-2.0
"""Language models: SmolLM2 against transformers' own continuations, plain and drafted, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import edit_json
from support.nightly import nightly_but
from support.paths import ORACLES, needs
from support.text_models import write_text_model
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.papers.smollm import write_smollm
from benchmarks.papers.text_target import TextTarget, text_observation
from specvla_ros import Engine, EngineSettings, Policy, UserError
from specvla_ros.engine.outcome import Action
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.config import DECODERS, read_checkpoint_json, read_decoder_shape
from specvla_ros.models.target import TARGETS
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

LONGEST = 64
ORACLE = ORACLES / "smollm_generate_a"
LOOKUP = adjusted(DraftSettings(), prompt_lookup_tokens=10)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> TextTarget:
    target = load_target(write_smollm(tmp_path_factory.mktemp("smollm")), device="cpu")
    assert isinstance(target, TextTarget)
    return target


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A random language model of 50 words."""
    return write_text_model(tmp_path)


@needs(ORACLE)
@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["ar", "spec"])
@pytest.mark.parametrize("number", [0, 3, 7])
def test_smollm_writes_what_transformers_does_wherever_the_margin_allows(
    smollm: TextTarget, mode: str, number: int
) -> None:
    case = json.loads((ORACLE / "cases.json").read_text())[number]
    margins = np.load(ORACLE / "margins.npz")[f"c{number}_margin"]
    assert smollm.prompt_layout(text_observation(case["text"], stamp_ns=1)).ids == tuple(case["prompt_ids"])
    engine = Engine(smollm, EngineSettings(mode, max_reasoning_tokens=LONGEST, draft=LOOKUP))
    action = engine.act(text_observation(case["text"], stamp_ns=1))
    assert isinstance(action, Action)
    for at, (ours, theirs) in enumerate(zip(action.tokens, case["generated_ids"], strict=True)):
        if ours != theirs:
            pytest.fail(f"token {at} is {ours}, not {theirs}; the margin there is {margins[at]:.4f}")
    if mode == "spec" and number in (3, 7):  # these repeat themselves
        assert action.record.forwards < 0.7 * LONGEST


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("mode", nightly_but(lambda mode: mode == "specpipe", ["ar", "spec", "pipeline", "specpipe"]))
@torch.inference_mode()
def test_every_mode_writes_the_same(tmp_path: Path, mode: str, family: str) -> None:
    target = load_target(write_text_model(tmp_path, family=family), device="cpu")
    settings = EngineSettings(mode, max_reasoning_tokens=20, draft=LOOKUP, in_order=True)
    plain = Engine(target, EngineSettings("ar", max_reasoning_tokens=20))
    engine = Engine(target, settings)
    for seed in range(6):
        ids = tuple(np.random.default_rng(seed).integers(0, 50, 4).tolist()) * 3
        question = text_observation("", stamp_ns=seed + 1, prompt_ids=ids)
        ours, expected = engine.act(question), plain.act(question)
        assert isinstance(ours, Action) and isinstance(expected, Action)
        assert ours.tokens == expected.tokens
        assert len(ours.tokens) == 20 or ours.tokens[-1] == 7


def test_answer_ends_with_its_end_token_and_holds_no_action(small: Path) -> None:
    codec = load_target(small, device="cpu").codec.with_text(10)
    assert codec.end([3, 4, 7, 5], known=0) == 3 and codec.end([3, 4], known=0) == 0
    assert codec.end(list(range(10, 20)), known=4) == 10
    assert codec.decode([3, 7]).shape == (1, 0)


@pytest.mark.parametrize("family", DECODERS)
def test_each_family_writes_what_transformers_own_class_does(tmp_path: Path, family: str) -> None:
    """From the directory, read by both."""
    directory = write_text_model(tmp_path, family=family)
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = Engine(load_target(directory, device="cpu"), EngineSettings("ar", max_reasoning_tokens=20))
    for seed in range(4):
        ids = torch.from_numpy(np.random.default_rng(seed).integers(8, 50, 9))[None]
        seen = torch.ones_like(ids)
        expected = reference.generate(ids, attention_mask=seen, max_new_tokens=20, do_sample=False, pad_token_id=0)
        action = engine.act(text_observation("", stamp_ns=seed + 1, prompt_ids=ids[0].tolist()))
        assert isinstance(action, Action)
        assert list(action.tokens) == expected[0, 9:].tolist()


@pytest.mark.parametrize("family", DECODERS)
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    ours, theirs = read_decoder_shape(read_checkpoint_json(tmp_path / "config.json")), AutoConfig.for_model(family)
    same = [name for name in asdict(ours) if hasattr(theirs, name)]
    assert {name: getattr(ours, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert len(same) >= 9
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": None}, "does not say which token ends an answer"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "only plain RoPE"),
        ({"attention_bias": True}, "config.json: attention_bias is not supported"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must contain only full attention"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported, only 'silu' is"),
        ({"model_type": "qwen2"}, r"lacks .*q_proj\.bias"),
        ({"num_hidden_layers": 1}, "which the model of config.json does not have"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(small: Path, change: dict[str, object], message: str) -> None:
    edit_json(small / "config.json", lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        load_target(small, device="cpu")


def test_what_a_language_model_cannot_do_is_said(small: Path) -> None:
    with pytest.raises(UserError, match=r"set decode\.max_reasoning_tokens"):
        Policy.load(small)
    with pytest.raises(UserError, match=r"does not support model\.quantization"):
        load_target(small, device="cpu", quantization="w8a8")
    with pytest.raises(UserError, match="a tolerance in metres"):
        acceptance = AcceptanceSettings("bin_distance", tolerance_m=0.01)
        Engine(load_target(small, device="cpu"), EngineSettings("ar", max_reasoning_tokens=5, acceptance=acceptance))
    with pytest.raises(UserError, match="the prompt is empty"):
        load_target(small, device="cpu").prompt_layout(text_observation(" ", stamp_ns=1))


def test_nodes_and_commands_which_do_not_register_it_refuse_it(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name: entry for name, entry in TARGETS.entries().items() if name not in DECODERS}
    monkeypatch.setattr(TARGETS, "_entries", own)
    with pytest.raises(UserError, match=r"only .* checkpoints are supported"):
        load_target(small, device="cpu")
