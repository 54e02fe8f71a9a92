# SPDX-License-Identifier: Apache-2.0
"""Every encoding against pixels computed another way; everything malformed refused."""

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFile
from support.image_oracle import expected_rgb

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import rgb_from_message
from specvla_ros.messages import image_message
from specvla_ros.messages.image_message import (
    SUPPORTED_ENCODINGS,
    is_grey,
    rgb_from_compressed,
    rgb_from_image,
    stamp_ns,
)

RED, GREEN, BLUE, GREY = (255, 0, 0), (0, 255, 0), (0, 0, 255), (90, 90, 90)


def message(pixels: np.ndarray, encoding: str, *, padding: int = 0, rows: int | None = None, **changes: Any) -> Any:
    """An image message of rows of bytes, with padding after each row."""
    height, row_bytes = pixels.shape
    data = np.pad(pixels, ((0, 0), (0, padding)), constant_values=77).tobytes()
    fields = dict(
        height=rows or height, width=4, encoding=encoding, is_bigendian=0, step=row_bytes + padding, data=data
    )
    return SimpleNamespace(**(fields | changes))


RGB = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
ALPHA = np.full((6, 4, 1), 13, np.uint8)


def flat(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(pixels.shape[0], -1)


EXACT = {
    "rgb8": (flat(RGB), RGB),
    "bgr8": (flat(RGB[..., ::-1]), RGB),
    "8UC3": (flat(RGB[..., ::-1]), RGB),
    "rgba8": (flat(np.concatenate((RGB, ALPHA), axis=2)), RGB),
    "bgra8": (flat(np.concatenate((RGB[..., ::-1], ALPHA), axis=2)), RGB),
    "8UC4": (flat(np.concatenate((RGB[..., ::-1], ALPHA), axis=2)), RGB),
    "mono8": (RGB[..., 0], RGB[..., :1].repeat(3, axis=2)),
    "8UC1": (RGB[..., 0], RGB[..., :1].repeat(3, axis=2)),
}


# OpenCV names a mosaic by the second pixels of its second row.
BAYER_NAMES = {"rggb": "BG", "bggr": "RG", "gbrg": "GR", "grbg": "GB"}
BRIDGE_CODES = {
    "bgr8": cv2.COLOR_BGR2RGB,
    "rgba8": cv2.COLOR_RGBA2RGB,
    "bgra8": cv2.COLOR_BGRA2RGB,
    "mono8": cv2.COLOR_GRAY2RGB,
    **{f"bayer_{pattern}8": getattr(cv2, f"COLOR_Bayer{name}2RGB") for pattern, name in BAYER_NAMES.items()},
}


class StandInBridge:
    """What cv_bridge.CvBridge does with an image message; it cannot be installed without ROS."""

    converted: ClassVar[list[str]] = []

    def imgmsg_to_cv2(self, message: Any, desired_encoding: str = "passthrough") -> np.ndarray:
        if message.encoding not in BRIDGE_CODES or desired_encoding != "rgb8":
            raise TypeError(f"[{message.encoding}] is not a color format. but [{desired_encoding}] is")
        assert not message.is_bigendian
        self.converted.append(message.encoding)
        channels = {"bgr8": 3, "rgba8": 4, "bgra8": 4}.get(message.encoding, 1)
        shape = (message.height, message.step // channels, channels)
        pixels = np.ndarray(shape=shape, dtype=np.uint8, buffer=message.data)[:, : message.width]
        return cv2.cvtColor(np.ascontiguousarray(pixels), BRIDGE_CODES[message.encoding])


def bridge_module(bridge: type) -> ModuleType:
    module = ModuleType("cv_bridge")
    module.CvBridge = bridge  # type: ignore[attr-defined]
    return module


@pytest.fixture
def fresh_converter() -> Iterator[None]:
    image_message._converter.cache_clear()
    yield
    image_message._converter.cache_clear()


@pytest.fixture(params=["rosbags-image", "cv_bridge"])
def converter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh_converter: None) -> str:
    """Image messages are converted by that library."""
    bridge = bridge_module(StandInBridge) if request.param == "cv_bridge" else None
    monkeypatch.setitem(sys.modules, "cv_bridge", bridge)
    return request.param


@pytest.mark.parametrize("shape", [(2, 2), (6, 8)])
@pytest.mark.parametrize("encoding", SUPPORTED_ENCODINGS)
def test_every_encoding_means_what_the_oracle_says(encoding: str, shape: tuple[int, int], converter: str) -> None:
    layout = image_message._LAYOUTS[encoding.lower()]
    height, width = shape
    generator = np.random.default_rng(1)
    for padding, big_endian in ((0, 0), (4, 1)):
        rows = int(height * (1 + layout.chroma_rows))
        pixels = generator.integers(0, 256, (rows, width * layout.pixel_bytes), dtype=np.uint8)
        image = message(pixels, encoding, padding=padding, rows=height, width=width, is_bigendian=big_endian)
        result = rgb_from_image(image)
        expected = expected_rgb(pixels, encoding, height, width, big_endian=bool(big_endian))
        assert result.shape == (height, width, 3)
        assert result.dtype == np.uint8
        if encoding in ("yuv422", "uyvy", "yuv422_yuy2", "yuyv", "nv12", "nv21"):
            assert np.abs(result - expected).max() < 0.5001  # rounded to the nearest
        else:
            np.testing.assert_array_equal(result, expected)


def test_cv_bridge_is_taken_where_it_works(monkeypatch: pytest.MonkeyPatch, fresh_converter: None) -> None:
    monkeypatch.setattr(StandInBridge, "converted", [])
    monkeypatch.setitem(sys.modules, "cv_bridge", bridge_module(StandInBridge))
    np.testing.assert_array_equal(rgb_from_image(message(flat(RGB[..., ::-1]), "8UC3")), RGB)
    assert StandInBridge.converted == ["bgr8", "bgr8"]  # a trial, then the image


def test_a_cv_bridge_that_does_not_work_is_passed_over(monkeypatch: pytest.MonkeyPatch, fresh_converter: None) -> None:
    class Broken:
        def imgmsg_to_cv2(self, message: Any, desired_encoding: str) -> np.ndarray:
            raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setitem(sys.modules, "cv_bridge", bridge_module(Broken))
    np.testing.assert_array_equal(rgb_from_image(message(flat(RGB[..., ::-1]), "bgr8")), RGB)


def test_opencv_is_imported_with_the_first_image_that_needs_it() -> None:
    code = """
import sys
from types import SimpleNamespace
from specvla_ros.messages.image_message import rgb_from_image
fields = dict(height=1, width=1, is_bigendian=0, step=3, data=bytes(3))
rgb_from_image(SimpleNamespace(encoding="rgb8", **fields))
before = "cv2" in sys.modules
rgb_from_image(SimpleNamespace(encoding="bgr8", **fields))
import cv2
print(before, cv2.getNumThreads())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "1"]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("encoding", EXACT)
def test_eight_bit_encodings(encoding: str, padding: int) -> None:
    pixels, expected = EXACT[encoding]
    np.testing.assert_array_equal(rgb_from_image(message(pixels, encoding, padding=padding)), expected)


@pytest.mark.parametrize("big_endian", [0, 1])
@pytest.mark.parametrize(("encoding", "order"), [("rgb16", (0, 1, 2)), ("bgr16", (2, 1, 0)), ("mono16", None)])
def test_sixteen_bit_encodings(encoding: str, order: tuple | None, big_endian: int) -> None:
    kind = ">u2" if big_endian else "<u2"
    source = RGB[..., 0] if order is None else RGB[..., order]
    words = flat((source.astype(np.uint16) * 257).astype(kind)).view(np.uint8)
    result = rgb_from_image(message(words.reshape(6, -1), encoding, padding=4, is_bigendian=big_endian))
    expected = RGB[..., :1].repeat(3, axis=2) if order is None else RGB
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("colour", [RED, GREEN, BLUE, GREY])
@pytest.mark.parametrize("encoding", ["yuv422", "uyvy", "yuv422_yuy2", "yuyv", "nv12", "nv21"])
def test_yuv_encodings(encoding: str, colour: tuple[int, int, int]) -> None:
    """BT.601, limited range, from the standard's own equations."""
    r, g, b = (value / 255 for value in colour)
    luma = 0.299 * r + 0.587 * g + 0.114 * b
    y, u, v = (
        round(x) for x in (16 + 219 * luma, 128 + 224 * 0.5 * (b - luma) / 0.886, 128 + 224 * 0.5 * (r - luma) / 0.701)
    )
    if encoding.startswith("nv"):
        chroma = [u, v] if encoding == "nv12" else [v, u]
        rows = np.array([[y] * 4] * 4 + [chroma * 2] * 2, np.uint8)
        image = message(rows, encoding, padding=3, rows=4)
    else:
        quad = [u, y, v, y] if encoding in ("yuv422", "uyvy") else [y, u, y, v]
        image = message(np.array([quad * 2] * 4, np.uint8), encoding, padding=3)
    result = rgb_from_image(image)
    assert result.shape == (4, 4, 3)
    assert np.abs(result.astype(int) - colour).max() <= 2


@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_encodings_of_one_colour(pattern: str) -> None:
    colour = dict(r=200, g=120, b=40)
    mosaic = np.array([[colour[pattern[2 * (y % 2) + x % 2]] for x in range(4)] for y in range(6)], np.uint8)
    result = rgb_from_image(message(mosaic, f"bayer_{pattern}8", padding=2))
    np.testing.assert_array_equal(result, np.broadcast_to((200, 120, 40), (6, 4, 3)))


def test_each_supported_encoding_is_tested() -> None:
    tested = {*EXACT, "rgb16", "bgr16", "mono16", "yuv422", "uyvy", "yuv422_yuy2", "yuyv", "nv12", "nv21"}
    assert tested | {f"bayer_{p}8" for p in ("rggb", "bggr", "gbrg", "grbg")} == set(SUPPORTED_ENCODINGS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(width=0), "the image is empty: 0 x 6"),
        (dict(height=0), "the image is empty"),
        (dict(step=11), "step is 11 bytes, but a row of 4 rgb8 pixels takes 12"),
        (dict(step=13), "cut off or its step or height is wrong"),
        (dict(data=bytes(10)), "holds 10 bytes"),
    ],
)
def test_malformed_images(changes: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        rgb_from_image(message(flat(RGB), "rgb8", **changes))


def encoded(kind: str, picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


def test_unknown_encodings_and_odd_sizes() -> None:
    with pytest.raises(UserError, match="'hsv12' is not supported; let the driver publish one of: rgb8, bgr8"):
        rgb_from_image(message(flat(RGB), "hsv12"))
    with pytest.raises(UserError, match="even width"):
        rgb_from_image(message(RGB[..., 0], "nv12", rows=4, width=3))


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1"])
def test_a_depth_image_is_no_grey_picture(encoding: str) -> None:
    depth = RGB[..., 0].astype(np.uint16 if encoding == "16UC1" else np.float32).view(np.uint8)
    with pytest.raises(UserError, match=f"'{encoding}' is a depth image's; choose .*remap .*--image-topic"):
        rgb_from_image(message(depth, encoding))
    with pytest.raises(UserError, match=r"a depth format; choose .*remap .*--image-topic"):
        rgb_from_compressed(SimpleNamespace(format=f"{encoding}; png compressed", data=b"x"))


@pytest.mark.parametrize("grey", ["mono8", "mono16", "8UC1"])
def test_grey_images_are_told_from_others(grey: str) -> None:
    assert is_grey(SimpleNamespace(encoding=grey))
    assert is_grey(SimpleNamespace(format=f"{grey}; jpeg compressed {grey}"))
    for colour in ("rgb8", "8UC3", "bayer_rggb8", "yuyv"):
        assert not is_grey(SimpleNamespace(encoding=colour))
        assert not is_grey(SimpleNamespace(format=f"{colour}; jpeg compressed bgr8"))


def test_compressed_images() -> None:
    png = SimpleNamespace(format="png", data=encoded("PNG", Image.fromarray(RGB)))
    np.testing.assert_array_equal(rgb_from_compressed(png), RGB)
    np.testing.assert_array_equal(rgb_from_message(png), RGB)
    jpeg = SimpleNamespace(format="rgb8; jpeg compressed bgr8", data=encoded("JPEG", Image.new("RGB", (8, 8), GREY)))
    np.testing.assert_allclose(rgb_from_compressed(jpeg), np.full((8, 8, 3), 90), atol=2)
    deep = SimpleNamespace(
        format="mono16; png compressed", data=encoded("PNG", Image.fromarray(RGB[..., 0] * np.uint16(257)))
    )
    np.testing.assert_array_equal(rgb_from_compressed(deep), RGB[..., :1].repeat(3, axis=2))
    webp = SimpleNamespace(format="webp", data=encoded("WEBP", Image.new("RGB", (8, 8), GREY)))
    np.testing.assert_allclose(rgb_from_compressed(webp), np.full((8, 8, 3), 90), atol=4)


@pytest.mark.parametrize("kind", ["EPS", "GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_not_even_opened(kind: str) -> None:
    """An EPS starts `gs` from PATH when it is loaded."""
    picture = SimpleNamespace(format="jpeg", data=encoded(kind, Image.fromarray(RGB)))
    with pytest.raises(UserError, match="cannot be decoded"):
        rgb_from_compressed(picture)


def test_a_claim_of_too_many_pixels_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"IHDR" + struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    whole = encoded("PNG", Image.fromarray(RGB))
    bomb = whole[:12] + head + struct.pack(">I", zlib.crc32(head)) + whole[33:]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match="13000 x 13000 pixels, above the limit of 36 million"):
        rgb_from_compressed(SimpleNamespace(format="png", data=bomb))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, IndexError, struct.error])
def test_whatever_a_decoder_raises_counts_as_a_bad_image(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise error("broken")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(UserError, match="cannot be decoded: broken"):
        rgb_from_compressed(SimpleNamespace(format="png", data=encoded("PNG", Image.fromarray(RGB))))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(format="jpeg", data=b""), "empty"),
        (dict(format="jpeg", data=b"no picture"), "cannot be decoded"),
        (dict(format="png", data=encoded("PNG", Image.fromarray(RGB))[:60]), "cannot be decoded|cut off"),
        (dict(format="16UC1; compressedDepth png", data=b"x"), "a depth format"),
    ],
)
def test_malformed_compressed_images(fields: dict, text: str) -> None:
    with pytest.raises(UserError, match=text):
        rgb_from_compressed(SimpleNamespace(**fields))


@pytest.mark.parametrize("stamp", [(0, 0), (-1, 5), (1, 10**9), (float("nan"), 0), (1.5, 0)])
def test_stamps_that_say_nothing(stamp: tuple) -> None:
    with pytest.raises(UserError, match=r"header\.stamp"):
        stamp_ns(SimpleNamespace(stamp=SimpleNamespace(sec=stamp[0], nanosec=stamp[1])))


def test_a_stamp_in_nanoseconds() -> None:
    assert stamp_ns(SimpleNamespace(stamp=SimpleNamespace(sec=3, nanosec=7))) == 3_000_000_007
