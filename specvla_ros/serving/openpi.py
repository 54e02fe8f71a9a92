# SPDX-License-Identifier: Apache-2.0
"""openpi's protocol: the policy's metadata once, then observations in, actions out. Refusals are text frames.

A client that sets `stream` in an observation also gets the first actions of an answer that is still being decoded.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket

from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.errors import UserError
from specvla_ros.serving.server import Server, Session, cancel, why
from specvla_ros.serving.wire import pack, unpack

_STREAM = "stream"  # key of an observation whose client wants the first actions as they are decoded


async def talk(server: Server, socket: WebSocket) -> None:
    """Serves a client until it disconnects."""

    async def answer(session: Session, message: bytes) -> None:
        started_s = time.perf_counter()

        def packed(action: Action, **more: bool) -> bytes:
            reply = {
                "actions": action.actions,
                "server_timing": {"infer_ms": 1e3 * (time.perf_counter() - started_s)},
                "policy_timing": {"forwards": action.record.forwards},
            }
            return pack(reply | more)

        try:
            asked = unpack(message)
            if asked.pop(_STREAM, False) is True:
                outcome, more = await _streamed(server, session, asked, socket, packed), {"partial": False}
            else:
                outcome, more = await server.decode(session, asked), {}
        except UserError as error:
            server.metrics.refused += 1
            await socket.send_text(str(error))
            return
        if not isinstance(outcome, Action):
            await socket.send_text(why(outcome))
            return
        await socket.send_bytes(packed(outcome, **more))

    await server.converse(socket, answer, greeting=pack(_metadata(server)))


async def _streamed(
    server: Server, session: Session, asked: dict[str, Any], socket: WebSocket, packed: Callable[..., bytes]
) -> Outcome:
    """Decodes an observation and sends the first actions of its answer as they are decoded, each time all so far."""
    loop, parts = asyncio.get_running_loop(), asyncio.Queue[Action | None]()

    async def send() -> None:
        while (action := await parts.get()) is not None:
            await socket.send_bytes(packed(action, partial=True))

    sending = asyncio.ensure_future(send())
    try:
        outcome = await server.decode(session, asked, lambda part: loop.call_soon_threadsafe(parts.put_nowait, part))
        parts.put_nowait(None)
        await sending
        return outcome
    finally:
        await cancel(sending)


def _metadata(server: Server) -> dict[str, Any]:
    policy, codec = server.policy, server.policy.codec
    described = {name: value for name, value in server.engine.describe().items() if name != "checkpoint"}
    return {
        "cameras": [*policy.cameras],
        "state_dims": policy.state_dims,
        "state_names": list(policy.state_names),
        "action_names": [*codec.names],
        "action_horizon": codec.horizon,
        "action_dt_s": codec.dt_s,
        "policy": {name: str(value) for name, value in described.items()},
    }
