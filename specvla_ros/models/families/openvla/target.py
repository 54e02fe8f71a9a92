# SPDX-License-Identifier: Apache-2.0
"""Loads OpenVLA and OpenVLA-OFT checkpoints."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from specvla_ros.errors import UserError, together
from specvla_ros.models.codecs.codec import Codec, CodecContext, make_codec
from specvla_ros.models.families.openvla.config import OpenVLAConfig, is_oft, read_config
from specvla_ros.models.families.openvla.image_processor import ImageProcessor, read_image_processor
from specvla_ros.models.families.openvla.model import OpenVLA, load_model
from specvla_ros.models.families.openvla.oft import OFTTarget, read_oft
from specvla_ros.models.families.openvla.prompt import (
    PromptTokenizer,
    StateTokens,
    read_prompt_tokenizer,
    read_state_tokens,
)
from specvla_ros.models.generation import NO_RULES, GreedyRules, read_end_ids, read_generation
from specvla_ros.models.observation import Observation
from specvla_ros.models.quantization import check_quantization
from specvla_ros.models.settings import ALL_CAMERAS, PromptStyle, refuse_options
from specvla_ros.models.target import TARGETS, Target
from specvla_ros.models.vision_language import VisionLanguageTarget
from specvla_ros.models.weights import Progress


@TARGETS.register("prismatic", order=1)
@TARGETS.register("openvla", order=0)
def load_openvla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    center_crop: bool,
    quantization: str,
    quantize_vision: bool,
    action_head: bool,
    prompt: str,
    cameras: tuple[str, ...],
    progress: Progress,
    **options: Any,
) -> "OpenVLATarget | OFTTarget":
    """Loads an OpenVLA or OpenVLA-OFT checkpoint; see `load_target` for the arguments.

    `cameras` of an OFT checkpoint: `image`, `image` and `wrist`, or these and `wrist_2`; ALL_CAMERAS: the first two.
    """
    refuse_options(directory, options)
    config = read_config(directory)
    style = PromptStyle.OPENVLA if prompt == "auto" else PromptStyle(prompt)
    with_head = is_oft(directory)
    generation, oft, prompts, image_processor, codec, _ = together(
        partial(read_generation, directory),
        partial(read_oft, directory, config, unnorm_key, cameras),
        partial(_prompts, directory, config, prompt),
        partial(_image_processor, directory, config, center_crop=center_crop and not with_head),
        lambda: None if with_head else _codec(directory, config, unnorm_key, style),
        partial(check_quantization, quantization, device, dtype, vision=quantize_vision),
    )
    load = partial(
        load_model,
        directory,
        config,
        device,
        dtype,
        quantization=quantization,
        quantize_vision=quantize_vision,
        progress=progress,
    )
    if oft is not None:
        return oft.target(directory, load(), image_processor, prompts, cropped=center_crop)
    if cameras not in (ALL_CAMERAS, config.cameras):
        raise UserError(
            f"{directory}: this policy needs exactly the cameras {', '.join(config.cameras)}; omit model.cameras"
        )
    state = read_state_tokens(config, directory, unnorm_key)
    head_ids = _head_ids(codec, directory) if action_head else None
    model = load()
    model.decoder.head_ids = head_ids
    weights = f"{quantization}, vision too" if quantize_vision else quantization
    return OpenVLATarget(directory, model, image_processor, prompts, codec, weights, generation, state)


def _prompts(directory: Path, config: OpenVLAConfig, chosen: str) -> PromptTokenizer:
    if chosen == "auto" and config.vicuna:
        raise UserError(
            f"{directory}: config.json names Vicuna, which both OpenVLA v0.1 and ECoT use. Their prompts are not "
            "interchangeable: set model.prompt to vicuna or to ecot, as the checkpoint was trained"
        )
    return read_prompt_tokenizer(
        directory,
        style=PromptStyle.OPENVLA if chosen == "auto" else PromptStyle(chosen),
        token_vocab_size=config.token_vocab_size,
        vocab_size=config.llama.vocab_size,
        taught=config.instructions,
    )


def _image_processor(directory: Path, config: OpenVLAConfig, *, center_crop: bool) -> ImageProcessor:
    image_processor = read_image_processor(directory, center_crop=center_crop)
    sizes = [tower.image_size for tower in config.towers]
    if [tower.size for tower in image_processor.towers] != sizes:
        raise UserError(f"{directory}: preprocessor_config.json does not give the towers' image sizes {sizes}")
    return image_processor


def _codec(directory: Path, config: OpenVLAConfig, unnorm_key: str, style: PromptStyle) -> Codec:
    end_ids = read_end_ids(directory) if style is PromptStyle.ECOT else frozenset[int]()
    vocab_size, bins = config.token_vocab_size, config.action_bins
    context = CodecContext(directory, config.norm_stats, unnorm_key, vocab_size, bins, end_ids)
    return make_codec(config.action_codec, context)


def _head_ids(codec: Codec, directory: Path) -> range:
    ids = range(codec.action_ids.first, codec.action_ids.stop)
    if not ids:
        raise UserError(f"{directory} does not answer with bins only, so it needs all logits: unset model.action_head")
    return ids


@dataclass(frozen=True)
class OpenVLATarget(VisionLanguageTarget):
    """A checkpoint whose prompt is BOS | camera images | state tokens | rest of the text."""

    directory: Path
    model: OpenVLA
    image_processor: ImageProcessor
    prompt: PromptTokenizer
    codec: Codec
    quantization: str = "none"
    generation: GreedyRules = NO_RULES
    state: StateTokens | None = None

    FAMILY = "openvla"

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.prompt.tokenizer

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.model.config.cameras

    @property
    def state_dims(self) -> int:
        return 0 if self.state is None else self.state.dims

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.model.config.state_names

    @property
    def action_head(self) -> bool:
        return self.decoder.head_ids is not None

    @property
    def image_tokens(self) -> int:
        return len(self.cameras) * self.model.config.image_tokens

    def ids(self, observation: Observation) -> tuple[int, ...]:
        state = observation.state_of(self.state_dims)
        ids = self.prompt.ids_of(observation)
        return ids if self.state is None else (ids[0], *self.state.ids(state).tolist(), *ids[1:])

    def blank_observation(self) -> Observation:
        return replace(super().blank_observation(), instruction="", prompt_ids=self.prompt.complete((1,)))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "quantization": self.quantization,
            "action_head": str(self.action_head).lower(),
            "image_resize_strategy": self.image_processor.strategy,
            "center_crop": str(self.image_processor.center_crop).lower(),
        }


def require_openvla(target: Target) -> OpenVLATarget:
    """Returns the target, or raises UserError if it is not of OpenVLA's family; for code that supports no other."""
    if not isinstance(target, OpenVLATarget):
        raise UserError(f"{target.directory} is not an OpenVLA checkpoint; training supports no other family")
    return target
