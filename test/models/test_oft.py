# SPDX-License-Identifier: Apache-2.0
"""OpenVLA-OFT: against its own code's answers, from the picture to the chunk, and what is refused."""

import json
import shutil
import sys
from collections.abc import Mapping
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
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.families.openvla.oft import OFTTarget, ProprioProjector
from specvla_ros.speculation.settings import DraftSettings, adjusted

ORACLE = ORACLES / "oft_tiny_a"
pytestmark = needs(ORACLE)
NAMES = ("image", "wrist", "wrist_2")
Targets = dict[tuple[Any, ...], OFTTarget]


def cases() -> list[dict[str, Any]]:
    """Those with a head: an OFT checkpoint without head and projector cannot be told from OpenVLA's."""
    path = ORACLE / "cases.json"
    return [case for case in json.loads(path.read_text()) if case["head"] == "l1"] if path.exists() else []


def without(name: str, into: Path) -> Path:
    """The checkpoint without some of its files."""
    shutil.copytree(ORACLE / "checkpoint", into)
    for path in (into, *into.iterdir()):
        path.chmod(0o755)
    for path in into.glob(name):
        path.unlink()
    return into


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy that does not read the robot's state."""
    return without("proprio_projector*", tmp_path_factory.mktemp("oft") / "plain")


@pytest.fixture(scope="module")
def targets() -> Targets:
    return {}


def target_of(case: Mapping[str, Any], loaded: Targets, plain: Path, *, crop: bool = False) -> OFTTarget:
    key = case["num_images"], case["use_proprio"], crop
    if key not in loaded:
        directory = ORACLE / "checkpoint" if case["use_proprio"] else plain
        target = load_target(directory, device="cpu", cameras=NAMES[: case["num_images"]], center_crop=crop)
        assert isinstance(target, OFTTarget)
        loaded[key] = target
    return loaded[key]


def asked(case: Mapping[str, Any], images: list[np.ndarray], stamp_ns: int = 1) -> Observation:
    state = np.array(case["state_raw"]) if case["use_proprio"] else None
    named = dict(zip(NAMES, images, strict=False))
    return Observation(named, "", stamp_ns, prompt_ids=tuple(case["input_ids_given"]), state=state)


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["case"]))
@torch.inference_mode()
def test_prepared_pictures_to_chunks(case: dict[str, Any], targets: Targets, plain: Path) -> None:
    target, name = target_of(case, targets, plain), f"c{case['case']:02d}_"
    expected = np.load(ORACLE / "expected.npz")
    seen = asked(case, list(expected[f"{name}prepared_images"]))
    layout = target.prompt_layout(seen)
    assert list(layout.ids) == case["input_ids"] and layout.rows == case["sequence_length"]
    pixels = torch.cat([target.image_processor(image) for image in seen.cameras.values()])
    np.testing.assert_allclose(pixels, expected[f"{name}pixel_values"], atol=1e-6)
    rows = target.prompt_embeddings(seen, layout.ids)
    patches = expected[f"{name}projected_patches"]
    np.testing.assert_allclose(rows[1 : 1 + len(patches)], patches, atol=1e-4)
    if target.proprio is not None:
        assert seen.state is not None
        np.testing.assert_allclose(target.proprio.normalised(seen.state), case["state_normalized"], atol=1e-6)
        at = 1 + len(target.cameras) * target.model.config.image_tokens
        np.testing.assert_allclose(rows[at], expected[f"{name}proprio_token"].reshape(-1), atol=1e-5)
    cache = new_cache(target.decoder, slots=1, slot_rows=len(rows))
    hidden = packed_forward(target.decoder, [Segment(0, 0, rows, sees_all=True)], cache).hidden
    first = case["first_hidden_row"]
    np.testing.assert_allclose(hidden[first : first + 56], expected[f"{name}hidden"], atol=1e-4)
    normalised = target.head_module.normalised(hidden[first : first + 56])
    np.testing.assert_allclose(normalised, case["actions_normalized"], atol=1e-4)
    np.testing.assert_allclose(target.head(hidden), case["actions"], atol=1e-4)


