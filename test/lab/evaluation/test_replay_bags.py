# SPDX-License-Identifier: Apache-2.0
"""Many bags in one replay: a row of each, one set of limits, and the same wherever and however often it runs."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import bags
from support.dying import replay_bag_dying_once, replaying_host_dying_once
from support.nightly import nightly_but
from support.paths import BAGS, needs
from support.replays import read_frames, warm_engine

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.evaluation import replay_bags as many
from specvla_ros.lab.evaluation.replay import replay
from specvla_ros.lab.evaluation.replay_bags import ReplaySettings, named_bags, replay_bags
from specvla_ros.lab.evaluation.replay_summary import BagsSummary
from specvla_ros.lab.plans import EngineSpread, Thresholds
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.settings import ModelSettings


@pytest.fixture
def settings(policy: OpenVLATarget) -> ReplaySettings:
    return ReplaySettings(policy.directory, ModelSettings(device="cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three bags."""
    for name, frames in (("a", 3), ("b", 4), ("c", 2)):
        bags.write_bag(tmp_path / "bags" / name, bags.episode(frames))
    return tmp_path / "bags"


def tokens(out: Path) -> dict[str, list[Any]]:
    return {
        each.parent.name: [frame["tokens"] for frame in read_frames(each.parent)] for each in out.glob("*/frames.jsonl")
    }


def counts(summary: BagsSummary) -> dict[str, tuple[int, int]]:
    return {row.name: (row.summary.frames, row.summary.actions) for row in summary.rows if row.summary is not None}


