"""Image messages of any common encoding to RGB arrays, and their stamps. Needs no ROS: only the fields count."""

import io
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL import Image as PillowImage

from specvla_ros.errors import UserError

NANOSECONDS = 1_000_000_000

RGB, BGR = (0, 1, 2), (2, 1, 0)


class ImageLike(Protocol):
    """The fields of sensor_msgs/Image that matter here."""

    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: Any


class CompressedImageLike(Protocol):
    """The fields of sensor_msgs/CompressedImage that matter here."""

    format: str
    data: Any


@dataclass(frozen=True)
class _Layout:
    """How an encoding lies in memory, and what makes RGB of its rows.

    Args:
        row_bytes: bytes per pixel in a row of `data`, padding not counted.
        to_rgb: rows [rows, width * row_bytes], and whether their words are big-endian, to RGB.
        even: which of width and height must be even.
        chroma_rows: rows behind the picture's own, as a fraction of its height.
    """

    row_bytes: int
    to_rgb: Callable[[np.ndarray, bool], np.ndarray]
    even: tuple[str, ...] = ()
    chroma_rows: float = 0.0


def rgb_from_image(message: ImageLike) -> np.ndarray:
    """The pixels of a sensor_msgs/Image as RGB.

    Words of 16 bits are scaled to 8. `8UC3` and `8UC4` hold blue first, as OpenCV stores them. YUV is BT.601, limited
    range.

    Returns:
        uint8 [height, width, 3]. For rgb8 a view of `message.data`: keep the message alive and do not write to it.

    Raises:
        UserError: size 0, unknown encoding, a step that is too small, or data that is not step * height bytes.
    """
    height, width, step = message.height, message.width, message.step
    if height < 1 or width < 1:
        raise UserError(f"the image is empty: {width} x {height}; check the camera driver")
    layout = _LAYOUTS.get(message.encoding.lower())
    if layout is None:
        raise UserError(
            f"the image encoding '{message.encoding}' is not supported; let the driver publish one of: "
            + ", ".join(SUPPORTED_ENCODINGS)
        )
    for name, size in (("width", width), ("height", height)):
        if name in layout.even and size % 2:
            raise UserError(f"a {message.encoding} image needs an even {name}, got {width} x {height}")
    row_bytes = width * layout.row_bytes
    if step < row_bytes:
        raise UserError(
            f"the image's step is {step} bytes, but a row of {width} {message.encoding} pixels takes {row_bytes}; "
            "the driver must fill step with the full row length"
        )
    rows = height + int(height * layout.chroma_rows)
    data = np.frombuffer(message.data, dtype=np.uint8)
    if data.size != step * rows:
        raise UserError(
            f"the image holds {data.size} bytes, but step {step} x {rows} rows of {message.encoding} make "
            f"{step * rows}; the message is cut off or its step or height is wrong"
        )
    return layout.to_rgb(data.reshape(rows, step)[:, :row_bytes], bool(message.is_bigendian))


def rgb_from_compressed(message: CompressedImageLike) -> np.ndarray:
    """The pixels of a sensor_msgs/CompressedImage (JPEG, PNG) as RGB uint8 [height, width, 3].

    Raises:
        UserError: a compressed depth image, or bytes that cannot be decoded in full.
    """
    if "compresseddepth" in message.format.lower():
        raise UserError(
            f"the compressed image has format '{message.format}', which is a depth image; "
            "remap image/compressed to a colour camera"
        )
    data = bytes(message.data)
    if not data:
        raise UserError("the compressed image is empty (0 bytes); check the camera driver")
    try:
        with PillowImage.open(io.BytesIO(data)) as picture:
            return _rgb_from_picture(picture)
    except (OSError, ValueError, SyntaxError, EOFError, PillowImage.DecompressionBombError) as error:
        raise UserError(
            f"the compressed image (format '{message.format}', {len(data)} bytes) cannot be decoded: {error}; "
            "it is cut off, or no JPEG or PNG"
        ) from error


