# SPDX-License-Identifier: Apache-2.0
"""Arrays on the wire: the msgpack of openpi and of vla-eval, and json-numpy, read within limits.

What a client says of an array is believed only where the bytes bear it out: an unknown number format, or a shape of
another size than the bytes, is refused before anything is made of it.
"""

import base64
import binascii
import io
import json
import math
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from specvla_ros.errors import UserError

_MAX_ITEMS = 4096  # of a list or an object
_MAX_DIMS = 8
_KINDS = "biuf"
_MAX_PIXELS = 1 << 24  # a small file may claim any number


@dataclass(frozen=True)
class EncodedPicture:
    """A picture as PNG or JPEG, which nobody has looked into yet.

    Args:
        data: the file.
    """

    data: bytes

    def decode(self) -> np.ndarray:
        """The picture, uint8 [height, width, 3]; of one that is not RGB, [height, width] or another last side.

        Raises:
            UserError: it is none, is cut off, or has too many pixels.
        """
        try:
            with Image.open(io.BytesIO(self.data), formats=("PNG", "JPEG")) as image:
                if math.prod(image.size) > _MAX_PIXELS:
                    raise UserError(f"a picture may have {_MAX_PIXELS} pixels, this one has {image.size}")
                return np.asarray(image)
        except UserError:
            raise
        except Exception as error:  # whatever a client sends
            raise UserError(f"a picture is no PNG and no JPEG, or cut off ({str(error)[:60]})") from None


def unpack(message: bytes) -> dict[str, Any]:
    """A message of openpi's client (openpi_client/msgpack_numpy.py) or of vla-eval's (vla_eval/protocol).

    Raises:
        UserError: it is no msgpack, no object, or holds an array that is none.
    """
    try:
        value = msgpack.unpackb(
            message, object_hook=_array_of_bytes, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS, strict_map_key=False
        )
    except UserError:
        raise
    except Exception as error:  # whatever a client sends
        raise UserError(f"the message is no msgpack ({type(error).__name__}: {error})") from None
    return _object(value)


def pack(value: dict[str, Any]) -> bytes:
    """What openpi's client reads."""
    packed: bytes = msgpack.packb(value, default=_bytes_of_array)
    return packed


def parse(message: bytes) -> dict[str, Any]:
    """A request of OpenVLA's clients: JSON with json-numpy's arrays.

    Raises:
        UserError: it is no JSON, no object, or holds an array that is none.
    """
    try:
        value = json.loads(message, object_hook=_array_of_text)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"the message is no JSON ({error})") from None
    return _object(value)


def dump(array: np.ndarray) -> dict[str, Any]:
    """An array as json-numpy writes it."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UserError("the message must be an object with names")
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
        raise UserError(f"an array's bytes are no base64 ({error})") from None
    return _array(data, value.get("dtype"), value.get("shape"))


def _array(data: Any, dtype: Any, shape: Any) -> np.ndarray:
    name = dtype.decode("ascii", "replace") if isinstance(dtype, bytes) else dtype
    try:
        kind = np.dtype(name) if isinstance(name, str) and len(name) <= 8 else None
    except TypeError:
        kind = None
    if kind is None or kind.kind not in _KINDS or kind.hasobject:
        raise UserError(f"an array of {str(name)[:20]!r}: numbers such as |u1 or <f4 are read")
    sides = list(shape) if isinstance(shape, list | tuple) else None
    if sides is None or len(sides) > _MAX_DIMS or not all(type(each) is int and each >= 0 for each in sides):
        raise UserError(f"an array's shape must be at most {_MAX_DIMS} whole numbers, it is {str(shape)[:60]}")
    if not isinstance(data, bytes) or math.prod(sides) * kind.itemsize != len(data):
        size = len(data) if isinstance(data, bytes) else 0
        raise UserError(f"an array of shape {sides} and {kind.itemsize} bytes each has other bytes than that: {size}")
    return np.frombuffer(data, kind).reshape(sides)


def _bytes_of_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent")