@pytest.mark.nightly
@needs(BAGS)
def test_a_folder_of_real_bags_gives_one_report(
    settings: ReplaySettings, policy: OpenVLATarget, tmp_path: Path
) -> None:
    finding = find_bags([BAGS])
    found, left_out = named_bags(finding.bags), finding.left_out
    assert len(found) == 17 and left_out == (str(BAGS / "README.txt"),)
    summary = replay_bags(
        settings, found, tmp_path / "out", left_out=left_out, thresholds=Thresholds(max_drop_fraction=0)
    )
    assert summary.failures == () and set(counts(summary).values()) == {(10, 10)}
    assert (summary.total.frames, summary.total.actions, summary.total.compared) == (170, 170, 170)
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written == json.loads(json.dumps(summary.as_json()))
    assert written["bags"].keys() == found.keys() and written["left_out"] == [str(BAGS / "README.txt")]
    html = (tmp_path / "out" / "report.html").read_text()
    assert "All 17 bags were replayed completely; all limits kept" in html
    assert all(f"<a href='{name}/report.html'>" in html for name in found)
    name = "bridge_turn_lever_03"
    alone = replay(warm_engine(policy), BAGS / name, tmp_path / "alone", progress=False)
    assert tokens(tmp_path / "out")[name] == [frame["tokens"] for frame in read_frames(tmp_path / "alone")]
    assert written["bags"][name]["mean_abs_error"] == pytest.approx(alone.mean_abs_error)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "where",
    (
        pytest.param(EngineSpread(workers=2), id="processes"),
        pytest.param(EngineSpread(workers=2, ray="local"), id="ray"),
    ),
)
def test_a_killed_worker_changes_nothing(
    settings: ReplaySettings,
    folder: Path,
    tmp_path: Path,
    where: EngineSpread,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if where.ray:
        request.getfixturevalue("cluster")
    found = named_bags(find_bags([folder]).bags)
    here = replay_bags(settings, found, tmp_path / "here")
    monkeypatch.setattr(many, "replay_bag", replay_bag_dying_once)
    ended: list[str] = []
    there = replay_bags(settings, found, tmp_path / "there", spread=where, on_bag=lambda name, *_: ended.append(name))
    assert (tmp_path / "there" / ".died").exists(), "the worker was not killed"
    assert sorted(ended) == ["a", "b", "c"]
    assert tokens(tmp_path / "there") == tokens(tmp_path / "here")
    assert counts(there) == counts(here) == {"a": (3, 3), "b": (4, 4), "c": (2, 2)}
    assert there.failures == here.failures == ()
    assert there.total.mean_abs_error == here.total.mean_abs_error


@pytest.mark.parametrize(
    "where",
    (
        pytest.param(EngineSpread(per_engine=2), id="processes"),
        pytest.param(EngineSpread(workers=2, ray="local", per_engine=2), id="ray"),
    ),
)
@pytest.mark.nightly
def test_workers_that_share_an_engine_answer_alike_though_it_is_killed(
    settings: ReplaySettings,
    folder: Path,
    tmp_path: Path,
    where: EngineSpread,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if where.ray:
        request.getfixturevalue("cluster")
    found = named_bags(find_bags([folder]).bags)
    here = replay_bags(settings, found, tmp_path / "here")
    died = tmp_path / ".died"
    monkeypatch.setattr(many, "host_engine", partial(replaying_host_dying_once, died))
    there = replay_bags(settings, found, tmp_path / "there", spread=where)
    assert died.exists(), "the engine was not killed"
    assert tokens(tmp_path / "there") == tokens(tmp_path / "here")
    assert counts(there) == counts(here) == {"a": (3, 3), "b": (4, 4), "c": (2, 2)}
    assert there.failures == here.failures == ()
    assert there.total.mean_abs_error == here.total.mean_abs_error
    for name in "abc":
        ours, theirs = (json.loads((tmp_path / run / name / "settings.json").read_text()) for run in ("here", "there"))
        assert ours == theirs, "another run is not taken for this one"


def test_a_bag_that_cannot_be_read_is_named_and_fails_the_replay(
    settings: ReplaySettings, folder: Path, tmp_path: Path
) -> None:
    next((folder / "b").glob("*.mcap")).write_bytes(b"no bag at all")
    bags.write_bag(folder / "mute", [entry for entry in bags.episode(2) if entry[1] != bags.TEXT])
    bags.write_bag(
        folder / "early",
        [
            *(entry for entry in bags.episode(2) if entry[1] != bags.TEXT),
            ("/instruction", bags.TEXT, bags.START_NS + 10**10, bags.text("go")),
        ],
    )
    found = named_bags(find_bags([folder]).bags)
    summary = replay_bags(settings, found, tmp_path / "out")
    failures = [failure.partition(":")[0] for failure in summary.failures]
    assert failures == ["b", "mute", "early"]
    assert counts(summary) == {"a": (3, 3), "c": (2, 2), "early": (2, 0)}
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "b" in written["bags"] and written["bags"]["b"]["why"]
    assert "The replay failed:</p><ul><li>b: " in (tmp_path / "out" / "report.html").read_text()


def test_limits_are_over_the_frames_of_all_bags(settings: ReplaySettings, folder: Path, tmp_path: Path) -> None:
    entries = bags.episode(5)
    entries[1] = (*entries[1][:3], bags.image(entries[1][2], height=0))
    bags.write_bag(folder / "d", entries)
    found = named_bags(find_bags([folder]).bags)
    kept = replay_bags(settings, found, tmp_path / "out", thresholds=Thresholds(max_drop_fraction=0.1))
    assert kept.failures == ()
    (failure,) = replay_bags(settings, found, tmp_path / "out", thresholds=Thresholds(max_drop_fraction=0.05)).failures
    assert failure.startswith("7.1% of the frames produced no action, the limit is 5.0%: 1 bad_image")


def test_called_again_it_replays_what_is_missing(settings: ReplaySettings, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = named_bags(find_bags([folder]).bags)
    replay_bags(settings, {name: found[name] for name in ("a", "b")}, out)
    lines = (out / "b" / "frames.jsonl").read_text().splitlines(keepends=True)
    (out / "b" / "frames.jsonl").write_text("".join(lines[:2]))  # as a process leaves it that was killed
    (out / "b" / "summary.json").unlink()
    ended: list[tuple[str, int, int]] = []
    summary = replay_bags(settings, found, out, on_bag=lambda *bag: ended.append(bag))
    assert ended == [("b", 2, 3), ("c", 3, 3)]
    assert summary.failures == () and counts(summary) == {"a": (3, 3), "b": (4, 4), "c": (2, 2)}
    assert (out / "b" / "frames.jsonl").read_text().splitlines(keepends=True)[:2] == lines[:2]
    with pytest.raises(UserError, match="other settings"):
        replay_bags(ReplaySettings(settings.policy, settings.model, topics=TopicChoice(instruction="go")), found, out)
    shutil.rmtree(folder / "a")
    bags.write_bag(folder / "a", bags.episode(5))
    summary = replay_bags(settings, found, out)
    (failure,) = summary.failures
    assert failure.startswith("a: ") and "holds the replay of another bag" in failure
    assert counts(summary) == {"b": (4, 4), "c": (2, 2)} and summary.total.frames == summary.total.frames_in_bag == 6


def test_a_folder_that_holds_something_else_fails_its_bag_and_counts_nowhere(
    settings: ReplaySettings, policy: OpenVLATarget, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    replay(warm_engine(policy), folder / "a", out / "a", topics=TopicChoice(instruction="go"), progress=False)
    (out / "b").mkdir()
    (out / "b" / "settings.json").write_text(json.dumps({"command": "simulate"}))
    (out / "b" / "summary.json").write_text(json.dumps({"success": {}}))
    summary = replay_bags(settings, named_bags(find_bags([folder]).bags), out)
    alone, other = summary.failures
    assert alone.startswith("a: ") and "holds a replay that was made on its own; remove it" in alone
    assert other.startswith("b: ") and "holds results of `specvla simulate`" in other
    assert counts(summary) == {"c": (2, 2)} and summary.total.frames == 2


def test_an_interruption_is_told_and_goes_on(
    settings: ReplaySettings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = named_bags(find_bags([folder]).bags)
    real = many.replay_bag
    with monkeypatch.context() as patch:
        patch.setattr(
            many, "replay_bag", lambda job: "interrupted after 0 of 4 frames" if job.out.name == "b" else real(job)
        )
        summary = replay_bags(settings, found, tmp_path / "out")
    assert [each.partition(":")[2] for each in summary.failures] == [
        " interrupted after 0 of 4 frames",
        " not replayed: the run ended first",
    ]
    assert replay_bags(settings, found, tmp_path / "out").failures == ()


@pytest.mark.parametrize("workers", nightly_but(lambda workers: workers == 0, (0, 1)))
def test_what_is_wrong_for_every_bag_is_the_users_error(
    settings: ReplaySettings, folder: Path, tmp_path: Path, workers: int
) -> None:
    found = named_bags(find_bags([folder]).bags)
    asked = ReplaySettings(settings.policy, settings.model, topics=TopicChoice(instruction="word " * 2000))
    with pytest.raises(UserError, match="the limit is 1000"):
        replay_bags(asked, found, tmp_path / "out", spread=EngineSpread(workers=workers))
    assert not (tmp_path / "out").exists()


def test_bags_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    bags.write_bag(tmp_path / "others" / "a", bags.episode(1))
    assert [*named_bags(find_bags([folder, folder / "a"]).bags)] == ["a", "b", "c"]
    with pytest.raises(UserError, match="two bags are called a, "):
        named_bags(find_bags([folder, tmp_path / "others"]).bags)
