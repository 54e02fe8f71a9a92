# SPDX-License-Identifier: Apache-2.0
"""NORA and VLA-0 against answers of their own code: from the raw picture to the action, in every decoding mode.

Where the original makes an action of an answer that is none, ours drops it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import MODES
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.qwen_vl.target import QwenVLTarget
from specvla_ros.models.families.qwen_vl.vla0 import vla0
from specvla_ros.speculation.settings import DraftSettings, adjusted

NORA, VLA0 = ORACLES / "nora_tiny_a", ORACLES / "vla0_tiny_a"
SETS = {"nora": NORA, "vla0": VLA0}
CONFIG = """
MODEL:
  QWEN: {{horizon: {horizon}, num_cam: {num_cam}, rgb_img_size: '{height},{width}', tiled_rgb_imgs: {tiled_rgb_imgs},
         add_vision_id: {add_vision_id}, num_bins_actions: {num_bins_actions}, history: {history}}}
DATALOADER:
  ROBOVERSE: {{cfg_opts: 'IMAGE.crop_img:{crop}'}}
"""


def cases(kind: str) -> list[dict[str, Any]]:
    path = SETS[kind] / "cases.json"
    return json.loads(path.read_text()) if path.exists() else []


def expected(kind: str, case: Mapping[str, Any], name: str) -> np.ndarray:
    return np.load(SETS[kind] / "expected.npz")[f"case{case['case']}_{name}"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QwenVLTarget]:
    return {}


def target_of(kind: str, case: Mapping[str, Any], loaded: dict[str, QwenVLTarget], folder: Path) -> QwenVLTarget:
    """NORA with the case's statistics; VLA-0 with the case's configuration, written as its own."""
    key = case.get("unnorm_key") or json.dumps(case["policy"])
    if key in loaded:
        return loaded[key]
    directory = SETS[kind] / "checkpoint"
    if kind == "vla0":
        directory = folder / "model_last"
        directory.mkdir()
        for path in (VLA0 / "checkpoint").iterdir():
            (directory / path.name).symlink_to(path)
        height, width = case["policy"]["rgb_img_size"]
        values = case["policy"] | {"height": height, "width": width, "crop": case["crop_img"]}
        (folder / "config.yaml").write_text(CONFIG.format(**values))
    target = load_target(directory, device="cpu", unnorm_key=case.get("unnorm_key", ""))
    assert isinstance(target, QwenVLTarget)
    return loaded.setdefault(key, target)


def observation(kind: str, case: Mapping[str, Any], target: QwenVLTarget, stamp_ns: int = 1) -> Observation:
    names = case.get("images") or [case["image"]]
    images = [np.array(Image.open(SETS[kind] / name).convert("RGB")) for name in names]
    return Observation(dict(zip(target.cameras, images, strict=True)), case["instruction"], stamp_ns)


def asked(case: Mapping[str, Any]) -> bool:
    """An instruction that ours refuses: empty, or one that would rewrite the prompt."""
    return bool(case["instruction"].strip()) and "<|" not in case["instruction"]


EVERY = [pytest.param(kind, case, id=f"{kind}-{case['case']}") for kind in SETS for case in cases(kind)]


@pytest.mark.parametrize(("kind", "case"), EVERY)
@torch.inference_mode()
def test_pictures_prompt_and_states(
    kind: str, case: dict[str, Any], targets: dict[str, QwenVLTarget], tmp_path: Path
) -> None:
    target = target_of(kind, case, targets, tmp_path)
    seen = observation(kind, case, target)
    if not asked(case):
        with pytest.raises(UserError, match="instruction"):
            target.prompt_layout(seen)
        return
    layout = target.prompt_layout(seen)
    assert [i for i in layout.ids if i != target.image_id] == [i for i in case["input_ids"] if i != target.image_id]
    assert layout.positions is not None
    assert np.array_equal(layout.positions, expected(kind, case, "position_ids"))
    delta = int(layout.positions.max()) + 1 - layout.rows
    assert delta == case["position_ids"]["rope_delta"]

    # LIBERO's route computes with fractions and cuts them off, ours as its server for robots does.
    shades = 1 if case.get("preprocessing") == "libero" or case.get("img_size") == 200 else 0
    pictures = target.policy.pictures(seen.cameras)
    shown = case.get("model_input_images") or [case["model_input_image"]]
    for ours, name in zip(pictures, shown, strict=True):
        theirs = np.array(Image.open(SETS[kind] / name))
        if ours.shape == theirs.shape:  # those of 200 pixels are resized once more after this
            assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= shades
    if shades:
        return
    patches = target.processor.patches(pictures)
    given = expected(kind, case, "pixel_values")
    rows = patches if len(given) == len(patches) else patches[::37]
    np.testing.assert_allclose(rows, given, atol=1e-5)
    embedded = target.prompt_embeddings(seen, layout.ids)
    np.testing.assert_allclose(embedded, expected(kind, case, "prompt_embeds"), atol=1e-3)

    answer = torch.tensor(case["generated_ids"])
    inputs = torch.cat((embedded, target.decoder.embed_tokens(answer[:-1])))
    behind = layout.tree_root_positions(layout.rows, len(answer) - 1)
    assert behind is not None
    positions = np.concatenate((layout.positions, behind + np.arange(len(answer) - 1)), axis=1)
    cache = new_cache(target.decoder, slots=1, slot_rows=len(inputs))
    result = packed_forward(target.decoder, [Segment(0, 0, inputs, wanted=len(answer), positions=positions)], cache)
    at = expected(kind, case, "hidden_positions")
    np.testing.assert_allclose(result.hidden[at], expected(kind, case, "last_hidden"), atol=1e-3)
    if kind == "nora":
        np.testing.assert_allclose(result.logits, expected(kind, case, "logits"), atol=1e-3)
    else:
        logits = result.logits[:, case["allowed_token_ids"]]
        np.testing.assert_allclose(logits, expected(kind, case, "logits_allowed"), atol=1e-3)


def long_or_not(kind: str, mode: str) -> Any:
    """By day the shorter answers, in the mode that does all that the others do."""
    marks = pytest.mark.nightly if (kind, mode) != ("nora", "specpipe") else ()
    return pytest.param(kind, mode, marks=marks)


@pytest.mark.parametrize(("kind", "mode"), [long_or_not(kind, mode) for kind in SETS for mode in MODES])
def test_tokens_and_actions(kind: str, mode: str, targets: dict[str, QwenVLTarget], tmp_path: Path) -> None:
    if not cases(kind):
        pytest.skip(f"reference data {SETS[kind]} is not here")
    drafts = adjusted(DraftSettings(nodes=16), temporal=True, prompt_lookup_tokens=6)
    settings = EngineSettings(mode, draft=drafts, prefill_chunks=2, in_order=True)
    engines: dict[int, Engine] = {}
    acted = dropped = 0
    for case in cases(kind):
        (folder := tmp_path / str(case["case"])).mkdir()
        if not asked(case) or case["near_tie"] or case.get("img_size") == 200:
            continue
        target = target_of(kind, case, targets, folder)
        engine = engines.setdefault(id(target), Engine(target, settings))
        outcome = engine.act(observation(kind, case, target, stamp_ns=case["case"] + 1))
        if case["legal"]:
            assert isinstance(outcome, Action), outcome
            assert list(outcome.tokens) == case["generated_ids"][:-1]
            actions = case["actions"] if kind == "vla0" else case["action"]
            np.testing.assert_allclose(outcome.actions, actions, atol=1e-6 if kind == "vla0" else 1e-9)
            acted += 1
        else:
            assert isinstance(outcome, Drop) and outcome.reason is DropReason.NOT_AN_ACTION
            dropped += 1
    assert (acted, dropped) == {"nora": (11, 6), "vla0": (10, 5)}[kind]


@needs(VLA0)
def test_vla0_texts_that_its_code_reads_one_way_or_another(targets: dict[str, QwenVLTarget], tmp_path: Path) -> None:
    """A whole chunk of numbers in range means the same here; all else is refused."""
    target = target_of("vla0", cases("vla0")[0], targets, tmp_path)
    every = json.loads((VLA0 / "text_cases.json").read_text())
    codec = target.codec
    taken = 0
    for case in every["text_to_actions"]:
        # Its vocabulary may join other letters; digits and spaces are tokens of their own.
        ids = [i for letter in case["text"] for i in target.tokenizer.encode(letter).ids]
        words = case["text"].split(" ")
        whole = len(words) == 56 and all(word.isascii() and word.isdigit() for word in words)
        whole = whole and all(word == str(int(word)) and int(word) <= 1000 for word in words)
        problem = codec.problem([*ids, min(codec.end_ids)])  # type: ignore[attr-defined]
        assert whole == (not problem), (case["text"][:40], problem)
        if whole:
            np.testing.assert_allclose(codec.decode(ids), case["actions"], atol=1e-6)
            taken += 1
    assert taken >= 3
    for case in every["actions_to_text"]:
        assert target.tokenizer.decode(list(codec.encode(np.array(case["actions"])))) == case["text"]


def test_a_checkpoint_without_statistics_is_not_vla0s(tmp_path: Path) -> None:
    from types import SimpleNamespace

    assert vla0(SimpleNamespace(directory=tmp_path / "model_last")) is None  # type: ignore[arg-type]
