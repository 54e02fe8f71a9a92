# SPDX-License-Identifier: Apache-2.0
"""One decoder of images: files, Pillow's images, and what Python callers have."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from specvla_ros.errors import UserError
from specvla_ros.messages.image_file import as_pixels, read_image
from specvla_ros.messages.image_message import is_grey, rgb_from_compressed, rgb_from_image

RGB = np.random.default_rng(3).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GREY = RGB[..., 0]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["image.png", "image.ppm", "image.bmp", "image.tiff"])
def test_a_file_gives_its_pixels(tmp_path: Path, name: str) -> None:
    Image.fromarray(RGB).save(tmp_path / name)
    np.testing.assert_array_equal(read_image(tmp_path / name), RGB)


@pytest.mark.parametrize("name", ["deep.png", "deep.tiff"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    Image.fromarray(GREY * np.uint16(257)).save(tmp_path / name)
    np.testing.assert_array_equal(read_image(tmp_path / name), GREY[:, :, None].repeat(3, axis=2))


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(GREY.astype(np.float32) / 255).save(tmp_path / "float.tiff")
    with pytest.raises(UserError, match=r"float\.tiff: the image has floating-point pixels"):
        read_image(tmp_path / "float.tiff")


def test_what_a_caller_has_for_an_image_becomes_pixels(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "image.png")
    given = (RGB, Image.fromarray(RGB), tmp_path / "image.png", str(tmp_path / "image.png"), torch.from_numpy(RGB))
    for each in given:
        np.testing.assert_array_equal(as_pixels(each), RGB)


@pytest.mark.parametrize("given", [None, [[0, 0, 0]], b"bytes", 7])
def test_anything_else_is_no_image(given: Any) -> None:
    with pytest.raises(UserError, match="an image must be a uint8 array"):
        as_pixels(given)


def bayer() -> SimpleNamespace:
    return SimpleNamespace(
        encoding="bayer_rggb8", height=6, width=8, step=8, is_bigendian=0, data=GREY.tobytes(), header=None
    )


def test_a_compressed_bayer_picture_has_the_colours_of_the_raw_one() -> None:
    png = SimpleNamespace(format="bayer_rggb8; png compressed ", data=encoded(Image.fromarray(GREY)))
    np.testing.assert_array_equal(rgb_from_compressed(png), rgb_from_image(bayer()))


def test_a_bayer_picture_that_the_camera_driver_gave_colours_is_taken_as_it_is() -> None:
    png = SimpleNamespace(format="bayer_rggb8; png compressed bgr8", data=encoded(Image.fromarray(RGB)))
    np.testing.assert_array_equal(rgb_from_compressed(png), RGB)


def test_samples_of_a_bayer_camera_in_a_jpeg_are_refused() -> None:
    jpeg = SimpleNamespace(format="bayer_rggb8; jpeg compressed ", data=encoded(Image.fromarray(GREY), "JPEG"))
    with pytest.raises(UserError, match="cannot be demosaiced"):
        rgb_from_compressed(jpeg)


def test_a_picture_of_one_channel_is_grey_whatever_its_format_says() -> None:
    assert is_grey(SimpleNamespace(format="jpeg", data=encoded(Image.fromarray(GREY), "JPEG")))
    assert not is_grey(SimpleNamespace(format="jpeg", data=encoded(Image.fromarray(RGB), "JPEG")))
    assert not is_grey(SimpleNamespace(format="jpeg", data=b"damaged"))
