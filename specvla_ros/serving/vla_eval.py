# SPDX-License-Identifier: Apache-2.0
"""vla-eval's model-server protocol, version 1: typed messages over a websocket, in msgpack.

A client sends a hello, which is answered with the server's, and the start and end of each episode. Each observation is
answered with an action or an error under its sequence number. Source: vla_eval/protocol of the package vla-eval.
"""

import time
from collections.abc import Mapping
from typing import Any

from starlette.websockets import WebSocket

from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.models.target import Target
from specvla_ros.serving.server import Server, Session, why
from specvla_ros.serving.wire import pack, unpack

VERSION = 1
HELLO, OBSERVATION, ACTION, ERROR = "hello", "observation", "action", "error"
EPISODE_START, EPISODE_END = "episode_start", "episode_end"
_KINDS = (HELLO, OBSERVATION, ERROR, EPISODE_START, EPISODE_END)  # message types a client may send


async def talk(server: Server, socket: WebSocket) -> None:
    """Serves a client until it disconnects."""
    policy = server.policy

    async def send(kind: str, payload: Mapping[str, Any], number: int) -> None:
        message = {"type": kind, "payload": payload, "seq": number, "timestamp": time.time()}
        await socket.send_bytes(pack(message, text_names=True))

    async def answer(session: Session, message: bytes) -> None:
        number = 0
        try:
            kind, payload, number = _read(message)
            if kind == HELLO:
                await send(HELLO, _hello(policy), number)
            elif kind in (EPISODE_START, EPISODE_END):
                session.begin_episode()
            elif kind == OBSERVATION:
                outcome = await server.decode(session, _observation(payload, policy))
                if isinstance(outcome, Action):
                    # vla-eval's benchmarks execute one action per request.
                    await send(ACTION, {"actions": outcome.actions[0]}, number)
                else:
                    await send(ERROR, {"error": why(outcome)}, number)
        except UserError as error:
            server.metrics.refused += 1
            await send(ERROR, {"error": str(error)}, number)

    await server.converse(socket, answer)


def _read(message: bytes) -> tuple[str, dict[str, Any], int]:
    given = unpack(message)
    kind, payload, number = given.get("type"), given.get("payload"), given.get("seq")
    if kind not in _KINDS:
        raise UserError(f"a message's 'type' must be one of {', '.join(_KINDS)}")
    if not isinstance(payload, dict) or type(number) is not int:
        raise UserError("a message needs an object as 'payload' and a whole number as 'seq'")
    if kind == HELLO and payload.get("protocol_version") != VERSION:
        version = str(payload.get("protocol_version"))[:20]
        raise UserError(f"vla-eval protocol version {version} is not supported, only version {VERSION}")
    return kind, payload, number


def _hello(policy: Target) -> dict[str, Any]:
    """The server's hello; it asks the benchmark for the optional inputs that the policy reads."""
    asked = {"send_wrist_image": len(policy.cameras) > 1, "send_state": bool(policy.state_dims)}
    return {
        "harness_version": "",
        "protocol_version": VERSION,
        "model_server": "specvla",
        "capabilities": {},
        "observation_params": {name: True for name, wanted in asked.items() if wanted},
    }


def _observation(payload: Mapping[str, Any], policy: Target) -> dict[str, Any]:
    """Renames a benchmark's observation as openpi's clients name it.

    Its cameras have the simulator's names (`agentview`). Those that the policy does not have are assigned in order, as
    in vla-eval's own servers, to the cameras that are left.
    """
    given = dict(payload)
    images = given.pop("images", None)
    if not isinstance(images, Mapping):  # a single camera's image
        images = {} if images is None else {policy.cameras[0]: images}
    known = {camera: {camera, f"{camera}_image"} for camera in policy.cameras}
    left = [camera for camera, names in known.items() if not names & {*images}]
    unknown = [name for name in images if name not in set().union(*known.values())]
    renamed = dict(zip(unknown, left, strict=False))
    words = given.pop("task_description", None)
    states = {} if "states" not in given else {"state": given.pop("states")}
    return {**given, **states, **{renamed.get(name, name): each for name, each in images.items()}, "prompt": words}
