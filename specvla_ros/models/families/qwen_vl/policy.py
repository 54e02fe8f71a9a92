# SPDX-License-Identifier: Apache-2.0
"""The parts that make a Qwen-VL checkpoint a robot policy: chat, images and codec.

A policy is one file with a function that inspects a checkpoint's directory and returns a `ChatPolicy`, or None if the
files are not those of its policy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.config import MAX_WIDTH, read_checkpoint_json
from specvla_ros.models.generation import GreedyRules
from specvla_ros.models.image_config import read_image_config
from specvla_ros.settings.json_file import Fields

_COLOURS = "three numbers"
# Other settings that transformers' class reads, with the supported values.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "do_resize": (True,),
    "resample": (3,),
    "do_rescale": (True,),
    "rescale_factor": (1 / 255,),
    "do_normalize": (True,),
    "do_convert_rgb": (True, False, None),  # images are always RGB
    "do_center_crop": (None, False),
    "do_pad": (None, False),
}
_MAX_PIXELS = 1 << 26  # of one image; more than any model uses


@dataclass(frozen=True)
class PatchProcessor:
    """Image preprocessing as in preprocessor_config.json, see `read_image_config`."""

    patch_size: int  # pixels of a patch's side
    merge_size: int  # patches per prompt row along a side
    temporal_patch_size: int  # images per patch: a single one is repeated
    min_pixels: int  # an image with fewer is resized
    max_pixels: int  # an image with more is resized
    mean: np.ndarray  # float32 [3], for colours from 0 to 1
    std: np.ndarray  # float32 [3]

    def fitted(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """The size of a resized image: multiples of `factor`, with `least` to `most` pixels."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        high, wide = smart_resize(height, width, factor=self.factor, min_pixels=least, max_pixels=most)
        return high, wide

    @property
    def factor(self) -> int:
        """Number of pixels of which an image's sides are multiples."""
        return self.patch_size * self.merge_size

    def patches(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """Converts uint8 RGB [height, width, 3], whose sides are multiples of `factor`, to float32 [patches, values].

        Patches of one prompt row are consecutive, as in transformers' Qwen2VLImageProcessor.
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
    """Reads a checkpoint's image settings, with Qwen2.5-VL's defaults.

    Raises UserError if they are missing, invalid or not supported.
    """
    raw = read_image_config(directory)
    for name, plain in PLAIN.items():
        if raw.raw.get(name, plain[0]) not in plain:
            raise raw.wrong(name, " or ".join(map(str, plain)) + ": other values are not supported")
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
    """Resizes uint8 RGB to [height, width, 3], bicubic, as in qwen_vl_utils."""
    if picture.shape[:2] == (height, width):
        return picture
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


Messages = list[dict[str, Any]]
IMAGE = {"type": "image"}  # in a chat message


@dataclass(frozen=True)
class PolicyContext:
    """The inputs for making a policy."""

    directory: Path  # the checkpoint
    tokenizer: Tokenizer
    processor: PatchProcessor
    unnorm_key: str  # the dataset whose action statistics are used; empty: the only one
    generation: GreedyRules  # of its generation_config.json


@dataclass(frozen=True)
class ChatPolicy:
    """A policy with a chat prompt."""

    name: str  # of the policy's family
    cameras: tuple[str, ...]  # in the order of training
    picture_sizes: tuple[tuple[int, int], ...]  # (height, width) of each image in the prompt
    pictures: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]  # camera images by name to prompt images, uint8
    messages: Callable[[str], Messages]  # an instruction to the chat before the answer
    numbers_pictures: bool  # the chat template numbers the images in its text (`add_vision_id`)
    codec: Codec  # of its answers
    generation: GreedyRules  # logit processing before the argmax


def read_chat(directory: Path, *, numbers_pictures: bool) -> Callable[[Messages], str]:
    """Reads the checkpoint's chat template, which turns messages into a prompt's text with one token per image."""
    from transformers import PreTrainedTokenizerFast

    template = _template(directory)
    renderer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))

    def chat(messages: Messages) -> str:
        text = renderer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            add_vision_id=numbers_pictures,
        )
        return cast(str, text)

    return chat


def _template(directory: Path) -> str:
    """Reads the chat template of the first file that has one, in transformers' order."""
    for name in ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"):
        path = directory / name
        if not path.exists():
            continue
        if path.suffix == ".jinja":
            return path.read_text(encoding="utf-8")
        template: str = read_checkpoint_json(path).text("chat_template", "")
        if template:
            return template
    raise UserError(f"{directory} has no chat template: copy chat_template.json from the source of the weights")


def read_yaml(path: Path, what: str) -> Fields:
    """Reads the object in a YAML file; UserError if it cannot be read as a `what` configuration."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a {what} configuration ({error}); copy it again") from None
    return Fields(given if isinstance(given, dict) else {}, path, hint="; compare it with a released run's")
