# SPDX-License-Identifier: Apache-2.0
"""The black box's end in the guard: hands every message to a process of its own, and never waits for it.

That process (black_box_process.py) keeps the last minutes, and writes them when a stop is told, or when the guard dies.
"""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEAD = struct.Struct("<cHQ")  # kind, channel, time in nanoseconds since the epoch
TOPIC, MESSAGE, STOP, BYE = b"T", b"M", b"S", b"B"
_BUFFER_BYTES = 4 << 20
_END_TIMEOUT_S = 20.0


class BlackBox:
    """Records messages as bytes; a message that the recorder has no room for is lost and counted.

    Args:
        directory: where stops are written.
        seconds: how much of the past is kept.
        files: how many files are kept.
    """

    def __init__(self, directory: Path, seconds: float, files: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        command = [sys.executable, "-m", "specvla_ros.ros.guard.black_box_process", str(theirs.fileno())]
        # A session of its own: Ctrl-C must not end it before it has written.
        self._process = subprocess.Popen(
            [*command, str(directory), str(seconds), str(files)], pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._channels: dict[str, int] = {}
        self.lost = 0
        self.last_file = ""
        self.problem = ""

    def add_topic(self, topic: str, msgtype: str) -> None:
        """Announces a topic, with its type such as std_msgs/msg/Empty."""
        self._channels[topic] = len(self._channels)
        self._send(TOPIC, self._channels[topic], json.dumps({"topic": topic, "type": msgtype}).encode())

    def record(self, topic: str, raw: bytes) -> None:
        """Records a message's CDR bytes; from any thread."""
        self._send(MESSAGE, self._channels[topic], raw)

    def stop(self, cause: str, reason: str) -> None:
        """What led here is written, with a moment of what follows."""
        self._send(STOP, 0, json.dumps({"cause": cause, "reason": reason}).encode())

    def look(self) -> None:
        """Reads what the recorder has to say."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while said := self._socket.recv(1 << 16):
                report: dict[str, Any] = json.loads(said)
                self.problem = report.get("problem", "")
                self.last_file = report.get("file", self.last_file)
        if self._process.poll() is not None:
            self.problem = f"the recorder ended with code {self._process.returncode}"

    def close(self) -> bool:
        """Lets the recorder finish what it is writing; False when it does not."""
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
        except OSError:  # no room, too long, or nobody there any more
            self.lost += 1
