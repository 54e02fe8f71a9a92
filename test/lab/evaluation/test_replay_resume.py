# SPDX-License-Identifier: Apache-2.0
"""A replay that was cut short goes on where it stopped, and nothing that it had found is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import bags
from support.checkpoints import write_checkpoint
from support.replays import Meddling, drops_of, read_frames, warm_engine

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC, DECODE_STATS_TOPIC
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.replay import check_replay, replay
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.families.openvla.target import OpenVLATarget


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def messages(out: Path, topic: str = ACTION_TOPIC) -> list[Any]:
    with open_bag(out / "actions_bag") as bag:
        assert bag.damage == ""
        return [message.message() for message in bag.messages([topic])]


def test_an_interrupted_replay_decodes_only_what_is_missing(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = bags.write_bag(tmp_path / "bag", bags.episode(6)), tmp_path / "out"
    replay(warm_engine(policy), path, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        Meddling(patch, 3, interrupt)
        assert replay(warm_engine(policy), path, out, progress=False).failures
    kept, recorded = (out / "frames.jsonl").read_bytes(), messages(out)
    with monkeypatch.context() as patch:
        engine = Meddling(patch, -1, interrupt)
        summary = replay(warm_engine(policy), path, out, progress=False)
    assert engine.calls == 1 + 3, "the newest frame that was kept, and the three that were missing"
    assert (summary.frames, summary.actions, summary.compared, summary.failures) == (6, 6, 6, ())
    assert (out / "frames.jsonl").read_bytes().startswith(kept) and len(recorded) == 3
    frames, want = read_frames(out), read_frames(tmp_path / "whole")
    assert [frame["tokens"] for frame in frames] == [frame["tokens"] for frame in want]
    assert [frame["seq"] for frame in frames] == list(range(6))
    assert summary.latency_s["total"]["max"] == max(frame["total_s"] for frame in frames)
    for topic in (ACTION_TOPIC, DECODE_STATS_TOPIC):
        whole = messages(out, topic)
        assert [message.seq for message in whole] == list(range(6))
        stamps = [message.header.stamp for message in whole]
        assert stamps == [message.header.stamp for message in messages(tmp_path / "whole", topic)]
    assert [repr(message) for message in messages(out)[:3]] == [repr(message) for message in recorded]
    assert [message.values.tolist() for message in messages(out)] == [frame["values"] for frame in frames]
    with pytest.raises(UserError, match="holds the result of an earlier replay"):
        check_replay(path, out)


@pytest.mark.nightly
def test_a_killed_replay_goes_on(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    write_checkpoint(checkpoint, seed=5)
    path = bags.write_bag(tmp_path / "bag", bags.episode(60))
    command = [sys.executable, "-m", "specvla_ros.cli", "replay", str(path), "--checkpoint", str(checkpoint)]
    command += ["--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = out / "frames.jsonl"
    while process.poll() is None and not (lines.exists() and lines.read_bytes().count(b"\n") >= 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = lines.read_bytes()
    assert 2 <= kept.count(b"\n") < 60
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "60 of 60 frames answered" in done.stdout
    assert lines.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert [message.seq for message in messages(out)] == list(range(60))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reasoning", EngineSettings("ar", max_reasoning_tokens=64, think_every_s=60.0)),
        ("digits", EngineSettings("ar", ensemble=8)),
    ],
)
def test_answers_that_follow_from_earlier_ones_are_those_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: EngineSettings
) -> None:
    policy = load_target(bundled_policy(name), device="cpu")
    topics = TopicChoice(instruction="lift the red cube")
    path, out = bags.write_bag(tmp_path / "bag", bags.episode(5)), tmp_path / "out"
    replay(Engine(policy, settings), path, tmp_path / "whole", topics=topics, progress=False)
    with monkeypatch.context() as patch:
        Meddling(patch, 2, interrupt)
        replay(Engine(policy, settings), path, out, topics=topics, progress=False)
    assert len(read_frames(out)) < 5
    replay(Engine(policy, settings), path, out, topics=topics, progress=False)
    once, resumed = read_frames(tmp_path / "whole"), read_frames(out)
    assert any(frame["values"] for frame in once[-2:])
    for field in ("values", "tokens"):
        assert [frame.get(field) for frame in resumed] == [frame.get(field) for frame in once]
    forwards = [
        [frame["decode"]["forwards"] for frame in frames if frame["seq"] is not None] for frames in (once, resumed)
    ]
    assert forwards[0] == forwards[1]


def test_a_line_that_was_cut_off_is_decoded_again(policy: OpenVLATarget, tmp_path: Path) -> None:
    path, out = bags.write_bag(tmp_path / "bag", bags.episode(4)), tmp_path / "out"
    replay(warm_engine(policy), path, out, progress=False)
    want = read_frames(out)
    lines = (out / "frames.jsonl").read_text().splitlines(keepends=True)
    (out / "summary.json").unlink()  # as a killed process leaves it
    (out / "frames.jsonl").write_text("".join(lines[:2]) + lines[2][:50])
    summary = replay(warm_engine(policy), path, out, progress=False)
    assert summary.actions == 4
    assert (out / "frames.jsonl").read_text().startswith("".join(lines[:2]))
    assert [frame["tokens"] for frame in read_frames(out)] == [frame["tokens"] for frame in want]
    (out / "summary.json").unlink()
    (out / "frames.jsonl").write_text(lines[0] + "{}\n" + lines[2])
    with pytest.raises(UserError, match=r"frames\.jsonl, line 2 is damaged"):
        replay(warm_engine(policy), path, out, progress=False)


def test_drops_and_the_order_of_stamps_hold_across_an_interruption(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, period = bags.START_NS, bags.PERIOD_NS
    entries: list[bags.Entry] = [("/instruction", bags.TEXT, start, bags.text("go"))]
    stamps = (
        start,
        start + 3 * period,
        start + 2 * period,
        0,
        start + 2 * period,
        start + 3 * period,
        start + 9 * period,
    )
    for index, stamp in enumerate(stamps):
        entries.append(("/camera/image_raw", bags.IMAGE, start + index * period, bags.image(stamp)))
    path, out = bags.write_bag(tmp_path / "bag", entries), tmp_path / "out"
    with monkeypatch.context() as patch:
        Meddling(patch, 3, interrupt)
        replay(warm_engine(policy), path, out, progress=False)
    assert drops_of(read_frames(out)) == [None, None, "out_of_order"]
    summary = replay(warm_engine(policy), path, out, progress=False)
    reasons = [None, None, "out_of_order", "bad_stamp", "out_of_order", "out_of_order", None]
    assert drops_of(read_frames(out)) == reasons
    assert (summary.drops["out_of_order"], summary.drops["bad_stamp"]) == (3, 1)
    *_, stats = messages(out, DECODE_STATS_TOPIC)
    assert dict(zip(stats.drop_reasons, stats.drop_counts.tolist(), strict=True))["out_of_order"] == 3


def test_another_question_is_not_answered_into_the_same_directory(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (bags.write_bag(tmp_path / name, bags.episode(frames)) for name, frames in (("a", 4), ("b", 3)))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        Meddling(patch, 2, interrupt)
        replay(warm_engine(policy), path, out, progress=False)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for bag, options, named in (
        (path, {"action": ConventionSettings(dt=0.1)}, r"settings\.action\.dt_s"),
        (path, {"topics": TopicChoice(instruction="flip pot")}, r"bag\.instruction_topic, settings\.instruction"),
        (other, {}, r"bag\.duration_s, bag\.sha256.*"),
    ):
        with pytest.raises(UserError, match=rf"holds results of other settings \({named}; .*--out"):
            replay(warm_engine(policy), bag, out, progress=False, **options)
    assert before == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    path.rename(tmp_path / "moved")
    assert replay(warm_engine(policy), tmp_path / "moved", out, progress=False).actions == 4


@pytest.mark.parametrize("name", ["summary.json", "episodes.jsonl"])
def test_results_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    path, out = bags.write_bag(tmp_path / "bag", bags.episode(1)), tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{}")
    with pytest.raises(UserError, match=rf"results of unknown origin \({name}.*--out"):
        check_replay(path, out)
    (out / "settings.json").write_text(json.dumps({"command": "simulate"}))
    with pytest.raises(UserError, match="holds results of `specvla simulate`"):
        check_replay(path, out)
    (out / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings\.json cannot be read as JSON .*remove that directory"):
        check_replay(path, out)
