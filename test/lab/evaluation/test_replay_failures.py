# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong in a replay, what was recorded is kept and the reason is told."""

import json
import os
import re
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bags
from support.replays import Meddling, Run, drops_of, read_frames, warm_engine

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC
from specvla_ros.lab.evaluation.replay import check_replay, replay
from specvla_ros.lab.plans import Thresholds
from specvla_ros.models.families.openvla.target import OpenVLATarget


def test_a_cut_off_bag_keeps_its_results_and_fails(run: Run, tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "whole.mcap", bags.episode(6), chunk_size=1)
    whole = path.read_bytes()
    (tmp_path / "cut.mcap").write_bytes(whole[: len(whole) // 2])
    _, want, _ = run(path)
    summary, frames, out = run(tmp_path / "cut.mcap")
    assert 0 < len(frames) < 6
    assert [frame["tokens"] for frame in frames] == [frame["tokens"] for frame in want[: len(frames)]]
    assert "is cut off at byte" in summary.failures[0]
    assert json.loads((out / "summary.json").read_text())["incomplete"] == summary.incomplete
    assert "is cut off at byte" in (out / "report.html").read_text()


@pytest.mark.parametrize("storage", ["rosbags", "chunked", "unchunked"])
def test_a_hole_in_a_recording_is_told(run: Run, tmp_path: Path, storage: str) -> None:
    if storage == "rosbags":  # one chunk without a checksum
        path = next(bags.write_bag(tmp_path / "bag", bags.episode(10)).glob("*.mcap"))
    else:
        path = bags.write_mcap(tmp_path / "bag.mcap", bags.episode(10), chunked=storage == "chunked")
    damaged = bytearray(path.read_bytes())
    begin = damaged.index(bytes(bags.pixels(1))) - 2000
    damaged[begin : begin + 4096] = bytes(4096)
    path.write_bytes(damaged)
    summary, frames, out = run(path)
    assert len(frames) < 10
    assert summary.frames_in_bag == (len(frames) if storage == "unchunked" else 10)
    assert re.search(
        r"is damaged at byte \d+.*: (a record with opcode 0|a truncated record|wrong checksum)", summary.failures[0]
    )
    assert json.loads((out / "summary.json").read_text())["failures"] == list(summary.failures)


def test_messages_that_the_statistics_count_and_nobody_finds_are_told(run: Run, tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "bag.mcap", bags.episode(10), chunked=False)
    whole = path.read_bytes()
    length = struct.pack("<Q", 22 + len(bags.STORE.serialize_cdr(bags.image(0), bags.IMAGE)))
    begin = whole.rindex(b"\x05" + length, 0, whole.index(bytes(bags.pixels(4))))
    path.write_bytes(whole[:begin] + b"\x81" + whole[begin + 1 :])  # a record of somebody else's kind
    summary, frames, _ = run(path)
    assert len(frames) == 9
    assert "it holds 9 of 10 messages of /camera/image_raw counted in its statistics" in summary.incomplete


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_all_frames_up_to_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    Meddling(monkeypatch, 3, lambda: os.kill(os.getpid(), number))
    summary, frames, out = run(bags.episode(6))
    assert (len(frames), summary.actions, summary.frames_in_bag) == (3, 3, 6)
    assert summary.failures == ("interrupted after 3 of 6 frames",)
    with open_bag(out / "actions_bag") as bag:
        assert bag.topic(ACTION_TOPIC).count == 3
        assert bag.damage == ""
    assert signal.getsignal(number) is before


def test_a_bug_is_raised_after_the_results_are_written(
    policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the GPU fell off the bus")

    Meddling(monkeypatch, 3, fail)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="fell off the bus"):
        replay(warm_engine(policy), bags.write_bag(tmp_path / "bag", bags.episode(6)), out, progress=False)
    assert len(read_frames(out)) == 2
    summary = json.loads((out / "summary.json").read_text())
    assert summary["failures"] == ["RuntimeError: the GPU fell off the bus"]
    assert (out / "report.html").exists()


def test_a_full_disk_is_a_users_error(policy: OpenVLATarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    Meddling(monkeypatch, 2, fail)
    path = bags.write_bag(tmp_path / "bag", bags.episode(3))
    with pytest.raises(UserError, match=r"replaying .*bag to .*out failed: .*No space left on device"):
        replay(warm_engine(policy), path, tmp_path / "out", progress=False)
    assert len(read_frames(tmp_path / "out")) == 1


def test_a_fault_of_the_engine_fails_the_replay_and_the_next_frame_is_answered(
    run: Run, policy: OpenVLATarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = type(policy).prompt_embeddings, []

    def embeddings(self: OpenVLATarget, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return real(self, *arguments)

    monkeypatch.setattr(type(policy), "prompt_embeddings", embeddings)
    summary, frames, _ = run(bags.episode(4))
    assert drops_of(frames) == [None, "engine_fault", None, None]
    assert summary.failures == ("1 of 4 frames ended in an engine fault, the first: RuntimeError: out of memory",)


def test_a_damaged_instruction_ends_the_replay_with_its_place(run: Run, tmp_path: Path) -> None:
    entries = bags.episode(4, actions=False)
    entries.append(("/instruction", bags.TEXT, bags.START_NS + 2 * bags.PERIOD_NS + 1, bags.text("turn lever")))
    path = bags.write_mcap(tmp_path / "bag.mcap", entries, chunked=False)
    data = bytearray(path.read_bytes())
    at = data.index(b"turn lever") - 4
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    summary, frames, _ = run(path)
    assert len(frames) == 2
    assert "stopped after 2 of 4 frames: topic /instruction at 17" in summary.failures[0]


# Refused before anything is written


def test_results_are_never_overwritten(run: Run, policy: OpenVLATarget, tmp_path: Path) -> None:
    path = bags.write_bag(tmp_path / "bag", bags.episode(2))
    _, _, out = run(path)
    before = (out / "frames.jsonl").read_bytes()
    for refuse in (lambda: replay(warm_engine(policy), path, out), lambda: check_replay(path, out)):
        with pytest.raises(UserError, match=r"holds the result of an earlier replay.*--out"):
            refuse()
    assert (out / "frames.jsonl").read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; give a directory"):
        check_replay(path, tmp_path / "file")


def test_other_files_in_the_output_directory_do_no_harm(policy: OpenVLATarget, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("keep me")
    path = bags.write_bag(tmp_path / "bag", bags.episode(1))
    assert replay(warm_engine(policy), path, out, progress=False).actions == 1
    assert (out / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_topic": "/nowhere"}, "has no messages on topic '/nowhere'"),
        ({"instruction": ""}, "instruction"),
        ({"instruction": "word " * 2000}, "the limit is 1000"),
    ],
)
def test_a_replay_that_cannot_begin_leaves_nothing_behind(
    policy: OpenVLATarget, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = bags.write_bag(tmp_path / "bag", bags.episode(1))
    with pytest.raises(UserError, match=words):
        replay(warm_engine(policy), path, tmp_path / "out", progress=False, topics=TopicChoice(**options))
    assert not (tmp_path / "out").exists()


def test_an_output_directory_that_cannot_be_written_is_refused(policy: OpenVLATarget, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = bags.write_bag(tmp_path / "bag", bags.episode(1))
    with pytest.raises(UserError, match="cannot be recorded"):
        replay(warm_engine(policy), path, tmp_path / "file" / "out", progress=False)


# Limits


def test_limits_that_are_kept_do_not_fail(run: Run) -> None:
    generous = Thresholds(max_p95_latency_s=60, max_drop_fraction=0, max_bin_distance=256, min_action_rate_hz=0.01)
    summary, _, out = run(bags.episode(3), thresholds=generous)
    assert summary.failures == ()
    assert "all limits kept" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ({"max_p95_latency_s": 1e-6}, r"the p95 latency is 0\.\d{4} s, the limit is 1e-06 s"),
        (
            {"max_drop_fraction": 0.2},
            r"25\.0% of the frames produced no action, the limit is 20\.0%: 1 bad_image \(the",
        ),
        ({"max_bin_distance": 0.5}, r"the mean distance to the recorded action is \d+\.\d bins, the limit is 0\.5"),
        ({"min_action_rate_hz": 1e6}, r"the action rate is \d+\.\d\d Hz, the limit is 1e\+06 Hz"),
    ],
)
def test_each_limit_fails_in_words(run: Run, limit: dict[str, float], words: str) -> None:
    entries = bags.episode(4)
    entries[3] = (*entries[3][:3], bags.image(entries[3][2], height=0))
    summary, _, out = run(entries, thresholds=Thresholds(**limit))
    (failure,) = summary.failures
    assert re.match(words, failure)
    assert "The replay failed" in (out / "report.html").read_text()


def test_a_limit_on_the_distance_needs_recorded_actions(run: Run) -> None:
    summary, _, _ = run(bags.episode(2, actions=False), thresholds=Thresholds(max_bin_distance=100))
    assert "the bag has no recorded action" in summary.failures[0]


@pytest.mark.parametrize("limit", [{"max_drop_fraction": 1.5}, {"max_p95_latency_s": -1}, {"max_bin_distance": np.nan}])
def test_limits_without_sense_are_refused(limit: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(limit))} must".replace("_", "-")):
        Thresholds(**limit)


def test_the_progress_bar_goes_to_stderr(
    policy: OpenVLATarget, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = bags.write_bag(tmp_path / "bag", bags.episode(2))
    replay(warm_engine(policy), path, tmp_path / "out")
    captured = capfd.readouterr()
    assert "2/2" in captured.err
    assert captured.out == ""