def stamp_ns(header: Any) -> int:
    """The stamp of a std_msgs/Header in nanoseconds, greater than 0.

    Raises:
        UserError: stamp 0, negative seconds, nanoseconds outside 0..999999999, or values that are no whole numbers.
    """
    try:
        seconds, nanoseconds = operator.index(header.stamp.sec), operator.index(header.stamp.nanosec)
    except TypeError as error:
        raise UserError(
            f"header.stamp is no whole number: sec {header.stamp.sec!r}, nanosec {header.stamp.nanosec!r}; the camera "
            "driver must fill in the time the image was taken"
        ) from error
    if seconds < 0 or not 0 <= nanoseconds < NANOSECONDS:
        raise UserError(
            f"header.stamp is out of range: sec {seconds}, nanosec {nanoseconds}; sec must be 0 or more and nanosec "
            f"between 0 and {NANOSECONDS - 1}"
        )
    if seconds == nanoseconds == 0:
        raise UserError("header.stamp is 0; the camera driver must fill in the time the image was taken")
    return seconds * NANOSECONDS + nanoseconds


def _rgb_from_picture(picture: PillowImage.Image) -> np.ndarray:
    # Pillow clips 16-bit grey to 255 when it converts.
    if picture.mode.startswith("I"):
        grey = np.clip(np.asarray(picture).astype(np.int64), 0, 65535)
        return _repeat(_to_8_bits(grey))
    return np.asarray(picture.convert("RGB"))


def _colour(channels: int, order: tuple[int, int, int]) -> Callable[[np.ndarray, bool], np.ndarray]:
    """8-bit interleaved colour; a view when nothing has to move."""

    def to_rgb(rows: np.ndarray, _: bool) -> np.ndarray:
        pixels = rows.reshape(len(rows), -1, channels)
        return pixels[:, :, :3] if order == RGB else _reordered(pixels, order)

    return to_rgb


def _colour_16(order: tuple[int, int, int]) -> Callable[[np.ndarray, bool], np.ndarray]:
    def to_rgb(rows: np.ndarray, big_endian: bool) -> np.ndarray:
        return _reordered(_to_8_bits(_words(rows, big_endian)).reshape(len(rows), -1, 3), order)

    return to_rgb


def _reordered(pixels: np.ndarray, order: tuple[int, int, int]) -> np.ndarray:
    # Channel by channel: 4 times as fast as a contiguous copy of pixels[..., ::-1]; torch takes no negative strides.
    rgb = np.empty((*pixels.shape[:2], 3), np.uint8)
    for target, source in enumerate(order):
        rgb[:, :, target] = pixels[:, :, source]
    return rgb


def _mono(rows: np.ndarray, _: bool) -> np.ndarray:
    return _repeat(rows)


def _mono_16(rows: np.ndarray, big_endian: bool) -> np.ndarray:
    return _repeat(_to_8_bits(_words(rows, big_endian)))


def _repeat(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2)


def _words(rows: np.ndarray, big_endian: bool) -> np.ndarray:
    return np.ascontiguousarray(rows, dtype=np.uint8).view(">u2" if big_endian else "<u2")


