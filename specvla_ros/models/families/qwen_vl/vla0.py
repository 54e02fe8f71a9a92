# SPDX-License-Identifier: Apache-2.0
"""VLA-0 (arXiv 2510.13054): an unmodified Qwen2.5-VL that writes its actions as numbers.

Source: NVlabs/vla0: rv_train/models/qwen/model.py, rv_train/configs.py, configs/vla0.yaml and RoboVerse's
image_unifier.py. Its checkpoint is the folder `model_last`, next to `dataset_stats.pkl` and `config.yaml`.
"""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.digits import DigitsCodec
from specvla_ros.models.codecs.statistics import MAX_VALUE, ActionStatistics
from specvla_ros.models.families.qwen_vl.policy import IMAGE, ChatPolicy, Messages, PolicyContext, read_yaml, resized
from specvla_ros.models.generation import read_end_ids
from specvla_ros.settings.json_file import Fields, is_number, read_fields, shown

_STATISTICS = ("dataset_stats.json", "dataset_stats.pkl")
_ACTIONS = "out_ori_act"
_MAX_NEW_TOKENS = 1024  # QwenActor.num_tokens
_CROP = "IMAGE.crop_img"
# Limits of an image's pixels in qwen_vl_utils.
_LEAST_PIXELS, _MOST_PIXELS = 4 * 28 * 28, 16384 * 28 * 28


@dataclass(frozen=True)
class _Run:
    """The run's config.yaml, mostly MODEL.QWEN's fields. Defaults are configs/vla0.yaml's, of the released policy."""

    horizon: int = 8
    num_cam: int = 2
    num_bins_actions: int = 1000
    add_vision_id: bool = True
    tiled_rgb_imgs: bool = True
    height: int = 224  # of `rgb_img_size`
    width: int = 224
    crop: float = 0.875  # kept share of an image's sides


