# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tokenizer, without truncation or padding, and checks of instructions and prompts."""

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import shown

MAX_INSTRUCTION = 1000  # characters; the longest in Open X-Embodiment have about 200
# Characters of instructions. An inconsistent tokenizer.json fails at its first encoding, not when it is read.
_SAMPLE = f"In: What action should the robot take to {string.printable}ä中🤖?\nOut:"


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json without its truncation and padding, as transformers does.

    With truncation, instructions that differ only at the end would give the same prompt.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} cannot be read ({error}); copy the file again") from None
    return tokenizer


def require_tokenizer(directory: Path, hint: str = "copy it from the source of the weights") -> Tokenizer:
    """Reads a directory's tokenizer.json; UserError, with `hint` at its end, if the file is missing."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} is missing; {hint}")
    return read_tokenizer(path)


def check_tokenizer(tokenizer: Tokenizer, path: Path, vocab_size: int) -> None:
    """Raises UserError if the tokenizer of `path` cannot encode text or has ids beyond the model's `vocab_size`."""
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
    except BaseException as error:  # on an inconsistent file the library panics with a BaseException
        raise UserError(f"{path} cannot encode a prompt ({error}); copy the file again") from None


def text_of(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """Decodes token ids to text without special tokens; empty without a tokenizer."""
    if tokenizer is None or not tokens:
        return ""
    text: str = tokenizer.decode(list(tokens))
    return text.strip()


def check_prompt_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises UserError if the prompt is empty, or the model has no embedding for one of its ids."""
    if not ids:
        raise UserError("the prompt has no token ids; give those of its text")
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise UserError(f"prompt id {wrong[0]} is outside the vocabulary of {vocab_size} ids")


def check_instruction(instruction: str) -> None:
    """Raises UserError if an instruction is not valid text for a prompt and a ROS string."""
    if not instruction.strip():
        raise UserError("the instruction is empty; describe the task, for example 'put carrot on plate'")
    if len(instruction) > MAX_INSTRUCTION:
        raise UserError(
            f"the instruction has {len(instruction)} characters, the limit is {MAX_INSTRUCTION}; shorten it"
        )
    if "\0" in instruction:
        raise UserError("the instruction contains a NUL character, which would truncate it; send plain text")
    try:
        instruction.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the instruction is not valid Unicode ({error.reason}); send it as UTF-8") from None


def refuse_special_tokens(text: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if an instruction contains a special token, which would change the prompt's structure."""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and token.content.strip() and token.content in text:
            raise UserError(f"the instruction contains '{token.content}', a special token of the policy; rephrase it")
