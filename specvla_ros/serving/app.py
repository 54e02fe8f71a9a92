# SPDX-License-Identifier: Apache-2.0
"""The web application: the websockets of openpi and vla-eval, OpenVLA's `/act`, `/healthz` and `/metrics`."""

import asyncio
import base64
import binascii
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DropReason, Outcome
from specvla_ros.engine.thread import SharedEngine
from specvla_ros.errors import UserError
from specvla_ros.models.target import Target
from specvla_ros.serving import vla_eval
from specvla_ros.serving.arrays import dump, pack, parse, unpack
from specvla_ros.serving.observations import read_observation
from specvla_ros.serving.sessions import NoRoomError, Session, Sessions

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CLIENT_LEFT = 499  # nobody reads it; what nginx notes
_NOT_ALLOWED, _TRY_LATER, _GOING, _NOT_READ = 4401, 1013, 1001, 1003  # closing codes of a websocket
_MAX_TOLD = 32  # warnings of what clients send in vain
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


@dataclass(frozen=True)
class ServeSettings:
    """What a server lets its clients do.

    Args:
        sessions: at once; the engine has slots for as many.
        token: that clients must show; empty: none.
        budget_s: in which a request should be answered.
        max_message_bytes: of one request.
        max_rate_hz: of one session's requests; 0: no limit.
        idle_s: after which a session over HTTP, which says no goodbye, is closed.
        message_s: in which the body of a request over HTTP must be there.
    """

    sessions: int = 4
    token: str = ""
    budget_s: float = 0.5
    max_message_bytes: int = 32 << 20
    max_rate_hz: float = 0.0
    idle_s: float = 60.0
    message_s: float = 10.0


class Metrics:
    """Counts for Prometheus."""

    def __init__(self) -> None:
        self.refused = 0
        self.abandoned = 0
        self._latency = [0] * (len(_BUCKETS_S) + 1)
        self._latency_sum = 0.0

    def took(self, seconds: float) -> None:
        """Counts an answered request by its time."""
        self._latency[sum(seconds > limit for limit in _BUCKETS_S)] += 1
        self._latency_sum += seconds

    def text(self, sessions: Sessions) -> str:
        """In Prometheus' text format."""
        lines = [
            "# TYPE specvla_sessions gauge",
            f"specvla_sessions {len(sessions)}",
            "# TYPE specvla_actions_total counter",
            f"specvla_actions_total {sessions.actions}",
            "# TYPE specvla_requests_refused_total counter",
            f"specvla_requests_refused_total {self.refused}",
            "# TYPE specvla_requests_abandoned_total counter",
            f"specvla_requests_abandoned_total {self.abandoned}",
            "# TYPE specvla_drops_total counter",
            *(
                f'specvla_drops_total{{reason="{reason.value}"}} {sessions.drops[reason.value]}'
                for reason in DropReason
            ),
            "# TYPE specvla_request_seconds histogram",
        ]
        total = 0
        for limit, number in zip((*map(str, _BUCKETS_S), "+Inf"), self._latency, strict=True):
            total += number
            lines.append(f'specvla_request_seconds_bucket{{le="{limit}"}} {total}')
        lines += [f"specvla_request_seconds_sum {self._latency_sum:.6f}", f"specvla_request_seconds_count {total}"]
        return "\n".join([*lines, ""])


def make_app(engine: Engine, settings: ServeSettings) -> Starlette:
    """The application of a warm engine, which it drives until it is shut down."""
    return _Server(engine, settings).app


