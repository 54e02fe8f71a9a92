# SPDX-License-Identifier: Apache-2.0
"""A language model without vision (`...ForCausalLM` of transformers), to measure drafters and rules on text.

The instruction is the verbatim prompt; camera images are ignored. Importing this module registers such models with
`load_target`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros import Observation, UserError
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.codecs.codec import ActionIds, WrittenChunkCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.config import DECODERS, check_directory, read_checkpoint_json, read_decoder_shape
from specvla_ros.models.decoder import PackedDecoder, allocate, decoder_tensors, empty_model
from specvla_ros.models.generation import NO_RULES, GreedyRules, read_end_ids, read_generation
from specvla_ros.models.settings import refuse_options
from specvla_ros.models.target import TARGETS, ImageEmbeddings, PromptLayout
from specvla_ros.models.tokenizer import check_prompt_ids, check_tokenizer, require_tokenizer
from specvla_ros.models.weights import Progress, check_weights, load_weights, read_tables


@dataclass(frozen=True)
class TextCodec(WrittenChunkCodec):
    """A codec whose answers are text; an action has no dimensions. See `Codec`.

    Args:
        end_ids: the token ids that end an answer and are part of it.
        max_tokens: maximum length of an answer.
    """

    WRITES: ClassVar[str] = "text"
    statistics: ClassVar[ActionStatistics] = ActionStatistics("", np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool))

    end_ids: frozenset[int]
    vocab_size: int
    max_tokens: int = 0
    horizon: int = 1
    dt_s: float | None = None

    @property
    def action_ids(self) -> ActionIds:
        return ActionIds(self.vocab_size, self.vocab_size, bins=1)

    def with_text(self, max_text: int) -> "TextCodec":
        """Returns the codec for answers of up to `max_text` tokens; UserError if 0."""
        if not max_text:
            raise UserError("a language model writes only text: set decode.max_reasoning_tokens to its maximum length")
        return replace(self, max_tokens=max_text)

    def position(self, tokens: Sequence[int]) -> int:
        return 0

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[:-1] if tokens[-1] in self.end_ids else tokens)

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, 0))

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return ()

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        raise UserError("a language model writes no actions: a tolerance in metres or radians does not apply")

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return ()

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, 0))


@dataclass(frozen=True)
class TextTarget:
    """A language model, ready to decode. Holds no state between prompts. See `Target`."""

    directory: Path
    decoder: PackedDecoder
    codec: TextCodec
    tokenizer: Tokenizer

    unnorm_key: str = ""
    causal_prompt: bool = True
    image_tokens: int = 0
    action_head: bool = False
    pixel_shape: tuple[int, ...] = ()
    generation: GreedyRules = NO_RULES
    cameras: tuple[str, ...] = ()
    state_dims: int = 0
    state_names: tuple[str, ...] = ()
    head: None = None

    @property
    def model(self) -> "TextTarget":
        return self

    def image_embeddings(self, pixel_values: Tensor) -> Tensor:
        """Returns no embeddings: [0, hidden]."""
        return pixel_values.new_zeros(0, self.decoder.config.hidden_size)

    def prompt_layout(self, observation: Observation) -> PromptLayout:
        """Returns the instruction's ids with the tokenizer's prefix; UserError if it is empty."""
        ids = observation.prompt_ids
        ids = tuple(self.tokenizer.encode(observation.instruction).ids if ids is None else ids)
        if not ids:
            raise UserError("the prompt is empty; give the text that the model should continue")
        check_prompt_ids(ids, self.decoder.config.vocab_size)
        return PromptLayout(ids, len(ids), ())

    def prompt_embeddings(
        self, observation: Observation, prompt_ids: Sequence[int], vision: ImageEmbeddings | None = None
    ) -> Tensor:
        """Returns the embeddings [n, hidden] of n ids."""
        embed: Callable[[Tensor], Tensor] = self.decoder.embed_tokens
        return embed(to_device(prompt_ids, self.decoder.device))

    def blank_observation(self) -> Observation:
        """Returns a prompt of one token."""
        return text_observation("", stamp_ns=1, prompt_ids=(0,))

    def text(self, tokens: Sequence[int]) -> str:
        """Returns an answer's text without its end token."""
        text: str = self.tokenizer.decode(list(tokens))
        return text

    def describe(self) -> dict[str, str | int]:
        return {
            "checkpoint": str(self.directory),
            "device": str(self.decoder.device),
            "dtype": str(self.decoder.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.decoder.parameters()),
        }


def text_observation(prompt: str, *, stamp_ns: int, prompt_ids: Sequence[int] | None = None) -> Observation:
    """Returns a prompt for a language model, from text or token ids; the stamp is greater than 0."""
    ids = None if prompt_ids is None else tuple(prompt_ids)
    return Observation(np.zeros((1, 1, 3), np.uint8), prompt, stamp_ns, prompt_ids=ids)


def load_text(
    directory: Path, *, device: torch.device, dtype: torch.dtype, progress: Progress, **options: Any
) -> TextTarget:
    """Loads a language model from a Hugging Face directory.

    Args:
        directory: holds config.json, safetensors weights and tokenizer.json.
        progress: called with the current step and the fraction of the tensors read.
        options: a policy's options, at their defaults.

    Raises:
        UserError: The directory or an argument is not suitable.
    """
    refuse_options(directory, options)
    check_directory(directory)
    raw = read_checkpoint_json(directory / "config.json")
    config = read_decoder_shape(raw)
    generation = read_generation(directory)
    tokenizer = require_tokenizer(directory)
    check_tokenizer(tokenizer, directory / "tokenizer.json", config.vocab_size)
    tables = read_tables(directory, "model.embed_tokens.weight", "lm_head.weight", tied=config.tie_word_embeddings)
    config = replace(config, tie_word_embeddings=tables.tied)
    decoder = empty_model(partial(PackedDecoder, config), dtype, device)
    check_weights(directory, decoder_tensors(decoder), unused=r".+\.inv_freq", stored=tables.stored)
    allocate(decoder, device)
    load_weights(directory, decoder_tensors(decoder), progress, stored=tables.stored)
    return TextTarget(
        directory=directory,
        decoder=decoder.eval().requires_grad_(False),
        codec=TextCodec(read_end_ids(directory), config.vocab_size),
        tokenizer=tokenizer,
        generation=generation,
    )


for family in DECODERS:
    TARGETS.register(family)(load_text)


def load_language_model(directory: Path, device: str = "cpu") -> TextTarget:
    """Loads a language model in float32; UserError if the directory holds a policy."""
    model = load_target(directory, device=device, dtype="float32")
    if not isinstance(model, TextTarget):
        raise UserError(f"{directory} is not a language model")
    return model
