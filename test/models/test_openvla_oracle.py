# SPDX-License-Identifier: Apache-2.0
"""The tiny OpenVLA checkpoints against answers of the original code, from the raw image on."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import bins_of, load_openvla
from support.paths import ORACLES, needs

from specvla_kernels.layout import Ancestry, PackedLayout, Span
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation

VARIANTS = ("openvla_tiny_a", "openvla_tiny_b")
CASES = [(variant, case) for variant in VARIANTS for case in range(8)]
pytestmark = needs(ORACLES / VARIANTS[0])


@cache
def arrays(variant: str, name: str) -> dict[str, np.ndarray]:
    return dict(np.load(ORACLES / variant / f"{name}.npz"))


@cache
def policy_of(variant: str, unnorm_key: str) -> OpenVLATarget:
    return load_openvla(ORACLES / variant / "checkpoint", unnorm_key=unnorm_key, device="cpu")


def load_case(variant: str, index: int) -> tuple[dict, np.ndarray, OpenVLATarget]:
    case = json.loads((ORACLES / variant / "cases.json").read_text())[index]
    image = np.asarray(Image.open(ORACLES / variant / case["image"]).convert("RGB"))
    return case, image, policy_of(variant, case["unnorm_key"])


@pytest.mark.parametrize(("variant", "index"), CASES)
def test_tokens_and_actions_equal_the_original(variant: str, index: int) -> None:
    case, image, policy = load_case(variant, index)
    observation = Observation(image, "", stamp_ns=1, prompt_ids=tuple(case["input_ids_given"]))

    outcome = Engine(policy, EngineSettings("ar")).act(observation)

    assert isinstance(outcome, Action)
    assert list(outcome.tokens) == case["generated_ids"]
    np.testing.assert_allclose(outcome.values, case["action"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("variant", "index"), CASES)
def test_logits_and_hidden_states_equal_the_original(variant: str, index: int) -> None:
    case, image, policy = load_case(variant, index)
    prompt = policy.prompt_embeddings(Observation(image, "", 1), case["input_ids"])
    cache = new_cache(policy.decoder, slots=2, slot_rows=320)
    segments = [Segment(1, 0, prompt)]
    for step, token in enumerate(case["generated_ids"][:-1]):
        segments.append(Segment(1, len(prompt) + step, torch.tensor([token]), ancestry=Ancestry.from_parents((-1,))))

    results = [packed_forward(policy.decoder, [segment], cache) for segment in segments]

    expected = arrays(variant, "cases")
    logits = torch.cat([result.logits for result in results]).numpy()
    hidden = torch.cat([result.hidden[-1:] for result in results]).numpy()
    np.testing.assert_allclose(logits, expected["logits"][index], atol=1e-4, rtol=0)
    np.testing.assert_allclose(hidden, expected["last_hidden"][index], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("variant", "index"), CASES)
def test_pixels_and_prompt_embeddings_equal_the_original(variant: str, index: int) -> None:
    case, image, policy = load_case(variant, index)

    pixels = policy.image_processor(image).numpy()
    prompt = policy.prompt_embeddings(Observation(image, "", 1), case["input_ids"]).numpy()

    np.testing.assert_allclose(pixels, arrays(variant, "vision")["pixel_values"][index], atol=1e-6, rtol=0)
    expected = arrays(variant, "cases")["prefill_embeddings"][index, : len(prompt)]
    np.testing.assert_allclose(prompt, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tower", [0, 1])
def test_each_vision_tower_equals_the_original(variant: str, tower: int) -> None:
    policy = policy_of(variant, json.loads((ORACLES / variant / "cases.json").read_text())[0]["unnorm_key"])
    vision = arrays(variant, "vision")
    expected = vision[("dino_patches_case01", "siglip_patches_case01")[tower]]
    for case in range(2):
        pixels = torch.from_numpy(vision["pixel_values"][case]).split(3)[tower]
        features = policy.model.towers[tower](pixels).numpy()
        np.testing.assert_allclose(features, expected[case], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("variant", "index"), CASES[::4])
def test_a_missing_trailing_token_is_appended(variant: str, index: int) -> None:
    case, _, policy = load_case(variant, index)
    without = [token for token in case["input_ids"] if token != 29871]
    assert policy.prompt.complete(without)[-1] == 29871
    assert policy.prompt.complete(case["input_ids"]) == tuple(case["input_ids"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_token_decodes_to_the_originals_action(variant: str) -> None:
    table = arrays(variant, "token_to_action")
    keys = [name.removeprefix("action__") for name in table if name.startswith("action__")]
    assert keys
    for key in keys:
        policy = policy_of(variant, key)
        for token, expected in zip(table["token_ids"], table[f"action__{key}"], strict=True):
            np.testing.assert_allclose(policy.codec.decode([int(token)] * 7)[0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_value_encodes_to_the_originals_token(variant: str) -> None:
    table = arrays(variant, "action_to_token")
    key = json.loads((ORACLES / variant / "cases.json").read_text())[0]["unnorm_key"]
    tokenizer = bins_of(policy_of(variant, key)).tokenizer
    np.testing.assert_array_equal(tokenizer.encode(table["action"]), table["token_id"])
    np.testing.assert_allclose(tokenizer.decode(table["token_id"]), table["decoded"], atol=1e-12, rtol=0)


def test_half_precision_differs_only_where_the_margin_is_small() -> None:
    """bf16 may choose another token than the original's float32 only at a small margin of its own logits."""
    variant = VARIANTS[0]
    path: Path = ORACLES / variant / "checkpoint"
    case, image, full = load_case(variant, 0)
    half = load_openvla(path, unnorm_key=case["unnorm_key"], device="cpu", dtype="bfloat16")
    results = []
    for policy in (full, half):
        prompt = policy.prompt_embeddings(Observation(image, "", 1), case["input_ids"])
        cache = new_cache(policy.decoder, slots=1, slot_rows=320)
        results.append(packed_forward(policy.decoder, [Segment(0, 0, prompt)], cache).logits)
    assert results[1].dtype == torch.float32
    top = results[0].topk(2).values[0]
    bound = (results[0] - results[1]).abs().max().item()
    assert bound < 0.05 * results[0].abs().max().item()
    if int(results[0].argmax()) != int(results[1].argmax()):
        assert float(top[0] - top[1]) <= 2 * bound


def test_layout_types_are_the_kernels() -> None:
    """The decoder is called with the kernels' own layout: models know nothing of the engine."""
    policy = policy_of(VARIANTS[0], "tiny_bridge")
    cache = new_cache(policy.decoder, slots=1, slot_rows=16)
    row = torch.tensor([0])
    layout = PackedLayout((Span(0, 0, 1, 0, is_tree=False),), row, row, row)
    result = policy.decoder(policy.decoder.embed_tokens(torch.tensor([1])), layout, row, cache.keys, cache.values)
    assert result.logits.shape == (1, 32064)