def test_a_state_is_clipped_as_its_own_code_does_also_where_it_is_not_scaled() -> None:
    """As `normalize_proprio` of openvla-oft's experiments."""
    bounds = ActionStatistics("own", np.array([0.0, 0.0, 0.0]), np.full(3, 0.5), np.array([True, True, False]))
    found = ProprioProjector(bounds, hidden=4).normalised(np.array([0.25, 0.9, 3.0]))
    np.testing.assert_allclose(found, [0.0, 1.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("mode", ["ar", "pipeline"])
def test_the_engine_gives_its_chunks(mode: str, targets: Targets, plain: Path) -> None:
    engines: dict[int, Engine] = {}
    expected = np.load(ORACLE / "expected.npz")
    for case in cases():
        target = target_of(case, targets, plain)
        if id(target) not in engines:
            engines[id(target)] = Engine(target, EngineSettings(mode))
            engines[id(target)].warm_up()
        engine = engines[id(target)]
        images = list(expected[f"c{case['case']:02d}_prepared_images"])
        action = engine.act(asked(case, images, stamp_ns=case["case"] + 1))
        assert isinstance(action, Action), action
        np.testing.assert_allclose(action.actions, case["actions"], atol=1e-4)
        assert action.tokens == () and action.record.forwards == 1


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["case"]))
def test_pictures_are_prepared_as_the_original_does(case: dict[str, Any], targets: Targets, plain: Path) -> None:
    """To the shade, but for few that the Lanczos filter or the crop rounds otherwise."""
    target = target_of(case, targets, plain, crop=case["center_crop"])
    prepared = np.load(ORACLE / "expected.npz")[f"c{case['case']:02d}_prepared_images"]
    for name, theirs in zip(case["images"], prepared, strict=True):
        image = np.array(Image.open(ORACLE / name).convert("RGB"))
        off = np.abs(target.picture(image).astype(int) - theirs.astype(int))
        untouched = image.shape[:2] == (224, 224) and not case["center_crop"]
        assert off.max() <= (0 if untouched else 1) and off.mean() < 0.001


@torch.inference_mode()
def test_pictures_of_any_size_to_chunks(targets: Targets, plain: Path) -> None:
    for case in cases():
        target = target_of(case, targets, plain, crop=case["center_crop"])
        images = [np.array(Image.open(ORACLE / name).convert("RGB")) for name in case["images"]]
        engine = Engine(target, EngineSettings())
        engine.warm_up()
        action = engine.act(asked(case, images))
        assert isinstance(action, Action) and action.record.mode == "auto"
        np.testing.assert_allclose(action.actions, case["actions"], atol=1e-3)


def test_without_the_decoder_of_its_pictures_it_is_refused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(UserError, match=r"'simplejpeg' is missing; .*requirements/robot-oft\.txt.*specvla_ros\[oft\]"):
        load_target(plain, device="cpu", cameras=("image",))


