# SPDX-License-Identifier: Apache-2.0
"""FAST: a policy that answers with it, in every mode; its tokens against the published tokenizer's own answers.

Where the published tokenizer makes an action of what is none, ours refuses.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import edit_json
from support.paths import ORACLES, needs
from support.random_fast import DIMS, HORIZON, write_fast_policy

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.lab.evaluation.replay_summary import compare
from specvla_ros.lab.training.artifacts import fit_fast_tokenizer, save_fast_tokenizer
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.codec import CODEC_FOLDER as FOLDER
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import FastTokenizer, read_fast_tokenizer
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

ORACLE = ORACLES / "fast_tokenizer_a"
FITTED = {"tok0": (10.0, 256), "tok1": (10.0, 512), "tok2": (50.0, 400), "tok3": (20.0, 300)}
NAMES = (*FITTED, "tok0_cleanup", "fast_plus")
HALF = 0xFFFD
CLEANED = ("tok0_cleanup", "fast_plus")  # the original's clean-up of spaces loses characters of theirs


def cases(kind: str) -> Iterator[tuple[str, FastTokenizer, dict[str, Any]]]:
    every = json.loads((ORACLE / "cases.json").read_text())
    for case, plain in zip(every["tok0_cleanup"][kind], every["tok0"][kind], strict=True):
        case["round_trip"] = plain.get("round_trip")  # the same characters, without the clean-up that loses some
    for case in every["fast_plus"][kind]:
        case["round_trip"] = True  # it has a symbol for every byte, and the clean-up alone loses characters
    for name in NAMES:
        tokenizer = read_fast_tokenizer(ORACLE / name)
        for case in every[name][kind]:
            yield name, tokenizer, case


def is_whole(code_points: list[int], horizon: int, dims: int) -> bool:
    return len(code_points) == horizon * dims and HALF not in code_points


@needs(ORACLE)
def test_what_the_original_encodes_without_loss_has_the_same_ids() -> None:
    same = refused = 0
    for name, tokenizer, case in cases("encode"):
        if "ids" not in case or case["dtype"] != "float64":
            continue
        actions = np.array(case["actions"])
        below = min(map(min, case["coefficients"])) < tokenizer.min_token  # it takes the lowest character for these
        if below or not case["round_trip"]:
            with pytest.raises(UserError, match="fit the tokenizer on similar actions"):
                tokenizer.encode(actions)
            refused += 1
            continue
        ids = tokenizer.encode(actions)
        if "half a step" in case["note"]:  # the last bit of the transform decides
            np.testing.assert_allclose(tokenizer.decode(ids, *actions.shape), actions, atol=1.0 / tokenizer.scale)
            continue
        assert ids == tuple(case["ids"]), (name, case["note"])
        if is_whole(case["decoded"]["code_points"], *actions.shape):
            np.testing.assert_allclose(tokenizer.decode(ids, *actions.shape), case["decoded"]["actions"], atol=1e-9)
            same += 1
    assert same > 60 and refused > 10, (same, refused)


@needs(ORACLE)
def test_what_stands_for_a_chunk_decodes_to_the_originals_actions_and_nothing_else_does() -> None:
    same = refused = 0
    for name, tokenizer, case in cases("decode"):
        shape = case["time_horizon"], case["action_dim"]
        ids, points = case["ids"], case.get("code_points") or []
        known = all(0 <= i < tokenizer.vocab_size for i in ids)
        if known and is_whole(points, *shape):
            np.testing.assert_allclose(tokenizer.decode(ids, *shape), np.array(case["actions"]), atol=1e-9)
            same += 1
        elif not known or name not in CLEANED or HALF in points:
            with pytest.raises(UserError):
                tokenizer.decode(ids, *shape)
            refused += 1
    assert same >= 12 and refused > 100, (same, refused)


@needs(ORACLE)
@pytest.mark.parametrize("name", FITTED)
def test_a_fit_gives_the_originals_tokenizer(name: str, tmp_path: Path) -> None:
    scale, vocab_size = FITTED[name]
    chunks = next(iter(np.load(ORACLE / name / "fit_actions.npz").values()))
    fitted = fit_fast_tokenizer(chunks, scale=scale, vocab_size=vocab_size)
    assert fitted.min_token == read_fast_tokenizer(ORACLE / name).min_token
    assert (
        json.loads(fitted.bpe.to_str())["model"] == json.loads((ORACLE / name / "tokenizer.json").read_text())["model"]
    )
    save_fast_tokenizer(fitted, tmp_path)
    again = read_fast_tokenizer(tmp_path)
    assert again.encode(chunks[3]) == fitted.encode(chunks[3])


# A policy


FRAMES = range(1, 61)


@pytest.fixture(scope="module")
def fast_policy(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_fast_policy(tmp_path_factory.mktemp("fast")), device="cpu")


def answers(target: Target, settings: EngineSettings) -> list[Outcome]:
    engine = Engine(target, settings)
    images = np.random.default_rng(1).integers(0, 256, (len(FRAMES), 16, 16, 3), np.uint8)
    return [engine.act(Observation(image, "lift the cube", i)) for i, image in zip(FRAMES, images, strict=True)]


def essence(outcome: Outcome) -> object:
    return outcome.tokens if isinstance(outcome, Action) else (outcome.reason, outcome.detail)


@pytest.mark.nightly
@torch.inference_mode()
def test_every_mode_gives_the_same_chunks_and_refuses_the_same_answers(fast_policy: Target) -> None:
    plain = answers(fast_policy, EngineSettings("ar"))
    codec = fast_policy.codec
    assert isinstance(codec, FastCodec)
    actions = [each for each in plain if isinstance(each, Action)]
    drops = [each for each in plain if isinstance(each, Drop)]
    assert len(actions) > 2 and {each.reason for each in drops} == {DropReason.NOT_AN_ACTION}
    assert any("FAST coefficients instead of 2 x 2" in each.detail for each in drops)
    for action in actions:
        assert action.actions.shape == (HORIZON, DIMS)
        np.testing.assert_allclose(codec.decode(codec.encode(action.actions)), action.actions, atol=1e-12)
        assert compare(codec, action, (0.5, 0.0)) == {"error": (action.values - [0.5, 0.0]).tolist()}
    drafts = adjusted(DraftSettings(), prompt_lookup_tokens=4, temporal=True)
    for mode in ("spec", "pipeline", "specpipe"):
        drafted = answers(fast_policy, EngineSettings(mode, draft=drafts, in_order=True))
        assert [*map(essence, drafted)] == [*map(essence, plain)], mode


def test_a_fast_policy_of_other_dimensions_or_asked_for_what_it_has_not_is_refused(tmp_path: Path) -> None:
    directory = write_fast_policy(tmp_path)
    with pytest.raises(UserError, match=r"unset model\.action_head"):
        load_target(directory, device="cpu", action_head=True)
    target = load_target(directory, device="cpu")
    with pytest.raises(UserError, match=r"2 dimensions without units: set acceptance\.bins instead"):
        Engine(target, EngineSettings("spec", acceptance=AcceptanceSettings("bin_distance", tolerance_m=0.01)))
    with pytest.raises(UserError, match=r"leave decode\.max_reasoning_tokens at 0"):
        Engine(target, EngineSettings(max_reasoning_tokens=8))
    edit_json(directory / FOLDER / "processor_config.json", lambda config: config.update(action_dim=7))
    with pytest.raises(UserError, match="fitted for 7 dimensions, but the action statistics have 2"):
        load_target(directory, device="cpu")
    (directory / FOLDER / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"action_tokenizer/tokenizer\.json is missing"):
        load_target(directory, device="cpu")


def test_a_fit_without_actions_or_with_too_few_ids_says_so() -> None:
    with pytest.raises(UserError, match="no chunks of actions to fit a FAST tokenizer on"):
        fit_fast_tokenizer([])
    with pytest.raises(UserError, match="use a larger vocab_size or a smaller scale"):
        fit_fast_tokenizer([np.array([[-9.0], [9.0]])], scale=100.0, vocab_size=256)
