# SPDX-License-Identifier: Apache-2.0
"""Certificates: what strict settings leave as it is, what relaxed ones change, and what is found in a check."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import bags
from support.checkpoints import load_openvla, write_checkpoint
from support.draft_heads import policy_with_random_head, write_random_head
from support.nightly import nightly_but
from typer.testing import CliRunner

from specvla_ros import Engine, EngineSettings, UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation import certificate
from specvla_ros.lab.evaluation.certificate import certify, differences, read_certificate, settings_of
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings, adjusted

FRAMES = 4
DRAFTS = adjusted(DraftSettings(nodes=8), temporal=True)
RELAXED = AcceptanceSettings("bin_distance", bins=(254,))
ALONE = TopicChoice()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=4)
    write_random_head(directory / "draft", load_openvla(directory, device="cpu").decoder)
    return directory


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> OpenVLATarget:
    return load_openvla(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bags")
    words = ("put carrot on plate", "flip the pot")
    return [bags.write_bag(folder / f"bag_{i}", bags.episode(FRAMES, instruction=text)) for i, text in enumerate(words)]


@pytest.mark.parametrize("mode", nightly_but(lambda mode: mode == "specpipe", ["ar", "spec", "pipeline", "specpipe"]))
def test_strict_settings_change_nothing(policy: OpenVLATarget, recorded: list[Path], mode: str) -> None:
    settings = EngineSettings(mode, draft=DRAFTS)
    found = certify(policy, settings, recorded, ALONE)
    result = found.content["result"]
    assert not found.failures and found.content["strict"]
    assert (result["frames"], result["actions"], result["tokens"]) == (2 * FRAMES, 2 * FRAMES, 14 * FRAMES)
    assert result["differing"] == 0 and result["deviation"]["largest_mm"] == 0
    assert result["closest"] > 0 and found.content["ties_looked_at"]
    assert settings_of(found) == settings
    assert found.content["bags"]["bag_0"]["digest"] != found.content["bags"]["bag_1"]["digest"]


def test_a_bag_has_its_name_also_where_it_is_given_as_the_current_directory(
    policy: OpenVLATarget, recorded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded[0])
    here = certify(policy, EngineSettings("ar"), [Path()], ALONE)
    assert [*here.content["bags"]] == ["bag_0"]
    assert differences(here, certify(policy, EngineSettings("ar"), recorded[:1], ALONE)) == ()


def test_what_of_a_bag_was_not_compared_is_said(policy: OpenVLATarget, recorded: list[Path], tmp_path: Path) -> None:
    cut = Path(shutil.copytree(recorded[0], tmp_path / "cut"))
    (file,) = cut.glob("*.mcap")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    found = certify(policy, EngineSettings("ar"), [cut, recorded[1]], ALONE)
    assert 0 < found.content["bags"]["cut"]["frames"] < FRAMES and not found.failures
    (lost,) = found.content["not_compared"].items()
    assert lost[0] == "cut" and "is cut off at byte" in lost[1]
    found.write(tmp_path / "certificate.json")
    assert "Not compared: cut: " in (tmp_path / "certificate.html").read_text()
    assert differences(read_certificate(tmp_path / "certificate.json"), found) == ()


def test_the_two_largest_logits_are_the_plain_decoders(policy: OpenVLATarget, recorded: list[Path]) -> None:
    """By its own forwards, one token at a time."""
    (closest,) = (certify(policy, EngineSettings("ar"), recorded[:1], ALONE).content["result"]["closest"],)
    margins = []
    engine = Engine(policy, EngineSettings("ar"))
    run = engine.runner.run

    def watched(batch: Any, along: Any) -> Any:
        result = run(batch, along)
        if len(result.logits):
            largest = result.logits.topk(2, dim=1).values
            margins.append(float((largest[:, 0] - largest[:, 1]).min()))
        return result

    engine.runner.run = watched  # type: ignore[assignment, method-assign]
    for frame in certificate.frames_in(policy, recorded[:1], ALONE):
        engine.act(frame)
    assert closest == pytest.approx(min(margins), abs=1e-5)


def test_margins_of_several_positions_per_row_are_those_of_each_prefix(tmp_path: Path) -> None:
    """M-RoPE: an answer's rows follow the largest position of the image, not the number of rows."""
    pytest.importorskip("transformers")
    from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, write_qwen_vl

    directory = add_nora(write_qwen_vl(tmp_path / "nora", SHAPES[0], seed=0, actions=FAST_IDS, penalty=1.0))
    target = load_target(directory, device="cpu")
    seen = Observation(np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8), "put it away", 1)
    tokens = [7, 11, 5, 9]
    whole = certificate._margins(target, seen, tokens)
    prefixes = [certificate._margins(target, seen, tokens[: n + 1])[-1] for n in range(len(tokens))]
    assert len(whole) == len(tokens) and whole == pytest.approx(prefixes, abs=1e-4)


