# SPDX-License-Identifier: Apache-2.0
"""The black box's recorder, a process beside the guard: `python -m specvla_ros.ros.guard.black_box_process`.

It keeps what the guard hands it for some minutes, and writes an MCAP file some seconds after each stop, and when the
guard is gone without a goodbye. Needs neither rclpy nor NumPy: messages are bytes, their definitions files of ROS.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from specvla_ros.ros.guard.black_box import BYE, HEAD, MESSAGE, STOP, TOPIC

_AFTERMATH_S = 2.0  # of what follows a stop, written with it
_PAUSE_S = 10.0  # between two files
_LARGEST_BYTES = 64 << 20
_SEPARATOR = "=" * 80
_PACKET_BYTES = 8 << 20
_NICENESS = 5
_FIELD_WORDS = 2


@dataclass(frozen=True)
class Topic:
    """A recorded topic."""

    name: str
    msgtype: str


@dataclass(frozen=True)
class Stop:
    """Why a file is written."""

    cause: str
    reason: str
    due_s: float


class Ring:
    """The messages of the last minutes.

    Args:
        seconds: how much of the past is kept.
    """

    def __init__(self, seconds: float) -> None:
        self._ns = int(seconds * 1e9)
        self._messages: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0
        self.topics: dict[int, Topic] = {}

    def add(self, time_ns: int, channel: int, raw: bytes) -> None:
        """The newest message; the oldest go."""
        self._messages.append((time_ns, channel, raw))
        self._bytes += len(raw) + HEAD.size
        while self._bytes > _LARGEST_BYTES or time_ns - self._messages[0][0] > self._ns:
            self._bytes -= len(self._messages.popleft()[2]) + HEAD.size

    def snapshot(self) -> list[tuple[int, int, bytes]]:
        """Time in nanoseconds, channel and bytes of each."""
        return list(self._messages)


class Recorder:
    """Reads from the guard until it is gone.

    Args:
        guard: the socket to it.
        directory: where files are written.
        seconds: how much of the past is kept.
        files: how many files are kept.
    """

    def __init__(self, guard: socket.socket, directory: Path, seconds: float, files: int) -> None:
        self._guard, self._directory, self._files = guard, directory, files
        self._ring = Ring(seconds)
        self._stop: Stop | None = None
        self._written_s = -_PAUSE_S
        self._writer: threading.Thread | None = None

    def run(self) -> None:
        """Returns when the guard is gone and everything is written."""
        while True:
            self._guard.settimeout(0.2)
            try:
                packet = self._guard.recv(_PACKET_BYTES)
            except TimeoutError:
                packet = None
            except ConnectionError:
                packet = b""
            if packet == b"":
                self._stop = Stop("guard_died", "the guard's process ended without a goodbye", 0.0)
            if packet == b"" or (packet is not None and packet[:1] == BYE):
                break
            if packet is not None:
                self._take(packet)
            self._write_if_due()
        if self._stop is not None:
            self._start_writing()
        if self._writer is not None:
            self._writer.join()

    def _take(self, packet: bytes) -> None:
        kind, channel, time_ns = HEAD.unpack_from(packet)
        data = packet[HEAD.size :]
        if kind == MESSAGE:
            self._ring.add(time_ns, channel, data)
        elif kind == TOPIC:
            said = json.loads(data)
            self._ring.topics[channel] = Topic(said["topic"], said["type"])
        elif kind == STOP and self._stop is None:
            said = json.loads(data)
            due_s = max(time.monotonic() + _AFTERMATH_S, self._written_s + _PAUSE_S)
            self._stop = Stop(said["cause"], said["reason"], due_s)

    def _write_if_due(self) -> None:
        writing = self._writer is not None and self._writer.is_alive()
        if self._stop is not None and time.monotonic() >= self._stop.due_s and not writing:
            self._start_writing()

    def _start_writing(self) -> None:
        """On a thread: a disk that hangs must not keep the guard's messages from coming in."""
        stop, self._stop = self._stop, None
        self._written_s = time.monotonic()
        assert stop is not None
        if self._writer is not None:
            self._writer.join()
        arguments = (stop, self._ring.snapshot(), dict(self._ring.topics))
        self._writer = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._writer.start()

    def _write(self, stop: Stop, messages: list[tuple[int, int, bytes]], topics: dict[int, Topic]) -> None:
        now = datetime.now(timezone.utc)
        path = self._directory / f"guard_{now:%Y%m%dT%H%M%S}_{now.microsecond // 1000:03d}_{stop.cause}.mcap"
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room()
            write_mcap(part, stop, messages, topics)
            part.rename(path)
            self._report({"file": str(path)})
        except ModuleNotFoundError as error:
            self._report({"problem": f"nothing can be written: the Python package {error.name} is missing"})
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._report({"problem": f"{path} could not be written: {error.strerror}; the guard goes on without it"})

    def _make_room(self) -> None:
        for leftover in self._directory.glob("guard_*.part"):
            leftover.unlink(missing_ok=True)
        kept = sorted(self._directory.glob("guard_*.mcap"))
        for old in kept[: max(0, len(kept) - self._files + 1)]:
            old.unlink(missing_ok=True)

    def _report(self, said: dict[str, str]) -> None:
        print(f"guard's black box: {said.get('problem') or said['file']}", file=sys.stderr, flush=True)
        try:
            self._guard.send(json.dumps(said).encode())
        except OSError:
            return  # the guard is gone


