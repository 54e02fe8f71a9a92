# SPDX-License-Identifier: Apache-2.0
"""vla-eval's model-server protocol, version 1: typed messages over a websocket, in msgpack.

A client says hello and is told who answers; of each episode it says the start and the end; each observation is answered
with an action, or with an error, under the number that it came with. Source: vla_eval/protocol of the package vla-eval.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.target import Target
from specvla_ros.serving.arrays import unpack

VERSION = 1
HELLO, OBSERVATION, ACTION, ERROR = "hello", "observation", "action", "error"
EPISODE_START, EPISODE_END = "episode_start", "episode_end"
_KINDS = (HELLO, OBSERVATION, ERROR, EPISODE_START, EPISODE_END)  # that a client sends


@dataclass(frozen=True)
class Message:
    """What a client sends.

    Args:
        kind: of `HELLO`, `OBSERVATION`, `ERROR`, `EPISODE_START` and `EPISODE_END`.
        payload: by the kind.
        number: the answer bears it too.
    """

    kind: str
    payload: dict[str, Any]
    number: int


def read(message: bytes) -> Message:
    """A client's message.

    Raises:
        UserError: it is none, or of a version that is not spoken here.
    """
    given = unpack(message)
    kind, payload, number = given.get("type"), given.get("payload"), given.get("seq")
    if kind not in _KINDS:
        raise UserError(f"a message's 'type' must be one of {', '.join(_KINDS)}")
    if not isinstance(payload, dict) or type(number) is not int:
        raise UserError("a message needs an object as 'payload' and a whole number as 'seq'")
    if kind == HELLO and payload.get("protocol_version") != VERSION:
        version = str(payload.get("protocol_version"))[:20]
        raise UserError(f"version {VERSION} of vla-eval's protocol is spoken here, and not {version}")
    return Message(kind, payload, number)


def write(kind: str, payload: Mapping[str, Any], number: int) -> bytes:
    """An answer."""
    message = {"type": kind, "payload": payload, "seq": number, "timestamp": time.time()}
    packed: bytes = msgpack.packb(message, default=_described)
    return packed


def hello(policy: Target) -> dict[str, Any]:
    """What a client is told at the beginning: of a benchmark that can send more than it does, what the policy reads."""
    asked = {"send_wrist_image": len(policy.cameras) > 1, "send_state": bool(policy.state_dims)}
    return {
        "harness_version": "",
        "protocol_version": VERSION,
        "model_server": "specvla",
        "capabilities": {},
        "observation_params": {name: True for name, wanted in asked.items() if wanted},
    }


def observation(payload: Mapping[str, Any], policy: Target) -> dict[str, Any]:
    """A benchmark's observation in the names that openpi's clients use.

    Its cameras have the simulator's names (`agentview`). Where these are not the policy's, they are taken in their
    order, as vla-eval's own servers do.
    """
    given = dict(payload)
    images = given.pop("images", None)
    if not isinstance(images, Mapping):  # of one camera
        images = {} if images is None else {policy.cameras[0]: images}
    by_order = not set(policy.cameras) <= set(images)
    names = [*policy.cameras, *[*images][len(policy.cameras) :]] if by_order else [*images]
    words = given.pop("task_description", None)
    states = {} if "states" not in given else {"state": given.pop("states")}
    return {**given, **states, **dict(zip(names, images.values(), strict=False)), "prompt": words}


def _described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return {"__ndarray__": True, "data": array.tobytes(), "dtype": array.dtype.str, "shape": list(array.shape)}
    raise TypeError(f"{type(value).__name__} cannot be sent")