def _to_8_bits(words: np.ndarray) -> np.ndarray:
    # 65535 / 255 is 257: rounds to the nearest, never a tie.
    return ((words.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _yuv_422(luma: int, u: int, v: int) -> Callable[[np.ndarray, bool], np.ndarray]:
    """Two pixels in four bytes; the arguments say where luma begins and where U and V are."""

    def to_rgb(rows: np.ndarray, _: bool) -> np.ndarray:
        pairs = rows.reshape(len(rows), -1, 4)
        chroma = np.stack([pairs[:, :, u], pairs[:, :, v]], axis=2)
        return _rgb_from_yuv(rows[:, luma::2], np.repeat(chroma, 2, axis=1))

    return to_rgb


def _yuv_420(u: int, v: int) -> Callable[[np.ndarray, bool], np.ndarray]:
    """A plane of luma, then half as many rows of interleaved chroma."""

    def to_rgb(rows: np.ndarray, _: bool) -> np.ndarray:
        height = len(rows) * 2 // 3
        chroma = rows[height:].reshape(height // 2, -1, 2)[:, :, (u, v)]
        return _rgb_from_yuv(rows[:height], chroma.repeat(2, axis=0).repeat(2, axis=1))

    return to_rgb


def _rgb_from_yuv(luma: np.ndarray, chroma: np.ndarray) -> np.ndarray:
    """BT.601 limited range: luma [height, width] in 16..235, chroma [height, width, 2] around 128."""
    y = (luma.astype(np.float32) - 16) * (255 / 219)
    u, v = np.moveaxis(chroma.astype(np.float32) - 128, 2, 0) * (255 / 224)
    red = y + 1.402 * v
    green = y - 0.344136 * u - 0.714136 * v
    blue = y + 1.772 * u
    rgb: np.ndarray = np.clip(np.rint(np.stack([red, green, blue], axis=2)), 0, 255).astype(np.uint8)
    return rgb


def _bayer(pattern: str) -> Callable[[np.ndarray, bool], np.ndarray]:
    """Bilinear. The pattern names the colours of the first two pixels of the first two rows."""

    def to_rgb(rows: np.ndarray, _: bool) -> np.ndarray:
        return np.stack([_interpolated(rows, pattern, colour) for colour in "rgb"], axis=2)

    return to_rgb


def _interpolated(mosaic: np.ndarray, pattern: str, colour: str) -> np.ndarray:
    """One colour everywhere: the weighted mean of its samples among a pixel and its 8 neighbours, inside the image."""
    height, width = mosaic.shape
    present = np.zeros((height + 2, width + 2), np.int32)
    for place, sampled in enumerate(pattern):
        if sampled == colour:
            present[1 + place // 2 : -1 : 2, 1 + place % 2 : -1 : 2] = 1
    samples = np.zeros_like(present)
    samples[1:-1, 1:-1] = mosaic
    samples *= present
    weights = (0, 1, 4) if colour == "g" else (1, 2, 4)
    total, weight = _weighted_sum(samples, *weights), _weighted_sum(present, *weights)
    mean: np.ndarray = (total + weight // 2) // weight
    return mean.astype(np.uint8)


def _weighted_sum(padded: np.ndarray, corner: int, edge: int, centre: int) -> np.ndarray:
    across = padded[:, :-2] + padded[:, 2:]
    edges = padded[:-2, 1:-1] + padded[2:, 1:-1] + across[1:-1]
    total: np.ndarray = centre * padded[1:-1, 1:-1] + edge * edges
    if corner:
        total += corner * (across[:-2] + across[2:])
    return total


_UYVY = _Layout(2, _yuv_422(luma=1, u=0, v=2), even=("width",))
_YUYV = _Layout(2, _yuv_422(luma=0, u=1, v=3), even=("width",))

_LAYOUTS = {
    "rgb8": _Layout(3, _colour(3, RGB)),
    "bgr8": _Layout(3, _colour(3, BGR)),
    "rgba8": _Layout(4, _colour(4, RGB)),
    "bgra8": _Layout(4, _colour(4, BGR)),
    "8uc3": _Layout(3, _colour(3, BGR)),
    "8uc4": _Layout(4, _colour(4, BGR)),
    "mono8": _Layout(1, _mono),
    "8uc1": _Layout(1, _mono),
    "rgb16": _Layout(6, _colour_16(RGB)),
    "bgr16": _Layout(6, _colour_16(BGR)),
    "mono16": _Layout(2, _mono_16),
    "16uc1": _Layout(2, _mono_16),
    "yuv422": _UYVY,
    "uyvy": _UYVY,
    "yuv422_yuy2": _YUYV,
    "yuyv": _YUYV,
    "nv12": _Layout(1, _yuv_420(u=0, v=1), even=("width", "height"), chroma_rows=0.5),
    "nv21": _Layout(1, _yuv_420(u=1, v=0), even=("width", "height"), chroma_rows=0.5),
    "bayer_rggb8": _Layout(1, _bayer("rggb"), even=("width", "height")),
    "bayer_bggr8": _Layout(1, _bayer("bggr"), even=("width", "height")),
    "bayer_gbrg8": _Layout(1, _bayer("gbrg"), even=("width", "height")),
    "bayer_grbg8": _Layout(1, _bayer("grbg"), even=("width", "height")),
}

SUPPORTED_ENCODINGS = tuple(name.replace("uc", "UC") for name in _LAYOUTS)
