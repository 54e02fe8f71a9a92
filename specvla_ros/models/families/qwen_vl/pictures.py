# SPDX-License-Identifier: Apache-2.0
"""From pictures to the patches that Qwen2.5-VL's vision tower read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from specvla_ros.models.config import MAX_WIDTH, read_checkpoint_json

_COLOURS = "three numbers"
_MAX_PIXELS = 1 << 26  # of one picture; more than any model has


@dataclass(frozen=True)
class PatchProcessor:
    """What preprocessor_config.json prescribes.

    Args:
        patch_size, merge_size, temporal_patch_size: pixels of a patch's side, patches that become one row of the
            prompt along a side, and pictures of a patch: a single one is repeated.
        min_pixels, max_pixels: a picture with fewer or more is resized.
        mean, std: float32 [3], of colours from 0 to 1.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: np.ndarray
    std: np.ndarray

    def fitted(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """The size that a picture is given: multiples of `factor`, with so many pixels at least and at most."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        high, wide = smart_resize(height, width, factor=self.factor, min_pixels=least, max_pixels=most)
        return high, wide

    @property
    def factor(self) -> int:
        """Pixels of which a picture's sides are a multiple."""
        return self.patch_size * self.merge_size

    def patches(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """Pictures uint8 RGB [height, width, 3], whose sides are multiples of `factor`, to float32 [patches, values].

        Patches of one row of the prompt follow each other, as transformers' Qwen2VLImageProcessor has them.
        """
        return torch.from_numpy(np.concatenate([self._patches(picture) for picture in pictures]))

    def _patches(self, picture: np.ndarray) -> np.ndarray:
        pixels = (picture.astype(np.float32) * np.float32(1 / 255) - self.mean) / self.std
        side, merged = self.patch_size, self.merge_size
        rows, columns = (length // self.factor for length in picture.shape[:2])
        blocks = pixels.reshape(rows, merged, side, columns, merged, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        repeated = np.repeat(blocks[:, :, :, :, :, None], self.temporal_patch_size, axis=5)
        return repeated.reshape(rows * columns * merged**2, -1)


def read_patch_processor(directory: Path) -> PatchProcessor:
    """Reads preprocessor_config.json; what it leaves out is Qwen2.5-VL's.

    Raises:
        UserError: it is missing, or a value is wrong.
    """
    raw = read_checkpoint_json(directory / "preprocessor_config.json")
    size = raw.inner("size", {})
    mean = raw.list_of("image_mean", float, _COLOURS, [0.48145466, 0.4578275, 0.40821073], length=3)
    std = raw.list_of("image_std", float, _COLOURS, [0.26862954, 0.26130258, 0.27577711], length=3)
    if min(std) <= 0:
        raise raw.wrong("image_std", "three numbers above 0")
    least = raw.whole("min_pixels", size.whole("shortest_edge", 56 * 56, maximum=_MAX_PIXELS), maximum=_MAX_PIXELS)
    most = raw.whole("max_pixels", size.whole("longest_edge", 28 * 28 * 1280, maximum=_MAX_PIXELS), maximum=_MAX_PIXELS)
    return PatchProcessor(
        patch_size=raw.whole("patch_size", 14, minimum=1, maximum=MAX_WIDTH),
        merge_size=raw.whole("merge_size", 2, minimum=1, maximum=64),
        temporal_patch_size=raw.whole("temporal_patch_size", 2, minimum=1, maximum=64),
        min_pixels=least,
        max_pixels=most,
        mean=np.float32(mean),
        std=np.float32(std),
    )


def resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Uint8 RGB [height, width, 3], bicubic, as qwen_vl_utils resizes it."""
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
