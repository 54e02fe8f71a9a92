# SPDX-License-Identifier: Apache-2.0
"""What robots that behave are answered while others attack the server, and when it is killed and started again.

PYTHONPATH=test python -m faults.serving_under_load

A server process on loopback with the nano policy. Well-behaved sessions speak openpi's protocol, ask at a steady rate
and compare each answer with the plain decoder's action for the picture. Beside them, in turns: floods, messages that
stall, sizes and pictures that lie, clients that leave before their answer, an older protocol, none with a token. Then
as many sessions as are said come and go, and are there at once. Then the server is killed, and started again at once.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_weights, result_head
from benchmarks.results_page import RESULTS, ROOT
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.serving.wire import pack, unpack

_TOKEN = "secret"
_FRAMES = 40
_MESSAGE_BYTES = 1_000_000
_SPARE = 8  # sessions that the attackers may take
_PATIENCE_S = 60.0
_REST_S = 0.02  # between two of an attacker's doings


class Server:
    """A process that can be killed and started again at the same port."""

    def __init__(self, sessions: int, budget_s: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._command = [sys.executable, "-m", "specvla_ros.cli", "serve", "--checkpoint", str(nano_policy())]
        self._command += ["--device", "cpu", "--port", str(self.port), "--robots", str(sessions + _SPARE)]
        self._command += ["--budget", str(budget_s), "--max-message-mb", str(_MESSAGE_BYTES / 1e6), "--mode", "spec"]
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"SPECVLA_TOKEN": _TOKEN, "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            self._command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ends_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends_s and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the server did not start")

    def kill(self) -> None:
        """As a power failure would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def resident_kb(self) -> int:
        """Of its memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def open(self, token: str = _TOKEN) -> ClientConnection:
        """A session."""
        headers = {"Authorization": f"Api-Key {token}"}
        url = f"ws://127.0.0.1:{self.port}"
        return connect(url, compression=None, additional_headers=headers, open_timeout=5, close_timeout=1, legacy=True)


@dataclass
class Tally:
    """What sessions were answered."""

    budget_s: float
    latencies_s: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    reconnects: int = 0
    refused: int = 0

    def figures(self) -> dict[str, float]:
        """Of all answers."""
        found = sorted(self.latencies_s)
        at: Callable[[float], float] = lambda share: found[int(share * (len(found) - 1))] if found else 0.0  # noqa: E731
        late = sum(each > self.budget_s for each in found)
        numbers = {"answers": len(found), "wrong": self.wrong, "lost": self.lost, "late": late}
        numbers |= {"reconnects": self.reconnects, "refused": self.refused}
        return {**numbers, "p50_s": at(0.5), "p95_s": at(0.95), "max_s": at(1.0)}


class Robots:
    """Sessions that behave: each asks at a steady rate, and looks at what it is answered.

    Args:
        frames: pictures with the plain decoder's actions.
    """

    def __init__(
        self, server: Server, number: int, rate_hz: float, frames: list[tuple[Observation, np.ndarray]]
    ) -> None:
        self._server, self._number, self._period_s, self._frames = server, number, 1 / rate_hz, frames

    def work(self, seconds: float, budget_s: float, *, beside: Callable[[], None] | None = None) -> Tally:
        """Lets them ask for a while; a connection that breaks is made again, and the frame asked for again.

        Args:
            beside: is done meanwhile; a request that it breaks off is no loss.
        """
        tally, ends_s = Tally(budget_s), time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._robot, args=(i, ends_s, tally, beside is not None))
            for i in range(self._number)
        ]
        for thread in threads:
            thread.start()
        if beside is not None:
            time.sleep(seconds / 3)
            beside()
        for thread in threads:
            thread.join()
        return tally

    def _robot(self, place: int, ends_s: float, tally: Tally, may_break: bool) -> None:
        client: ClientConnection | None = None
        due_s = time.monotonic() + place * self._period_s / self._number
        for number in count(place):
            if due_s > ends_s:
                break
            time.sleep(max(0.0, due_s - time.monotonic()))
            seen, right = self._frames[number % len(self._frames)]
            asked_s = time.monotonic()
            while True:
                asked = client is not None
                try:
                    if client is None:
                        client = self._server.open()
                        client.recv(_PATIENCE_S)
                        asked_s = time.monotonic()  # of the connection that answers
                    asked = True
                    client.send(_request(seen))
                    answer = client.recv(_PATIENCE_S)
                    break
                except (OSError, WebSocketException):
                    if time.monotonic() > ends_s + _PATIENCE_S:
                        tally.lost += 1
                        return
                    tally.lost += asked and not may_break
                    tally.reconnects += asked
                    tally.refused += not asked
                    client = None
                    time.sleep(0.1)
            tally.latencies_s.append(time.monotonic() - asked_s)
            if isinstance(answer, str):
                tally.lost += 1
            else:
                tally.wrong += not np.array_equal(unpack(answer)["actions"], right)
            due_s = max(due_s + self._period_s, time.monotonic())
        if client is not None:
            client.close()


def _request(seen: Observation) -> bytes:
    images = seen.images
    image = images if isinstance(images, np.ndarray) else next(iter(images.values()))
    return pack({"image": image, "prompt": seen.instruction})


def _flood(server: Server, message: bytes) -> None:
    with server.open() as client:
        client.recv(5)
        for _ in range(50):
            client.send(message)


def _stall(server: Server, _: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stalled:
        head = f"POST /act HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {_TOKEN}\r\nContent-Length: 100000\r\n\r\n"
        stalled.sendall(head.encode() + b'{"image":')
        time.sleep(0.5)


def _lie_about_size(server: Server, _: bytes) -> None:
    with server.open() as client:
        client.recv(5)
        client.send(b"\0" * (_MESSAGE_BYTES + 1))
        client.recv(5)


def _lie_in_pictures(server: Server, message: bytes) -> None:
    shape = {b"__ndarray__": True, b"data": b"abc", b"dtype": b"|u1", b"shape": [9999, 9999, 3]}
    pictures = (shape, np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), np.zeros((4, 4), np.uint8))
    with server.open() as client:
        client.recv(5)
        for lie in (message[: len(message) // 2], *(pack({"prompt": "x", "image": each}) for each in pictures)):
            client.send(lie)
            assert isinstance(client.recv(5), str), "a picture that lies was believed"


def _leave(server: Server, message: bytes) -> None:
    client = server.open()
    client.recv(5)
    client.send(message)
    client.socket.close()


def _old_protocol(server: Server, _: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as old:
        head = "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        old.sendall(f"{head}Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 7\r\n\r\n".encode())
        old.recv(1024)


def _without_token(server: Server, _: bytes) -> None:
    with server.open("wrong") as client:
        client.recv(5)


ATTACKS: dict[str, Callable[[Server, bytes], None]] = {
    "flood": _flood,
    "stall in mid-message": _stall,
    "lie about a size": _lie_about_size,
    "pictures that lie": _lie_in_pictures,
    "leave before the answer": _leave,
    "an older protocol": _old_protocol,
    "no token": _without_token,
}


@contextmanager
def _attackers(server: Server, message: bytes) -> Iterator[Counter[str]]:
    """One thread for each attack, over and over; gives how often each was tried."""
    tried: Counter[str] = Counter()
    ended = threading.Event()

    def attack(name: str) -> None:
        while not ended.is_set():
            with suppress(OSError, WebSocketException):  # shown out, which is as it should be
                ATTACKS[name](server, message)
            tried[name] += 1
            ended.wait(_REST_S)

    threads = [threading.Thread(target=attack, args=(name,)) for name in ATTACKS]
    for thread in threads:
        thread.start()
    try:
        yield tried
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _frames() -> list[tuple[Observation, np.ndarray]]:
    policy = load_target(nano_policy(), device="cpu")
    engine, found = Engine(policy, EngineSettings("ar")), []
    for number, seen in enumerate(islice(simulation_source(policy, FRAMES_FIRST_SEED), _FRAMES), start=1):
        outcome = engine.act(Observation(seen.images, seen.instruction, number, state=seen.state))
        assert isinstance(outcome, Action), outcome
        found.append((seen, outcome.actions))
    return found


def main(
    context: typer.Context,
    robots: Annotated[int, typer.Option(help="Well-behaved sessions.")] = 3,
    rate: Annotated[float, typer.Option(help="Requests per second of each.")] = 1.0,
    budget: Annotated[float, typer.Option(help="Seconds in which an answer is not late.")] = 1.0,
    seconds: Annotated[float, typer.Option(help="Of each part.")] = 30.0,
    sessions: Annotated[int, typer.Option(help="That come and go, and are there at once.")] = 100,
    crowd_period: Annotated[float, typer.Option(help="Seconds from a request of theirs to the next, each.")] = 10.0,
    out: Out = RESULTS / "serving_under_load.json",
) -> None:
    """Serves robots alone, beside attackers, after many sessions, and over a restart."""
    frames = _frames()
    busy_before = os.getloadavg()[0]
    server = Server(robots + sessions, budget)
    try:
        fleet, parts, memory = Robots(server, robots, rate, frames), {}, {}
        message = _request(frames[0][0])
        fleet.work(seconds / 3, budget)  # warm
        parts["alone"] = fleet.work(seconds, budget).figures()
        memory["before"] = server.resident_kb()
        tried: Counter[str] = Counter()
        for name, memory_name in (("beside the attackers", "after the attacks"), ("again", "after more attacks")):
            with _attackers(server, message) as attacks:
                parts[name] = fleet.work(seconds, budget).figures()
            tried += attacks
            memory[memory_name] = server.resident_kb()
        for _ in range(sessions):
            with server.open() as client:
                client.recv(_PATIENCE_S)
                client.send(message)
                client.recv(_PATIENCE_S)
        memory["after the sessions"] = server.resident_kb()
        crowd = Robots(server, sessions, 1 / crowd_period, frames)
        with ThreadPoolExecutor(1) as beside:
            theirs = beside.submit(crowd.work, seconds, budget)
            parts["beside a crowd"] = fleet.work(seconds, budget).figures()
            parts["the crowd"] = theirs.result().figures()
        memory["after the crowd"] = server.resident_kb()

        def restart() -> None:
            server.kill()
            server.start()

        parts["killed and started again"] = fleet.work(seconds, budget, beside=restart).figures()
    finally:
        server.kill()
    measured: dict[str, Any] = {"parts": parts, "attacks": dict(tried), "memory_kb": memory}
    machine = {"cores": os.cpu_count(), "load_before": busy_before}
    finish(result_head(context) | of_weights(nano_policy()) | machine | measured, out)


if __name__ == "__main__":
    typer.run(main)
