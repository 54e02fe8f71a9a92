# SPDX-License-Identifier: Apache-2.0
"""Wire formats: msgpack of openpi and vla-eval and json-numpy, parsed within limits, and the names of their fields.

An array's dtype and shape are checked against its bytes before the array is made: an unknown dtype or a shape of
another size is refused.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from specvla_ros.errors import UserError, shortened
from specvla_ros.models.observation import image_remedy
from specvla_ros.models.target import Target

_PREFIXES = ("observation/", "observation.", "images/", "images.", "image/")
_MAX_ITEMS = 4096  # in a list or an object
_MAX_DIMS = 8
_KINDS = "biuf"
_MAX_PIXELS = 1 << 24  # a small file may claim any size


@dataclass(frozen=True)
class EncodedPicture:
    """An image as PNG or JPEG, not yet decoded."""

    data: bytes

    def decode(self) -> np.ndarray:
        """Decodes to uint8 [height, width, 3], or another shape if not RGB; UserError if damaged or too large."""
        try:
            with Image.open(io.BytesIO(self.data), formats=("PNG", "JPEG")) as image:
                if math.prod(image.size) > _MAX_PIXELS:
                    raise UserError(f"an image may have at most {_MAX_PIXELS} pixels, got {image.size}")
                return np.asarray(image)
        except UserError:
            raise
        except Exception as error:  # decoders raise arbitrary errors for a client's bytes
            raise UserError(f"an image is not a PNG or JPEG, or is truncated ({str(error)[:60]})") from None


def unpack(message: bytes) -> dict[str, Any]:
    """Parses a message of openpi's client (openpi_client/msgpack_numpy.py) or of vla-eval's (vla_eval/protocol)."""
    try:
        value = msgpack.unpackb(
            message, object_hook=_array_of_bytes, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS, strict_map_key=False
        )
    except UserError:
        raise
    except Exception as error:  # msgpack raises arbitrary errors for a client's bytes
        raise UserError(f"the message is not valid msgpack ({type(error).__name__}: {error})") from None
    return _object(value)


def pack(value: Mapping[str, Any], *, text_names: bool = False) -> bytes:
    """Packs a message for openpi's client; for vla-eval's, `text_names` writes an array's field names as text."""

    def described(value: Any) -> dict[Any, Any]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent")
        data = np.ascontiguousarray(value).tobytes()
        fields = {"__ndarray__": True, "data": data, "dtype": value.dtype.str, "shape": value.shape}
        return {name if text_names else name.encode(): field for name, field in fields.items()}

    packed: bytes = msgpack.packb(value, default=described)
    return packed


def parse(message: bytes) -> dict[str, Any]:
    """Parses a request of OpenVLA's clients: JSON with json-numpy arrays."""
    try:
        value = json.loads(message, object_hook=_array_of_text)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"the message is not valid JSON ({error})") from None
    return _object(value)


