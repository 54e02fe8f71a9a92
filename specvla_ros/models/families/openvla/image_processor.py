# SPDX-License-Identifier: Apache-2.0
"""Converts a camera image to pixels as in the vision towers' training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.image_config import read_image_config
from specvla_ros.settings.json_file import Fields, is_number

STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CENTER_CROP_AREA = 0.9  # of the image; OpenVLA's fine-tuned checkpoints saw it on average under augmentation
_RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}
_MAX_PIXELS = 4096
_SIZES = f"a list of sizes such as [3, 224, 224], at most {_MAX_PIXELS} pixels, one for each vision tower"
_MAX_COLOUR = 1e4
_COLOURS = f"a list with three values per tower, up to {_MAX_COLOUR:g}, standard deviations above {1 / _MAX_COLOUR:g}"
_FILL = "three whole numbers from 0 to 255"


@dataclass(frozen=True)
class _TowerInput:
    size: int
    resampling: Image.Resampling
    mean: np.ndarray  # float32 [3]
    std: np.ndarray


@dataclass(frozen=True)
class ImageProcessor:
    """Image preprocessing as in preprocessor_config.json, see `read_image_config`."""

    # `resize-naive` squeezes to a square; `letterbox` pads to a square first; `resize-crop` scales the shorter side and
    # crops the middle.
    strategy: str
    towers: tuple[_TowerInput, ...]  # input size, resampling, mean and std of each vision tower
    letterbox_fill: tuple[int, int, int]  # RGB of the padding
    # Crop to the central 90 % of the area first, as OpenVLA's evaluation does for checkpoints that were fine-tuned with
    # image augmentation.
    center_crop: bool = False

    def __call__(self, image: np.ndarray) -> Tensor:
        """Converts RGB uint8 [height, width, 3] to normalised float32 [3 * towers, size, size]."""
        if self.center_crop:
            image = center_crop(image, self.towers[0].size)
        picture = Image.fromarray(image)
        if self.strategy == "letterbox":
            picture = _letterbox(picture, self.letterbox_fill)
        fitted: dict[tuple[int, Image.Resampling], np.ndarray] = {}  # towers often share one
        size = self.towers[0].size
        pixels = np.empty((3 * len(self.towers), size, size), np.float32)
        for tower, channels in zip(self.towers, np.split(pixels, len(self.towers)), strict=True):
            key = tower.size, tower.resampling
            if key not in fitted:
                fitted[key] = np.asarray(self._fitted(picture, tower)).transpose(2, 0, 1)
            # Written in place: concatenating and reordering float pixels takes longer than the arithmetic.
            np.divide(fitted[key], np.float32(255), out=channels)
            channels -= tower.mean[:, None, None]
            channels /= tower.std[:, None, None]
        return torch.from_numpy(pixels)

    def _fitted(self, picture: Image.Image, tower: _TowerInput) -> Image.Image:
        if self.strategy == "resize-naive":
            return picture.resize((tower.size, tower.size), tower.resampling)
        return _resize_shorter_side(picture, tower)


def read_image_processor(directory: Path, *, center_crop: bool) -> ImageProcessor:
    """Reads a checkpoint's image settings. Means are read, not assumed: released files have bf16-rounded ones.

    Raises UserError if the file is missing or incomplete, or has an unknown strategy.
    """
    raw = read_image_config(directory)
    strategy = raw.text("image_resize_strategy", choices=STRATEGIES)
    towers = _towers(raw)
    fill = raw.list_of("tvf_letterbox_fill", int, _FILL, None, length=3)
    if fill is None:
        fill = [min(255, max(0, int(each * 255))) for each in raw.raw["means"][-1]]
    if not all(0 <= each <= 255 for each in fill):
        raise raw.wrong("tvf_letterbox_fill", _FILL)
    return ImageProcessor(strategy, towers, tuple(fill), center_crop)


def dinosiglip_processor(sizes: Sequence[int]) -> ImageProcessor:
    """Prismatic's image processor for DINOv2 and SigLIP: squeezed to a square, bicubic, with timm's means."""
    imagenet = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    half = np.full(3, 0.5, np.float32), np.full(3, 0.5, np.float32)
    towers = (
        _TowerInput(size, Image.Resampling.BICUBIC, *colours)
        for size, colours in zip(sizes, (imagenet, half), strict=True)
    )
    return ImageProcessor("resize-naive", tuple(towers), (0, 0, 0))


def _towers(raw: Fields) -> tuple[_TowerInput, ...]:
    sizes = raw.list_of("input_sizes", list, _SIZES)
    names = raw.list_of("interpolations", str, f"a list with one of {', '.join(_RESAMPLING)} for each vision tower")
    means, stds = (raw.list_of(name, list, _COLOURS) for name in ("means", "stds"))
    if not len(sizes) == len(names) == len(means) == len(stds) > 0:
        raise UserError(f"{raw.path}: each tower needs input_sizes, interpolations, means and stds{raw.hint}")
    towers = []
    for size, name, mean, std in zip(sizes, names, means, stds, strict=True):
        if (
            len(size) != 3
            or type(size[2]) is not int
            or size != [3, size[2], size[2]]
            or not 0 < size[2] <= _MAX_PIXELS
        ):
            raise raw.wrong("input_sizes", _SIZES)
        if name not in _RESAMPLING:
            raise raw.wrong("interpolations", f"a list with one of {', '.join(_RESAMPLING)} for each vision tower")
        for each, values, least in (("means", mean, -_MAX_COLOUR), ("stds", std, 1 / _MAX_COLOUR)):
            if len(values) != 3 or not all(is_number(value) and least <= value <= _MAX_COLOUR for value in values):
                raise raw.wrong(each, _COLOURS)
        towers.append(_TowerInput(size[-1], _RESAMPLING[name], np.float32(mean), np.float32(std)))
    return tuple(towers)


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Crops to the central 90 % of an image's area, bilinear: RGB uint8 [height, width, 3] to [size, size, 3].

    Follows OpenVLA's evaluation: resizes to `size` (Lanczos), then repeats the arithmetic of TensorFlow's
    crop_and_resize and convert_image_dtype.
    """
    if image.shape[:2] != (size, size):
        image = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS))
    side = np.float32(CENTER_CROP_AREA) ** np.float32(0.5)
    start = (np.float32(1) - side) / 2 * (size - 1)
    at = start + np.arange(size, dtype=np.float32) * side
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, size - 1)
    weight = (at - low).astype(np.float32)
    pixels = image.astype(np.float32) / np.float32(255)
    rows = pixels[low] * (1 - weight)[:, None, None] + pixels[high] * weight[:, None, None]
    cropped = rows[:, low] * (1 - weight)[None, :, None] + rows[:, high] * weight[None, :, None]
    return np.clip(cropped * 255.5, 0, 255).astype(np.uint8)


def _letterbox(picture: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    """Pads to a square; like the original, one pixel short if the difference is odd."""
    width, height = picture.size
    side = max(width, height)
    left, top = (side - width) // 2, (side - height) // 2
    padded = Image.new("RGB", (width + 2 * left, height + 2 * top), fill)
    padded.paste(picture, (left, top))
    return padded


def _resize_shorter_side(picture: Image.Image, tower: _TowerInput) -> Image.Image:
    width, height = picture.size
    shorter = min(width, height)
    new_width, new_height = (int(tower.size * side / shorter) for side in (width, height))
    resized = picture.resize((new_width, new_height), tower.resampling)
    left, top = (round((side - tower.size) / 2.0) for side in (new_width, new_height))
    return resized.crop((left, top, left + tower.size, top + tower.size))
