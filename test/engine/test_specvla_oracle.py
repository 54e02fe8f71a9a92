# SPDX-License-Identifier: Apache-2.0
"""Whole answers recorded from the published SpecVLA code, with its draft positions corrected."""

import json
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.checkpoints import load_openvla
from support.paths import ORACLES, needs

from specvla_kernels.accept_tree import NO_NODE
from specvla_ros.engine import verifier
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.accept import NOT_A_NUMBER, AcceptanceRule, Verification
from specvla_ros.speculation.settings import AcceptanceSettings

DATA, TARGET = ORACLES / "specvla_e2e", ORACLES / "openvla_tiny_b"
pytestmark = needs(DATA)
RADII = [None, 0, 1, 5, 9, 15, 40]


def runs(r: int | None) -> list[dict]:
    recorded = json.loads((DATA / "runs.json").read_text())
    return [run for run in recorded if run["r"] == r and run["positions"].startswith("fixed")]


@lru_cache(maxsize=8)
def policy_of(unnorm_key: str) -> OpenVLATarget:
    return load_openvla(TARGET / "checkpoint", device="cpu", unnorm_key=unnorm_key)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head")
    shutil.copy(DATA / "draft_head.safetensors", directory / "model.safetensors")
    shutil.copy(DATA / "draft_config.json", directory / "config.json")
    return directory


def decode(run: dict, head: Path) -> tuple[int, ...]:
    case = json.loads((TARGET / "cases.json").read_text())[run["case"]]
    image = np.asarray(Image.open(TARGET / case["image"]).convert("RGB"))
    bins = (run["r"] or 0,) * 7
    rule = "strict" if run["r"] is None else "bin_distance"
    published = engine_settings_from(mode="spec", preset="spec-vla-paper", draft_head=str(head))
    settings = replace(published, acceptance=AcceptanceSettings(rule, bins=bins))
    action = Engine(policy_of(case["unnorm_key"]), settings).act(
        Observation(image, "", stamp_ns=1, prompt_ids=tuple(case["input_ids_given"]))
    )
    assert isinstance(action, Action), action
    return action.tokens


@pytest.mark.parametrize("r", [None, 0])
def test_strict_answers_are_the_plain_decoders(r: int | None, head: Path) -> None:
    for run in runs(r):
        assert list(decode(run, head)) == run["raw_tokens"][:7] == run["ar_tokens"]


def accept_as_published(rule: AcceptanceRule, verification: Verification) -> torch.Tensor:
    """The published code's choice: the first of the longest paths, leaves in the order of their nodes, raw ids."""
    trees, r = verification.trees, getattr(rule, "bins", (0,))[0]
    (parents,), (tokens,), (choices,) = (x.tolist() for x in (trees.parents, trees.tokens, trees.choices))
    best = [0]
    for leaf in range(len(tokens)):
        if leaf in parents:
            continue
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        good = [0]
        for node in path[1:]:
            if abs(tokens[node] - choices[good[-1]]) > r:
                break
            good.append(node)
        if len(good) > len(best):
            best = good
    width = verification.max_depth + 1
    committed = [*(tokens[node] for node in best[1:]), choices[best[-1]]]

    def padded(values: list[int], filling: int) -> list[int]:
        return [*values, *[filling] * (width - len(values))]

    nothing = padded([], 0)
    return torch.tensor([[*padded(best, NO_NODE), *padded(committed, NOT_A_NUMBER), *nothing, *nothing, len(best)]])


@pytest.mark.parametrize("r", RADII)
def test_with_the_published_choice_of_path_the_answers_are_the_recorded_ones(
    r: int | None, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "_within", lambda rule: None)  # every rule takes the general way
    monkeypatch.setattr(verifier, "accept", accept_as_published)
    # The published code drafts to its full depth, whatever is still missing of the answer.
    monkeypatch.setattr(BinsCodec, "remaining", lambda *_: 6)
    assert len(runs(r)) == 8
    for run in runs(r):
        assert list(decode(run, head)) == run["raw_tokens"][:7]