def test_it_is_not_cut_and_nothing_can_draft(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = load_target(plain, device="cpu", cameras=("image",))
    assert "has no proprio_projector--*.pt: the policy reads no state of the robot" in caplog.text
    with pytest.raises(UserError, match="this policy's prompt attends bidirectionally"):
        Engine(target, EngineSettings("pipeline", prefill_chunks=2))
    with pytest.raises(UserError, match=r"draft\.self_tokens omits image rows"):
        Engine(target, EngineSettings("spec", draft=adjusted(DraftSettings(), self_tokens=3)))
    with pytest.raises(UserError, match=r"draft\.chunk_shift drafts tokens, .* a head: set it to false"):
        Engine(target, EngineSettings("auto", draft=adjusted(DraftSettings(), chunk_shift=True)))
    with pytest.raises(UserError, match="come from a head, not from tokens"):
        target.codec.decode(())


def test_a_head_that_gives_no_numbers(plain: Path) -> None:
    target = load_target(plain, device="cpu", cameras=("image",))
    assert isinstance(target, OFTTarget)
    target.head_module.fc_out.bias.fill_(float("nan"))
    image = np.zeros((224, 224, 3), np.uint8)
    outcome = Engine(target, EngineSettings("ar")).act(Observation(image, "", 1, prompt_ids=(1, 5)))
    assert isinstance(outcome, Drop) and outcome.reason is DropReason.NOT_FINITE


@pytest.mark.parametrize("state", [None, np.zeros(7), np.full(8, np.nan)])
def test_states(state: np.ndarray | None) -> None:
    target = load_target(ORACLE / "checkpoint", device="cpu", cameras=("image",))
    image = np.zeros((224, 224, 3), np.uint8)
    with pytest.raises(UserError, match="reads the robot's state, 8 finite numbers"):
        target.prompt_layout(Observation(image, "", 1, prompt_ids=(1, 5), state=state))


def refuse(directory: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        load_target(directory, device="cpu", **options)


def test_what_is_refused(tmp_path: Path) -> None:
    directory = without("none", tmp_path / "checkpoint")
    refuse(directory, "model.cameras must begin with image, wrist, wrist_2", cameras=("wrist",))
    statistics = json.loads((directory / "dataset_statistics.json").read_text())
    (directory / "dataset_statistics.json").write_text(json.dumps({"kitchen": statistics["libero_goal_no_noops"]}))
    refuse(
        directory,
        "dataset 'kitchen', but the number of actions per chunk is known only for datasets with libero, aloha",
    )
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    edit_json(directory / "dataset_statistics.json", lambda given: given["libero_goal_no_noops"].pop("proprio"))
    refuse(directory, "needs q01 and q99 of proprio")
    (directory / "dataset_statistics.json").write_text(json.dumps(statistics))
    head = next(directory.glob("action_head--*"))
    shutil.copy(head, directory / "action_head--7_checkpoint.pt")
    refuse(directory, "contains 2 files")
    head.rename(tmp_path / head.name)
    refuse(directory, r"action_head--7_checkpoint.pt and proprio_projector--\d+_checkpoint.pt are of different steps")
    (tmp_path / head.name).rename(head)
    (directory / "action_head--7_checkpoint.pt").unlink()
    saved = torch.load(head, weights_only=True)
    torch.save({name: each for name, each in saved.items() if "fc2" not in name}, head)
    refuse(directory, r"model.fc2.weight must have shape \[7, 48\], .* there is no such tensor")
    torch.save({"module.model.trunk": torch.zeros(1)}, head)
    refuse(directory, "contains no L1 head")
    (directory / "vision_backbone--1.pt").touch()
    refuse(directory, "with FiLM, which is not supported")


def test_half_a_checkpoint_is_not_taken_for_plain_openvla(tmp_path: Path) -> None:
    directory = without("action_head--*", tmp_path / "checkpoint")
    for action_head in (False, True):
        refuse(directory, r"is an incomplete OpenVLA-OFT checkpoint: .* no action_head--\*.pt", action_head=action_head)


@torch.inference_mode()
def test_a_vision_that_overwrites_what_it_gave_gives_the_same_prompt(targets: Targets, plain: Path) -> None:
    """As a captured one does."""
    case = next(each for each in cases() if each["num_images"] > 1)
    target, held = target_of(case, targets, plain), torch.empty(0)

    def overwriting(pixels: torch.Tensor) -> torch.Tensor:
        nonlocal held
        found = target.model.image_embeddings(pixels)
        held = held.copy_(found) if held.shape == found.shape else found.clone()
        return held

    images = [np.full((48, 64, 3), 60 * i, np.uint8) for i in range(case["num_images"])]
    observation = asked(case, images)
    layout = target.prompt_layout(observation)
    expected = target.prompt_embeddings(observation, layout.ids)
    assert target.prompt_embeddings(observation, layout.ids, overwriting).equal(expected)
