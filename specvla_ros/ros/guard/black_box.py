# SPDX-License-Identifier: Apache-2.0
"""The black box: the guard passes every message to a separate process, and never waits for it.

That process, `python -m specvla_ros.ros.guard.black_box`, keeps the last minutes. It writes an MCAP file some seconds
after each stop, and when the guard ends unexpectedly. It needs neither rclpy nor NumPy: messages are bytes, and their
definitions are files of ROS.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HEAD = struct.Struct("<cHQ")  # kind, channel, time in nanoseconds since the epoch
TOPIC, MESSAGE, STOP, BYE = b"T", b"M", b"S", b"B"
_BUFFER_BYTES = 4 << 20
_END_TIMEOUT_S = 20.0
_AFTERMATH_S = 2.0  # time after a stop that its file includes
_PAUSE_S = 10.0  # min time between two files
_LARGEST_BYTES = 64 << 20
_SEPARATOR = "=" * 80
_PACKET_BYTES = 8 << 20
_NICENESS = 5
_FIELD_WORDS = 2


class BlackBox:
    """Records messages as bytes. A message that the recorder has no room for is lost and counted.

    Args:
        directory: folder of the files.
        seconds: length of the past that is kept.
        files: number of files that are kept.
        output: the guard's output, named in each file.
    """

    def __init__(self, directory: Path, seconds: float, files: int, output: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        command = [sys.executable, "-m", "specvla_ros.ros.guard.black_box", str(theirs.fileno())]
        # A session of its own: Ctrl-C must not end it before it has written.
        self._process = subprocess.Popen(
            [*command, str(directory), str(seconds), str(files), output],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._channels: dict[str, int] = {}
        self.lost = 0
        self.last_file = ""
        self.problem = ""

    def add_topic(self, topic: str, msgtype: str) -> None:
        """Announces a topic, with its type such as std_msgs/msg/Empty."""
        if topic in self._channels:  # another subscription announced it
            return
        self._channels[topic] = len(self._channels)
        self._send(TOPIC, self._channels[topic], json.dumps({"topic": topic, "type": msgtype}).encode())

    def record(self, topic: str, raw: bytes) -> None:
        """Records a message's CDR bytes; from any thread."""
        self._send(MESSAGE, self._channels[topic], raw)

    def stop(self, cause: str, reason: str) -> None:
        """Requests a file of the messages before the stop and shortly after it."""
        self._send(STOP, 0, json.dumps({"cause": cause, "reason": reason}).encode())

    def look(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while said := self._socket.recv(1 << 16):
                report: dict[str, Any] = json.loads(said)
                self.problem = report.get("problem", "")
                self.last_file = report.get("file", self.last_file)
        if self._process.poll() is not None:
            self.problem = f"the recorder ended with code {self._process.returncode}"

    def close(self) -> bool:
        """Lets the recorder finish writing. Returns False if it does not."""
        self._send(BYE, 0, b"")
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, kind: bytes, channel: int, data: bytes) -> None:
        try:
            self._socket.send(HEAD.pack(kind, channel, time.time_ns()) + data)
        except OSError:  # no room, too long, or the recorder is gone
            self.lost += 1


Topics = dict[int, tuple[str, str]]  # name and type by channel


@dataclass(frozen=True)
class Stop:
    """The reason for writing a file."""

    cause: str
    reason: str
    time_ns: int  # of the first braking tick
    due_s: float


