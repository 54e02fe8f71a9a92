# SPDX-License-Identifier: Apache-2.0
"""Actions as bins: 256 per dimension at the end of the vocabulary, scaled by the training data's quantiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import CODECS, ActionIds, Codec, CodecContext
from specvla_ros.models.codecs.statistics import ActionStatistics, spread_bins, tolerance_in_bins


class ActionTokenizer:
    """OpenVLA's action tokens.

    Bin edges are linspace(-1, 1, bins); token `vocab_size - d` stands for the d-th bin, so that the last ids of the
    vocabulary are the lowest values. 256 ids share 255 centres: the two lowest ids decode alike.

    Args:
        vocab_size: tokens in the vocabulary, padding rows not counted (32000 for Llama 2).
        bins: number of edges, and of ids.
    """

    def __init__(self, vocab_size: int, bins: int = 256) -> None:
        self.vocab_size = vocab_size
        self.edges = np.linspace(-1.0, 1.0, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2.0

    @property
    def first_id(self) -> int:
        """The lowest action token, which is the highest value."""
        return self.vocab_size - len(self.edges)

    def is_action(self, token: int) -> bool:
        return self.first_id <= token < self.vocab_size

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Encodes normalised values of any shape, clipped to [-1, 1], as int64 token ids of the same shape."""
        return self.vocab_size - np.digitize(np.clip(values, -1.0, 1.0), self.edges)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Decodes token ids to bin centres, float64 of the same shape; ids outside the action tokens are clipped."""
        index = np.clip(self.vocab_size - np.asarray(tokens) - 1, 0, len(self.centers) - 1)
        return self.centers[index]


@dataclass(frozen=True)
class BinsCodec(Codec):
    """OpenVLA's answers: one bin token per dimension, after up to `max_text` tokens of text."""

    tokenizer: ActionTokenizer  # token ids to normalised values
    statistics: ActionStatistics  # normalised values to the robot's units
    # Maximum number of text tokens before the action, as in embodied chain-of-thought; 0 for OpenVLA, whose first token
    # is an action.
    max_text: int = 0
    dt_s: float | None = None  # see `Codec`
    # End tokens of a policy that writes text; its answer must have one whole action just before the end token.
    # Empty: an answer ends with the last token of the first whole action.
    end_ids: frozenset[int] = frozenset()

    @property
    def horizon(self) -> int:
        return 1

    @property
    def dims(self) -> int:
        return len(self.statistics.low)

    @property
    def action_ids(self) -> ActionIds:
        tokenizer = self.tokenizer
        return ActionIds(tokenizer.first_id, tokenizer.vocab_size, bins=len(tokenizer.centers))

    @property
    def max_tokens(self) -> int:
        return self.max_text + self.dims + bool(self.end_ids)

    def with_text(self, max_text: int) -> "BinsCodec":
        if self.end_ids and not max_text:
            raise UserError(
                "this policy writes text before its action: set decode.max_reasoning_tokens to its length, e.g. 1024"
            )
        return replace(self, max_text=max_text)

    def position(self, tokens: Sequence[int]) -> int:
        if not self.max_text:
            return len(tokens)
        text = (i for i, token in enumerate(reversed(tokens)) if not self.tokenizer.is_action(token))
        return next(text, len(tokens))

    def in_text(self, tokens: Sequence[int]) -> bool:
        return self.max_text > 0 and not 0 < self.position(tokens) < self.dims

    def remaining(self, tokens: Sequence[int]) -> int:
        position, limit = self.position(tokens), self.max_tokens - len(tokens)
        return min(limit, self.dims - position + bool(self.end_ids)) if 0 < position < self.dims else limit

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None if self.in_text(tokens) else range(self.tokenizer.first_id, self.tokenizer.vocab_size)

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            whole = tokens[n - 1] in self.end_ids if self.end_ids else self.position(tokens[:n]) == self.dims
            if whole or n == self.max_tokens:
                return n
        return 0

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._stop(tokens)][-self.dims :])

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: self._stop(tokens)][: -self.dims])

    def _stop(self, tokens: Sequence[int]) -> int:
        return len(tokens) - (tokens[-1] in self.end_ids)

    def problem(self, tokens: Sequence[int]) -> str:
        if not self.end_ids:
            other = (token for token in self.action_tokens(tokens) if not self.tokenizer.is_action(token))
            return "".join(f"token {token} is not an action token" for token in islice(other, 1))
        if tokens[-1] not in self.end_ids:
            return f"the answer has no end token after {len(tokens)} tokens: raise decode.max_reasoning_tokens"
        actions = self.position(tokens[:-1])
        return "" if actions == self.dims else f"the answer ends with {actions} action tokens instead of {self.dims}"

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return self.statistics.unnormalise(self.tokenizer.decode(tokens))[None]

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        return tuple(int(token) for token in self.tokenizer.encode(self.statistics.normalise(actions[0])))

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        return tolerance_in_bins(
            self.statistics, len(self.tokenizer.centers), metres=metres, radians=radians, gripper_bins=gripper_bins
        )

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return spread_bins(bins, self.statistics.moves, gripper_bins)

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        normalised = np.asarray(bins) * np.diff(self.tokenizer.edges)[0]
        scale = np.where(self.statistics.mask, (self.statistics.high - self.statistics.low) / 2, 1.0)
        return (normalised * scale)[None]


@CODECS.register("bins")
def _bins(context: CodecContext) -> BinsCodec:
    tokenizer = ActionTokenizer(context.vocab_size, context.bins)
    return BinsCodec(tokenizer, context.statistics, end_ids=context.end_ids)
