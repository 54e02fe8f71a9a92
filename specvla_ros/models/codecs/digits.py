# SPDX-License-Identifier: Apache-2.0
"""Actions as whole numbers in digits, as VLA-0 (arXiv 2510.13054) writes them: `406 674 313 …`.

Each value of the chunk, row by row, is a number from 0 to the number of bins; a space stands between two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics, read_statistics
from specvla_ros.models.codecs.chunk import WrittenChunkCodec
from specvla_ros.models.codecs.codec import CODEC_FILE, CODEC_FOLDER, CODECS, CodecContext
from specvla_ros.models.generation import read_end_ids
from specvla_ros.settings.json_file import read_fields


@dataclass(frozen=True)
class DigitsCodec(WrittenChunkCodec):
    """Answers of digits and spaces, and an end token. See `Codec`.

    What VLA-0's own code makes an action of though it is none (numbers left out, too many of them, beyond the range, or
    the middle of the range for what it cannot read) is refused. Relaxed acceptance has no bound here yet.

    Args:
        digit_ids: the tokens of 0 to 9.
        space_id: the token between two numbers.
        end_ids: the tokens that end an answer, and belong to it.
        statistics: smallest and largest value of each dimension.
        horizon: actions per answer.
        bins: the largest number.
        limit: length at which an answer ends whatever it holds.
        dt_s: see `Codec`.
    """

    WRITES: ClassVar[str] = "digits"

    digit_ids: tuple[int, ...]
    space_id: int
    end_ids: frozenset[int]
    statistics: ActionStatistics
    horizon: int
    bins: int
    limit: int
    dt_s: float | None = None

    @property
    def max_tokens(self) -> int:
        """Of the longest answer that can stand for actions, and its end; cut at the limit."""
        longest = self.horizon * len(self.names) * (len(str(self.bins)) + 1)
        return min(longest, self.limit)

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[:-1] if tokens[-1] in self.end_ids else tokens)

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return ()

    def problem(self, tokens: Sequence[int]) -> str:
        if tokens[-1] not in self.end_ids:
            return f"the answer has no end after {len(tokens)} tokens"
        other = next((i for i in tokens[:-1] if i != self.space_id and i not in self.digit_ids), None)
        if other is not None:
            return f"token {other} is neither a digit nor a space"
        words = self._words(tokens[:-1])
        wrong = next((word for word in words if word != str(int(word or -1)) or int(word) > self.bins), None)
        if wrong is not None:
            return f"'{wrong}' is no number from 0 to {self.bins}"
        dims = len(self.names)
        return "" if len(words) == self.horizon * dims else f"{len(words)} numbers in place of {self.horizon} x {dims}"

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        numbers = np.array([int(word) for word in self._words(tokens)], dtype=np.float64)
        low, high = self.action_range
        return low + (high - low) * (numbers / self.bins).reshape(self.horizon, len(self.names))

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Values beyond the range of the training data are clipped to it; in float32, as the original rounds."""
        low, high = (each.astype(np.float32) for each in self.action_range)
        width = np.where(high > low, high - low, np.float32(1))
        shares = (np.clip(actions.astype(np.float32), low, high) - low) / width
        numbers = np.around(shares * np.float32(self.bins)).astype(np.int64).flatten().tolist()
        text = " ".join(map(str, numbers))
        return tuple(self.space_id if each == " " else self.digit_ids[int(each)] for each in text)

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        """At the same digit of the same number: numbers have different lengths."""
        number = sum(token == self.space_id for token in answer)
        digit = next((i for i, token in enumerate(reversed(answer)) if token == self.space_id), len(answer))
        spaces = [i for i, token in enumerate(draft) if token == self.space_id]
        if number > len(spaces):
            return len(draft)
        begin = spaces[number - 1] + 1 if number else 0
        behind = spaces[number] if number < len(spaces) else len(draft)
        return min(begin + digit, behind)

    def _words(self, tokens: Sequence[int]) -> list[str]:
        digits = {token: str(value) for value, token in enumerate(self.digit_ids)}
        return "".join(digits.get(token, " ") for token in tokens).split(" ")


DIGIT_TOKENS = 11
"""At the vocabulary's end, counting down from 0 on; the last of them is the space."""


@CODECS.register("digits")
def _digits(context: CodecContext) -> DigitsCodec:
    """Of this package's own format: `action_tokenizer/processor_config.json` says `time_horizon` and `bins`."""
    path = context.directory / CODEC_FOLDER / CODEC_FILE
    fields = read_fields(path, missing="it must say time_horizon and bins", hint="; copy it again")
    if context.vocab_size <= DIGIT_TOKENS:
        raise UserError(f"{context.directory}: a vocabulary of {context.vocab_size} tokens has no room for digits")
    ids = [context.vocab_size - 1 - i for i in range(DIGIT_TOKENS)]
    return DigitsCodec(
        digit_ids=tuple(ids[:-1]),
        space_id=ids[-1],
        end_ids=read_end_ids(context.directory),
        statistics=read_statistics(context),
        horizon=fields.whole("time_horizon", minimum=1, maximum=1 << 10),
        bins=fields.whole("bins", minimum=1, maximum=10**6),
        limit=1 << 14,
    )
