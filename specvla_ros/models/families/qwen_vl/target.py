# SPDX-License-Identifier: Apache-2.0
"""From a Qwen2.5-VL checkpoint directory to a policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros.errors import UserError
from specvla_ros.models.checkpoint import STARVLA_RUN, TARGETS, refuse_options
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.config import check_directory, read_checkpoint_json
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.models.families.qwen_vl.config import QWEN_VL_TYPES, read_config
from specvla_ros.models.families.qwen_vl.model import QwenVL, load_model
from specvla_ros.models.families.qwen_vl.nora import nora
from specvla_ros.models.families.qwen_vl.pictures import PatchProcessor, read_patch_processor
from specvla_ros.models.families.qwen_vl.policy import ChatPolicy, Messages, PolicyContext
from specvla_ros.models.families.qwen_vl.vla0 import vla0
from specvla_ros.models.families.starvla.target import qwen_fast, read_run
from specvla_ros.models.generation import GreedyRules, read_end_ids, read_generation
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import ImageEmbeddings, Pixels, PromptLayout
from specvla_ros.models.tokenizer import (
    check_instruction,
    check_prompt_ids,
    check_tokenizer,
    refuse_special_tokens,
    require_tokenizer,
)
from specvla_ros.models.weights import Progress

_POLICIES = (nora, vla0)


@dataclass(frozen=True)
class QwenVLTarget:
    """A checkpoint, ready to decode. Holds no state between observations. See `Target`.

    Args:
        directory: of the checkpoint; of StarVLA's, the run.
        model: vision tower and language model.
        tokenizer: text to ids and back.
        chat: messages to a prompt's text, a picture being one token.
        processor: pictures to patches.
        policy: how it is asked and how it answers.
        image_id: the token that stands for a picture.
        text_end_ids: the tokens that end a text of the model's.
    """

    directory: Path
    model: QwenVL
    tokenizer: Tokenizer
    chat: Callable[[Messages], str]
    processor: PatchProcessor
    policy: ChatPolicy
    image_id: int
    text_end_ids: frozenset[int]

    causal_prompt: bool = True
    action_head: bool = False
    state_dims: int = 0
    head: None = None

    @property
    def decoder(self) -> PackedDecoder:
        return self.model.decoder

    @property
    def codec(self) -> Codec:
        return self.policy.codec

    @property
    def unnorm_key(self) -> str:
        return self.codec.unnorm_key

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
        """Rows of the prompt that each picture takes: high and wide."""
        side = self.processor.factor
        return tuple((height // side, width // side) for height, width in self.policy.picture_sizes)

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """The chat, with a picture's rows in place of its token.

        Raises:
            UserError: an instruction that cannot be asked, or images of other cameras than the policy's.
        """
        observation.of_cameras(self.cameras)
        ids = observation.prompt_ids
        return self._layout(self.prompt_ids(observation.instruction) if ids is None else tuple(ids))

    def question_layout(self, observation: Observation, question: str) -> PromptLayout:
        """See `Target`; asked in the chat in which it is given instructions."""
        return self._layout(self.prompt_ids(question))

    def _layout(self, ids: tuple[int, ...]) -> PromptLayout:
        check_prompt_ids(ids, self.decoder.config.vocab_size)
        grids = self._row_grids
        places = len(self._image_places(ids))
        if places != len(grids):
            raise UserError(f"the prompt has {places} places for pictures, and there are {len(grids)}")
        positions = mrope_positions(ids, self.image_id, grids)
        visual, after = [], 0
        for place, (height, width) in zip(self._image_places(ids), grids, strict=True):
            start = place + after
            visual.append(range(start, start + height * width))
            after += height * width - 1
        return PromptLayout(ids, positions.shape[1], tuple(visual), positions)

    def _image_places(self, ids: Sequence[int]) -> list[int]:
        """Where in a prompt's ids the pictures stand."""
        return [place for place, token in enumerate(ids) if token == self.image_id]

    def prompt_ids(self, instruction: str) -> tuple[int, ...]:
        """Prompt ids of an instruction, a picture being one token.

        Raises:
            UserError: it is no plain text of a usable length, or holds one of the tokenizer's special tokens.
        """
        check_instruction(instruction)
        refuse_special_tokens(instruction, self.tokenizer)
        return tuple(self.tokenizer.encode(self.chat(self.policy.messages(instruction))).ids)

    def pixels(self, observation: Observation) -> Pixels:
        """See `PreparesPictures`; the patches of all pictures together."""
        return (self.processor.patches(self.policy.pictures(observation.of_cameras(self.cameras))),)

    def prompt_embeddings(
        self,
        observation: Observation,
        prompt_ids: Sequence[int],
        vision: ImageEmbeddings | None = None,
        pixels: Pixels | None = None,
    ) -> Tensor:
        (patches,) = pixels or self.pixels(observation)
        rows = (vision or self.model.image_embeddings)(patches).split([h * w for h, w in self._row_grids])
        text = self.decoder.embed_tokens(to_device(prompt_ids, self.decoder.device))
        parts, start = [], 0
        for place, picture in zip(self._image_places(prompt_ids), rows, strict=True):
            parts += [text[start:place], picture.to(text.dtype)]
            start = place + 1
        return torch.cat([*parts, text[start:]])

    def blank_observation(self) -> Observation:
        """Black images, and a prompt that needs no words."""
        black = np.zeros((self.processor.factor, self.processor.factor, 3), np.uint8)
        return Observation(dict.fromkeys(self.cameras, black), "wait", stamp_ns=1)

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.directory),
            "policy": self.policy.name,
            "unnorm_key": self.unnorm_key,
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "cameras": ", ".join(self.cameras),
            "horizon": self.codec.horizon,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }


