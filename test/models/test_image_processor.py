# SPDX-License-Identifier: Apache-2.0
"""The three resize strategies, and the centre crop of fine-tuned checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.checkpoints import edit_json, write_checkpoint

from specvla_ros.models.families.openvla.image_processor import (
    STRATEGIES,
    ImageProcessor,
    _letterbox,
    _resize_shorter_side,
    _TowerInput,
    center_crop,
    dinosiglip_processor,
    read_image_processor,
)


def processor(directory: Path, strategy: str, *, crop: bool = False) -> ImageProcessor:
    write_checkpoint(directory)
    edit_json(directory / "preprocessor_config.json", lambda config: config.update(image_resize_strategy=strategy))
    return read_image_processor(directory, center_crop=crop)


def pixels(result: np.ndarray) -> np.ndarray:
    """The second tower's input (mean and std 0.5) back in 0 to 255, [size, size, 3]."""
    return (result[3:].transpose(1, 2, 0) * 0.5 + 0.5) * 255


def picture(height: int, width: int) -> np.ndarray:
    """A different smooth ramp in each channel."""
    y, x = np.mgrid[0:height, 0:width]
    ramp = np.stack((255 * y / height, 255 * x / width, 127 * (y / height + x / width)), axis=-1)
    return ramp.astype(np.uint8)


def test_naive_squeezes_the_whole_image(tmp_path: Path) -> None:
    image = picture(120, 300)
    result = pixels(processor(tmp_path, "resize-naive")(image).numpy())
    expected = Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC)
    np.testing.assert_allclose(result, np.asarray(expected), atol=1e-3)


def test_the_first_tower_has_its_own_mean(tmp_path: Path) -> None:
    result = processor(tmp_path, "resize-naive")(np.full((10, 10, 3), 255, np.uint8)).numpy()
    np.testing.assert_allclose(
        result[:3, 0, 0], (1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225], rtol=1e-5
    )
    np.testing.assert_allclose(result[3:, 0, 0], 1.0)


@pytest.mark.parametrize(("height", "width"), [(100, 200), (201, 100), (224, 224)])
def test_letterbox_keeps_the_whole_image_between_bars(tmp_path: Path, height: int, width: int) -> None:
    image = np.full((height, width, 3), 200, np.uint8)
    result = pixels(processor(tmp_path, "letterbox")(image).numpy())
    bar = (1 - min(height, width) / max(height, width)) / 2
    inside = slice(int(bar * 224) + 6, int((1 - bar) * 224) - 6)
    shown = result[:, inside] if height > width else result[inside]
    np.testing.assert_allclose(shown, 200, atol=1e-3)
    if bar:
        np.testing.assert_allclose(result[0, 0], 127, atol=1e-3)
        np.testing.assert_allclose(result[-1, -1], 127, atol=1e-3)


def test_crop_keeps_the_middle_of_the_longer_side(tmp_path: Path) -> None:
    image = np.zeros((100, 300, 3), np.uint8)
    image[:, :95] = (255, 0, 0)
    image[:, 205:] = (0, 0, 255)
    image[:, 95:205] = (0, 255, 0)
    result = pixels(processor(tmp_path, "resize-crop")(image).numpy())
    assert result.shape == (224, 224, 3)
    np.testing.assert_allclose(result[5:-5, 5:-5], np.broadcast_to([0, 255, 0], (214, 214, 3)), atol=1e-3)


def test_the_centre_crop_follows_tensorflows_sampling() -> None:
    """Sample i of n lies at (1 - s) / 2 (n - 1) + i s of the image, s the root of 0.9; values are cut at 255.5 v."""
    image = picture(224, 224)
    result = center_crop(image, 224)
    s = 0.9**0.5
    for row, column in ((0, 0), (7, 200), (111, 112), (223, 223)):
        y, x = ((1 - s) / 2 * 223 + i * s for i in (row, column))
        y0, x0 = int(y), int(x)
        fy, fx = y - y0, x - x0
        corners = image[y0 : y0 + 2, x0 : x0 + 2] / 255.0
        rows = corners[0] * (1 - fy) + corners[1] * fy
        value = rows[0] * (1 - fx) + rows[1] * fx
        assert np.abs(result[row, column] - np.floor(value * 255.5)).max() <= 1


