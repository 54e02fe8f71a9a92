# SPDX-License-Identifier: Apache-2.0
"""The part that all protocols share: access, sessions, decoding while the client stays, and counts."""

import asyncio
import base64
import binascii
import hmac
import logging
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason, Outcome
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.models.target import Target
from specvla_ros.serving.sessions import NoRoomError, ServeSettings, Session, Sessions
from specvla_ros.serving.wire import read_observation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NOT_ALLOWED, _TRY_LATER, _NOT_READ = 4401, 1013, 1003  # closing codes of a websocket
NO_TOKEN = "no token, or another than the server's"
_SILENCE_S = 2.0  # that ends an episode; longer where a client may be acting on a long chunk
_MAX_WARNINGS = 32  # of what clients send in vain
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


class Metrics:
    """Counts for Prometheus."""

    def __init__(self) -> None:
        self.refused = 0
        self.abandoned = 0
        self._latency = [0] * (len(_BUCKETS_S) + 1)
        self._latency_sum = 0.0

    def took(self, seconds: float) -> None:
        self._latency[sum(seconds > limit for limit in _BUCKETS_S)] += 1
        self._latency_sum += seconds

    def text(self, sessions: Sessions) -> str:
        """In Prometheus' text format."""
        lines = []
        for kind, name, number in (
            ("gauge", "sessions", len(sessions)),
            ("counter", "actions_total", sessions.actions),
            ("counter", "requests_refused_total", self.refused),
            ("counter", "requests_abandoned_total", self.abandoned),
        ):
            lines += [f"# TYPE specvla_{name} {kind}", f"specvla_{name} {number}"]
        lines.append("# TYPE specvla_drops_total counter")
        for reason in DropReason:
            lines.append(f'specvla_drops_total{{reason="{reason.value}"}} {sessions.drops[reason.value]}')
        lines.append("# TYPE specvla_request_seconds histogram")
        total = 0
        for limit, number in zip((*map(str, _BUCKETS_S), "+Inf"), self._latency, strict=True):
            total += number
            lines.append(f'specvla_request_seconds_bucket{{le="{limit}"}} {total}')
        lines += [f"specvla_request_seconds_sum {self._latency_sum:.6f}", f"specvla_request_seconds_count {total}"]
        return "\n".join([*lines, ""])


class Server:
    """One engine, warm and driven by `thread`, for the clients of all protocols."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        self.policy: Target = engine.target
        self.metrics = Metrics()
        self.thread = SharedEngine(engine)
        codec = self.policy.codec
        chunk_s = codec.horizon * (engine.settings.chunk_step_s or codec.dt_s or 0.0)
        self.sessions = Sessions(self.thread, settings, max(_SILENCE_S, 2 * chunk_s))
        self._names = count(1)
        self._ignored: set[str] = set()  # that were warned of

    def allows(self, client: HTTPConnection) -> bool:
        """Whether a client shows the token, if one is wanted."""
        token = self.settings.token
        if not token:
            return True
        kind, _, shown = client.headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":  # of an address such as ws://robot:TOKEN@host
            kind, shown = "bearer", _password(shown)
        return kind.lower() in ("api-key", "bearer") and hmac.compare_digest(shown.encode(), token.encode())

    def problem(self, text: str, status: int) -> Response:
        """An HTTP answer without an action."""
        self.metrics.refused += status != 422
        return JSONResponse({"error": text}, status)

    async def converse(
        self, socket: WebSocket, answer: Callable[[Session, bytes], Coroutine[Any, Any, None]], greeting: bytes = b""
    ) -> None:
        """Opens a session for a websocket that is not accepted yet, and answers its messages one after the other.

        Args:
            answer: sends the answer to a message.
            greeting: sent first; empty: nothing.
        """
        await socket.accept()

        async def refuse(code: int, reason: str) -> None:
            self.metrics.refused += 1
            await socket.close(code, reason)

        if not self.allows(socket):
            return await refuse(_NOT_ALLOWED, NO_TOKEN)
        try:
            session = self.sessions.open(f"socket {next(self._names)}", lasting=True)
        except NoRoomError as error:
            return await refuse(_TRY_LATER, str(error))
        coming = asyncio.ensure_future(_received(socket))
        try:
            if greeting:
                await socket.send_bytes(greeting)
            while True:
                message = await coming
                coming = asyncio.ensure_future(_received(socket))
                await unless_gone(answer(session, message), coming)
        except WebSocketDisconnect:
            pass
        except _TextError:
            await refuse(_NOT_READ, "messages are MessagePack in binary frames, this one is a text")
        finally:
            await cancel(coming)
            self.sessions.close(session)

    async def decode(self, session: Session, message: dict[str, Any]) -> Outcome:
        """The outcome of an observation in client names; UserError if it cannot be used, or comes too soon."""
        started_s = time.perf_counter()
        if message.pop("reset", False) is True:
            session.begin_episode()
        try:
            asked = await asyncio.to_thread(read_observation, message, self.policy)  # a picture may have to be decoded
            self._warn_of(asked.ignored)
            outcome = await session.act(asked.images, asked.instruction, asked.state)
        except asyncio.CancelledError:
            self.metrics.abandoned += 1
            raise
        self.sessions.count(outcome)
        if isinstance(outcome, Action):
            self.metrics.took(time.perf_counter() - started_s)
        return outcome

    def _warn_of(self, ignored: str) -> None:
        if ignored and ignored not in self._ignored and len(self._ignored) < _MAX_WARNINGS:
            self._ignored.add(ignored)
            _log.warning("the policy has no use for %s, which a client sends", ignored)


async def unless_gone(answer: Coroutine[Any, Any, _T], coming: "asyncio.Future[Any]") -> _T:
    """The result of an answer; cancelled if the client leaves meanwhile.

    Args:
        coming: the client's next message; leaving ends it with an error, which is raised here.
    """
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({task, coming}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and coming.exception() is not None:
            await coming
        return await task
    finally:
        await cancel(task)


class _TextError(Exception):
    pass


async def _received(socket: WebSocket) -> bytes:
    try:
        return await socket.receive_bytes()
    except KeyError:  # a text has no bytes
        raise _TextError from None


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Ends a task, and waits for that."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def why(outcome: Outcome) -> str:
    """For a client: why there is no action."""
    assert not isinstance(outcome, Action)
    return f"{outcome.reason.value}: {outcome.detail}" if outcome.detail else outcome.reason.value


def _password(credentials: str) -> str:
    """HTTP's basic authorization (RFC 7617)."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (ValueError, binascii.Error):
        return ""
