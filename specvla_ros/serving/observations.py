# SPDX-License-Identifier: Apache-2.0
"""From the names that clients use to what a policy looks at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specvla_ros.errors import UserError, shortened
from specvla_ros.models.target import Target
from specvla_ros.serving.arrays import EncodedPicture

_PREFIXES = ("observation/", "observation.", "images/", "images.", "image/")


@dataclass(frozen=True)
class Asked:
    """What a client asks.

    Args:
        images: uint8 RGB by the policy's names.
        state: the robot's; None: the policy reads none.
        instruction: the task in words.
        ignored: names of what the policy has no use for, shortened; empty: none.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str
    ignored: str


def read_observation(message: Mapping[str, Any], policy: Target) -> Asked:
    """What a message asks of a policy.

    `prompt` or `instruction`; `state`; the cameras by the policy's names, also as `NAME_image`, below `image` or
    `images`, and with `observation/` before any of them. The first camera may be called `image`; where there is one
    camera alone, a picture under that name is it.

    Raises:
        UserError: a part is missing, or of another kind.
    """
    given = {_plain(name): value for name, value in _flat(message).items()}
    instruction = given.pop("prompt", None) or given.pop("instruction", None)
    if not isinstance(instruction, str):
        raise UserError("the message needs the task in words, as 'prompt' or 'instruction'")
    images = {}
    for place, camera in enumerate(policy.cameras):
        names = [camera, f"{camera}_image", *(["image"] if not place else [])]
        found = next((name for name in names if name in given), None)
        if found is None:
            raise UserError(
                f"there is no picture of the camera '{camera}'; the policy looks at {', '.join(policy.cameras)}, and "
                f"the message has {_names(given) or 'none'}"
            )
        images[camera] = _picture(given.pop(found), camera)
    state = None
    if policy.state_dims:
        if "state" not in given:
            raise UserError(f"the policy reads the robot's state: 'state' must be {policy.state_dims} numbers")
        state = _numbers(given.pop("state"))
    return Asked(images, state, instruction, _names(given))


def _names(given: Mapping[str, Any]) -> str:
    """For a message: a client's names may be as long as it likes."""
    return shortened(", ".join(sorted(given)))


def _flat(message: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in message.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        flat |= {str(each): picture for each, picture in inner} if inner else {name: value}
    return flat


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _picture(value: Any, camera: str) -> np.ndarray:
    if isinstance(value, EncodedPicture):
        value = value.decode()
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
        has = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise UserError(f"the picture of '{camera}' must be uint8 RGB [height, width, 3], it is {has}")
    return value


def _numbers(value: Any) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise UserError("'state' must be a list of numbers") from None
