# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL (interleaved M-RoPE, norms per head, features for the first layers) against transformers' own classes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.paths import ORACLES, needs
from support.random_qwen_vl import add_nora
from tokenizers import AddedToken, Tokenizer

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.fast_tokenizer import read_fast_tokenizer
from specvla_ros.models.families.qwen_vl.model import QwenVL, QwenVLConfig, load_model, read_config
from specvla_ros.models.families.qwen_vl.policy import read_patch_processor
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget, mrope_positions
from specvla_ros.models.weights import no_progress

ORACLE = ORACLES / "qwen3vl_text_tiny_a"
CHECKPOINT = ORACLE / "checkpoint"
pytestmark = needs(ORACLE)


def cases() -> list[dict[str, Any]]:
    path = ORACLE / "cases.json"
    return json.loads(path.read_text()) if path.exists() else []


def loaded(case: Mapping[str, Any]) -> tuple[QwenVLConfig, QwenVL]:
    config = read_config(CHECKPOINT)
    grid = tuple((h, w) for _, h, w in case["image_grid_thw"])
    return config, load_model(CHECKPOINT, config, grid, torch.device("cpu"), torch.float32, no_progress)


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["case"]))
@torch.inference_mode()
def test_pictures_states_and_answers(case: dict[str, Any]) -> None:
    config, model = loaded(case)
    expected, name = np.load(ORACLE / "expected.npz"), f"case{case['case']}_"
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(case["prompt"]).ids
    grids = [(h // 2, w // 2) for _, h, w in case["image_grid_thw"]]
    positions = mrope_positions(ids, config.image_id, grids)
    assert np.array_equal(positions, expected[f"{name}position_ids"])

    text = model.decoder.embed_tokens(torch.tensor(ids))
    parts, start = [], 0
    if grids:
        given = expected[f"{name}pixel_values"]
        pictures = [np.array(Image.open(ORACLE / path).convert("RGB")) for path in case["model_input_images"]]
        processor = read_patch_processor(CHECKPOINT)
        if all(p.shape[:2] == (16 * h, 16 * w) for p, (_, h, w) in zip(pictures, case["image_grid_thw"], strict=True)):
            patches = processor.patches(pictures)
            whole = len(given) == len(patches)
            np.testing.assert_allclose(patches if whole else patches[::37], given, atol=1e-5)
            seen = model.image_embeddings(patches)
        else:  # enlarged by torchvision's resampling, whose shades are not Pillow's: from the reference's own features
            seen = torch.from_numpy(
                np.concatenate((expected[f"{name}image_embeds"], *expected[f"{name}deepstack"]), axis=1)
            )
        hidden = config.decoder.hidden_size
        np.testing.assert_allclose(seen[:, :hidden], expected[f"{name}image_embeds"], atol=1e-4)
        features = seen[:, hidden:].reshape(len(seen), -1, hidden).transpose(0, 1)
        np.testing.assert_allclose(features, expected[f"{name}deepstack"], atol=1e-4)
        places = [i for i, token in enumerate(ids) if token == config.image_id]
        for place, rows in zip(places, seen.split([h * w for h, w in grids]), strict=True):
            parts += [text[start:place], rows]
            start = place + 1
    prompt = torch.cat([*parts, text[start:]])
    answer = torch.tensor(case["generated_ids"])
    inputs = torch.cat((prompt, model.decoder.embed_tokens(answer[:-1])))
    behind = positions.max() + 1 + np.arange(len(answer) - 1)
    every = np.concatenate((positions, np.tile(behind, (3, 1))), axis=1)
    cache = new_cache(model.decoder, slots=1, slot_rows=len(inputs))
    result = packed_forward(model.decoder, [Segment(0, 0, inputs, wanted=len(answer), positions=every)], cache)
    np.testing.assert_allclose(result.logits, expected[f"{name}logits"], atol=1e-3)
    at = expected[f"{name}hidden_positions"]
    # Recorded in front of the final norm, as that class hands its states out.
    theirs = model.decoder.norm(torch.from_numpy(expected[f"{name}last_hidden"]))
    np.testing.assert_allclose(result.hidden[at], theirs, atol=1e-3)
    if not case["near_tie"]:
        assert result.logits.argmax(-1).tolist() == case["generated_ids"]


def test_a_checkpoint_without_a_policys_files_is_refused() -> None:
    with pytest.raises(UserError, match="is a Qwen-VL checkpoint, but not a known policy"):
        load_target(CHECKPOINT, device="cpu")


@pytest.fixture
def policy(tmp_path: Path) -> QwenVLTarget:
    """The same model with NORA's tokens: what a policy on this base would be."""
    directory = tmp_path / "policy"
    directory.mkdir()
    for path in CHECKPOINT.iterdir():
        if path.name != "tokenizer.json":
            (directory / path.name).symlink_to(path)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    add_nora(directory, ids=416 - tokenizer.get_vocab_size(), scale=3.0)
    ids = read_fast_tokenizer(directory / "action_tokenizer").vocab_size
    tokenizer.add_tokens([AddedToken(f"<robot_action_{i}>", special=False) for i in range(ids)])
    tokenizer.save(str(directory / "tokenizer.json"))
    target = load_target(directory, device="cpu")
    assert isinstance(target, QwenVLTarget)
    return target


@pytest.mark.parametrize("mode", ["ar", "spec", "pipeline", "specpipe"])
def test_every_mode_writes_the_same(policy: QwenVLTarget, mode: str) -> None:
    from models.test_qwen_vl import LONGEST, as_text

    from specvla_ros.speculation.settings import DraftSettings, adjusted

    target = as_text(policy)
    assert policy.policy.picture_sizes == ((256, 256),), "enlarged to as many pixels as the processor wants"
    drafts = adjusted(DraftSettings(nodes=12), temporal=True, prompt_lookup_tokens=4)
    plain = Engine(target, EngineSettings("ar", max_reasoning_tokens=LONGEST))
    settings = EngineSettings(mode, max_reasoning_tokens=LONGEST, prefill_chunks=2, draft=drafts, in_order=True)
    engine = Engine(target, settings)
    for seed in range(4):
        image = np.random.default_rng(seed // 2).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        question = Observation(image, "put the carrot on the plate", stamp_ns=seed + 1)
        ours, theirs = engine.act(question), plain.act(question)
        assert isinstance(ours, Action) and isinstance(theirs, Action)
        assert ours.tokens == theirs.tokens
