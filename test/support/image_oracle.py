# SPDX-License-Identifier: Apache-2.0
"""What each image encoding means, pixel by pixel and in plain loops: the reference for image messages."""

import numpy as np

CHANNELS = {"rgb": (0, 1, 2), "bgr": (2, 1, 0), "rgba": (0, 1, 2), "bgra": (2, 1, 0), "mono": (0, 0, 0)}
NAMES = {"8UC1": "mono8", "8UC3": "bgr8", "8UC4": "bgra8"}
NAMES |= {"yuv422": "uyvy", "yuv422_yuy2": "yuyv"}


def expected_rgb(rows: np.ndarray, encoding: str, height: int, width: int, *, big_endian: bool) -> np.ndarray:
    """Float64 [height, width, 3], exact: only YUV still has to be rounded.

    Args:
        rows: uint8 [rows, bytes] without padding.
        encoding: a supported one.
        height: of the image in pixels.
        width: of the image in pixels.
        big_endian: the order of the bytes in a word.
    """
    encoding = NAMES.get(encoding, encoding)
    rgb = np.empty((height, width, 3))
    for y in range(height):
        for x in range(width):
            if encoding.startswith("bayer_"):
                rgb[y, x] = [_bayer_mean(rows, encoding[6:10], y, x, colour) for colour in "rgb"]
            elif encoding in ("uyvy", "yuyv", "nv12", "nv21"):
                rgb[y, x] = _bt601(*_yuv_at(rows, encoding, height, y, x))
            else:
                rgb[y, x] = _interleaved(rows[y], encoding, x, big_endian)
    return rgb


def _interleaved(row: np.ndarray, encoding: str, x: int, big_endian: bool) -> list[float]:
    kind = encoding.rstrip("0123456789")
    word_bytes = int(encoding[len(kind) :]) // 8
    channels = 1 if kind == "mono" else len(kind)
    values: list[float] = []
    for channel in CHANNELS[kind]:
        at = (x * channels + channel) * word_bytes
        word = int.from_bytes(row[at : at + word_bytes].tobytes(), "big" if big_endian else "little")
        values.append(word if word_bytes == 1 else round(word / 65535 * 255))
    return values


def _yuv_at(rows: np.ndarray, encoding: str, height: int, y: int, x: int) -> tuple[int, int, int]:
    if encoding in ("uyvy", "yuyv"):
        quad = [int(value) for value in rows[y, x // 2 * 4 : x // 2 * 4 + 4]]
        u, first, v, second = quad if encoding == "uyvy" else (quad[1], quad[0], quad[3], quad[2])
        return (second if x % 2 else first), u, v
    pair = [int(value) for value in rows[height + y // 2, x // 2 * 2 : x // 2 * 2 + 2]]
    u, v = pair if encoding == "nv12" else pair[::-1]
    return int(rows[y, x]), u, v


def _bt601(luma: int, u: int, v: int) -> tuple[float, float, float]:
    y, cb, cr = (luma - 16) / 219, (u - 128) / 224, (v - 128) / 224
    red, blue = y + 1.402 * cr, y + 1.772 * cb
    green = (y - 0.299 * red - 0.114 * blue) / 0.587
    return tuple(min(max(255 * value, 0.0), 255.0) for value in (red, green, blue))  # type: ignore[return-value]


def _bayer_mean(mosaic: np.ndarray, pattern: str, y: int, x: int, colour: str) -> int:
    """The nearest samples of a colour around a pixel, inside the image; halves are rounded up."""
    height, width = mosaic.shape
    for distance in (0, 1, 2):
        samples = [
            int(mosaic[row, column])
            for row in range(max(y - 1, 0), min(y + 2, height))
            for column in range(max(x - 1, 0), min(x + 2, width))
            if abs(row - y) + abs(column - x) == distance and pattern[2 * (row % 2) + column % 2] == colour
        ]
        if samples:
            return (2 * sum(samples) + len(samples)) // (2 * len(samples))
    raise AssertionError("each colour lies within one pixel")