class Ring:
    """The messages of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._messages: deque[tuple[float, int, int, bytes]] = deque()
        self._bytes = 0
        self.topics: Topics = {}

    def add(self, steady_s: float, time_ns: int, channel: int, raw: bytes) -> None:
        """Adds a message. Its age is that by the steady clock: a wall clock that is set must not drop the past."""
        self._messages.append((steady_s, time_ns, channel, raw))
        self._bytes += len(raw) + HEAD.size
        while self._bytes > _LARGEST_BYTES or steady_s - self._messages[0][0] > self._seconds:
            self._bytes -= len(self._messages.popleft()[3]) + HEAD.size

    def snapshot(self) -> list[tuple[int, int, bytes]]:
        """Copies the kept messages: time in nanoseconds, channel and bytes of each."""
        return [(time_ns, channel, raw) for _, time_ns, channel, raw in self._messages]


class Recorder:
    """Reads from the guard's socket until the guard is gone; see `BlackBox`."""

    def __init__(self, guard: socket.socket, directory: Path, seconds: float, files: int, output: str) -> None:
        self._guard, self._directory, self._files, self._output = guard, directory, files, output
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
            except (TimeoutError, ConnectionError):  # reset as the guard left reports unread; its packets still follow
                packet = None
            if packet == b"":
                self._stop = Stop("guard_died", "the guard's process ended unexpectedly", time.time_ns(), 0.0)
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
            self._ring.add(time.monotonic(), time_ns, channel, data)
        elif kind == TOPIC:
            said = json.loads(data)
            self._ring.topics[channel] = (said["topic"], said["type"])
        elif kind == STOP and self._stop is None:
            said = json.loads(data)
            due_s = max(time.monotonic() + _AFTERMATH_S, self._written_s + _PAUSE_S)
            self._stop = Stop(said["cause"], said["reason"], time_ns, due_s)

    def _write_if_due(self) -> None:
        writing = self._writer is not None and self._writer.is_alive()
        if self._stop is not None and time.monotonic() >= self._stop.due_s and not writing:
            self._start_writing()

    def _start_writing(self) -> None:
        """Writes on a thread, so that a hanging disk does not block the guard's messages."""
        stop, self._stop = self._stop, None
        self._written_s = time.monotonic()
        assert stop is not None
        if self._writer is not None:
            self._writer.join()
        arguments = (stop, self._ring.snapshot(), dict(self._ring.topics))
        self._writer = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._writer.start()

    def _write(self, stop: Stop, messages: list[tuple[int, int, bytes]], topics: Topics) -> None:
        now = datetime.now(timezone.utc)
        path = self._directory / f"guard_{now:%Y%m%dT%H%M%S}_{now.microsecond // 1000:03d}_{stop.cause}.mcap"
        part = path.with_suffix(".part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._make_room()
            write_mcap(part, stop, self._output, messages, topics)
            part.rename(path)
            self._report({"file": str(path)})
        except ModuleNotFoundError as error:
            self._report({"problem": f"nothing can be written: the Python package {error.name} is missing"})
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._report({"problem": f"{path} could not be written: {error.strerror}; the guard continues without it"})

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


def write_mcap(path: Path, stop: Stop, output: str, messages: list[tuple[int, int, bytes]], topics: Topics) -> None:
    """Writes a recording; raises OSError, or ModuleNotFoundError if the package mcap is not installed."""
    from mcap.writer import CompressionType, Writer

    with path.open("wb") as file:
        writer = Writer(file, compression=CompressionType.NONE)
        writer.start(profile="ros2", library="specvla_ros guard")
        about = {"cause": stop.cause, "reason": stop.reason, "time_ns": str(stop.time_ns), "output": output}
        writer.add_metadata("guard", about)
        schemas = {
            msgtype: writer.register_schema(msgtype, "ros2msg", definition(msgtype).encode())
            for msgtype in {msgtype for _, msgtype in topics.values()}
        }
        channels = {
            number: writer.register_channel(name, "cdr", schemas[msgtype]) for number, (name, msgtype) in topics.items()
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
    number, directory, seconds, files, output = arguments
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with the guard, after writing
    os.nice(_NICENESS)
    guard = socket.socket(fileno=int(number))
    Recorder(guard, Path(directory).expanduser(), float(seconds), int(files), output).run()


if __name__ == "__main__":
    main(sys.argv[1:])
