# SPDX-License-Identifier: Apache-2.0
"""Compressed images with damaged bytes, of other formats, and bombs, through the decoder that node and replay share."""

import io
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
from attacks.tally import Silent, Tally
from PIL import Image

from specvla_ros.lab.bags.frames import rgb_from_message

_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM", "ICO", "TGA", "EPS", "PDF", "JPEG2000")
_SIZES = ((64, 48), (1, 1), (33, 7))
_DAMAGES = ("cut", "flipped bit", "noise", "zeros", "doubled", "none")
_PER_DAMAGE = 30


def attack_images(*, limit: int | None = None, seed: int = 0) -> Tally:
    """Decodes each damaged image.

    Args:
        limit: number of cases, drawn at random; None: all.
        seed: of the damage.
    """
    tally = Tally()
    for name, form, content in (*damaged_pictures(limit, seed), *bombs()):
        tally.judge(name, partial(_decode, form, content))
    return tally


def damaged_pictures(limit: int | None, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, format and bytes of each damaged picture, or of some drawn at random."""
    rng = random.Random(seed)
    cases = [
        (f"{form} {mode} {size}: {damage}", form, content, damage, rng.random())
        for form, mode, size, content in _pictures()
        for damage in _DAMAGES
        for _ in range(_PER_DAMAGE)
    ]
    if limit is not None:
        cases = rng.sample(cases, min(limit, len(cases)))
    for name, form, content, damage, share in cases:
        yield name, form, _damaged(content, damage, share, rng)


def _decode(form: str, content: bytes) -> str:
    message = SimpleNamespace(format=form.lower(), data=np.frombuffer(content, np.uint8))
    pixels = rgb_from_message(message)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise Silent(f"{pixels.dtype} {pixels.shape}")
    return "decoded"


def _pictures() -> Iterator[tuple[str, str, tuple[int, int], bytes]]:
    rng = np.random.default_rng(0)
    for form in _FORMATS:
        for mode in ("RGB", "L", "RGBA", "P", "I;16"):
            for size in _SIZES:
                stream = io.BytesIO()
                picture = Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8))
                try:
                    picture.convert("I" if mode == "I;16" else mode).save(stream, form)
                except (OSError, KeyError, ValueError):  # the format has no such mode, or Pillow no such encoder
                    continue
                yield form, mode, size, stream.getvalue()


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """Name, format and some kB that are a huge picture."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    for form, mode, side in (("PNG", "1", 13000), ("PNG", "L", 12000), ("WEBP", "RGB", 9000), ("GIF", "P", 12000)):
        stream = io.BytesIO()
        Image.new(mode, (side, side)).save(stream, form)
        yield f"{form} of {side} x {side}", form, stream.getvalue()


def _damaged(content: bytes, damage: str, share: float, rng: random.Random) -> bytes:
    at = int(share * len(content))
    changes: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[:at],
        "flipped bit": lambda: content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        "noise": lambda: content[:at] + rng.randbytes(16) + content[at + 16 :],
        "zeros": lambda: content[:at] + bytes(64) + content[at + 64 :],
        "doubled": lambda: content[:at] + content,
        "none": lambda: content,
    }
    return changes[damage]()
