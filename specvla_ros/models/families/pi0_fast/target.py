# SPDX-License-Identifier: Apache-2.0
"""Loads pi0-FAST checkpoints as saved by LeRobot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.codecs.fast import FastCodec
from specvla_ros.models.codecs.fast_tokenizer import read_fast_tokenizer
from specvla_ros.models.decoder import PackedDecoder, allocate, decoder_tensors, empty_model
from specvla_ros.models.families.pi0_fast.config import MODEL_TYPE, Normalisation, Pi0FastConfig, read_config
from specvla_ros.models.observation import Observation
from specvla_ros.models.settings import ALL_CAMERAS, refuse_options
from specvla_ros.models.target import TARGETS, Pixels, PromptLayout
from specvla_ros.models.tokenizer import check_instruction, check_tokenizer, refuse_special_tokens, require_tokenizer
from specvla_ros.models.vision_language import VisionLanguageTarget
from specvla_ros.models.weights import Progress, check_weights, load_weights, read_tables

_EDGES = np.linspace(-1, 1, 257)[:-1]  # of the state's bins, as in openpi's tokenizer
_BEGINNING, _END = "Action: ", "|"
_PREFIX = "model.paligemma_with_expert.paligemma."
_HEAD = f"{_PREFIX}lm_head.weight"
_EMBEDDINGS = f"{_PREFIX}model.language_model.embed_tokens.weight"


class PaliGemma(nn.Module):
    """transformers' SigLIP tower, a projector and our decoder, for images of a given number of cameras."""

    def __init__(self, config: Pi0FastConfig, cameras: int) -> None:
        try:
            from transformers import SiglipVisionConfig, SiglipVisionModel
        except ModuleNotFoundError as error:
            raise missing_package(error, "requirements/robot-transformers.txt") from None

        super().__init__()
        try:
            self.tower: nn.Module = SiglipVisionModel(SiglipVisionConfig(**config.vision))
        except Exception as error:  # its checks raise several exceptions, none of its own
            raise UserError(
                f"transformers cannot build the vision tower that config.json describes ({error})"
            ) from None
        self.projector = nn.Linear(config.vision["hidden_size"], config.decoder.hidden_size)
        self.decoder = PackedDecoder(config.decoder)
        self._pictures = (cameras, 3, *config.image_size)
        self.image_tokens = cameras * (config.image_size[0] // config.vision["patch_size"]) ** 2

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of the pixels of one observation, [cameras, 3, height, width]."""
        return self._pictures

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Maps pixels of `pixel_shape` to embeddings [image_tokens, hidden], which are not scaled, unlike text."""
        pixels = pixel_values.to(self.decoder.device, self.decoder.dtype, non_blocking=True)
        embeddings: Tensor = self.projector(self.tower(pixels).last_hidden_state).flatten(0, 1)
        return embeddings


def load_model(
    directory: Path,
    config: Pi0FastConfig,
    cameras: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> PaliGemma:
    """Loads a checkpoint's model, ready to decode; UserError if the weights are incomplete or do not fit the config."""
    # LeRobot saves both tables if they differ, else only one, usually under the head's name.
    tables = read_tables(directory, _EMBEDDINGS, _HEAD, tied=True)
    config = replace(config, decoder=replace(config.decoder, tie_word_embeddings=tables.tied))
    model = empty_model(partial(PaliGemma, config, cameras), dtype, device)
    check_weights(directory, _tensors(model), stored=tables.stored)
    allocate(model, device)
    for name, buffer in model.tower.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.numel(), device=buffer.device).view_as(buffer))
    load_weights(directory, _tensors(model), progress, stored=tables.stored)
    return model.eval().requires_grad_(False)


def _tensors(model: PaliGemma) -> dict[str, Tensor]:
    """Every tensor by its name in the checkpoint."""
    tower = {name.removeprefix("vision_model."): each for name, each in model.tower.named_parameters()}
    tensors = {f"{_PREFIX}model.vision_tower.vision_model.{name}": each.detach() for name, each in tower.items()}
    for name, parameter in model.projector.named_parameters():
        tensors[f"{_PREFIX}model.multi_modal_projector.linear.{name}"] = parameter.detach()
    for name, tensor in decoder_tensors(model.decoder).items():
        inner = name.replace("model.", "model.language_model.", 1)
        tensors[_PREFIX + inner] = tensor
    return tensors


@TARGETS.register(MODEL_TYPE)
def load_pi0_fast(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cameras: tuple[str, ...],
    progress: Progress,
    **options: Any,
) -> "Pi0FastTarget":
    """Loads a pi0-FAST policy from a directory that LeRobot saved; see `load_target` for the arguments.

    Args:
        directory: contains config.json, model.safetensors, the processors with their statistics, tokenizer/ and
            action_tokenizer/.
        cameras: the robot's cameras among the policy's, or ALL_CAMERAS.
    """
    refuse_options(directory, options)
    config = read_config(directory)
    asked = config.cameras if cameras == ALL_CAMERAS else cameras
    unknown = [name for name in asked if name not in config.cameras]
    if unknown:
        raise UserError(f"{directory} has no camera '{unknown[0]}'; its cameras are {', '.join(config.cameras)}")
    shown = tuple(name for name in config.cameras if name in asked)
    tokenizer = _tokenizer(config)
    codec = _codec(directory, config, tokenizer)
    return Pi0FastTarget(
        directory=directory,
        model=load_model(directory, config, len(shown), device, dtype, progress),
        tokenizer=tokenizer,
        codec=codec,
        state=config.state,
        cameras=shown,
        image_size=config.image_size,
        prompt_tokens=config.prompt_tokens,
        bos_id=_only(tokenizer, "<bos>", config.text_tokenizer),
    )


