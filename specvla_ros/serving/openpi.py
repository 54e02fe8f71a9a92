# SPDX-License-Identifier: Apache-2.0
"""openpi's protocol: the policy's metadata once, then observations in, actions out. Refusals are text frames."""

import time
from typing import Any

from starlette.websockets import WebSocket

from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.serving.server import Server, Session, why
from specvla_ros.serving.wire import pack, unpack


async def talk(server: Server, socket: WebSocket) -> None:
    """Serves a client until it disconnects."""

    async def answer(session: Session, message: bytes) -> None:
        started_s = time.perf_counter()
        try:
            outcome = await server.decode(session, unpack(message))
        except UserError as error:
            server.metrics.refused += 1
            await socket.send_text(str(error))
            return
        if not isinstance(outcome, Action):
            await socket.send_text(why(outcome))
            return
        reply = {
            "actions": outcome.actions,
            "server_timing": {"infer_ms": 1e3 * (time.perf_counter() - started_s)},
            "policy_timing": {"forwards": outcome.record.forwards},
        }
        await socket.send_bytes(pack(reply))

    await server.converse(socket, answer, greeting=pack(_metadata(server)))


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
