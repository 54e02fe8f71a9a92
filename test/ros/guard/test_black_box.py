# SPDX-License-Identifier: Apache-2.0
"""The black box: what it keeps, what it writes and when, and that it never holds up who records."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mcap.reader import make_reader
from support.black_boxes import read_black_box
from support.patience import wait_until

from specvla_ros.ros.guard.black_box import BlackBox, Ring, definition

RAW = b"\x00\x01\x00\x00" + b"\x06\x00\x00\x00hello\x00"  # std_msgs/msg/String "hello"


@contextmanager
def recording(directory: Path, *, seconds: float = 60.0, files: int = 20) -> Iterator[BlackBox]:
    box = BlackBox(directory, seconds, files, "twist")
    box.add_topic("/words", "std_msgs/msg/String")
    try:
        yield box
    finally:
        assert box.close()


def written(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.mcap"))


def looked(box: BlackBox) -> BlackBox:
    box.look()
    return box


def test_a_stop_is_written_with_what_led_there(tmp_path: Path) -> None:
    with recording(tmp_path) as box:
        for _ in range(10):
            box.record("/words", RAW)
        box.stop("stop", "somebody pressed it")
        wait_until(lambda: written(tmp_path))
        wait_until(lambda: looked(box).last_file)
    (file,) = written(tmp_path)
    counts, last = read_black_box(file)
    assert counts["/words"] == 10
    assert last["/words"].data == "hello"
    assert "stop" in file.name
    assert box.last_file == str(file)


def test_every_topic_has_a_channel_of_its_own_however_often_it_is_announced(tmp_path: Path) -> None:
    types = {"/instruction": "std_msgs/msg/String", "/diagnostics": "diagnostic_msgs/msg/DiagnosticArray"}
    with recording(tmp_path) as box:
        for topic in ("/instruction", "/instruction", "/diagnostics"):
            box.add_topic(topic, types[topic])
        box.record("/instruction", RAW)
        box.record("/words", RAW)
        box.stop("stop", "somebody pressed it")
        wait_until(lambda: written(tmp_path))
    with written(tmp_path)[0].open("rb") as file:
        summary = make_reader(file).get_summary()
        file.seek(0)
        read = [(channel.topic, message.data) for _, channel, message in make_reader(file).iter_messages()]
    assert summary is not None
    named = {channel.topic: summary.schemas[channel.schema_id].name for channel in summary.channels.values()}
    assert named == types | {"/words": "std_msgs/msg/String"}
    assert read == [("/instruction", RAW), ("/words", RAW)]


def test_a_goodbye_without_a_stop_leaves_nothing(tmp_path: Path) -> None:
    with recording(tmp_path) as box:
        box.record("/words", RAW)
    assert not list(tmp_path.iterdir())


def test_a_goodbye_right_after_a_stop_still_writes_it(tmp_path: Path) -> None:
    with recording(tmp_path) as box:
        box.record("/words", RAW)
        box.stop("stop", "and at once the end")
    assert len(written(tmp_path)) == 1


def test_a_goodbye_with_a_report_unread_is_no_death(tmp_path: Path) -> None:
    with recording(tmp_path) as box:
        box.record("/words", RAW)
        box.stop("stop", "somebody pressed it")
        wait_until(lambda: written(tmp_path))
        wait_until(lambda: select.select([box._socket], [], [], 0)[0])  # it was told, and does not look
    assert ["stop" in file.name for file in written(tmp_path)] == [True]


def test_a_guard_that_is_killed_leaves_what_led_there(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from specvla_ros.ros.guard.black_box import BlackBox
box = BlackBox(Path({str(tmp_path)!r}), 60.0, 20, "twist")
box.add_topic("/words", "std_msgs/msg/String")
for _ in range(10):
    box.record("/words", {RAW!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    wait_until(lambda: written(tmp_path))
    (file,) = written(tmp_path)
    assert read_black_box(file)[0]["/words"] == 10
    assert "guard_died" in file.name


def test_what_cannot_be_written_is_said_and_harms_nobody(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with recording(in_the_way / "box") as box:
        box.stop("stop", "")
        wait_until(lambda: looked(box).problem)
        assert "could not be written" in box.problem
        box.record("/words", RAW)
        assert box.lost == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk needs a mount")
def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with recording(tmp_path) as box:
            for _ in range(100):
                box.record("/words", RAW + bytes(2000))
            box.stop("stop", "")
            wait_until(lambda: looked(box).problem)
            assert "No space left" in box.problem
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_recorder_that_hangs_holds_up_nobody_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    with recording(tmp_path) as box:
        os.kill(box._process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: box.lost, meanwhile=lambda: box.record("/words", bytes(10_000)))
        finally:
            os.kill(box._process.pid, signal.SIGCONT)


def test_a_recorder_that_died_is_said(tmp_path: Path) -> None:
    box = BlackBox(tmp_path, 60.0, 20, "twist")
    box._process.kill()
    wait_until(lambda: looked(box).problem)
    assert "ended with code -9" in box.problem
    box.add_topic("/words", "std_msgs/msg/String")
    box.record("/words", RAW)
    assert box.lost == 2
    assert box.close()


def test_the_oldest_files_go(tmp_path: Path) -> None:
    old = [tmp_path / f"guard_2020010{day}T000000_000_stop.mcap" for day in range(1, 6)]
    for path in [*old, tmp_path / "mine.mcap"]:
        path.write_text("")
    with recording(tmp_path, files=3) as box:
        box.stop("stop", "")
        wait_until(lambda: not old[2].exists())
    assert [path.name for path in written(tmp_path)][:2] == [path.name for path in old[3:]]
    assert (tmp_path / "mine.mcap").exists()


def test_the_ring_keeps_its_time_and_its_size() -> None:
    ring = Ring(2.0)
    for second in range(10):
        ring.add(float(second), second * 10**9, 0, b"x")
    assert [time_ns for time_ns, _, _ in ring.snapshot()] == [7 * 10**9, 8 * 10**9, 9 * 10**9]
    for _ in range(10):
        ring.add(10.0, 10 * 10**9, 0, bytes(10 << 20))
    assert sum(len(raw) for _, _, raw in ring.snapshot()) <= 64 << 20


def test_a_wall_clock_that_is_set_drops_nothing_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as box:
        for now_ns in (time.time_ns(), time.time_ns() + 3600 * 10**9, time.time_ns()):
            with monkeypatch.context() as patched:
                patched.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
                box.record("/words", RAW)
        box.stop("clock", "the clock jumped")
        wait_until(lambda: written(tmp_path))
    counts, _ = read_black_box(written(tmp_path)[0])
    assert counts["/words"] == 3


def test_definitions_hold_what_they_need() -> None:
    text = definition("specvla_ros/msg/VlaAction")
    assert "MSG: std_msgs/Header" in text
    assert "MSG: builtin_interfaces/Time" in text
    nested = definition("trajectory_msgs/msg/JointTrajectory")
    assert "MSG: trajectory_msgs/JointTrajectoryPoint" in nested
    assert "MSG: builtin_interfaces/Duration" in nested