def _tokenizer(config: Pi0FastConfig) -> Tokenizer:
    hint = "copy PaliGemma's tokenizer there (google/paligemma-3b-pt-224)"
    tokenizer = require_tokenizer(config.text_tokenizer, hint)
    # <image> comes after the model's own ids.
    check_tokenizer(tokenizer, config.text_tokenizer / "tokenizer.json", config.decoder.vocab_size + 1)
    return tokenizer


def _only(tokenizer: Tokenizer, text: str, path: Path) -> int:
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise UserError(f"{path} has no token '{text}', which PaliGemma's has; copy it again")
    return found


def _codec(directory: Path, config: Pi0FastConfig, tokenizer: Tokenizer) -> FastCodec:
    if not config.action_tokenizer.is_dir():
        raise UserError(
            f"{config.action_tokenizer} is missing: copy the FAST tokenizer of the policy's training there "
            "(physical-intelligence/fast, unless it was fitted)"
        )
    fast = read_fast_tokenizer(config.action_tokenizer)
    first = config.decoder.vocab_size - 1 - config.skipped_ids
    if first < fast.vocab_size:
        raise UserError(
            f"{config.action_tokenizer} has {fast.vocab_size} ids, but the policy has room for {first}: copy the FAST "
            "tokenizer of the policy's training there, and config.json from the same checkpoint"
        )
    return FastCodec(
        tokenizer=fast,
        statistics=config.actions,
        horizon=config.chunk,
        first_id=first,
        end_ids=frozenset({_only(tokenizer, _END, config.text_tokenizer)}),
        limit=config.answer_tokens,
        beginning=tuple(tokenizer.encode(_BEGINNING, add_special_tokens=False).ids),
    )


@dataclass(frozen=True)
class Pi0FastTarget(VisionLanguageTarget):
    """A checkpoint whose prompt is [images][text]<bos>, with full attention and without LeRobot's padding."""

    directory: Path
    model: PaliGemma
    tokenizer: Tokenizer
    codec: Codec
    state: Normalisation
    cameras: tuple[str, ...]
    image_size: tuple[int, int]  # height and width
    prompt_tokens: int  # the longest prompt
    bos_id: int  # the token after the text

    FAMILY = MODEL_TYPE

    @property
    def causal_prompt(self) -> bool:
        return False

    @property
    def image_tokens(self) -> int:
        return self.model.image_tokens

    @property
    def state_dims(self) -> int:
        return len(self.state.first)

    def layout(self, ids: tuple[int, ...]) -> PromptLayout:
        return PromptLayout(ids, self.image_tokens + len(ids), (range(self.image_tokens),), causal=False)

    def written(self, observation: Observation) -> tuple[int, ...]:
        instruction, state = observation.instruction, observation.state_of(self.state_dims)
        check_instruction(instruction)
        refuse_special_tokens(instruction, self.tokenizer)
        task = instruction.strip().replace("_", " ").replace("\n", " ")
        bins = (np.digitize(self.state(state), _EDGES) - 1).tolist()
        ids = self.tokenizer.encode(f"Task: {task}, State: {' '.join(map(str, bins))};\n").ids
        if len(ids) > self.prompt_tokens:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but the policy reads {self.prompt_tokens}: the robot's state at "
                "its end would be cut off; shorten the instruction"
            )
        return (*ids, self.bos_id)

    def pixels(self, observation: Observation) -> Pixels:
        """Pixels of all images together."""
        images = observation.of_cameras(self.cameras).values()
        return (torch.stack([padded_picture(image, *self.image_size) for image in images]),)

    def assemble(self, observation: Observation, prompt_ids: Sequence[int], images: Tensor) -> Tensor:
        return torch.cat((images, self.embedded(prompt_ids)))


def padded_picture(image: np.ndarray, height: int, width: int) -> Tensor:
    """Scales uint8 RGB to fit and pads it with black, as LeRobot does: float32 [3, height, width] from -1 to 1.

    Bilinear without antialiasing; an odd row or column of padding goes below or to the right (openpi's
    resize_with_pad).
    """
    pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    # An image of extreme shape keeps a row; the original rounds to none, and fails.
    high, wide = (max(1, int(side / ratio)) for side in image.shape[:2])
    if (high, wide) != image.shape[:2]:
        pixels = F.interpolate(pixels, size=(high, wide), mode="bilinear", align_corners=False).clamp(0, 1)
    top, left = (height - high) // 2, (width - wide) // 2
    around = (left, width - wide - left, top, height - high - top)
    return F.pad(pixels[0], around) * 2 - 1
