# SPDX-License-Identifier: Apache-2.0
"""Loads policies built on Qwen-VL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.families.qwen_vl.model import QwenVL, QwenVLConfig, load_model, read_config
from specvla_ros.models.families.qwen_vl.nora import nora
from specvla_ros.models.families.qwen_vl.policy import (
    ChatPolicy,
    Messages,
    PatchProcessor,
    PolicyContext,
    read_chat,
    read_patch_processor,
)
from specvla_ros.models.families.qwen_vl.vla0 import vla0
from specvla_ros.models.generation import GreedyRules, read_generation
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import refuse_options
from specvla_ros.models.target import TARGETS, Pixels, PromptLayout
from specvla_ros.models.tokenizer import (
    check_instruction,
    check_tokenizer,
    refuse_special_tokens,
    require_tokenizer,
)
from specvla_ros.models.vision_language import VisionLanguageTarget
from specvla_ros.models.weights import Progress

_POLICIES = (nora, vla0)


@TARGETS.register("qwen2_5_vl")
@TARGETS.register("qwen3_vl")
def load_qwen_vl(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    progress: Progress,
    **options: Any,
) -> "QwenVLTarget":
    """Loads a policy built on Qwen2.5-VL or Qwen3-VL; see `load_target` for the arguments.

    The directory also holds a chat template and the policy's own files.
    """
    refuse_options(directory, options)
    config, context = read_base(directory, unnorm_key)
    policy = _policy(context)
    load = partial(load_model, directory, config, device=device, dtype=dtype, progress=progress)
    return qwen_vl_target(directory, config, context, policy, load)


def read_base(directory: Path, unnorm_key: str) -> tuple[QwenVLConfig, PolicyContext]:
    """Reads a policy's config, tokenizer and processor, not its weights; UserError if damaged or mismatched."""
    config = read_config(directory)
    tokenizer = require_tokenizer(directory)
    check_tokenizer(tokenizer, directory / "tokenizer.json", config.decoder.vocab_size)
    processor = read_patch_processor(directory)
    return config, PolicyContext(directory, tokenizer, processor, unnorm_key, read_generation(directory))


def _policy(context: PolicyContext) -> ChatPolicy:
    found = (make(context) for make in _POLICIES)
    policy = next((each for each in found if each is not None), None)
    if policy is None:
        raise UserError(
            f"{context.directory} is a Qwen-VL checkpoint, but not a known policy: NORA has tokens from "
            "<robot_action_0> on, VLA-0 has dataset_stats.pkl or dataset_stats.json inside or next to the directory"
        )
    return policy


def qwen_vl_target(
    directory: Path,
    config: QwenVLConfig,
    context: PolicyContext,
    policy: ChatPolicy,
    load: Callable[[tuple[tuple[int, int], ...]], QwenVL],
) -> "QwenVLTarget":
    """Makes a policy's target; UserError if there is no chat template, or the weights do not fit.

    Args:
        directory: of the target; for a training run this is not the base model's.
        config: of the base model.
        load: loads the model for each image's number of patches, (height, width).
    """
    chat = read_chat(context.directory, numbers_pictures=policy.numbers_pictures)
    side = context.processor.patch_size
    model = load(tuple((height // side, width // side) for height, width in policy.picture_sizes))
    return QwenVLTarget(directory, model, context.tokenizer, chat, context.processor, policy, config.image_id)


@dataclass(frozen=True)
class QwenVLTarget(VisionLanguageTarget):
    """A checkpoint whose prompt is a chat, with each image's token replaced by its rows."""

    directory: Path  # of the checkpoint; for StarVLA, of the run
    model: QwenVL
    tokenizer: Tokenizer
    chat: Callable[[Messages], str]  # messages to a prompt's text, with one token per image
    processor: PatchProcessor  # images to patches
    policy: ChatPolicy
    image_id: int  # the token that stands for an image

    FAMILY = "qwen-vl"

    @property
    def codec(self) -> Codec:
        return self.policy.codec

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.policy.cameras

    @property
    def generation(self) -> GreedyRules:
        return self.policy.generation

    @property
    def image_tokens(self) -> int:
        return sum(height * width for height, width in self._row_grids)

    @property
    def _row_grids(self) -> tuple[tuple[int, int], ...]:
        """Prompt rows of each image, (height, width)."""
        side = self.processor.factor
        return tuple((height // side, width // side) for height, width in self.policy.picture_sizes)

    def written(self, observation: Observation) -> tuple[int, ...]:
        check_instruction(observation.instruction)
        refuse_special_tokens(observation.instruction, self.tokenizer)
        return tuple(self.tokenizer.encode(self.chat(self.policy.messages(observation.instruction))).ids)

    def layout(self, ids: tuple[int, ...]) -> PromptLayout:
        """Lays out the prompt; UserError for a wrong number of images."""
        grids = self._row_grids
        places = self._image_places(ids)
        if len(places) != len(grids):
            raise UserError(f"the prompt has {len(places)} image tokens, but there are {len(grids)} images")
        positions = mrope_positions(ids, self.image_id, grids)
        visual, after = [], 0
        for place, (height, width) in zip(places, grids, strict=True):
            start = place + after
            visual.append(range(start, start + height * width))
            after += height * width - 1
        return PromptLayout(ids, positions.shape[1], tuple(visual), positions)

    def _image_places(self, ids: Sequence[int]) -> list[int]:
        return [place for place, token in enumerate(ids) if token == self.image_id]

    def pixels(self, observation: Observation) -> Pixels:
        """The patches of all images together."""
        return (self.processor.patches(self.policy.pictures(observation.of_cameras(self.cameras))),)

    def assemble(self, observation: Observation, prompt_ids: Sequence[int], images: Tensor) -> Tensor:
        text, pictures = self.embedded(prompt_ids), images.split([h * w for h, w in self._row_grids])
        parts, start = [], 0
        for place, picture in zip(self._image_places(prompt_ids), pictures, strict=True):
            parts += [text[start:place], picture.to(text.dtype)]
            start = place + 1
        return torch.cat([*parts, text[start:]])

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"policy": self.policy.name}


def mrope_positions(ids: Sequence[int], image_id: int, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """M-RoPE positions of a prompt: time, height and width, int64 [3, rows].

    Text counts up on all three axes. An image keeps one time, its rows and columns count from there, and the text after
    it continues after the larger of them (Qwen2.5-VL, arXiv 2502.13923, section 2.1.2).

    Args:
        ids: of the prompt, with one token, `image_id`, per image.
        grids: rows and columns of each image.
    """
    parts, at = [], 0
    sizes = iter(grids)
    for token in ids:
        if token != image_id:
            parts.append(np.full((3, 1), at))
            at += 1
            continue
        high, wide = next(sizes)
        parts.append(at + np.stack([np.zeros(high * wide, np.int64), *np.indices((high, wide)).reshape(2, -1)]))
        at += max(high, wide)
    return np.concatenate(parts, axis=1)
