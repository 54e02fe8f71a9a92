# SPDX-License-Identifier: Apache-2.0
"""Pictures of files, bytes and Pillow to RGB arrays: one decoder for messages, commands and Python."""

import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image as PillowImage

from specvla_ros.errors import UserError, shortened

# What image_transport writes, and WebP. Pillow knows some forty formats more, one of which starts an interpreter.
SENT_FORMATS = ("JPEG", "PNG", "WEBP")
FILE_FORMATS = (*SENT_FORMATS, "BMP", "TIFF", "GIF", "PPM")
warnings.simplefilter("ignore", PillowImage.DecompressionBombWarning)  # our limit is lower
MAX_PIXELS = 36_000_000  # 8K video; an image of a few hundred kB may claim gigabytes


def rgb_from_pillow(image: PillowImage.Image) -> np.ndarray:
    """The pixels as RGB uint8 [height, width, 3]; 16-bit grey is scaled to 8 bits.

    Raises UserError for an image of too many pixels, or of floating-point values, whose range nobody knows.
    """
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UserError(
            f"the image has {width} x {height} pixels, at most {MAX_PIXELS // 10**6} million are decoded; "
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
    """16-bit samples as uint8."""
    # 65535 / 255 is 257: rounds to the nearest, never a tie. rosbags-image rounds down.
    return ((words.astype(np.uint32) + 128) // 257).astype(np.uint8)


def opened_picture(source: Path | IO[bytes], formats: tuple[str, ...] = FILE_FORMATS) -> PillowImage.Image:
    """A picture whose header is read, in one of the formats."""
    return PillowImage.open(source, formats=formats)


def read_picture(path: Path) -> np.ndarray:
    """A picture file as RGB uint8 [height, width, 3]; UserError if it is missing, damaged or too large."""
    try:
        with opened_picture(path) as image:
            return rgb_from_pillow(image)
    except FileNotFoundError:
        raise UserError(f"image {path} does not exist") from None
    except UserError as error:
        raise UserError(f"image {path}: {error}") from None
    except Exception as error:  # whatever a decoder makes of damaged bytes, or Pillow of a bomb
        known = ", ".join(FILE_FORMATS)
        raise UserError(f"image {path} cannot be read ({shortened(str(error))}); give one of {known}") from None


def as_pixels(given: Any) -> np.ndarray:
    """What a caller has for an image: an array or a tensor [height, width, 3], a Pillow image, or a file's path.

    Raises UserError for anything else.
    """
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, str | Path):
        return read_picture(Path(given))
    if isinstance(given, PillowImage.Image):
        return rgb_from_pillow(given)
    if hasattr(given, "detach"):  # a tensor; torch is not imported for one that nobody gives
        return np.asarray(given.detach().cpu())
    raise UserError(
        f"an image must be a uint8 array [height, width, 3], a Pillow image or a file's path, got "
        f"{type(given).__name__}"
    )
