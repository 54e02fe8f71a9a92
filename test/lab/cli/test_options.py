# SPDX-License-Identifier: Apache-2.0
"""Options that a parameter file or the input also determines."""

import re
from pathlib import Path

import pytest
from support import bags
from typer.testing import CliRunner

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.cli.options import BagOptions, topics_of
from specvla_ros.lab.cli.parameter_options import PolicyOptions
from specvla_ros.lab.evaluation import replay
from specvla_ros.models.settings import ModelSettings

DATASETS = Path(__file__).parents[1] / "bags" / "lerobot"


@pytest.mark.parametrize(("option", "used"), [(None, 0.2), (0.05, 0.05), (0.1, 0.1)])
def test_a_tolerance_of_stamps_replaces_that_of_the_parameter_file(option: float | None, used: float) -> None:
    in_file = {"sync_tolerance_s": 0.2}
    chosen = PolicyOptions(Path("policy"), ModelSettings(), EngineSettings(), ConventionSettings(), in_file)
    assert topics_of(chosen, BagOptions(sync_tolerance_s=option)).sync_tolerance_s == used


def test_replays_of_different_recordings_get_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    def look(_: Path, out: Path, __: object) -> None:
        folders.append(str(out))
        raise SystemExit(0)

    monkeypatch.setattr(replay, "check_replay", look)
    two = [bags.write_bag(tmp_path / name, bags.episode(1)) for name in ("run.1", "run.2")]
    recordings = [*two, *(DATASETS / version / "episode_000001" for version in ("v21", "v30"))]
    for path in (*recordings, next(two[0].glob("*.mcap"))):
        CliRunner().invoke(app, ["replay", str(path)], catch_exceptions=False)
    assert folders[:2] == ["replay-run.1", "replay-run.2"]
    assert folders[2:] == ["replay-v21_episode_000001", "replay-v30_episode_000001", "replay-run.1"]


class Left(Exception):
    """A core was left to others."""


@pytest.mark.parametrize(
    "words",
    [
        ["train-draft", "--policy", "nano", "--data", "sim"],
        ["collect-answers", "--policy", "nano", "--data", "sim"],
        ["train-policy", "--data", "bags"],
        ["collect", "--policy", "nano"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_computes_leaves_a_core(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")

    def leave() -> None:
        raise Left

    monkeypatch.setattr("specvla_ros.models.checkpoint.leave_a_core", leave)
    with pytest.raises(Left):
        CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")], catch_exceptions=False)


@pytest.mark.parametrize("command", ["train-draft", "fleet-draft"])
def test_too_few_images_for_a_head_are_refused_by_the_option(command: str, tmp_path: Path) -> None:
    given = ["--policy", "nano", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--frames", "256"]
    done = CliRunner().invoke(app, [command, *given])
    assert done.exit_code == 2 and "--frames" in done.output and "257" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "--max-mm", "-1"], "--max-mm must be non-negative, got -1"),
        (["calibrate", "--max-loss", "nan"], "--max-loss must be non-negative, got nan"),
        (["replay", "bag", "--max-drop-fraction", "5"], "--max-drop-fraction must be between 0 and 1, got 5"),
        (["replay", "bag", "--min-action-rate-hz", "-1"], "--min-action-rate-hz must be non-negative"),
    ],
)
def test_a_wrong_limit_is_told_by_its_option(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        given = [*words, "--out", str(tmp_path / "out"), "--policy", "nano"]
        CliRunner().invoke(app, given, catch_exceptions=False)


def test_a_wrong_choice_is_told_without_words_of_a_library() -> None:
    done = CliRunner().invoke(app, ["replay", "bag", "--mode", "specc"])
    assert done.exit_code == 2 and "--mode" in done.output and "specc" in done.output
    assert "Value error" not in done.output
