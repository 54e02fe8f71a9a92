# SPDX-License-Identifier: Apache-2.0
"""Answers of a language model: text that ends with an end token, and no action."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import ActionIds


@dataclass(frozen=True)
class TextCodec:
    """All of an answer is text; an action of it has no dimensions. See `Codec`.

    Args:
        end_ids: the token ids that end an answer, and belong to it.
        vocab_size: ids of the model.
        max_text: length of the longest answer in tokens.
    """

    end_ids: frozenset[int]
    vocab_size: int
    max_text: int = 0

    names: tuple[str, ...] = ()
    unnorm_key: str = ""
    horizon: int = 1
    dt_s: float | None = None

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(0), np.zeros(0)

    @property
    def action_ids(self) -> ActionIds:
        return ActionIds(self.vocab_size, self.vocab_size, bins=1)

    @property
    def distances(self) -> ActionIds:
        return self.action_ids

    @property
    def max_tokens(self) -> int:
        return self.max_text

    def with_text(self, max_text: int) -> "TextCodec":
        """The codec for answers of up to `max_text` tokens.

        Raises:
            UserError: it is 0.
        """
        if not max_text:
            raise UserError("a language model answers with text alone: set decode.max_reasoning_tokens to its length")
        return replace(self, max_text=max_text)

    def position(self, tokens: Sequence[int]) -> int:
        return 0

    def in_text(self, tokens: Sequence[int]) -> bool:
        return True

    def remaining(self, tokens: Sequence[int]) -> int:
        return self.max_text - len(tokens)

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            if n == self.max_text or tokens[n - 1] in self.end_ids:
                return n
        return 0

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The whole answer: whoever asks reads it."""
        return tuple(tokens)

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[:-1] if tokens[-1] in self.end_ids else tokens)

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, 0))

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return ()

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        return actions

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        raise UserError("a language model writes no action that could be off by metres or radians")

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return min(len(answer), len(draft))

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return ()

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, 0))