def dump(array: np.ndarray) -> dict[str, Any]:
    """Encodes an array as json-numpy does."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UserError("the message must be an object with string keys")
    return value


def _array_of_bytes(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _array(value.get(b"data"), value.get(b"dtype"), value.get(b"shape"))
    if "__ndarray__" in value or ("__image__" in value and value.get("format") == "raw"):
        return _array(value.get("data"), value.get("dtype"), value.get("shape"))
    if "__image__" in value:
        return EncodedPicture(value["data"] if isinstance(value.get("data"), bytes) else b"")
    if b"__npgeneric__" in value:
        return value.get(b"data")
    return value


def _array_of_text(value: dict[str, Any]) -> Any:
    if "__numpy__" not in value:
        return value
    try:
        data = base64.b64decode(value["__numpy__"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise UserError(f"an array's bytes are not valid base64 ({error})") from None
    return _array(data, value.get("dtype"), value.get("shape"))


def _array(data: Any, dtype: Any, shape: Any) -> np.ndarray:
    name = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    try:
        kind = np.dtype(name) if isinstance(name, str) and len(name) <= 8 else None
    except Exception:  # NumPy reads a client's text as an expression, and raises arbitrary errors for it
        kind = None
    if kind is None or kind.kind not in _KINDS or kind.hasobject:
        raise UserError(f"an array has dtype {str(name)[:20]!r}; use a numeric one such as |u1 or <f4")
    sides = list(shape) if isinstance(shape, list | tuple) else None
    if sides is None or len(sides) > _MAX_DIMS or not all(type(each) is int and each >= 0 for each in sides):
        raise UserError(f"an array's shape must be at most {_MAX_DIMS} whole numbers, got {str(shape)[:60]}")
    if not isinstance(data, bytes) or math.prod(sides) * kind.itemsize != len(data):
        size = len(data) if isinstance(data, bytes) else 0
        raise UserError(f"an array of shape {sides} with {kind.itemsize}-byte values does not match its {size} bytes")
    return np.frombuffer(data, kind).reshape(sides)


@dataclass(frozen=True)
class Asked:
    """A client's request."""

    images: dict[str, np.ndarray]  # uint8 RGB by the policy's camera names
    state: np.ndarray | None  # the robot's state; None: the policy reads none
    instruction: str  # the task in words
    ignored: str  # names of inputs that the policy does not use, shortened


def read_observation(message: Mapping[str, Any], policy: Target) -> Asked:
    """Reads an observation from a client's message; UserError if a part is missing or has the wrong type.

    The instruction is `prompt` or `instruction`, the state `state`. Cameras have the policy's names, also as
    `NAME_image`, below `image` or `images`, or after `observation/`. The first camera may be called `image`.
    """
    given = {_plain(name): value for name, value in _flat(message).items()}
    texts = {name: given.pop(name) for name in ("prompt", "instruction") if given.get(name) is not None}
    if not texts:
        raise UserError("the message has no instruction: give the task as 'prompt' or 'instruction'")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f"'{name}' must be text, got {type(text).__name__}")
    instruction = next(filter(None, texts.values()), "")
    key = given.pop("unnorm_key", None)
    if not isinstance(key, str | None):
        raise UserError(f"'unnorm_key' must be text, got {type(key).__name__}")
    if key and policy.unnorm_key not in (key, f"{key}_no_noops"):
        raise UserError(
            f"the message asks for unnorm_key {shortened(key)}, but the policy was loaded with "
            f"{policy.unnorm_key}: omit it, or serve the checkpoint with --unnorm-key"
        )
    images = {}
    for place, camera in enumerate(policy.cameras):
        names = [camera, f"{camera}_image", *(["image"] if not place else [])]
        found = next((name for name in names if name in given), None)
        if found is None:
            raise UserError(
                f"the image of camera '{camera}' is missing; the policy's cameras are {', '.join(policy.cameras)}, "
                f"the message has {_names(given) or 'none'}"
            )
        images[camera] = _picture(given.pop(found), camera)
    state = None
    if policy.state_dims:
        if "state" not in given:
            raise UserError(f"the policy reads the robot's state: send {policy.state_dims} numbers as 'state'")
        state = _numbers(given.pop("state"))
        if len(state) != policy.state_dims or not np.isfinite(state).all():
            raise UserError(f"'state' must be {policy.state_dims} finite numbers, got {shortened(str(state.tolist()))}")
    return Asked(images, state, instruction, _names(given))


def _names(given: Mapping[str, Any]) -> str:
    """The names, shortened for a message: a client's names may have any length."""
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
        has = f"{type(value).__name__}; send it as an array, as JSON does after json_numpy.patch()"
        if isinstance(value, np.ndarray):
            has = f"{value.dtype} {list(value.shape)}{image_remedy(value)}"
        raise UserError(f"the image of '{camera}' must be uint8 RGB [height, width, 3], got {has}")
    return value


def _numbers(value: Any) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise UserError("'state' must be a list of numbers") from None
