# SPDX-License-Identifier: Apache-2.0
"""One engine for the clients of all protocols: access control, sessions, cancellable decoding and metrics.

Each session is one stream of the engine and has at most one request in progress.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import numpy as np
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason, Outcome
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.serving.wire import read_observation

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NOT_ALLOWED, _TRY_LATER, _NOT_READ = 4401, 1013, 1003  # websocket close codes
NO_TOKEN = "the token is missing or wrong"
_SILENCE_S = 2.0  # silence that ends an episode; longer for long chunks, during which a client stays silent
_MAX_WARNINGS = 32  # about unused inputs
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


@dataclass(frozen=True)
class ServeSettings:
    """Limits for a server's clients."""

    sessions: int = 4  # maximum number of open sessions; the engine has as many slots
    token: str = ""  # token required of clients; empty: none
    budget_s: float = 0.5  # deadline for answering a request
    max_message_bytes: int = 32_000_000  # maximum size of a request
    max_rate_hz: float = 0.0  # maximum request rate of a session; 0: no limit
    idle_s: float = 60.0  # an HTTP session is closed after this long without a request
    message_s: float = 10.0  # the body of an HTTP request must arrive within this time


class NoRoomError(Exception):
    """All sessions are taken."""


class Session:
    """One client's stream of the engine; its requests are answered one at a time."""

    def __init__(
        self, thread: SharedEngine, name: str, min_period_s: float, silence_s: float, *, lasting: bool
    ) -> None:
        self.name, self.lasting, self._silence_s = name, lasting, silence_s
        self.used_s = time.monotonic()
        self._thread = thread
        self._min_period_s = min_period_s
        self._lock = asyncio.Lock()
        self._claims = 0
        self._instruction = ""
        self._epoch = 0
        self._stamp_ns = 0
        self._asked_s = -math.inf

    @property
    def busy(self) -> bool:
        return self._claims > 0 or self._lock.locked()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keeps the session from being closed for idleness while a request is read that has yet to reach `act`."""
        self._claims += 1
        try:
            yield
        finally:
            self._claims -= 1

    def begin_episode(self) -> None:
        """Starts an episode: later requests are unrelated to earlier ones."""
        self._epoch += 1

    async def act(
        self,
        images: Mapping[str, np.ndarray],
        instruction: str,
        state: np.ndarray | None,
        on_partial: Callable[[Action], object] | None = None,
    ) -> Outcome:
        """Returns a request's outcome; UserError if the images are invalid or the rate limit is exceeded.

        `on_partial` is called on the engine's thread, see `SharedEngine.decode`.
        """
        async with self._lock:
            now_s = time.monotonic()
            if now_s - self._asked_s < self._min_period_s:
                raise UserError(f"this request exceeds the limit of {1 / self._min_period_s:g} requests per second")
            if now_s - self.used_s > self._silence_s:  # only vla-eval's protocol signals the end of an episode
                self.begin_episode()
            self._asked_s = self.used_s = now_s
            self._epoch += instruction != self._instruction
            self._instruction = instruction
            self._stamp_ns = max(time.time_ns(), self._stamp_ns + 1)  # the client's clock is not used
            observation = Observation(
                images,
                instruction,
                self._stamp_ns,
                epoch=self._epoch,
                received_ns=time.monotonic_ns(),
                state=state,
                stream=self.name,
            )
            pictures = await asyncio.to_thread(self._thread.prepared, observation)
            outcome = (await asyncio.wrap_future(self._thread.decode(observation, pictures, on_partial))).outcome
            self.used_s = time.monotonic()
            return outcome


class Sessions:
    """All open sessions, with counts of actions and of drops by reason.

    `silence_s`: a request after this long a silence starts a new episode.
    """

    def __init__(self, thread: SharedEngine, settings: ServeSettings, silence_s: float) -> None:
        self.actions = 0
        self.drops: Counter[str] = Counter()
        self._thread, self._settings, self._silence_s = thread, settings, silence_s
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        self._close_idle()
        return len(self._open)

    def open(self, name: str, *, lasting: bool) -> Session:
        """Returns the session of this name, opening it if needed; NoRoomError if all are taken and none is idle.

        A lasting session is closed only by its opener, never for being idle.
        """
        if name in self._open:
            return self._open[name]
        chosen = self._settings
        if len(self) >= chosen.sessions:
            self.drops[DropReason.TOO_MANY_STREAMS.value] += 1
            raise NoRoomError(f"all {chosen.sessions} sessions are in use (--robots): try again later")
        period_s = 1 / chosen.max_rate_hz if chosen.max_rate_hz else 0.0
        session = self._open[name] = Session(self._thread, name, period_s, self._silence_s, lasting=lasting)
        self._thread.call(lambda engine: engine.open(name, budget_s=chosen.budget_s))
        return session

    def close(self, session: Session) -> None:
        if self._open.pop(session.name, None) is not None:
            self._thread.close(session.name)

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, Action):
            self.actions += 1
        else:
            self.drops[outcome.reason.value] += 1

    def _close_idle(self) -> None:
        now_s = time.monotonic()
        for session in [*self._open.values()]:
            idle = now_s - session.used_s > self._settings.idle_s and not session.busy
            if idle and not session.lasting:
                self.close(session)


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
        """The counts in Prometheus' text format."""
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
    """One warmed-up engine, driven by `thread`, for the clients of all protocols."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        self.policy: Target = engine.target
        self.metrics = Metrics()
        self.thread = SharedEngine(engine)
        codec = self.policy.codec
        chunk_s = codec.horizon * engine.settings.step_s(codec)
        self.sessions = Sessions(self.thread, settings, max(_SILENCE_S, 2 * chunk_s))
        self._names = count(1)
        self._ignored: set[str] = set()  # unused inputs that were already warned about

    def allows(self, client: HTTPConnection) -> bool:
        """True if the client's token is valid or none is required."""
        token = self.settings.token
        if not token:
            return True
        kind, _, shown = client.headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":  # sent for an address such as ws://robot:TOKEN@host
            kind, shown = "bearer", _password(shown)
        return kind.lower() in ("api-key", "bearer") and hmac.compare_digest(shown.encode(), token.encode())

    def problem(self, text: str, status: int) -> Response:
        """Returns an HTTP error response."""
        self.metrics.refused += status != 422
        # A client's names in the text may be invalid Unicode, which JSON can escape.
        return JSONResponse({"error": text.encode(errors="replace").decode()}, status)

    async def converse(
        self, socket: WebSocket, answer: Callable[[Session, bytes], Coroutine[Any, Any, None]], greeting: bytes = b""
    ) -> None:
        """Accepts a websocket, opens a session for it and answers its messages one at a time.

        `answer` sends the answer to one message. `greeting` is sent first unless it is empty.
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
            await refuse(_NOT_READ, "expected MessagePack in a binary frame, got a text frame")
        finally:
            await cancel(coming)
            self.sessions.close(session)

    async def decode(
        self, session: Session, message: dict[str, Any], on_partial: Callable[[Action], object] | None = None
    ) -> Outcome:
        """Decodes an observation given in client names; UserError if it is invalid or exceeds the rate limit."""
        started_s = time.perf_counter()
        if message.pop("reset", False) is True:
            session.begin_episode()
        try:
            asked = await asyncio.to_thread(read_observation, message, self.policy)  # may have to decode images
            self._warn_of(asked.ignored)
            outcome = await session.act(asked.images, asked.instruction, asked.state, on_partial)
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
            _log.warning("a client sends %s, which the policy does not use", ignored)


async def unless_gone(answer: Coroutine[Any, Any, _T], coming: "asyncio.Future[Any]") -> _T:
    """Awaits an answer and returns its result; cancels it if the client disconnects.

    `coming` is the client's next message. A disconnect ends it with an error, which is raised here.
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
    except KeyError:  # a text frame has no bytes
        raise _TextError from None


async def cancel(task: "asyncio.Future[Any]") -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def why(outcome: Outcome) -> str:
    """The reason for a missing action, for the client."""
    assert not isinstance(outcome, Action)
    return f"{outcome.reason.value}: {outcome.detail}" if outcome.detail else outcome.reason.value


def _password(credentials: str) -> str:
    """The password of HTTP basic authentication (RFC 7617)."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (ValueError, binascii.Error):
        return ""