class _Server:
    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self._engine, self._settings = engine, settings
        self._policy: Target = engine.target
        self._metrics = Metrics()
        self._thread = SharedEngine(engine)
        self._sessions = Sessions(
            self._thread,
            limit=settings.sessions,
            budget_s=settings.budget_s,
            max_rate_hz=settings.max_rate_hz,
            idle_s=settings.idle_s,
        )
        self._names = count(1)
        self._told: set[str] = set()
        self.app = Starlette(
            routes=[
                Route("/healthz", self._health),
                Route("/metrics", self._show_metrics),
                Route("/act", self._act, methods=["POST"]),
                WebSocketRoute("/", self._openpi),
                WebSocketRoute("/vla-eval", self._vla_eval),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("OK\n")

    async def _show_metrics(self, request: Request) -> Response:
        if not self._allowed(request.headers.get("authorization", "")):
            return self._problem("no token, or another than the server's", 401)
        return PlainTextResponse(self._metrics.text(self._sessions))

    async def _act(self, request: Request) -> Response:
        """OpenVLA's protocol (vla-scripts/deploy.py): a picture and an instruction, back comes the action."""
        if not self._allowed(request.headers.get("authorization", "")):
            return self._problem("no token, or another than the server's", 401)
        client = request.headers.get("x-robot") or (request.client.host if request.client else "")
        try:
            message = await asyncio.wait_for(self._body(request), self._settings.message_s)
            twice = "encoded" in (given := parse(message))  # its clients may encode the object once more
            given = parse(str(given["encoded"]).encode()) if twice else given
            session = self._sessions.open(f"http {client}", lasting=False)
            left = asyncio.ensure_future(_left(request))
            try:
                outcome = await _unless_gone(self._decode(session, given), left)
            finally:
                await _cancel(left)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except asyncio.TimeoutError:
            return self._problem(f"the message was not there after {self._settings.message_s:g} s", 408)
        except NoRoomError as error:
            return self._problem(str(error), 503)
        except UserError as error:
            return self._problem(str(error), 400)
        if not isinstance(outcome, Action):
            return self._problem(_why(outcome), 422)
        actions = outcome.actions if self._policy.codec.horizon > 1 else outcome.actions[0]
        written = dump(actions)
        return JSONResponse(json.dumps(written) if twice else written)

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._settings.max_message_bytes:
                raise UserError(f"a message may have {self._settings.max_message_bytes} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _openpi(self, socket: WebSocket) -> None:
        """Openpi's protocol: what the policy is, once; then an observation in, its actions out."""

        async def greet() -> None:
            await socket.send_bytes(pack(self._metadata()))

        await self._converse(socket, self._answer, greet)

    async def _vla_eval(self, socket: WebSocket) -> None:
        """vla-eval's protocol: each message has a type and a number, which its answer has too."""
        await self._converse(socket, self._answer_vla_eval)

    async def _converse(
        self,
        socket: WebSocket,
        answer: Callable[[WebSocket, Session, bytes], Coroutine[Any, Any, None]],
        greet: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        await socket.accept()
        if not self._allowed(socket.headers.get("authorization", "")):
            self._metrics.refused += 1
            await socket.close(_NOT_ALLOWED, "no token, or another than the server's")
            return
        try:
            session = self._sessions.open(f"socket {next(self._names)}", lasting=True)
        except NoRoomError as error:
            self._metrics.refused += 1
            await socket.close(_TRY_LATER, str(error))
            return
        coming = asyncio.ensure_future(_received(socket))
        try:
            if greet is not None:
                await greet()
            while True:
                message = await coming
                coming = asyncio.ensure_future(_received(socket))
                await _unless_gone(answer(socket, session, message), coming)
        except WebSocketDisconnect:
            pass
        except _TextError:
            self._metrics.refused += 1
            await socket.close(_NOT_READ, "messages are MessagePack in binary frames, this one is a text")
        finally:
            await _cancel(coming)
            self._sessions.close(session)

    async def _answer_vla_eval(self, socket: WebSocket, session: Session, message: bytes) -> None:
        number = 0
        try:
            given = vla_eval.read(message)
            number = given.number
            if given.kind == vla_eval.HELLO:
                await socket.send_bytes(vla_eval.write(vla_eval.HELLO, vla_eval.hello(self._policy), number))
            elif given.kind == vla_eval.EPISODE_START:
                session.begin_episode()
            elif given.kind == vla_eval.OBSERVATION:
                outcome = await self._decode(session, vla_eval.observation(given.payload, self._policy))
                if not isinstance(outcome, Action):
                    await socket.send_bytes(vla_eval.write(vla_eval.ERROR, {"error": _why(outcome)}, number))
                    return
                # Its benchmarks take one action of an answer and ask again.
                await socket.send_bytes(vla_eval.write(vla_eval.ACTION, {"actions": outcome.actions[0]}, number))
        except UserError as error:
            self._metrics.refused += 1
            await socket.send_bytes(vla_eval.write(vla_eval.ERROR, {"error": str(error)}, number))

    async def _answer(self, socket: WebSocket, session: Session, message: bytes) -> None:
        started_s = time.perf_counter()
        try:
            outcome = await self._decode(session, unpack(message))
        except UserError as error:
            self._metrics.refused += 1
            await socket.send_text(str(error))
            return
        if not isinstance(outcome, Action):
            await socket.send_text(_why(outcome))
            return
        milliseconds = 1e3 * (time.perf_counter() - started_s)
        answer = {
            "actions": outcome.actions,
            "server_timing": {"infer_ms": milliseconds},
            "policy_timing": {"forwards": outcome.record.forwards},
        }
        await socket.send_bytes(pack(answer))

    async def _decode(self, session: Session, message: dict[str, Any]) -> Outcome:
        started_s = time.perf_counter()
        asked = await asyncio.to_thread(read_observation, message, self._policy)  # a picture may have to be decoded
        if asked.ignored and asked.ignored not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(asked.ignored)
            _log.warning("the policy has no use for %s, which a client sends", asked.ignored)
        try:
            outcome = await session.act(asked.images, asked.instruction, asked.state)
        except asyncio.CancelledError:
            self._metrics.abandoned += 1
            raise
        self._sessions.count(outcome)
        if isinstance(outcome, Action):
            self._metrics.took(time.perf_counter() - started_s)
        return outcome

    def _allowed(self, authorization: str) -> bool:
        token = self._settings.token
        if not token:
            return True
        kind, _, shown = authorization.partition(" ")
        if kind.lower() == "basic":  # of an address such as ws://robot:TOKEN@host
            kind, shown = "bearer", _password(shown)
        return kind.lower() in ("api-key", "bearer") and hmac.compare_digest(shown.encode(), token.encode())

    def _problem(self, text: str, status: int) -> Response:
        self._metrics.refused += status != 422
        return JSONResponse({"error": text}, status)

    def _metadata(self) -> dict[str, Any]:
        codec = self._policy.codec
        described = {name: value for name, value in self._engine.describe().items() if name != "checkpoint"}
        return {
            "cameras": [*self._policy.cameras],
            "state_dims": self._policy.state_dims,
            "action_names": [*codec.names],
            "action_horizon": codec.horizon,
            "action_dt_s": codec.dt_s,
            "policy": {name: str(value) for name, value in described.items()},
        }


async def _unless_gone(answer: Coroutine[Any, Any, _T], coming: "asyncio.Future[Any]") -> _T:
    """What comes of an answer; where its client leaves meanwhile, nothing more is computed for it.

    Args:
        answer: the answer.
        coming: what the client does next; one that leaves ends it with an error, which is raised here.
    """
    task = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({task, coming}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and coming.exception() is not None:
            await coming
        return await task
    finally:
        await _cancel(task)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


class _TextError(Exception):
    """A client sends texts."""


async def _received(socket: WebSocket) -> bytes:
    try:
        return await socket.receive_bytes()
    except KeyError:  # a text has no bytes
        raise _TextError from None


async def _cancel(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _why(outcome: Outcome) -> str:
    assert not isinstance(outcome, Action)
    return f"{outcome.reason.value}: {outcome.detail}" if outcome.detail else outcome.reason.value


def _password(credentials: str) -> str:
    """Of HTTP's basic authorization (RFC 7617)."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except (ValueError, binascii.Error):
        return ""
