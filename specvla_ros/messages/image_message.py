# SPDX-License-Identifier: Apache-2.0
"""Converts image messages of common encodings to RGB arrays and reads stamps. Needs no ROS: only field names matter."""

import io
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from specvla_ros.errors import UserError, shortened
from specvla_ros.messages.image_file import SENT_FORMATS, opened_image, rgb_from_pillow, to_8_bits

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class _Layout:
    pixel_bytes: int  # per pixel in a row of `data`, padding not counted
    form: str  # 8-bit encoding of the pixels after wide words are scaled
    word_bytes: int = 1  # bytes per sample
    even: tuple[str, ...] = ()  # dimensions that must be even: width, height
    chroma_rows: float = 0.0  # rows after the image's own, as a fraction of its height


_BOTH = ("width", "height")
_LAYOUTS = {
    "rgb8": _Layout(3, "rgb8"),
    "bgr8": _Layout(3, "bgr8"),
    "rgba8": _Layout(4, "rgba8"),
    "bgra8": _Layout(4, "bgra8"),
    "8uc3": _Layout(3, "bgr8"),
    "8uc4": _Layout(4, "bgra8"),
    "mono8": _Layout(1, "mono8"),
    "8uc1": _Layout(1, "mono8"),
    "rgb16": _Layout(6, "rgb8", word_bytes=2),
    "bgr16": _Layout(6, "bgr8", word_bytes=2),
    "mono16": _Layout(2, "mono8", word_bytes=2),
    "yuv422": _Layout(2, "uyvy", even=("width",)),
    "uyvy": _Layout(2, "uyvy", even=("width",)),
    "yuv422_yuy2": _Layout(2, "yuyv", even=("width",)),
    "yuyv": _Layout(2, "yuyv", even=("width",)),
    "nv12": _Layout(1, "nv12", even=_BOTH, chroma_rows=0.5),
    "nv21": _Layout(1, "nv21", even=_BOTH, chroma_rows=0.5),
    **{name: _Layout(1, name, even=_BOTH) for name in ("bayer_rggb8", "bayer_bggr8", "bayer_gbrg8", "bayer_grbg8")},
}

_DEPTH = ("16uc1", "32fc1")
_HEAD_BYTES = 1 << 16  # start of a compressed image, which holds its header
_COLOURED = ("RGB", "RGBA", "P", "CMYK", "YCbCr", "RGBX")  # Pillow modes

SUPPORTED_ENCODINGS = tuple(name.replace("uc", "UC") for name in _LAYOUTS)

# Offsets of first luma, U and V in the four bytes of two pixels.
_PACKED_YUV = {"uyvy": (1, 0, 2), "yuyv": (0, 1, 3)}
# Offsets of U and V in the pairs of the chroma plane.
_PLANAR_YUV = {"nv12": (0, 1), "nv21": (1, 0)}


def rgb_from_image(message: Any) -> np.ndarray:
    """The pixels of a sensor_msgs/Image as RGB uint8 [height, width, 3].

    16-bit samples are scaled to 8 bits. `8UC3` and `8UC4` are blue first, as in OpenCV. YUV is BT.601, limited range.
    For rgb8 the result is a view of `message.data`: keep the message alive and do not write to it.
    """
    layout, rows = _checked(message)
    if layout.word_bytes == 2:
        words = np.ascontiguousarray(rows).view(">u2" if message.is_bigendian else "<u2")
        rows = to_8_bits(words)
    if layout.form == "rgb8":
        return rows.reshape(message.height, message.width, 3)
    if layout.form in _PACKED_YUV or layout.form in _PLANAR_YUV:
        return _rgb_from_yuv(*_yuv_planes(rows, message.height, layout.form))
    if layout.form.startswith("bayer"):
        return _demosaiced(rows, layout.form)
    return _converted(rows, message.width, layout.form)


_ANOTHER_TOPIC = (
    "choose the camera's colour image: remap the topic `image` of the policy, or name it with --image-topic in a replay"
)


def is_depth(message: Any) -> bool:
    """True if a sensor_msgs/Image or CompressedImage holds depth, whose bytes could be mistaken for brightness."""
    form = getattr(message, "format", None)
    if form is None:
        return message.encoding.lower() in _DEPTH
    return "compresseddepth" in form.lower() or _encoding_of(form) in _DEPTH