def test_the_centre_crop_takes_nine_tenths_of_the_area(tmp_path: Path) -> None:
    image = np.full((224, 224, 3), 255, np.uint8)
    image[6:-6, 6:-6] = 10  # (1 - 0.9487) / 2 * 224 = 5.7 pixels fall away on each side
    result = pixels(processor(tmp_path, "resize-naive", crop=True)(image).numpy())
    np.testing.assert_allclose(result[1:-1, 1:-1], 10, atol=1)


def test_the_centre_crop_of_a_large_image_is_smooth(tmp_path: Path) -> None:
    large, small = picture(480, 640), picture(224, 224)
    crop = processor(tmp_path, "resize-naive", crop=True)
    assert np.abs(pixels(crop(large).numpy()) - pixels(crop(small).numpy())).max() < 3


def tower_by_tower(processor: ImageProcessor, image: np.ndarray) -> np.ndarray:
    """Straightforwardly: each tower's picture by itself, in the order in which the originals compute."""
    if processor.center_crop:
        image = center_crop(image, processor.towers[0].size)
    picture = Image.fromarray(image)
    if processor.strategy == "letterbox":
        picture = _letterbox(picture, processor.letterbox_fill)
    made = []
    for tower in processor.towers:
        if processor.strategy == "resize-naive":
            fitted = picture.resize((tower.size, tower.size), tower.resampling)
        else:
            fitted = _resize_shorter_side(picture, tower)
        pixels = np.asarray(fitted, dtype=np.float32) / np.float32(255)
        made.append(((pixels - tower.mean) / tower.std).transpose(2, 0, 1))
    return np.concatenate(made)


FILTERS = [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.LANCZOS, Image.Resampling.NEAREST]
COLOURS = st.lists(st.floats(0.0625, 2, width=32), min_size=3, max_size=3).map(lambda x: np.array(x, np.float32))


@st.composite
def processors(draw: st.DrawFn) -> ImageProcessor:
    size = draw(st.integers(1, 40))
    towers = [
        _TowerInput(size, draw(st.sampled_from(FILTERS)), draw(COLOURS), draw(COLOURS))
        for _ in range(draw(st.integers(1, 3)))
    ]
    fill = draw(st.tuples(*[st.integers(0, 255)] * 3))
    return ImageProcessor(draw(st.sampled_from(STRATEGIES)), tuple(towers), fill, draw(st.booleans()))


@given(processors(), st.integers(1, 90), st.integers(1, 90), st.integers(0, 2**32 - 1))
def test_shared_pictures_give_the_pixels_of_tower_by_tower_to_the_bit(
    processor: ImageProcessor, height: int, width: int, seed: int
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    result = processor(image).numpy()
    assert result.dtype == np.float32 and result.flags.c_contiguous
    np.testing.assert_array_equal(result, tower_by_tower(processor, image))


@pytest.mark.parametrize(
    ("filters", "resizes"), [(FILTERS[:1] * 2, 1), (FILTERS[:2], 2), ([FILTERS[0], FILTERS[1], FILTERS[0]], 2)]
)
def test_a_picture_is_resized_once_for_each_size_and_filter(
    filters: list[Image.Resampling], resizes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    colours = dinosiglip_processor([224, 224]).towers[0]
    towers = tuple(_TowerInput(224, each, colours.mean, colours.std) for each in filters)
    calls: list[Any] = []
    resize = Image.Image.resize

    def counted(image: Image.Image, *how: Any) -> Image.Image:
        calls.append(how)
        return resize(image, *how)

    monkeypatch.setattr(Image.Image, "resize", counted)
    ImageProcessor("resize-naive", towers, (0, 0, 0))(picture(480, 640))
    assert len(calls) == resizes


def test_a_file_that_transformers_5_saves_is_read(tmp_path: Path) -> None:
    """Its processors' save_pretrained puts one file into another."""
    old = processor(tmp_path, "letterbox")(picture(50, 90))
    given = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": given}))
    assert torch.equal(read_image_processor(tmp_path, center_crop=False)(picture(50, 90)), old)
