# SPDX-License-Identifier: Apache-2.0
"""A server's application in this process, clients of it without a network, and what answers in the engine's place."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from specvla_ros.engine.outcome import Action, DecodeRecord, Drop, DropReason, Outcome, StageTimings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.observation import Observation
from specvla_ros.serving import app, server
from specvla_ros.serving.server import Server, ServeSettings
from specvla_ros.serving.wire import dump

PICTURE = np.zeros((4, 4, 3), np.uint8)
ASKED = {"image": PICTURE, "prompt": "go"}
_HANGS_S = 20.0


def no_action(observation: Observation) -> Outcome:
    return Drop(observation, DropReason.NOT_AN_ACTION)


def actions(values: np.ndarray, forwards: int = 1) -> Callable[[Observation], Outcome]:
    """Answers each observation with these."""
    record = DecodeRecord("spec", tokens_per_forward=(1,) * forwards)
    names = tuple(f"axis {number}" for number in range(values.shape[1]))
    return lambda observation: Action(observation, names, values, (), StageTimings(), record, 0)


class Thread:
    """The engine's, which answers as it is told; None: never."""

    def __init__(self, answer: Callable[[Observation], Outcome] | None = no_action) -> None:
        self.answer = answer
        self.first: list[Action] = []  # of an answer, for clients that ask
        self.asked: list[Observation] = []
        self.closed: list[str] = []
        self.stopped = False
        self.engine = mock.Mock()  # notes what is called between two ticks

    @property
    def epochs(self) -> list[int]:
        return [observation.epoch for observation in self.asked]

    def prepared(self, observation: Observation) -> str:
        self.asked.append(observation)
        return "pictures"

    def decode(
        self, observation: Observation, pictures: str, on_partial: Callable[[Action], object] | None = None
    ) -> "Future[Any]":
        done: Future[Any] = Future()
        assert pictures == "pictures"
        if on_partial is not None:
            for action in self.first:
                on_partial(action)
        if self.answer is not None:
            done.set_result(SimpleNamespace(outcome=self.answer(observation)))
        return done

    def call(self, call: Callable[[Any], Any]) -> None:
        call(self.engine)

    def close(self, name: str) -> None:
        self.closed.append(name)

    def stop(self) -> None:
        self.stopped = True


class Served:
    """The application of a policy whose answers have `horizon` actions.

    Args:
        thread: in place of the engine's.
        limits: fields of `ServeSettings`.
    """

    def __init__(
        self,
        thread: Thread,
        *,
        horizon: int = 1,
        dt_s: float | None = None,
        ensemble: int = 0,
        step_s: float = 0.0,
        **limits: Any,
    ) -> None:
        codec = SimpleNamespace(horizon=horizon, dt_s=dt_s, names=("x", "gripper"))
        policy = SimpleNamespace(cameras=("image",), state_dims=0, state_names=(), unnorm_key="", codec=codec)
        engine: Any = SimpleNamespace(
            target=policy,
            settings=EngineSettings("ar", ensemble=ensemble, chunk_step_s=step_s),
            fault="",
            describe=lambda: {"checkpoint": "/home/me/policy", "mode": "spec"},
        )
        with mock.patch.object(server, "SharedEngine", lambda _: thread):
            self.server = Server(engine, ServeSettings(**limits))
        with mock.patch.object(app, "Server", lambda *_: self.server):
            self.app = app.make_app(engine, self.server.settings)

    def post(self, robot: str = "", *, token: str = "", **fields: Any) -> tuple[int, Any]:
        """Status and answer of OpenVLA's protocol."""
        body = json.dumps({"image": dump(PICTURE), "instruction": "go", **fields}).encode()
        return self.post_body(body, robot=robot, token=token)

    def post_body(
        self, *parts: bytes, whole: bool = True, then: str = "", robot: str = "", token: str = ""
    ) -> tuple[int, Any]:
        """Sends a body part by part, to its end or not; then nothing more, or a message of this kind."""
        more = [True] * (len(parts) - 1) + [not whole]
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": each} for part, each in zip(parts, more, strict=True)
        ]
        messages += [{"type": then}] if then else []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.sleep(_HANGS_S)

        return asyncio.run(self._http("POST", "/act", receive, token, robot))

    def get(self, path: str, token: str = "") -> tuple[int, Any]:
        return asyncio.run(self._http("GET", path, mock.AsyncMock(return_value={"type": "http.request"}), token))

    async def _http(
        self, method: str, path: str, receive: Callable[[], Awaitable[Any]], token: str, robot: str = ""
    ) -> tuple[int, Any]:
        scope = {"type": "http", "method": method, "path": path, "headers": _headers(token, robot), "query_string": b""}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(self.app({**scope, "client": ("10.0.0.7", 1)}, receive, send), _HANGS_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something is still waited for"
        body = b"".join(each.get("body", b"") for each in sent)
        is_json = (b"content-type", b"application/json") in sent[0]["headers"]
        return sent[0]["status"], json.loads(body) if is_json else body.decode()


def _headers(token: str, robot: str = "") -> list[tuple[bytes, bytes]]:
    given = {"authorization": token and f"Bearer {token}", "x-robot": robot}
    return [(name.encode(), value.encode()) for name, value in given.items() if value]


class Socket:
    """A client's websocket: `async with Socket(served) as client`, in which it is accepted."""

    def __init__(self, served: Served, path: str = "/", token: str = "") -> None:
        self._app, self._sent, self._coming = served.app, asyncio.Queue[Any](), asyncio.Queue[Any]()
        self._scope = {"type": "websocket", "path": path, "headers": _headers(token), "query_string": b""}

    async def __aenter__(self) -> "Socket":
        self._ends = asyncio.ensure_future(self._app(self._scope, self._sent.get, self._coming.put))
        self._sent.put_nowait({"type": "websocket.connect"})
        assert (await self.hear())["type"] == "websocket.accept"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Goes without a goodbye, and waits until the server has noticed."""
        self._sent.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await asyncio.wait_for(self._ends, _HANGS_S)

    async def end(self) -> None:
        """The server stops, as it does on SIGTERM."""
        self._ends.cancel()
        await asyncio.gather(self._ends, return_exceptions=True)

    def say(self, message: bytes | str) -> None:
        name = "bytes" if isinstance(message, bytes) else "text"
        self._sent.put_nowait({"type": "websocket.receive", name: message})

    async def hear(self) -> Any:
        """What the server sends next."""
        next_one = asyncio.ensure_future(self._coming.get())
        await asyncio.wait({next_one, self._ends}, timeout=_HANGS_S, return_when=asyncio.FIRST_COMPLETED)
        assert next_one.done() or not self._coming.empty(), "the server sends nothing"
        return await next_one

    async def ask(self, message: bytes | str) -> Any:
        """The answer to a message: bytes, or a text."""
        self.say(message)
        answer = await self.hear()
        return answer.get("bytes") or answer.get("text") or answer