def _encoding_of(form: str) -> str:
    """The pixel encoding, which image_transport puts first in a compressed image's format."""
    return form.split(";")[0].strip().lower()


def _checked(message: Any) -> tuple[_Layout, np.ndarray]:
    """The encoding's layout and the image's rows without padding, uint8 [rows, bytes]."""
    height, width, step = message.height, message.width, message.step
    if height < 1 or width < 1:
        raise UserError(f"the image is empty: {width} x {height}; check the camera driver")
    layout = _LAYOUTS.get(message.encoding.lower())
    if is_depth(message):
        raise UserError(
            f"the image encoding '{message.encoding}' is a depth image's; {_ANOTHER_TOPIC}. For a grey image the "
            "driver must publish mono16"
        )
    if layout is None:
        raise UserError(
            f"the image encoding '{message.encoding}' is not supported; let the driver publish one of: "
            + ", ".join(SUPPORTED_ENCODINGS)
        )
    for name, size in (("width", width), ("height", height)):
        if name in layout.even and size % 2:
            raise UserError(f"a {message.encoding} image needs an even {name}, got {width} x {height}")
    row_bytes = width * layout.pixel_bytes
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
    return layout, data.reshape(rows, step)[:, :row_bytes]


def _converted(rows: np.ndarray, width: int, encoding: str) -> np.ndarray:
    height, step = rows.shape
    data = np.ascontiguousarray(rows)
    message = SimpleNamespace(height=height, width=width, encoding=encoding, step=step, data=data, is_bigendian=0)
    return _converter()(message, "rgb8")


@cache
def _converter() -> Callable[[Any, str], np.ndarray]:
    """Returns cv_bridge's converter if it works here, else rosbags-image's. OpenCV is imported with the first image."""
    data = np.zeros(3, dtype=np.uint8)
    probe = SimpleNamespace(height=1, width=1, encoding="bgr8", step=3, data=data, is_bigendian=0)
    try:
        from cv_bridge import CvBridge

        convert: Callable[[Any, str], np.ndarray] = CvBridge().imgmsg_to_cv2
        convert(probe, "rgb8")
    except Exception:  # not installed, or built for another NumPy or OpenCV
        try:
            from rosbags.image import message_to_cvimage
        except ImportError as error:
            raise UserError(
                f"images of this encoding need OpenCV ({error}): pip install rosbags-image opencv-python-headless"
            ) from None
        convert = message_to_cvimage
    import cv2

    cv2.setNumThreads(1)  # an image takes 0.1 ms; more threads would compete with torch's for the cores
    return convert


def _yuv_planes(rows: np.ndarray, height: int, form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Luma, U and V of each pixel, uint8 [height, width]."""
    if form in _PACKED_YUV:
        luma, u, v = _PACKED_YUV[form]
        pairs = rows.reshape(height, -1, 4)
        return rows[:, luma::2], pairs[:, :, u].repeat(2, axis=1), pairs[:, :, v].repeat(2, axis=1)
    chroma = rows[height:].reshape(height // 2, -1, 2).repeat(2, axis=0).repeat(2, axis=1)
    u, v = _PLANAR_YUV[form]
    return rows[:height], chroma[:, :, u], chroma[:, :, v]


def _rgb_from_yuv(luma: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Converts BT.601 limited range: luma in 16..235, chroma around 128.

    Computed in float: OpenCV's 8-bit integers are off by one in many pixels and by more where luma is below 16.
    """
    y = (luma.astype(np.float32) - 16) * (255 / 219)
    u = (u.astype(np.float32) - 128) * (255 / 224)
    v = (v.astype(np.float32) - 128) * (255 / 224)
    rgb = np.stack([y + 1.402 * v, y - 0.344136 * u - 0.714136 * v, y + 1.772 * u], axis=2)
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)


