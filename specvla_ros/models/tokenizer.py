# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tokenizer.json, made to take any prompt whole."""

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import shown

MAX_INSTRUCTION = 1000  # characters; the longest in Open X-Embodiment have some 200
# What instructions are made of; a file that contradicts itself shows it with the first text, not when it is read.
_SAMPLE = f"In: What action should the robot take to {string.printable}ä中🤖?\nOut:"


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json without its truncation and padding, as transformers reads it.

    With truncation, two instructions that differ at their end would be the same prompt.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} cannot be read ({error}); copy the file again") from None
    return tokenizer


def require_tokenizer(directory: Path, hint: str = "copy it from where the weights are from") -> Tokenizer:
    """The tokenizer.json of a directory that must have one; `hint` ends the message where it does not."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing; {hint}")
    return read_tokenizer(path)


def check_tokenizer(tokenizer: Tokenizer, path: Path, vocab_size: int) -> None:
    """UserError if the tokenizer in `path` cannot encode a text, or gives ids beyond the `vocab_size` of the model."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if largest >= vocab_size:
        raise UserError(
            f"{path} gives {shown(token)} the id {largest}, but the model has embeddings for {vocab_size}: it belongs "
            "to another checkpoint, or is damaged; copy the file again"
        )
    try:
        tokenizer.encode(_SAMPLE)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # where the file contradicts itself the library panics, which is no Exception
        raise UserError(f"{path} cannot encode a prompt ({error}); copy the file again") from None


def text_of(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """Token ids as text, special tokens left out; empty without a tokenizer."""
    if tokenizer is None or not tokens:
        return ""
    text: str = tokenizer.decode(list(tokens))
    return text.strip()


def check_prompt_ids(ids: Sequence[int], vocab_size: int) -> None:
    """UserError if the model has no embedding for one of the ids of a prompt."""
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise UserError(f"prompt id {wrong[0]} is outside the vocabulary of {vocab_size} ids")


def check_instruction(instruction: str) -> None:
    """UserError if an instruction is no text that a prompt and a ROS string can hold."""
    if not instruction.strip():
        raise UserError("the instruction is empty; say what the robot shall do, for instance 'put carrot on plate'")
    if len(instruction) > MAX_INSTRUCTION:
        raise UserError(
            f"the instruction has {len(instruction)} characters, at most {MAX_INSTRUCTION} are taken; shorten it"
        )
    if "\0" in instruction:
        raise UserError("the instruction holds a NUL character, which would cut it off; send plain text")
    try:
        instruction.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the instruction is no Unicode text ({error.reason}); send it as UTF-8") from None


def refuse_special_tokens(text: str, tokenizer: Tokenizer) -> None:
    """UserError if an instruction holds a special token, which would rewrite the prompt."""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and token.content.strip() and token.content in text:
            raise UserError(
                f"the instruction holds '{token.content}', a special token of the policy; say it in plain words"
            )