def write_mcap(path: Path, stop: Stop, messages: list[tuple[int, int, bytes]], topics: dict[int, Topic]) -> None:
    """Writes a recording.

    Raises:
        OSError: it cannot be written.
        ModuleNotFoundError: the package mcap is not installed.
    """
    from mcap.writer import CompressionType, Writer

    with path.open("wb") as file:
        writer = Writer(file, compression=CompressionType.NONE)
        writer.start(profile="ros2", library="specvla_ros guard")
        writer.add_metadata("guard", {"cause": stop.cause, "reason": stop.reason})
        schemas = {
            msgtype: writer.register_schema(msgtype, "ros2msg", definition(msgtype).encode())
            for msgtype in {topic.msgtype for topic in topics.values()}
        }
        channels = {
            number: writer.register_channel(topic.name, "cdr", schemas[topic.msgtype])
            for number, topic in topics.items()
        }
        for sequence, (time_ns, channel, raw) in enumerate(messages):
            writer.add_message(channels[channel], time_ns, raw, time_ns, sequence)
        writer.finish()
        file.flush()
        os.fsync(file.fileno())


def definition(msgtype: str) -> str:
    """A type's ros2msg text, followed by the definitions that it needs."""
    texts: dict[str, str] = {}
    _collect(msgtype, texts)
    first, *others = texts.items()
    return first[1] + "".join(f"{_SEPARATOR}\nMSG: {name.replace('/msg/', '/')}\n{text}" for name, text in others)


def _collect(msgtype: str, texts: dict[str, str]) -> None:
    if msgtype in texts:
        return
    package, _, name = msgtype.split("/")
    text = _definition_file(package, name).read_text(encoding="utf-8")
    texts[msgtype] = text if text.endswith("\n") else f"{text}\n"
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if len(words) < _FIELD_WORDS:
            continue
        kind = words[0].partition("[")[0].partition("<")[0]
        if "/" in kind:
            other, _, its_name = kind.rpartition("/")
            _collect(f"{other.partition('/')[0]}/msg/{its_name}", texts)
        elif kind[:1].isupper():
            _collect(f"{package}/msg/{kind}", texts)


def _definition_file(package: str, name: str) -> Path:
    prefixes = [Path(each) for each in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if each]
    paths = [prefix / "share" / package / "msg" / f"{name}.msg" for prefix in prefixes]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        raise FileNotFoundError(2, f"the definition {package}/msg/{name} is not in AMENT_PREFIX_PATH")
    return found


def main(arguments: list[str]) -> None:
    """Runs until the guard is gone."""
    number, directory, seconds, files = arguments
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with the guard, having written
    os.nice(_NICENESS)
    guard = socket.socket(fileno=int(number))
    Recorder(guard, Path(directory).expanduser(), float(seconds), int(files)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
