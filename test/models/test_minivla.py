# SPDX-License-Identifier: Apache-2.0
"""MiniVLA in its native layout: against its own code's answers, in every mode, and what is refused."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import edit_json
from support.paths import ORACLES, needs

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Segment, packed_forward
from specvla_ros.engine.kv_cache import new_cache
from specvla_ros.engine.outcome import Action, Drop, DropReason
from specvla_ros.engine.settings import MODES
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.codecs.vq import VqCodec
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.minivla import MiniVLATarget
from specvla_ros.speculation.settings import DraftSettings, adjusted

ORACLE = ORACLES / "minivla_tiny_a"
pytestmark = needs(ORACLE)
Targets = dict[tuple[str, ...], MiniVLATarget]


def cases() -> list[dict[str, Any]]:
    path = ORACLE / "cases.json"
    return json.loads(path.read_text()) if path.exists() else []


@pytest.fixture(scope="module")
def targets() -> Targets:
    return {}


def target_of(case: Mapping[str, Any], loaded: Targets) -> MiniVLATarget:
    names = ("image", "wrist")[: case["image_sequence_len"]]
    if names not in loaded:
        target = load_target(ORACLE / "checkpoint", device="cpu", cameras=names)
        assert isinstance(target, MiniVLATarget)
        loaded[names] = target
    return loaded[names]


def observation(case: Mapping[str, Any], target: MiniVLATarget, stamp_ns: int = 1) -> Observation:
    pictures = [np.array(Image.open(ORACLE / name).convert("RGB")) for name in case["images"]]
    return Observation(dict(zip(target.cameras, pictures, strict=True)), case["instruction"], stamp_ns)


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["case"]))
@torch.inference_mode()
def test_prompt_pictures_and_states(case: dict[str, Any], targets: Targets) -> None:
    target, name = target_of(case, targets), f"c{case['case']:02d}_"
    seen, expected = observation(case, target), np.load(ORACLE / "expected.npz")
    layout = target.prompt_layout(seen)
    assert list(layout.ids) == case["input_ids"]
    pixels = torch.cat([target.image_processor(image) for image in seen.cameras.values()])
    np.testing.assert_allclose(pixels.flatten(), expected[f"{name}pixel_values"].flatten(), atol=1e-6)
    rows = target.prompt_embeddings(seen, layout.ids)
    np.testing.assert_allclose(rows[1 : 1 + target.image_tokens], expected[f"{name}projected_patches"], atol=1e-4)
    answer = torch.tensor(case["generated_ids"])
    inputs = torch.cat((rows, target.decoder.embed_tokens(answer[:-1])))
    cache = new_cache(target.decoder, slots=1, slot_rows=len(inputs))
    result = packed_forward(target.decoder, [Segment(0, 0, inputs, wanted=len(answer))], cache)
    np.testing.assert_allclose(result.logits, expected[f"{name}logits"], atol=1e-3)
    np.testing.assert_allclose(result.hidden[-len(answer) :], expected[f"{name}last_hidden"], atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_chunks(mode: str, targets: Targets) -> None:
    drafts = adjusted(DraftSettings(nodes=16), temporal=True, chunk_shift=True)
    engines: dict[int, Engine] = {}
    for case in cases():
        target = target_of(case, targets)
        settings = EngineSettings(mode, draft=drafts, prefill_chunks=2, in_order=True)
        engine = engines.setdefault(id(target), Engine(target, settings))
        action = engine.act(observation(case, target, stamp_ns=case["case"] + 1))
        assert isinstance(action, Action), action
        assert list(action.tokens) == case["generated_ids"]
        np.testing.assert_allclose(action.actions, case["vq_chunk_unnormalized"], atol=1e-5)
        np.testing.assert_allclose(action.values, case["action"], atol=1e-5)


def test_chunks_are_encoded_as_its_code_does(targets: Targets) -> None:
    codec = target_of(cases()[0], targets).codec
    assert isinstance(codec, VqCodec)
    every = json.loads((ORACLE / "vq_encode_cases.json").read_text())
    for case in every:
        codes = codec.vae.encode(np.array(case["action"]))
        assert [codec.stop_id - 1 - code for code in codes] == case["token_ids"]
    assert len(every) == 12


def test_what_is_no_code_is_no_action(targets: Targets) -> None:
    codec = target_of(cases()[0], targets).codec
    assert not codec.problem(cases()[0]["generated_ids"])
    for other in (5, 1649, 1778):
        assert codec.problem([*cases()[0]["generated_ids"][:6], other]) == f"token {other} is not an action token"
    with pytest.raises(UserError, match="codes of a VQ-VAE have no bins"):
        codec.spread_bins((3,), 0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("checkpoint", "llm", "vq"):
        shutil.copytree(ORACLE / name, tmp_path / name)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    return tmp_path / "checkpoint"


def refuse(directory: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        load_target(directory, device="cpu", **options)


def test_the_tokenizer_of_bins(checkpoint: Path) -> None:
    edit_json(
        checkpoint / "config.json", lambda config: config["vla"].update(action_tokenizer="extra_action_tokenizer")
    )
    codec = load_target(checkpoint, device="cpu").codec
    assert isinstance(codec, BinsCodec)
    case = cases()[0]
    normalised = codec.tokenizer.decode(case["generated_ids"])
    np.testing.assert_allclose(normalised, case["action_normalized_if_extra_action_tokenizer"], atol=1e-9)


@pytest.mark.parametrize("name", ["llm", "vq", "checkpoint/checkpoints", "checkpoint/dataset_statistics.json"])
def test_missing_parts(checkpoint: Path, name: str) -> None:
    path = checkpoint.parent / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    refuse(checkpoint, name.rpartition("/")[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_tokenizer": "action_tokenizer"}, "vla.action_tokenizer is 'action_tokenizer'; supported are"),
        ({"image_sequence_len": 3}, "image_sequence_len is 3"),
        ({"image_sequence_len": 2}, "the last 2 images of one camera, which is not supported"),
        ({"image_sequence_len": 2, "use_wrist_image": None}, "set vla.use_wrist_image to true"),
    ],
)
def test_configurations(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    edit_json(checkpoint / "config.json", lambda config: config["vla"].update(change))
    refuse(checkpoint, message)


def test_an_adapter_is_not_passed_over(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")
    refuse(
        checkpoint,
        "adapter_config.json: adapters cannot be merged into this kind of checkpoint: merge it with the code",
    )


def test_damaged_weights(checkpoint: Path) -> None:
    (path,) = (checkpoint / "checkpoints").glob("*.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refuse(checkpoint, "cannot be read as weights")
    saved = torch.load(ORACLE / "checkpoint" / "checkpoints" / path.name, weights_only=True)
    del saved["model"]["projector"]["projector.0.bias"]
    torch.save(saved, path)
    refuse(checkpoint, r"projector.fc1.bias must have shape \[448\], but there is no such tensor")
    torch.save(saved, path.with_name("step-2.pt"))
    refuse(checkpoint, "must contain one .pt file, that of the step to run; it has 2")


def test_no_tensor_is_left_out_in_silence(checkpoint: Path) -> None:
    (path,) = (checkpoint / "checkpoints").glob("*.pt")
    saved = torch.load(path, weights_only=True)
    llm = saved["model"]["llm_backbone"]
    own = llm["llm.lm_head.weight"] = llm["llm.lm_head.weight"] + 1
    torch.save(saved, path)
    refuse(checkpoint, "lm_head.weight and .*embed_tokens.weight differ, but llm/config.json says .* tied")
    edit_json(checkpoint.parent / "llm" / "config.json", lambda config: config.update(tie_word_embeddings=False))
    decoder = load_target(checkpoint, device="cpu").decoder
    assert isinstance(decoder, PackedDecoder) and torch.equal(decoder.lm_head.weight, own)
    edit_json(checkpoint.parent / "llm" / "config.json", lambda config: config.update(num_hidden_layers=2))
    refuse(checkpoint, r"contains language_model.model.layers.2.\S+, which this policy does not have, and 11 more")


class _Acts:
    def __reduce__(self) -> Any:
        return print, ("a pickle that acts",)


def test_weights_that_act(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (checkpoint / "checkpoints").glob("*.pt")
    torch.save({"model": _Acts()}, path)
    refuse(checkpoint, "cannot be read as weights")
    assert "acts" not in capsys.readouterr().out


def test_a_vq_vae_of_another_shape(checkpoint: Path) -> None:
    (folder,) = (checkpoint.parent / "vq").iterdir()
    edit_json(folder / "config.json", lambda config: config.update(input_dim_h=5))
    refuse(checkpoint, r"encoder.encoder.0.weight must have shape any x 35, as config.json says")
    shutil.copytree(folder, folder.with_name("another"))
    refuse(checkpoint, "must contain one folder, that of the policy's own VQ-VAE; it has 2")


def test_cameras_and_options(checkpoint: Path) -> None:
    refuse(checkpoint, r"model.cameras must be \[image\] or \[image, wrist\]", cameras=("wrist",))
    refuse(checkpoint, "this family of policies does not support center_crop", center_crop=True)
    target = load_target(checkpoint, device="cpu")
    assert target.cameras == ("image",) and target.codec.horizon == 8
    both = {"image_sequence_len": 2, "use_wrist_image": True}
    edit_json(checkpoint / "config.json", lambda config: config["vla"].update(both))
    assert load_target(checkpoint, device="cpu").cameras == ("image", "wrist")


@pytest.mark.parametrize(
    "ids, why",
    [((), "the prompt has no token ids"), ((5, -1), "prompt id -1 is outside"), ((1 << 20,), "prompt id 1048576 is")],
)
def test_a_prompt_of_ids_that_the_model_does_not_have(ids: tuple[int, ...], why: str, targets: Targets) -> None:
    """On a GPU such an id would make the device unusable for all further frames."""
    case = cases()[0]
    target = target_of(case, targets)
    outcome = Engine(target, EngineSettings("ar")).act(replace(observation(case, target), prompt_ids=ids))
    assert isinstance(outcome, Drop) and outcome.reason is DropReason.BAD_INSTRUCTION and why in outcome.detail
