# SPDX-License-Identifier: Apache-2.0
"""From an instruction to prompt tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specvla_ros.errors import UserError, shortened
from specvla_ros.models.settings import PromptStyle
from specvla_ros.models.tokenizer import check_instruction, check_prompt_ids, read_tokenizer, refuse_special_tokens

# OpenVLA was trained with this token, a lone space, before the first action token; without it most tokens change.
LLAMA_SPACE_ID = 29871
_SHOWN_TAUGHT = 20
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class PromptTokenizer:
    """The checkpoint's prompt.

    Args:
        tokenizer: of the checkpoint; None when the directory has no tokenizer.json, then only ids can be given.
        style: the words around the instruction.
        trailing_id: the token that must end the prompt; None in a vocabulary without a lone space.
        vocab_size: ids the model has embeddings for.
        taught: all instructions that the policy was trained on, where its config.json lists them; empty: any is asked.
    """

    tokenizer: Tokenizer | None
    style: PromptStyle
    trailing_id: int | None
    vocab_size: int
    taught: tuple[str, ...] = ()

    def ids(self, instruction: str) -> tuple[int, ...]:
        """Prompt ids of an instruction, BOS first, the trailing token last.

        Raises:
            UserError: the instruction is no plain text of a usable length, holds one of the tokenizer's special tokens,
                was never taught, or the checkpoint has no tokenizer.
        """
        check_instruction(instruction)
        if self.taught:
            instruction = normalise_instruction(instruction)
            if instruction not in self.taught:
                more = len(self.taught) - _SHOWN_TAUGHT
                raise UserError(
                    f"the policy was never taught '{shortened(instruction)}'; it knows: "
                    + "; ".join(f"'{shortened(each)}'" for each in self.taught[:_SHOWN_TAUGHT])
                    + (f"; and {more} more" if more > 0 else "")
                )
        tokenizer = self._require_tokenizer()
        refuse_special_tokens(instruction.lower(), tokenizer)
        return self.complete(tokenizer.encode(self.text(instruction)).ids)

    def text(self, instruction: str) -> str:
        """The prompt as text."""
        text = self._asking(f"What action should the robot take to {instruction.lower()}?")
        return f"{text} TASK:" if self.style is PromptStyle.ECOT else text

    def question_ids(self, question: str) -> tuple[int, ...]:
        """Prompt ids of a question that is to be answered in words, BOS first.

        Raises:
            UserError: it is no plain text of a usable length, holds a special token, or there is no tokenizer.
        """
        check_instruction(question)
        tokenizer = self._require_tokenizer()
        refuse_special_tokens(question, tokenizer)
        return tuple(tokenizer.encode(self._asking(question)).ids)

    def _asking(self, question: str) -> str:
        if self.style is PromptStyle.OPENVLA:
            return f"In: {question}\nOut:"
        return f"{_VICUNA_SYSTEM} USER: {question} ASSISTANT:"

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                "the checkpoint has no tokenizer.json, so instructions cannot be read; copy it there from the released "
                "checkpoint, or give the prompt as token ids"
            )
        return self.tokenizer

    def complete(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Appends the trailing token where it is missing.

        Raises:
            UserError: no ids, or one that the model has no embedding for.
        """
        if not ids:
            raise UserError("the prompt has no token ids; begin with the BOS id (1)")
        check_prompt_ids(ids, self.vocab_size)
        if self.trailing_id is None or ids[-1] == self.trailing_id:
            return tuple(ids)
        return (*ids, self.trailing_id)


def normalise_instruction(instruction: str) -> str:
    """Lower case, single spaces, no full stop: as a list of taught instructions is compared."""
    return " ".join(instruction.lower().split()).rstrip(" .!")


def read_prompt_tokenizer(
    directory: Path, *, style: PromptStyle, token_vocab_size: int, vocab_size: int, taught: tuple[str, ...] = ()
) -> PromptTokenizer:
    """Reads tokenizer.json if it is there.

    Args:
        style: the words around the instruction; ECoT's prompt ends with no lone space.
        token_vocab_size: tokens in the vocabulary, padding not counted; tells Llama's vocabulary from a smaller one,
            whose own lone-space token takes the place of 29871.
        vocab_size: rows of the embedding.
        taught: see PromptTokenizer.

    Raises:
        UserError: tokenizer.json cannot be read, or gives ids the model does not have.
    """
    path = directory / "tokenizer.json"
    tokenizer = None
    if path.exists():
        tokenizer = read_tokenizer(path)
        if tokenizer.get_vocab_size() > vocab_size:
            raise UserError(
                f"{path} has {tokenizer.get_vocab_size()} tokens, but the model has embeddings for {vocab_size}: "
                "it belongs to another checkpoint"
            )
    trailing: int | None
    if style is PromptStyle.ECOT:
        trailing = None
    elif token_vocab_size > LLAMA_SPACE_ID:
        trailing = LLAMA_SPACE_ID
    else:
        trailing = tokenizer.token_to_id("▁") if tokenizer is not None else None
    return PromptTokenizer(tokenizer, style, trailing, vocab_size, taught)
