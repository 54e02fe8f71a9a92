# SPDX-License-Identifier: Apache-2.0
"""Decodes image files, bytes and Pillow images to RGB arrays, for messages, commands and Python alike."""

import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image as PillowImage

from specvla_ros.errors import UserError, shortened

# The formats that image_transport writes, and WebP. Pillow reads some forty more; one of them starts an interpreter.
SENT_FORMATS = ("JPEG", "PNG", "WEBP")
FILE_FORMATS = (*SENT_FORMATS, "BMP", "TIFF", "GIF", "PPM")
warnings.simplefilter("ignore", PillowImage.DecompressionBombWarning)  # MAX_PIXELS is lower
MAX_PIXELS = 36_000_000  # 8K video; a file of a few hundred kB may claim gigabytes


def rgb_from_pillow(image: PillowImage.Image) -> np.ndarray:
    """Returns the pixels as RGB uint8 [height, width, 3]; 16-bit grey is scaled to 8 bits.

    Raises UserError if the image has too many pixels, or floating-point pixels, whose range is unknown.
    """
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UserError(
            f"the image has {width} x {height} pixels, above the limit of {MAX_PIXELS // 10**6} million; "
            "scale it down, or let the camera driver publish a smaller one"
        )
    if image.mode == "F":
        raise UserError(
            "the image has floating-point pixels, whose range is not known; save it with 8 bits per channel"
        )
    if not image.mode.startswith("I"):
        return np.asarray(image.convert("RGB"))
    # Pillow clips 16-bit grey to 255 when it converts.
    grey = np.clip(np.asarray(image).astype(np.int32), 0, 65535)
    return np.repeat(to_8_bits(grey)[:, :, None], 3, axis=2)


def to_8_bits(words: np.ndarray) -> np.ndarray:
    """Scales 16-bit samples to uint8."""
    # 65535 / 255 is 257, so this rounds to the nearest without ties. rosbags-image rounds down.
    return ((words.astype(np.uint32) + 128) // 257).astype(np.uint8)


def opened_image(source: Path | IO[bytes], formats: tuple[str, ...] = FILE_FORMATS) -> PillowImage.Image:
    """Opens an image in one of the formats; only its header is read."""
    return PillowImage.open(source, formats=formats)


def read_image(path: Path) -> np.ndarray:
    """Reads an image file as RGB uint8 [height, width, 3]; UserError if it is missing, damaged or too large."""
    try:
        with opened_image(path) as image:
            return rgb_from_pillow(image)
    except FileNotFoundError:
        raise UserError(f"image {path} does not exist") from None
    except UserError as error:
        raise UserError(f"image {path}: {error}") from None
    except Exception as error:  # decoders raise arbitrary errors for damaged data, Pillow for decompression bombs
        known = ", ".join(FILE_FORMATS)
        raise UserError(f"image {path} cannot be read ({shortened(str(error))}); give one of {known}") from None


def as_pixels(given: Any) -> np.ndarray:
    """Converts an array or tensor [height, width, 3], a Pillow image or a file's path to an array.

    Raises UserError for anything else.
    """
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, str | Path):
        return read_image(Path(given))
    if isinstance(given, PillowImage.Image):
        return rgb_from_pillow(given)
    if hasattr(given, "detach"):  # a tensor, recognised without importing torch
        try:
            return np.asarray(given.detach().cpu())
        except TypeError:
            raise UserError(f"an image must be uint8 [height, width, 3], got a tensor of {given.dtype}") from None
    raise UserError(
        f"an image must be a uint8 array [height, width, 3], a Pillow image or a file's path, got "
        f"{type(given).__name__}"
    )