def test_relaxed_settings_say_how_far(policy: OpenVLATarget, recorded: list[Path]) -> None:
    found = certify(policy, EngineSettings("spec", draft=DRAFTS, acceptance=RELAXED), recorded, ALONE)
    result = found.content["result"]
    assert not found.content["strict"] and not found.failures, "a relaxed setting may differ"
    assert result["differing"] == len(result["differences"]) > 0 and result["ties"] == 0
    assert result["deviation"]["largest_mm"] >= result["deviation"]["p95_mm"] > 0


def test_a_setting_made_bad_on_purpose_is_found(
    policy: OpenVLATarget, recorded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that relaxes where it is told to be strict."""

    def lax(target: OpenVLATarget, settings: EngineSettings) -> Engine:
        return Engine(target, replace(settings, acceptance=RELAXED) if settings.drafts else settings)

    monkeypatch.setattr(certificate, "Engine", lax)
    found = certify(policy, EngineSettings("spec", draft=DRAFTS), recorded, ALONE)
    assert found.content["strict"]
    (failure,) = found.failures
    assert f"of {2 * FRAMES} strict answers differ from plain decoding" in failure


class _Lax(Engine):
    """Answers what a policy of other weights answers, in the mode that is certified."""

    other: OpenVLATarget

    def __init__(self, target: OpenVLATarget, settings: EngineSettings) -> None:
        super().__init__(self.other if settings.drafts else target, settings)


def test_only_what_differs_first_at_a_near_tie_is_excused(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(2))
    _Lax.other = load_openvla(write_checkpoint(tmp_path / "other", seed=5), device="cpu")
    monkeypatch.setattr(certificate, "Engine", _Lax)
    settings = EngineSettings("spec", draft=replace(DRAFTS, head="none"))
    for tie, failures in ((1e-9, 1), (1e9, 0)):
        monkeypatch.setitem(certificate._TIES, torch.float32, tie)
        found = certify(policy, settings, [bag], ALONE)
        result = found.content["result"]
        assert (result["differing"], result["ties"]) == (2, 2 - 2 * failures)
        assert len(found.failures) == failures
        assert result["near_ties"] == (0 if failures else 14)


def test_a_certificate_holds_for_the_same_and_for_nothing_else(
    policy: OpenVLATarget, recorded: list[Path], tmp_path: Path
) -> None:
    settings = EngineSettings("spec", draft=DRAFTS)
    given = certify(policy, settings, recorded, ALONE)
    given.write(tmp_path / "certificate.json")
    assert read_certificate(tmp_path / "certificate.json") == given
    assert differences(given, certify(policy, settings, recorded, ALONE)) == ()

    other = load_openvla(write_checkpoint(tmp_path / "other", seed=5), device="cpu")
    found = differences(given, certify(other, settings, recorded, ALONE))
    assert any("the policy's files" in each for each in found) and any("the result" in each for each in found)
    shorter = bags.write_bag(tmp_path / "bag_0", bags.episode(FRAMES - 1))
    found = differences(given, certify(policy, settings, [shorter, recorded[1]], ALONE))
    assert any("the bags or their results" in each for each in found)
    found = differences(given, certify(policy, EngineSettings("ar"), recorded, ALONE))
    assert any("the settings" in each for each in found)


def test_what_plain_decoding_does_not_answer_the_setting_must_not_either(
    policy: OpenVLATarget, recorded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(FRAMES, instruction="x" * 4000))
    found = certify(policy, EngineSettings("spec", draft=DRAFTS), [bag], ALONE)
    assert found.content["result"]["unanswered"] == {"bad_instruction": FRAMES}
    assert found.failures == ("the policy answered no image with an action",)

    def lenient(target: OpenVLATarget, settings: EngineSettings) -> Engine:
        return Engine(target, replace(settings, max_text_tokens=1024) if settings.drafts else settings)

    bag = bags.write_bag(tmp_path / "both", bags.episode(2, instruction="x" * 600))
    monkeypatch.setattr(certificate, "Engine", lenient)
    found = certify(policy, EngineSettings("spec", draft=DRAFTS), [bag, *recorded[:1]], ALONE)
    assert found.content["result"]["gained"] == 2
    assert found.failures == ("2 images were answered by only one of the two",)


def test_the_command_writes_and_checks(checkpoint: Path, recorded: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "certificate.json"
    given = ["certify", "--policy", str(checkpoint), "--device", "cpu", "--data", str(recorded[0].parent)]
    made = CliRunner().invoke(app, [*given, "--mode", "spec", "--out", str(out)], catch_exceptions=False)
    assert made.exit_code == 0 and "0 answers differ from plain decoding's" in made.output
    printed = made.output.replace("\n", " ").partition("verify it with: ")[2].split()
    assert f"its page to {out.with_suffix('.html')}" in made.output.replace("\n", " ")
    assert "--out" not in printed and CliRunner().invoke(app, printed[1:], catch_exceptions=False).exit_code == 0
    held = CliRunner().invoke(app, [*given, "--verify", str(out)], catch_exceptions=False)
    assert held.exit_code == 0 and f"{out} holds" in " ".join(held.output.split()).replace(" /", "/")
    page = out.with_suffix(".html").read_text()
    assert "answers differ from plain decoding" in page
    content = json.loads(out.read_text())
    assert all(name in page for name in content["bags"])
    assert "not as in the certificate" not in held.output
    elsewhere = content | {"code": "0" * 64, "software": content["software"] | {"torch": "1.0"}, "hardware": {}}
    out.write_text(json.dumps(elsewhere))
    moved = CliRunner().invoke(app, [*given, "--verify", str(out)], catch_exceptions=False)
    named = " ".join(moved.output.split())
    assert moved.exit_code == 0 and "the package's sources: not as in the certificate: other files" in named
    assert f"the software: not as in the certificate: torch {torch.__version__}, not 1.0" in named
    assert "the hardware: not as in the certificate: cpu " in named
    assert content.keys() == certificate._FIELDS
    out.write_text(json.dumps(content | {"foo": 1}))
    with pytest.raises(UserError, match="has 'foo', which `specvla certify` does not write"):
        CliRunner().invoke(app, [*given, "--verify", str(out)], catch_exceptions=False)
    content["result"]["digest"] = "0" * 64
    out.write_text(json.dumps(content))
    broken = CliRunner().invoke(app, [*given, "--verify", str(out)], catch_exceptions=False)
    assert broken.exit_code == 1 and "the result: not as in the certificate" in " ".join(broken.output.split())
    with pytest.raises(UserError, match="is not a certificate of this version"):
        (tmp_path / "no.json").write_text("{}")
        read_certificate(tmp_path / "no.json")
    assert np.isfinite(content["result"]["closest"])
    told = [*given, "--mode", "spec", "--out", str(out), "--instruction", "turn the lever"]
    assert CliRunner().invoke(app, told, catch_exceptions=False).exit_code == 0
    other = json.loads(out.read_text())
    assert other["instruction"] == "turn the lever" and other["result"]["digest"] != content["result"]["digest"]
    assert CliRunner().invoke(app, [*given, "--verify", str(out)], catch_exceptions=False).exit_code == 0
    same = CliRunner().invoke(app, [*given, "--mode", "spec", "--verify", str(out)], catch_exceptions=False)
    assert same.exit_code == 0
    values = ("--mode", "pipeline", "--tolerance", "2mm", "-p", "draft.nodes:=3")
    another = str(CliRunner().invoke(app, [*given, *values, "--verify", str(out)]).exception)
    assert "decode.mode pipeline, certified spec" in another and "draft.nodes 3, certified" in another
    assert "acceptance.tolerance_m 0.002, certified 0.0" in another
    both = CliRunner().invoke(app, [*given, "--verify", str(out), "--instruction", "lift"])
    assert "omit --instruction" in str(both.exception)
    plainly = CliRunner().invoke(app, [*given, "--mode", "ar"])
    assert "give one, such as --mode spec" in str(plainly.exception)


def test_a_relaxed_certificate_says_why_actions_differ_by_more(
    checkpoint: Path, recorded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "_SHOWN", 2)
    out = tmp_path / "certificate.json"
    given = ["certify", "--policy", str(checkpoint), "--device", "cpu", "--data", str(recorded[0]), "--out", str(out)]
    relaxed = ["--mode", "spec", "--tolerance", "254bins", "-p", "draft.temporal:=true"]
    made = CliRunner().invoke(app, [*given, *relaxed], catch_exceptions=False)
    assert "so a whole action may differ by more" in made.output, made.output
    page = out.with_suffix(".html").read_text()
    differing = json.loads(out.read_text())["result"]["differing"]
    assert differing > 2 and f"The first 2 of {differing} different answers" in page
    assert "so a whole action may differ by more" in page


def test_thinking_less_often_is_certified_as_a_setting_that_changes_answers(
    recorded: list[Path], tmp_path: Path
) -> None:
    writer = policy_with_random_head(tmp_path, seed=1, hidden_size=64, layers=2, text=1.2)
    own = EngineSettings("ar", max_reasoning_tokens=24)
    rarely = certify(writer, replace(own, think_every_s=3600.0), recorded, ALONE)
    assert not rarely.content["strict"] and rarely.content["result"]["differing"] > 0
    assert settings_of(rarely) == replace(own, think_every_s=3600.0)
    always = certify(writer, own, recorded, ALONE)
    assert always.content["strict"] and not always.content["result"]["differing"]
    assert rarely.content["result"]["digest"] == always.content["result"]["digest"], "held against plain decoding"