def _demosaiced(mosaic: np.ndarray, encoding: str) -> np.ndarray:
    """OpenCV's bilinear demosaicing, with border pixels computed as the mean of the existing samples.

    OpenCV copies the border from adjacent pixels. Mirroring the mosaic by two pixels keeps its pattern and also yields
    the border, except for green between three samples, where the mirrored sample would count twice.
    """
    rgb = _converted(np.pad(mosaic, 2, mode="reflect"), mosaic.shape[1] + 4, encoding)[2:-2, 2:-2].copy()
    pattern = np.array(list(encoding[6:10])).reshape(2, 2)  # bayer_RGGB8: the colours of the first two pixels and rows
    for turns in range(4):
        edge, samples = np.rot90(rgb, turns), np.rot90(mosaic, turns).astype(np.int32)
        last = samples.shape[1] - 1
        first = 1 if np.rot90(pattern, turns)[0, 0] == "g" else 2  # the first sample in the row that is not green
        neighbours = samples[0, first - 1 : last - 1 : 2] + samples[0, first + 1 :: 2] + samples[1, first:last:2]
        edge[0, first:last:2, 1] = (neighbours + 1) // 3
    return rgb


def rgb_from_compressed(message: Any) -> np.ndarray:
    """The pixels of a sensor_msgs/CompressedImage (JPEG, PNG, WebP) as RGB uint8 [height, width, 3]."""
    encoding = _encoding_of(message.format)
    if is_depth(message):
        raise UserError(
            f"the compressed image has format '{shortened(message.format)}', a depth format; {_ANOTHER_TOPIC}"
        )
    data = bytes(message.data)
    if not data:
        raise UserError("the compressed image is empty (0 bytes); check the camera driver")
    try:
        with opened_image(io.BytesIO(data), SENT_FORMATS) as image:
            pixels = rgb_from_pillow(image)
            if not encoding.startswith("bayer_") or image.mode in _COLOURED:
                return pixels
            return _demosaiced_image(pixels[:, :, 0], encoding, lossless=image.format != "JPEG")
    except UserError:
        raise
    except Exception as error:  # decoders raise arbitrary errors, and each broken image must be counted
        raise UserError(
            f"the compressed image (format '{shortened(message.format)}', {len(data)} bytes) cannot be decoded: "
            f"{shortened(str(error))}; it is truncated, or not a JPEG, PNG or WebP"
        ) from error


def _demosaiced_image(mosaic: np.ndarray, encoding: str, *, lossless: bool) -> np.ndarray:
    """Demosaics a Bayer image that was compressed without demosaicing."""
    if encoding not in _LAYOUTS or not lossless:
        raise UserError(
            f"the compressed image holds raw Bayer samples ({encoding}) as a JPEG or with 16 bits, which cannot be "
            "demosaiced; let the camera driver publish a colour image, or compress to 8-bit PNG"
        )
    height, width = mosaic.shape
    if height % 2 or width % 2:
        raise UserError(
            f"an image with encoding '{encoding}' must have an even width and height, got {width} x {height}"
        )
    return _demosaiced(mosaic, encoding)


def is_grey(message: Any) -> bool:
    """True if an Image or CompressedImage declares a grey encoding, or the compressed data is grey."""
    if not hasattr(message, "format"):
        encoding = message.encoding.lower()
        return "mono" in encoding or "8uc1" in encoding
    encoding = message.format.lower()
    if "mono" in encoding or "8uc1" in encoding:
        return True
    if encoding.startswith("bayer_"):
        return False
    try:
        with opened_image(io.BytesIO(bytes(message.data[:_HEAD_BYTES])), SENT_FORMATS) as image:
            return image.mode not in _COLOURED
    except Exception:  # damaged: decoding reports it
        return False


def stamp_ns(header: Any, remedy: str = "the camera driver must fill in the time the image was taken") -> int:
    """The stamp of a std_msgs/Header in nanoseconds, greater than 0; `remedy` ends the error if there is none."""
    try:
        seconds, nanoseconds = operator.index(header.stamp.sec), operator.index(header.stamp.nanosec)
    except TypeError as error:
        raise UserError(
            f"header.stamp must be whole numbers, got sec {header.stamp.sec!r}, nanosec {header.stamp.nanosec!r}; "
            f"{remedy}"
        ) from error
    if seconds < 0 or not 0 <= nanoseconds < NANOSECONDS:
        raise UserError(
            f"header.stamp is out of range: sec {seconds}, nanosec {nanoseconds}; sec must be 0 or more and nanosec "
            f"between 0 and {NANOSECONDS - 1}"
        )
    if seconds == nanoseconds == 0:
        raise UserError(f"header.stamp is 0; {remedy}")
    return seconds * NANOSECONDS + nanoseconds
