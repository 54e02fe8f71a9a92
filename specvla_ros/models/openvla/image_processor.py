# SPDX-License-Identifier: Apache-2.0
"""From a camera image to the pixels that the vision towers were trained on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.config import read_json

STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CENTER_CROP_AREA = 0.9  # of the image, what OpenVLA's fine-tuned checkpoints saw on average under augmentation
_RESAMPLING = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
}


@dataclass(frozen=True)
class _TowerInput:
    size: int
    resampling: Image.Resampling
    mean: np.ndarray  # float32 [3]
    std: np.ndarray


@dataclass(frozen=True)
class ImageProcessor:
    """What preprocessor_config.json prescribes.

    Args:
        strategy: `resize-naive` squeezes to a square; `letterbox` pads to a square first; `resize-crop` scales the
            shorter side and crops the middle.
        towers: input size, resampling, mean and std of each vision tower.
        letterbox_fill: RGB of the padding.
        center_crop: cut the middle 90 % (by area) first, as OpenVLA's evaluation does for checkpoints that were
            fine-tuned with image augmentation.
    """

    strategy: str
    towers: tuple[_TowerInput, ...]
    letterbox_fill: tuple[int, int, int]
    center_crop: bool = False

    def __call__(self, image: np.ndarray) -> Tensor:
        """RGB uint8 [height, width, 3] to normalised float32 [3 * towers, size, size]."""
        if self.center_crop:
            image = center_crop(image, self.towers[0].size)
        picture = Image.fromarray(image)
        if self.strategy == "letterbox":
            picture = _letterbox(picture, self.letterbox_fill)
        return torch.from_numpy(np.concatenate([self._tower_input(picture, tower) for tower in self.towers]))

    def _tower_input(self, picture: Image.Image, tower: _TowerInput) -> np.ndarray:
        if self.strategy == "resize-naive":
            picture = picture.resize((tower.size, tower.size), tower.resampling)
        else:
            picture = _resize_shorter_side(picture, tower)
        pixels = np.asarray(picture, dtype=np.float32) / np.float32(255)
        return ((pixels - tower.mean) / tower.std).transpose(2, 0, 1)


def read_image_processor(directory: Path, *, center_crop: bool) -> ImageProcessor:
    """Reads preprocessor_config.json. Means are read, not assumed: released files hold bf16-rounded ones.

    Raises:
        UserError: the file is missing, incomplete or names an unknown strategy.
    """
    path = directory / "preprocessor_config.json"
    raw = read_json(path)
    strategy = raw.get("image_resize_strategy")
    if strategy not in STRATEGIES:
        raise UserError(
            f"{path}: image_resize_strategy '{strategy}' is unknown; it must be one of {', '.join(STRATEGIES)}"
        )
    try:
        towers = tuple(
            _TowerInput(int(size[-1]), _RESAMPLING[name], np.float32(mean), np.float32(std))
            for size, name, mean, std in zip(
                raw["input_sizes"], raw["interpolations"], raw["means"], raw["stds"], strict=True
            )
        )
        fill = raw.get("tvf_letterbox_fill") or [int(value * 255) for value in raw["means"][-1]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error!r}; each tower needs input_sizes, interpolations, means and stds") from None
    if not towers or any(tower.mean.shape != (3,) or tower.std.shape != (3,) for tower in towers):
        raise UserError(f"{path}: means and stds need three values per tower")
    return ImageProcessor(strategy, towers, tuple(fill), center_crop)


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """The middle 90 % of the image by area, bilinear, at the towers' size.

    Follows OpenVLA's evaluation: the frame is brought to `size` first (Lanczos), then TensorFlow's crop_and_resize and
    convert_image_dtype, whose arithmetic is repeated here.

    Args:
        image: RGB uint8 [height, width, 3].
        size: height and width of the result.

    Returns:
        RGB uint8 [size, size, 3].
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
    """Pads to a square; like the original, to one pixel less where the difference is odd."""
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
