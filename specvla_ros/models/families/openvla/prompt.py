# SPDX-License-Identifier: Apache-2.0
"""Converts an instruction and the robot's state to prompt tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specvla_ros.errors import UserError, shortened
from specvla_ros.models.codecs.bins import ActionTokenizer
from specvla_ros.models.codecs.statistics import ActionStatistics, checked_statistics
from specvla_ros.models.families.openvla.config import OpenVLAConfig
from specvla_ros.models.observation import Observation, normalise_instruction
from specvla_ros.models.settings import PromptStyle
from specvla_ros.models.tokenizer import (
    check_instruction,
    check_prompt_ids,
    check_tokenizer,
    read_tokenizer,
    refuse_special_tokens,
)

# OpenVLA was trained with this token, a lone space, before the first action token; without it most tokens change.
LLAMA_SPACE_ID = 29871
# Llama's tokenizer, as OpenVLA runs it, starts every prompt with it, even if tokenizer.json does not say so.
_BOS = "<s>"
_SHOWN_TAUGHT = 20
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class PromptTokenizer:
    """The checkpoint's prompt."""

    tokenizer: Tokenizer | None  # None if the directory has no tokenizer.json; then only ids can be given
    style: PromptStyle  # the words around the instruction
    trailing_id: int | None  # the token that must end the prompt; None in a vocabulary without a lone space
    vocab_size: int  # ids the model has embeddings for
    taught: tuple[str, ...] = ()  # all instructions that the policy was trained on; empty: any is accepted

    def ids(self, instruction: str) -> tuple[int, ...]:
        """Prompt ids of an instruction, BOS first, the trailing token last.

        Raises UserError if the instruction is not plain text of a usable length, contains a special token or is not
        among the trained ones, or the checkpoint has no tokenizer.
        """
        check_instruction(instruction)
        if self.taught:
            instruction = normalise_instruction(instruction)
            if instruction not in self.taught:
                more = len(self.taught) - _SHOWN_TAUGHT
                raise UserError(
                    f"the policy was not trained on '{shortened(instruction)}'; its instructions are: "
                    + "; ".join(f"'{shortened(each)}'" for each in self.taught[:_SHOWN_TAUGHT])
                    + (f"; and {more} more" if more > 0 else "")
                )
        if self.tokenizer is None:
            raise UserError(
                "the checkpoint has no tokenizer.json, so instructions cannot be encoded; copy it from the released "
                "checkpoint, or give the prompt as token ids"
            )
        refuse_special_tokens(instruction.lower(), self.tokenizer)
        encoded, bos = self.tokenizer.encode(self.text(instruction)).ids, self.tokenizer.token_to_id(_BOS)
        return self.complete(encoded if bos is None or encoded[:1] == [bos] else [bos, *encoded])

    def ids_of(self, observation: Observation) -> tuple[int, ...]:
        """Prompt ids of an observation's instruction, or the ids given instead."""
        given = observation.prompt_ids
        return self.ids(observation.instruction) if given is None else self.complete(given)

    def text(self, instruction: str) -> str:
        question = f"What action should the robot take to {instruction.lower()}?"
        if self.style is PromptStyle.OPENVLA:
            return f"In: {question}\nOut:"
        text = f"{_VICUNA_SYSTEM} USER: {question} ASSISTANT:"
        return f"{text} TASK:" if self.style is PromptStyle.ECOT else text

    def complete(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Appends the trailing token if it is missing; UserError for empty or unknown ids."""
        if not ids:
            raise UserError("the prompt has no token ids; begin with the BOS id (1)")
        check_prompt_ids(ids, self.vocab_size)
        if self.trailing_id is None or ids[-1] == self.trailing_id:
            return tuple(ids)
        return (*ids, self.trailing_id)


def read_prompt_tokenizer(
    directory: Path, *, style: PromptStyle, token_vocab_size: int, vocab_size: int, taught: tuple[str, ...] = ()
) -> PromptTokenizer:
    """Reads tokenizer.json if it exists.

    Args:
        style: ECoT's prompt does not end with a lone space.
        token_vocab_size: tokens in the vocabulary, padding not counted; distinguishes Llama's vocabulary from a smaller
            one, whose own lone-space token replaces 29871.
        vocab_size: rows of the embedding.

    Raises UserError: tokenizer.json cannot be read, or gives ids the model does not have.
    """
    path = directory / "tokenizer.json"
    tokenizer = None
    if path.exists():
        tokenizer = read_tokenizer(path)
        check_tokenizer(tokenizer, path, vocab_size)
    trailing: int | None
    if style is PromptStyle.ECOT:
        trailing = None
    elif token_vocab_size > LLAMA_SPACE_ID:
        trailing = LLAMA_SPACE_ID
    else:
        trailing = tokenizer.token_to_id("▁") if tokenizer is not None else None
    return PromptTokenizer(tokenizer, style, trailing, vocab_size, taught)


@dataclass(frozen=True)
class StateTokens:
    """The robot's state in the prompt: each value as the bin token that it would have in an action."""

    tokenizer: ActionTokenizer
    statistics: ActionStatistics  # of the state in the training data; values outside their range take the last bin

    @property
    def dims(self) -> int:
        return len(self.statistics.low)

    def ids(self, states: np.ndarray) -> np.ndarray:
        """Encodes float [..., dims] in the units of the training data as int64 ids of the same shape."""
        return self.tokenizer.encode(self.statistics.normalise(states))


def read_state_tokens(config: OpenVLAConfig, directory: Path, unnorm_key: str) -> StateTokens | None:
    """Reads the state's part of a prompt, if the policy uses it; UserError if its statistics are missing or wrong."""
    if not config.state_dims:
        return None
    statistics = checked_statistics(directory, config.norm_stats, unnorm_key, "proprio")
    if len(statistics.low) != config.state_dims:
        raise UserError(
            f"{directory}: config.json gives state_dims {config.state_dims} and statistics of {len(statistics.low)} "
            "numbers under proprio: the two must be equal"
        )
    return StateTokens(ActionTokenizer(config.token_vocab_size, config.action_bins), statistics)
