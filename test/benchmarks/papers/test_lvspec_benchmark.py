# SPDX-License-Identifier: Apache-2.0
"""LVSpec's benchmark on a few frames of the nano policy, without its episodes; and the lot that is its baseline."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from support.verifications import TreeCase, make_tree, verify_tree
from typer.testing import CliRunner

from benchmarks.papers.lvspec_baselines import RandomRelaxation
from benchmarks.results_page import section
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.compare import Setting, SweepRow
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.evaluation.simulate import SimulateSettings, policy_of
from specvla_ros.lab.evaluation.simulate_summary import summarise_episodes
from specvla_ros.lab.simulation.rollout import EpisodeResult
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.accept import AcceptReason, Verification
from specvla_ros.speculation.settings import RULES

FRAMES = [
    Observation(
        np.random.default_rng(seed).integers(0, 256, (224, 224, 3), dtype=np.uint8),
        TASKS[seed % len(TASKS)].instruction,
        stamp_ns=1,
    )
    for seed in (
        1,
        21,
        47,
    )  # on which drafts are wrong, and loosened and shifted ones accepted; other weights, other seeds
]
SMALLER = "4-layer draft model"  # which is the policy itself
LOSSLESS = ("naive SD", "SpecVLM", "SpecVLM, tokens by similarity", "lambda 0", f"naive SD, {SMALLER}")


@pytest.fixture
def lvspec(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, whose rule is registered for the length of a test."""
    monkeypatch.setattr(RULES, "_entries", dict(RULES.entries()))
    yield importlib.import_module("benchmarks.papers.lvspec")
    sys.modules.pop("benchmarks.papers.lvspec", None)


def few_frames(tokens: dict[str, list[tuple[int, ...]]]) -> Any:
    """In place of a sweep's episodes: each setting answers the frames; what it answers is added to `tokens`."""

    def sweep(base: SimulateSettings, settings: Sequence[Setting], *_: object) -> list[SweepRow]:
        policy, rows = policy_of(base), []
        for setting in settings:
            tally, engine = DecodeTally(), Engine(policy, setting.engine)
            for stamp, frame in enumerate(FRAMES, start=1):
                action = engine.act(replace(frame, stamp_ns=stamp))
                assert isinstance(action, Action), action
                tally.add(action.record)
                tokens.setdefault(setting.name, []).append(action.tokens)
            episode = EpisodeResult("lift red", 0, "lift the red cube", True, 2, 0.4, decode=tally.as_json())
            pairs = PairedComparison.from_pairs([(True, True)])
            rows.append(SweepRow(setting, summarise_episodes([episode], context={}), pairs, 0.01, 1.0))
        return rows

    return sweep


@pytest.mark.nightly
def test_every_setting_decodes_and_is_shown(
    lvspec: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Path(shutil.copytree(nano_policy(), tmp_path / "text-policy"))
    card = dict(command="none", longest_answer=7, held_out_token_accuracy=0.9)
    (policy / "card.json").write_text(json.dumps(card))
    tokens: dict[str, list[tuple[int, ...]]] = {}
    monkeypatch.setattr(lvspec, "sweep", few_frames(tokens))
    monkeypatch.setattr(lvspec, "simulation_source", lambda *_, **__: iter(FRAMES))
    app = typer.Typer(add_completion=False)
    app.command()(lvspec.main)
    out = tmp_path / "lvspec.json"
    arguments = ["--text-policy", str(policy), "--draft-policies", str(policy), "--out", str(out)]
    done = CliRunner().invoke(app, arguments, prog_name="python -m benchmarks.papers.lvspec", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert {name for names in result["tables"].values() for name in names} == set(rows) == set(tokens)
    assert all(tokens[name] == tokens["plain"] for name in LOSSLESS)
    assert all(rows[name]["agreement"] == 1 for name in ("plain", *LOSSLESS))
    for name in ("naive SD", f"naive SD, {SMALLER}"):
        assert rows[name]["forwards_per_action"] == 2, "the prompt's, and one that accepts everything"
    assert rows["by embeddings, without shift"]["why"]["irrelevant"]
    assert "shifted" not in rows["by embeddings, without shift"]["why"]
    assert {"irrelevant", "shifted"} <= rows["LVSpec"]["why"].keys() and "shifted" not in rows["N 1"]["why"]
    assert rows["random relaxation, 0.7"]["why"]["irrelevant"] and rows["FLy without window"]["why"]["deferred"]
    assert rows["K 2"]["forwards_per_action"] > rows["LVSpec"]["forwards_per_action"]
    shares = [row["rule_share_of_tick"] for name, row in rows.items() if name != "plain"]
    assert all(0 < share < 1 for share in shares) and rows["plain"]["rule_share_of_tick"] is None
    page = section(result)
    assert all(f"| {name} |" in page for name in rows) and all(f"### {title}" in page for title in result["tables"])


def random_chain(seed: int, vocab: int = 50) -> TreeCase:
    """A long chain, none of whose tokens is the target's choice."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(64, vocab, generator=generator)
    choices = logits.argmax(dim=-1)
    wrong = (choices + torch.randint(1, vocab, (64,), generator=generator)) % vocab
    return verify_tree(
        make_tree([0, *wrong[:-1].tolist()], list(range(-1, 63))), logits, actions=ActionIds(1000, 1001, 1)
    )


def chances(rule: RandomRelaxation, verification: Verification) -> list[bool]:
    accepted: list[bool] = rule.accept(verification).mask[0, 0, 1:].tolist()
    return accepted


@pytest.mark.parametrize("share", [0.0, 0.25, 0.7, 1.0])
def test_mismatches_are_accepted_at_their_rate(share: float) -> None:
    found = [chances(RandomRelaxation(share), random_chain(seed).verification()) for seed in range(100)]
    places = np.array(found)  # [100, 63]
    assert abs(places.mean() - share) < 0.025
    together = (places[:, 1:] & places[:, :-1]).mean()
    assert abs(together - share**2) < 0.03, "neighbours are drawn apart"


def test_a_lot_is_the_same_again_and_another_with_another_seed_or_token() -> None:
    verification = random_chain(0).verification()
    first, again, other = (chances(RandomRelaxation(0.5, seed), verification) for seed in (1, 1, 2))
    assert again == first
    assert 10 < sum(one != two for one, two in zip(first, other, strict=True)) < 53


def test_what_the_target_chose_is_no_lot() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 7]), 9).float()
    case = verify_tree(make_tree([0, 5, 6], [-1, 0, 1]), logits, actions=ActionIds(1000, 1001, 1))
    accepted = RandomRelaxation(0.0).accept(case.verification())
    assert accepted.mask[0, 0, 1:].all() and accepted.reasons[0, 1:].eq(AcceptReason.EXACT).all()