def mrope_positions(ids: Sequence[int], image_id: int, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """M-RoPE positions of a prompt: time, height and width, int64 [3, rows].

    Text counts up in all three. A picture stays at one time, its rows and columns count from there, and what follows
    goes on behind the larger of them (Qwen2.5-VL, arXiv 2502.13923, section 2.1.2).

    Args:
        ids: of the prompt, a picture being one token.
        image_id: that token.
        grids: rows and columns of each picture.
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


def load_qwen_vl(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    progress: Progress | None,
    **options: Any,
) -> QwenVLTarget:
    """Loads a policy that was made of Qwen2.5-VL from a Hugging Face directory.

    Args:
        directory: holds config.json, safetensors weights, preprocessor_config.json, tokenizer.json, a chat template and
            what the policy brings.
        device: where the weights go.
        dtype: precision of the weights.
        unnorm_key: whose action statistics to use; empty: the only ones there are.
        progress: called with what is being done and the fraction of the tensors read.
        options: of other families, as they are where nobody sets them.

    Raises:
        UserError: anything about the directory or an argument that does not fit, before weights are read if possible.
    """
    refuse_options(directory, options)
    return _load(directory, directory, directory, _policy, unnorm_key, device, dtype, progress)


def load_starvla(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    unnorm_key: str,
    progress: Progress | None,
    **options: Any,
) -> QwenVLTarget:
    """Loads StarVLA's QwenFast from the folder of its training run.

    Args:
        directory: see `read_run`.
        device, dtype, unnorm_key, progress, options: as of `load_qwen_vl`.

    Raises:
        UserError: as of `load_qwen_vl`.
    """
    refuse_options(directory, options)
    run = read_run(directory)
    make = partial(qwen_fast, run)
    prefix = "qwen_vl_interface.model."
    return _load(directory, run.vlm, run.weights, make, unnorm_key, device, dtype, progress, prefix)


def _load(
    checkpoint: Path,
    directory: Path,
    weights: Path,
    make: Callable[[PolicyContext], ChatPolicy],
    unnorm_key: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
    prefix: str = "",
) -> QwenVLTarget:
    check_directory(directory)
    config = read_config(directory)
    tokenizer = require_tokenizer(directory)
    check_tokenizer(tokenizer, directory / "tokenizer.json", config.decoder.vocab_size)
    processor = read_patch_processor(directory)
    policy = make(PolicyContext(directory, tokenizer, processor, unnorm_key, read_generation(directory)))
    chat = _chat(directory, numbers_pictures=policy.numbers_pictures)
    side = processor.patch_size
    grid = tuple((height // side, width // side) for height, width in policy.picture_sizes)
    model = load_model(weights, config, grid, device, dtype, progress, prefix)
    ends = read_end_ids(directory)
    return QwenVLTarget(checkpoint, model, tokenizer, chat, processor, policy, config.image_id, ends)


def _policy(context: PolicyContext) -> ChatPolicy:
    found = (make(context) for make in _POLICIES)
    policy = next((each for each in found if each is not None), None)
    if policy is None:
        raise UserError(
            f"{context.directory} is a Qwen-VL checkpoint, but no policy that is known: NORA has the tokens "
            "<robot_action_0> and on, VLA-0 has dataset_stats.pkl or dataset_stats.json with or beside it"
        )
    return policy


def _chat(directory: Path, *, numbers_pictures: bool) -> Callable[[Messages], str]:
    """The checkpoint's chat template.

    Raises:
        UserError: there is none.
    """
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
    """Of chat_template.jinja, chat_template.json or tokenizer_config.json, as transformers looks for it.

    Raises:
        UserError: none of them has one.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        template = read_checkpoint_json(path).text("chat_template", "") if path.exists() else ""
        if template:
            return template
    raise UserError(f"{directory} has no chat template: copy chat_template.json from where the weights are from")


for family in QWEN_VL_TYPES:
    TARGETS.register(family)(load_qwen_vl)
TARGETS.register(STARVLA_RUN)(load_starvla)