def vla0(context: PolicyContext) -> ChatPolicy | None:
    """Makes the policy if its action statistics exist; UserError for damaged files or unsupported values."""
    path = _beside(context.directory, _STATISTICS)
    if path is None:
        return None
    statistics = _statistics(path)
    run = _run(context.directory)
    written = [context.tokenizer.encode(text).ids for text in "0123456789 "]
    if any(len(each) != 1 for each in written):
        raise UserError(f"{context.directory}: tokenizer.json lacks a separate token for each digit and the space")
    ids = [only for (only,) in written]
    end_ids = read_end_ids(context.directory)
    codec = DigitsCodec(
        digit_ids=tuple(ids[:10]),
        space_id=ids[10],
        end_ids=end_ids,
        statistics=statistics,
        horizon=run.horizon,
        bins=run.num_bins_actions,
        limit=context.generation.max_new_tokens or _MAX_NEW_TOKENS,
    )
    pictures, wide = (1, run.width * run.num_cam) if run.tiled_rgb_imgs else (run.num_cam, run.width)
    # An image is resized by qwen_vl_utils, and again by its processor.
    first = context.processor.fitted(run.height, wide, _LEAST_PIXELS, _MOST_PIXELS)
    sides = context.processor.fitted(*first, run.height * wide, run.height * wide)
    system = _system_message(run, len(statistics.low))

    def messages(instruction: str) -> Messages:
        content = [*[IMAGE] * pictures, {"type": "text", "text": instruction}]
        return [{"role": "system", "content": [{"type": "text", "text": system}]}, {"role": "user", "content": content}]

    def show(images: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        cropped = [_cropped(image, run) for image in images.values()]
        tiled = [np.concatenate(cropped, axis=1)] if run.tiled_rgb_imgs else cropped
        return [resized(resized(image, *first), *sides) for image in tiled]

    return ChatPolicy(
        name="vla0",
        cameras=tuple(f"3p{i + 1}" for i in range(run.num_cam)),
        picture_sizes=(sides,) * pictures,
        pictures=show,
        messages=messages,
        numbers_pictures=run.add_vision_id,
        codec=codec,
        generation=replace(context.generation, allowed_ids=(*ids, _end_of_turn(context, end_ids))),
    )


def _system_message(run: _Run, dims: int) -> str:
    return (
        f"Analyze the input image and predict robot actions for the next {run.horizon} timesteps. "
        f"Each action has {dims} dimensions. Output a single sequence of {run.horizon * dims} integers "
        f"(0-{run.num_bins_actions} each), representing the {run.horizon} timesteps sequentially. "
        "Provide only space separated numbers. Nothing else."
    )


def _end_of_turn(context: PolicyContext, end_ids: frozenset[int]) -> int:
    """The tokenizer's own end token, the only one that VLA-0 allows."""
    config = read_fields(context.directory / "tokenizer_config.json", missing="copy it from the original", hint="")
    given = config.raw.get("eos_token")
    name = given.get("content") if isinstance(given, dict) else given
    found = context.tokenizer.token_to_id(name) if isinstance(name, str) else None
    if found is None or found not in end_ids:
        raise UserError(f"{config.path}: eos_token is {shown(given)}, which is not a token that ends an answer")
    return found


def _beside(directory: Path, names: tuple[str, ...]) -> Path | None:
    """Finds a file in the checkpoint, or in the run's folder that contains it."""
    paths = (folder / name for folder in (directory, directory.resolve().parent) for name in names)
    return next((path for path in paths if path.is_file()), None)


class _Numbers(pickle.Unpickler):
    """Reads only plain values and NumPy arrays, no code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def _statistics(path: Path) -> ActionStatistics:
    if path.suffix == ".pkl":
        try:
            with path.open("rb") as file:
                value = _Numbers(file).load()
        except Exception as error:  # a damaged pickle raises nearly anything
            raise UserError(f"{path} cannot be read as action statistics ({error}); copy it again") from None
        raw = Fields(value if isinstance(value, dict) else {}, path)
    else:
        raw = read_fields(path, missing="copy it again")
    actions = raw.inner(_ACTIONS)
    bounds: list[np.ndarray] = []
    for name in ("min", "max"):
        values = np.asarray(actions.raw.get(name, ()), dtype=object).reshape(-1).tolist()
        if not values or not all(is_number(each) and abs(each) <= MAX_VALUE for each in values):
            raise actions.wrong(name, f"a list of numbers, at most {MAX_VALUE:g}")
        bounds.append(np.float64(values))
    low, high = bounds
    if len(low) != len(high) or not (low <= high).all():
        raise UserError(f"{path}: {_ACTIONS}.min and max must be of the same length, min <= max")
    return ActionStatistics("", low, high, np.ones(len(low), dtype=bool))


def _run(directory: Path) -> _Run:
    path = _beside(directory, ("config.yaml",))
    if path is None:
        return _Run()
    fields = read_yaml(path, "VLA-0")
    qwen = fields.inner("MODEL").inner("QWEN")
    options = fields.inner("DATALOADER", {}).inner("ROBOVERSE", {}).text("cfg_opts", "")
    if qwen.whole("history", 1) != 1 or qwen.text("action_type", "original") != "original":
        raise UserError(f"{path}: only policies with history 1 and action_type original are supported")
    height, width = _sides(qwen)
    names, values = options.split(":")[::2], options.split(":")[1::2]
    crop = dict(zip(names, values, strict=False)).get(_CROP, "1.0")
    try:
        share = float(crop)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UserError(f"{path}: {_CROP} is {shown(crop)}, but it must be a number above 0, at most 1")
    return _Run(
        horizon=qwen.whole("horizon", 8, minimum=1, maximum=256),
        num_cam=qwen.whole("num_cam", 1, minimum=1, maximum=16),
        num_bins_actions=qwen.whole("num_bins_actions", 1000, minimum=1, maximum=10**6),
        add_vision_id=qwen.flag("add_vision_id", False),
        tiled_rgb_imgs=qwen.flag("tiled_rgb_imgs", False),
        height=height,
        width=width,
        crop=share,
    )


def _sides(qwen: Fields) -> tuple[int, int]:
    """Reads `rgb_img_size`: a list, or a string such as `224,224`."""
    given = qwen.raw.get("rgb_img_size")
    words = given.strip("()[] ").split(",") if isinstance(given, str) else given
    try:
        height, width = (int(each) for each in words or ())
    except (TypeError, ValueError):
        raise qwen.wrong("rgb_img_size", "height and width, such as 224,224") from None
    if not (28 <= height <= 4096 and 28 <= width <= 4096):
        raise qwen.wrong("rgb_img_size", "height and width from 28 to 4096 pixels")
    return height, width


def _cropped(image: np.ndarray, run: _Run) -> np.ndarray:
    """Crops and resizes an image, bilinear without antialiasing, aspect ratio not kept: uint8 [height, width, 3].

    Computed on integer colours, as in VLA-0's server for robots. Its LIBERO evaluation computes with fractions and
    truncates them, which differs by 1 of 255 in some pixels.
    """
    height, width = image.shape[:2]
    kept_height, kept_width = int(height * run.crop), int(width * run.crop)
    top, left = round((height - kept_height) / 2), round((width - kept_width) / 2)
    kept = image[top : top + kept_height, left : left + kept_width]
    if kept.shape[:2] == (run.height, run.width):
        return kept
    planes = torch.from_numpy(np.ascontiguousarray(kept.transpose(2, 0, 1)))[None]
    scaled = F.interpolate(planes, size=(run.height, run.width), mode="bilinear", align_corners=False)
    return scaled[0].numpy().transpose(1, 2, 0)
