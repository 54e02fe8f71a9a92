# SPDX-License-Identifier: Apache-2.0
"""A real server process, asked by clients that others wrote, and by some that mean no good."""

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.checkpoints import load_openvla, write_checkpoint
from support.gl import needs_gl
from support.nightly import nightly_but
from support.patience import PATIENCE_S, wait_until
from support.typed import specvla
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.libero import require_libero
from specvla_ros.serving.wire import dump, pack, unpack

INSTRUCTION = "put carrot on plate"
TOKEN = "secret"
LIMIT = 200_000  # bytes of a message
ROBOTS = 3
THEIR_PYTHON = Path(sys.prefix) / "clients" / "bin" / "python"


def pictures(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 48, 64, 3), dtype=np.uint8)


class Server:
    def __init__(self, checkpoint: Path, *options: object, token: str = TOKEN) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "specvla_ros.cli", "serve", "--checkpoint", checkpoint, "--port", self.port]
        command += [
            "--device",
            "cpu",
            "--robots",
            ROBOTS,
            "--max-message-mb",
            LIMIT / 1e6,
            "--mode",
            "spec",
            "--idle",
            0.5,
        ]
        command += ["-p", "draft.temporal:=true", *options]
        environment = {**os.environ, "SPECVLA_TOKEN": token}
        self.process = subprocess.Popen([*map(str, command)], env=environment, stderr=subprocess.PIPE, text=True)

    def wait(self) -> None:
        wait_until(lambda: self.process.poll() is not None or self.health() == 200)
        assert self.process.poll() is None, self.process.stderr.read() if self.process.stderr else ""

    def health(self) -> int:
        try:
            return int(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5).status)
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics", headers=_header(TOKEN))
        lines = urllib.request.urlopen(request, timeout=5).read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def post(self, body: bytes, token: str = TOKEN, robot: str = "") -> tuple[int, Any]:
        headers = _header(token) | ({"X-Robot": robot} if robot else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/act", data=body, headers=headers)
        try:
            answer = urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        return answer.status, json.loads(answer.read())

    def open(self, token: str = TOKEN, path: str = "/") -> ClientConnection:
        shown = token if " " in token else f"Api-Key {token}"
        headers = {"Authorization": shown} if token else {}
        return connect(
            f"ws://127.0.0.1:{self.port}{path}",
            compression=None,
            max_size=None,
            additional_headers=headers,
            legacy=True,
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=5)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    made = Server(checkpoint)
    try:
        made.wait()
        yield made
    finally:
        made.end()


def decoded(checkpoint: Path, images: np.ndarray, instruction: str = INSTRUCTION) -> list[np.ndarray]:
    """The plain decoder's actions."""
    engine = Engine(load_openvla(checkpoint, device="cpu"), EngineSettings("ar"))
    answers = []
    for number, image in enumerate(images, start=1):
        outcome = engine.act(Observation(image, instruction, number))
        assert isinstance(outcome, Action)
        answers.append(outcome.actions)
    return answers


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[np.ndarray]:
    """The plain decoder's actions for the pictures."""
    return decoded(checkpoint, pictures(6))


def ask(client: ClientConnection, image: np.ndarray, **changes: Any) -> Any:
    client.send(pack({"image": image, "prompt": INSTRUCTION, **changes}))
    answer = client.recv(PATIENCE_S)
    return answer if isinstance(answer, str) else unpack(answer)["actions"]


needs_their_packages = pytest.mark.skipif(
    not THEIR_PYTHON.exists(), reason="make test installs other people's clients beside the tests' packages"
)


def run_theirs(name: str, server: Server, tmp_path: Path) -> Any:
    """What a script in the environment of other people's clients was answered for the pictures."""
    np.savez(tmp_path / "frames.npz", images=pictures(6), instruction=INSTRUCTION)
    script = Path(__file__).with_name(name)
    arguments = [server.port, tmp_path / "frames.npz", tmp_path / "answers.npz", TOKEN]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(THEIR_PYTHON), str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return np.load(tmp_path / "answers.npz")


@needs_their_packages
def test_unchanged_clients_get_the_plain_decoders_actions(
    server: Server, plain: list[np.ndarray], tmp_path: Path
) -> None:
    answers = run_theirs("their_clients.py", server, tmp_path)
    np.testing.assert_array_equal(answers["openpi"], plain)
    np.testing.assert_array_equal(answers["openvla"], np.array(plain)[:, 0])
    np.testing.assert_array_equal(answers["encoded"], np.array(plain)[:, 0])


@needs_their_packages
def test_unchanged_benchmarks_are_driven_by_the_plain_decoders_actions(
    server: Server, checkpoint: Path, plain: list[np.ndarray], tmp_path: Path
) -> None:
    answers = run_theirs("their_benchmarks.py", server, tmp_path)
    np.testing.assert_array_equal(answers["vla_eval"], np.array(plain)[:, 0])
    seen = answers["seen"]
    assert len(seen) == 6  # two scenes of three steps
    np.testing.assert_array_equal(answers["inspect_robots"], decoded(checkpoint, seen, "reach the cube"))


@needs_their_packages
@needs_gl
def test_vla_evals_libero_is_driven_by_the_plain_decoders_actions(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    try:
        require_libero()
    except UserError as error:
        pytest.skip(str(error))
    (packages,) = THEIR_PYTHON.parents[1].glob("lib/python*/site-packages")
    script, out = Path(__file__).with_name("their_libero.py"), tmp_path / "seen.npz"
    command = [sys.executable, script, server.port, out, TOKEN, packages]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = np.load(out)
    expected = decoded(checkpoint, found["seen"], str(found["instruction"]))
    np.testing.assert_array_equal(found["done"], np.array(expected)[:, 0])


@pytest.mark.parametrize("sessions", nightly_but(lambda sessions: sessions == 30, [30, 100]))
def test_many_sessions_at_once_get_their_own_answers(checkpoint: Path, plain: list[np.ndarray], sessions: int) -> None:
    server = Server(checkpoint, "--robots", sessions)
    try:
        server.wait()
        clients = [server.open() for _ in range(sessions)]
        for client in clients:
            client.recv(PATIENCE_S)
        for turn in range(2):
            for place, client in enumerate(clients):
                client.send(pack({"image": pictures(6)[(place + turn) % 6], "prompt": INSTRUCTION}))
            for place, client in enumerate(clients):
                answer = client.recv(PATIENCE_S)
                assert isinstance(answer, bytes), answer
                np.testing.assert_array_equal(unpack(answer)["actions"], plain[(place + turn) % 6])
        assert server.metrics()["specvla_sessions"] == sessions
        for client in clients:
            client.close()
    finally:
        server.end()


def test_nothing_is_computed_for_clients_that_have_left(server: Server, plain: list[np.ndarray]) -> None:
    """However many there are: who stays waits for none of them."""
    wait_until(lambda: server.metrics()["specvla_sessions"] == 0)
    before = server.metrics()
    body = json.dumps({"image": dump(pictures(6)[0]), "instruction": INSTRUCTION}).encode()
    head = f"POST /act HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        gone = server.open()
        gone.recv()
        gone.send(pack({"image": pictures(6)[0], "prompt": INSTRUCTION}))
        gone.socket.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as over_http:
            over_http.sendall(head.encode() + body)
        wait_until(lambda: server.metrics()["specvla_sessions"] < ROBOTS)
    with server.open() as client:
        client.recv()
        np.testing.assert_array_equal(ask(client, pictures(6)[1]), plain[1])
    after = server.metrics()
    abandoned, acted = (
        after[name] - before[name] for name in ("specvla_requests_abandoned_total", "specvla_actions_total")
    )
    assert abandoned > 0 and abandoned + acted <= 41


def test_robots_at_once_get_their_own_answers(server: Server, plain: list[np.ndarray]) -> None:
    """While others send nonsense, leave in the middle, or ask what cannot be asked."""
    wait_until(lambda: server.metrics()["specvla_sessions"] == 0)
    before = server.metrics()
    first, second = server.open(), server.open()
    for client in (first, second):
        metadata = client.recv()
        assert isinstance(metadata, bytes) and unpack(metadata)["cameras"] == ["image"]
    for turn in range(6):
        gone = server.open()
        gone.recv()
        gone.send(pack({"image": pictures(6)[0], "prompt": INSTRUCTION}))
        first.send(pack({"image": pictures(6)[turn], "prompt": INSTRUCTION}))
        gone.socket.close()  # in the middle of its answer, without a goodbye
        np.testing.assert_array_equal(ask(second, pictures(6)[5 - turn]), plain[5 - turn])
        answer = first.recv(PATIENCE_S)
        assert isinstance(answer, bytes)
        np.testing.assert_array_equal(unpack(answer)["actions"], plain[turn])
        wait_until(lambda: server.metrics()["specvla_sessions"] == 2)
    after = server.metrics()
    assert after["specvla_actions_total"] - before["specvla_actions_total"] >= 12
    for client in (first, second):
        client.close()
    wait_until(lambda: server.metrics()["specvla_sessions"] == 0)


LIES = {
    "no msgpack": (b"\xc1\xc1", "not valid msgpack"),
    "a list": (b"\x93\x01\x02\x03", "must be an object"),
    "a shape of other bytes": (
        pack({"prompt": "x", "image": {b"__ndarray__": True, b"data": b"abc", b"dtype": "|u1", b"shape": [99, 99, 3]}}),
        "does not match its 3 bytes",
    ),
    "a shape below zero": (
        pack({"prompt": "x", "image": {b"__ndarray__": True, b"data": b"", b"dtype": "|u1", b"shape": [-1, 0, 3]}}),
        "shape must be at most 8 whole numbers",
    ),
    "objects": (
        pack({"prompt": "x", "image": {b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]}}),
        r"an array has dtype '\|O'; use a numeric one such as",
    ),
    "a picture of floats": (pack({"prompt": "x", "image": np.zeros((4, 4, 3))}), "must be uint8 RGB"),
    "a picture without pixels": (pack({"prompt": "x", "image": np.zeros((0, 4, 3), np.uint8)}), "needs a uint8 RGB"),
    "no picture": (
        pack({"prompt": "x", "depth": 1}),
        "the image of camera 'image' is missing; .* the message has depth",
    ),
    "no words": (pack({"image": np.zeros((4, 4, 3), np.uint8)}), "give the task as 'prompt' or 'instruction'"),
    "an empty instruction": (pack({"image": np.zeros((4, 4, 3), np.uint8), "prompt": " "}), "bad_instruction: "),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_message_that_lies_is_answered_with_the_reason(server: Server, plain: list[np.ndarray], kind: str) -> None:
    message, reason = LIES[kind]
    with server.open() as client:
        client.recv()
        client.send(message)
        answer = client.recv(PATIENCE_S)
        assert isinstance(answer, str) and re.search(reason, answer), answer
        np.testing.assert_array_equal(ask(client, pictures(6)[0]), plain[0])  # the session goes on


def test_a_text_is_told_what_is_read_here(server: Server, plain: list[np.ndarray]) -> None:
    refused = server.metrics()["specvla_requests_refused_total"]
    with server.open() as older, pytest.raises(ConnectionClosed) as closed:
        older.recv()
        older.send('{"image": 1}')
        older.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1003 and "MessagePack" in closed.value.rcvd.reason
    assert server.metrics()["specvla_requests_refused_total"] == refused + 1


def test_who_has_no_token_or_sends_too_much_is_shown_out(server: Server, plain: list[np.ndarray]) -> None:
    for token in ("", "wrong", TOKEN[::-1]):
        with server.open(token) as client, pytest.raises(ConnectionClosed) as closed:
            client.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    body = json.dumps({"image": dump(pictures(1)[0]), "instruction": INSTRUCTION}).encode()
    for token in ("wrong", TOKEN[::-1]):
        assert server.post(body, token=token)[0] == 401
    status, answer = server.post(b" " * (LIMIT + 1))
    assert status == 400 and f"the message exceeds {LIMIT} bytes" in answer["error"]
    with server.open() as client:
        client.recv()
        client.send(b"\0" * (LIMIT + 1))
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(PATIENCE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
    for text in (b"{", b"[1]", b'{"image": {"__numpy__": "!", "dtype": "|u1", "shape": [1]}, "instruction": "x"}'):
        assert server.post(text)[0] == 400
    wait_until(lambda: server.metrics()["specvla_sessions"] == 0)
    assert server.health() == 200


def test_numbers_of_another_dataset_than_the_servers_are_not_given(server: Server, plain: list[np.ndarray]) -> None:
    def asked(key: str) -> tuple[int, Any]:
        message = {"image": dump(pictures(1)[0]), "instruction": INSTRUCTION, "unnorm_key": key}
        return server.post(json.dumps(message).encode())

    assert asked("bridge_orig")[0] == asked("")[0] == 200
    status, answer = asked("another_robot")
    assert status == 400 and "unnorm_key another_robot, but the policy was loaded with bridge_orig" in answer["error"]


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(checkpoint: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = specvla("serve", "--checkpoint", checkpoint, "--device", "cpu", "--port", port)
    assert refused.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in " ".join(refused.stderr.split())
    assert "serving" not in refused.stdout


def vla_eval_message(kind: object, payload: object, number: object = 1) -> bytes:
    return pack({"type": kind, "payload": payload, "seq": number, "timestamp": 0.0})


def test_what_vla_evals_clients_send_wrongly_is_answered_with_the_reason(
    server: Server, plain: list[np.ndarray]
) -> None:
    def observation(data: bytes) -> bytes:
        picture = {"__image__": True, "format": "png", "data": data, "shape": [48, 64, 3]}
        return vla_eval_message("observation", {"images": {"agentview": picture}, "task_description": INSTRUCTION}, 7)

    def png(image: np.ndarray) -> bytes:
        Image.fromarray(image).save(file := io.BytesIO(), format="PNG")
        return file.getvalue()

    huge = io.BytesIO()
    Image.new("1", (5000, 5000)).save(huge, format="PNG")  # 3 kB of zeros
    lies = {
        b"\xc1": "not valid msgpack",
        vla_eval_message("metadata", {}): "'type' must be one of hello",
        vla_eval_message("hello", []): "an object as 'payload'",
        vla_eval_message("hello", {}, "first"): "a whole number as 'seq'",
        vla_eval_message("hello", {"protocol_version": 0}): "version 0 is not supported, only version 1",
        vla_eval_message(
            "observation", {"images": {}, "task_description": "x"}
        ): "the image of camera 'image' is missing",
        observation(png(pictures(1)[0])[:200]): "truncated",
        observation(b"MZ"): "not a PNG or JPEG",
        observation(huge.getvalue()): "may have at most 16777216 pixels",
        observation(png(pictures(1)[0][..., 0])): "must be uint8 RGB",
    }
    for token in ("", "Basic !", "Basic " + base64.b64encode(b"robot:wrong").decode()):
        with server.open(token, "/vla-eval") as refused, pytest.raises(ConnectionClosed) as closed:
            refused.recv(PATIENCE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    with server.open(path="/vla-eval") as client:
        for message, reason in lies.items():
            client.send(message)
            answer = unpack_bytes(client.recv(PATIENCE_S))
            assert answer["type"] == "error" and re.search(reason, answer["payload"]["error"]), answer
        client.send(observation(png(pictures(1)[0])))  # the session goes on
        answer = unpack_bytes(client.recv(PATIENCE_S))
        assert (answer["type"], answer["seq"]) == ("action", 7)
        np.testing.assert_array_equal(answer["payload"]["actions"], plain[0][0])


def unpack_bytes(answer: str | bytes) -> dict[str, Any]:
    assert isinstance(answer, bytes), answer
    return unpack(answer)


def test_more_sessions_than_slots_are_told_to_come_later(server: Server, plain: list[np.ndarray]) -> None:
    wait_until(lambda: server.metrics()["specvla_sessions"] == 0)
    clients = [server.open() for _ in range(ROBOTS)]
    for client in clients:
        client.recv()
    with server.open() as late, pytest.raises(ConnectionClosed) as closed:
        late.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
    assert f"all {ROBOTS} sessions are in use" in closed.value.rcvd.reason
    body = json.dumps({"image": dump(pictures(6)[3]), "instruction": INSTRUCTION}).encode()
    assert server.post(body)[0] == 503
    np.testing.assert_array_equal(ask(clients[1], pictures(6)[2]), plain[2])
    clients[0].close()
    wait_until(lambda: server.metrics()["specvla_sessions"] == ROBOTS - 1)
    status, answer = server.post(body)
    assert status == 200
    assert answer["shape"] == [7]
    for client in clients[1:]:
        client.close()


def test_a_client_that_stalls_in_mid_message_holds_nobody_up(server: Server, plain: list[np.ndarray]) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        head = f"POST /act HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n"
        stalled.sendall(head.encode() + b'{"image":')
        with server.open() as client:
            client.recv()
            for number in range(4):
                np.testing.assert_array_equal(ask(client, pictures(6)[number]), plain[number])
        stalled.settimeout(PATIENCE_S)
        assert b"408" in stalled.recv(4096).split(b"\r\n")[0]


def test_it_ends_when_told_and_what_is_asked_for_wrongly_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    ending = Server(checkpoint)
    try:
        ending.wait()
        client = ending.open()
        client.recv()
        ending.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            client.recv(PATIENCE_S)
        assert ending.process.wait(30) in (0, -signal.SIGTERM)
    finally:
        ending.end()
    for options, message in (
        (("--certificate", "cert.pem"), "TLS needs both"),
        (("--token-file", tmp_path / "none"), "none does not exist"),
    ):
        refused = specvla("serve", "--checkpoint", checkpoint, "--device", "cpu", *options)
        assert refused.returncode != 0 and message in " ".join(refused.stderr.split())


@pytest.mark.nightly
def test_a_hundred_sessions_come_and_go(server: Server, plain: list[np.ndarray]) -> None:
    """Memory does not grow with those that are gone."""

    def resident() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def come_and_go(n: int) -> None:
        for number in range(n):
            with server.open() as client:
                client.recv()
                np.testing.assert_array_equal(ask(client, pictures(6)[number % 6]), plain[number % 6])
            wait_until(lambda: server.metrics()["specvla_sessions"] == 0)

    wait_until(lambda: server.post(b"{")[0] == 400)
    come_and_go(20)
    before = resident()
    come_and_go(100)
    assert resident() - before < 20_000, "kB"
