# SPDX-License-Identifier: Apache-2.0
"""Actions as integers in digits, as VLA-0 (arXiv 2510.13054) writes them: `406 674 313 …`.

Each value of the chunk, row by row, is an integer from 0 to the number of bins; spaces separate them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.compare_drafts import Comparison, Trees
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import CODEC_FILE, CODEC_FOLDER, CODECS, CodecContext, WrittenChunkCodec
from specvla_ros.models.codecs.statistics import ActionStatistics, tolerance_in_bins
from specvla_ros.models.generation import read_end_ids
from specvla_ros.settings.json_file import read_fields

_MOST_UNITS = 9  # maximum difference between two last digits
_SPACE, _OTHER = 10, -1  # in addition to the digits' values


@dataclass(frozen=True)
class PlaceValues:
    """Distances between digits in a number's units; see `TokenDistances`.

    A digit may replace another only as the number's last: if a further digit would take either number above the
    largest. An earlier digit does not determine the distance of the numbers: `4 …` may become 4 and `5 …` 599.
    """

    digit_ids: tuple[int, ...]  # the tokens of 0 to 9
    space_id: int  # the token between two numbers
    largest: int  # the largest number

    def contain(self, tokens: Tensor) -> Tensor:
        """Mask of digits and spaces."""
        return self._values(tokens) != _OTHER

    def position(self, tokens: Sequence[int]) -> int:
        """The count of numbers before the next token, combined with the digits so far of its own number: see `_at`."""
        spaces = [i for i, token in enumerate(tokens) if token == self.space_id]
        values = {token: value for value, token in enumerate(self.digit_ids)}
        written = [values[token] for token in tokens[spaces[-1] + 1 if spaces else 0 :] if token in values]
        begun = int("".join(map(str, written))) + 1 if written else 0
        return len(spaces) * self._stride + min(begun, self._stride - 1)

    @property
    def _stride(self) -> int:
        """Positions per number: nothing written yet, any number, or one that is too large."""
        return self.largest + 3

    def compare(self, trees: Trees) -> Comparison:
        """See `TokenDistances`: dimensions are indices of numbers, distances are in units of a number."""
        wanted = trees.wanted
        drafted, own = self._values(trees.tokens), self._values(wanted)
        index, written, begun = self._at(trees, drafted)
        pairs = torch.stack((drafted, own))
        numbers = written * 10 + pairs
        last = _is_digit(pairs) & (numbers <= self.largest) & ((numbers * 10 > self.largest) | (numbers == 0))
        near = last.all(dim=0) & ~(begun & (written == 0))
        return Comparison.where_near(trees, wanted, near, (drafted - own).abs(), index)

    def _at(self, trees: Trees, drafted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each node's token: index of its number, value of the digits before it, and if there are any.

        `drafted`: values of the tokens, int64 [requests, n]; the results are int64, int64 and bool of that shape.
        """
        depths, before = trees.depths, trees.drafted_before
        spaces = before & (drafted == _SPACE)[:, None]
        last_space = torch.where(spaces, depths[:, None], 0).amax(dim=2)
        own = before & (depths[:, None] > last_space[:, :, None]) & _is_digit(drafted)[:, None]
        places = (depths[:, :, None] - 1 - depths[:, None]).clamp(0, len(str(self.largest)))
        written = torch.where(own, drafted[:, None] * 10**places, 0).sum(dim=2)
        # The root's number continues if no space is drafted.
        begun = (trees.positions % self._stride)[:, None].where(last_space == 0, 0)
        shift = 10 ** (depths - 1).clamp(0, len(str(self.largest)))
        written = written + (begun - 1).clamp(min=0) * shift
        index = trees.positions[:, None] // self._stride + spaces.sum(dim=2)
        return index, written, own.any(dim=2) | (begun > 0)

    def _values(self, tokens: Tensor) -> Tensor:
        table = _value_table(self.digit_ids, self.space_id, tokens.device)
        return table[tokens.clamp(max=len(table) - 1)]


def _is_digit(values: Tensor) -> Tensor:
    return (values >= 0) & (values < _SPACE)


@cache  # uploaded once: in a tick, a copy waits for the device
def _value_table(digit_ids: tuple[int, ...], space_id: int, device: torch.device) -> Tensor:
    """Values of tokens, int64 [n]; the last entry is for all higher ids, and for NO_TOKEN."""
    table = torch.full((max(*digit_ids, space_id) + 2,), _OTHER)
    table[list(digit_ids)] = torch.arange(10)
    table[space_id] = _SPACE
    return table.to(device)


@dataclass(frozen=True)
class DigitsCodec(WrittenChunkCodec):
    """Codec of answers with digits, spaces and an end token. See `Codec`.

    Answers that VLA-0's own code repairs (missing, extra, out-of-range or unreadable numbers) are refused.

    Relaxed acceptance allows another last digit of a number, see `PlaceValues`: an accepted number is off by at most
    its tolerance in units, and never by more than nine.
    """

    WRITES: ClassVar[str] = "digits"

    digit_ids: tuple[int, ...]  # the tokens of 0 to 9
    space_id: int  # the token between two numbers
    end_ids: frozenset[int]  # end tokens, which are part of the answer
    statistics: ActionStatistics  # smallest and largest value of each dimension
    horizon: int  # actions per answer
    bins: int  # the largest number
    limit: int  # maximum length of an answer
    dt_s: float | None = None  # see `Codec`

    @property
    def distances(self) -> "PlaceValues":
        return PlaceValues(self.digit_ids, self.space_id, self.bins)

    def position(self, tokens: Sequence[int]) -> int:
        return self.distances.position(tokens)

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        units = tolerance_in_bins(self.statistics, self.bins, metres=metres, radians=radians, gripper_bins=gripper_bins)
        return units * self.horizon

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        low, high = self.action_range
        units = np.minimum(bins, _MOST_UNITS).reshape(self.horizon, len(self.names))
        return units * (high - low) / self.bins

    @property
    def max_tokens(self) -> int:
        """Length of the longest valid answer, including its end token."""
        longest = self.horizon * len(self.names) * (len(str(self.bins)) + 1)
        return min(longest, self.limit)

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[:-1] if tokens[-1] in self.end_ids else tokens)

    def problem(self, tokens: Sequence[int]) -> str:
        if tokens[-1] not in self.end_ids:
            return f"the answer has no end token after {len(tokens)} tokens"
        other = next((i for i in tokens[:-1] if i != self.space_id and i not in self.digit_ids), None)
        if other is not None:
            return f"token {other} is neither a digit nor a space"
        words = self._words(tokens[:-1])
        wrong = next((word for word in words if not self._is_number(word)), None)
        if wrong is not None:
            return f"'{wrong}' is not a number from 0 to {self.bins}"
        dims = len(self.names)
        return "" if len(words) == self.horizon * dims else f"{len(words)} numbers instead of {self.horizon} x {dims}"

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        return self._values(self._words(tokens)).reshape(self.horizon, len(self.names))

    def completed_numbers(self, tokens: Sequence[int]) -> np.ndarray:
        """See `SaysNumbers`."""
        known = [*takewhile({*self.digit_ids, self.space_id}.__contains__, tokens)]
        words = [*takewhile(self._is_number, self._words(known)[:-1])]
        return self._values(words[: self.horizon * len(self.names)])

    def tokens_of_actions(self, tokens: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
        """See `SaysNumbers`; each number with the space after it."""
        dims = len(self.names)
        words = self._words(tokens)[first * dims : stop * dims]
        return self._tokens_of("".join(f"{word} " for word in words))

    def _values(self, words: Sequence[str]) -> np.ndarray:
        """Converts numbers to the robot's units, float64 [n], action by action."""
        low, high = self.action_range
        place = np.arange(len(words)) % len(self.names)
        return low[place] + (high - low)[place] * (np.array(words, dtype=np.float64) / self.bins)

    def _is_number(self, word: str) -> bool:
        return word == str(int(word or -1)) and int(word) <= self.bins

    def other_continuations(self, drafts: Sequence[Sequence[int]], answer: Sequence[int]) -> list[tuple[int, ...]]:
        """See `SaysNumbers`: other next digits, nearest first, each continued like the first draft."""
        written = [*takewhile(self.digit_ids.__contains__, reversed(answer))][::-1]
        begun = [(draft, self.resume(draft, answer)) for draft in drafts if draft]
        if not written or any([*draft[at - len(written) : at]] == written for draft, at in begun):
            return []
        rest = next((tuple(draft[at:]) for draft, at in begun), ())
        if not rest or rest[0] not in self.digit_ids:
            return []
        stop = rest.index(self.space_id) + 1 if self.space_id in rest else len(rest)
        drafted = self.digit_ids.index(rest[0])
        others = sorted({*range(10)} - {drafted}, key=lambda digit: (abs(digit - drafted), digit))
        return [(self.digit_ids[digit], *rest[1:stop]) for digit in others]

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Clips values to the range of the training data; computed in float32, as the original rounds."""
        low, high = (each.astype(np.float32) for each in self.action_range)
        width = np.where(high > low, high - low, np.float32(1))
        shares = (np.clip(actions.astype(np.float32), low, high) - low) / width
        numbers = np.around(shares * np.float32(self.bins)).astype(np.int64).flatten().tolist()
        return self._tokens_of(" ".join(map(str, numbers)))

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.space_id if each == " " else self.digit_ids[int(each)] for each in text)

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        """Resumes at the same digit of the same number, since numbers differ in length."""
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
"""Number of tokens at the vocabulary's end, counting down from digit 0; the last of them is the space."""


@CODECS.register("digits")
def _digits(context: CodecContext) -> DigitsCodec:
    """Makes the codec of this package's format, which is described by `action_tokenizer/processor_config.json`."""
    path = context.directory / CODEC_FOLDER / CODEC_FILE
    fields = read_fields(path, missing="it must contain time_horizon and bins", hint="; copy it again")
    if context.vocab_size <= DIGIT_TOKENS:
        raise UserError(f"{context.directory}: a vocabulary of {context.vocab_size} tokens has no room for digits")
    ids = [context.vocab_size - 1 - i for i in range(DIGIT_TOKENS)]
    return DigitsCodec(
        digit_ids=tuple(ids[:-1]),
        space_id=ids[-1],
        end_ids=read_end_ids(context.directory),
        statistics=context.statistics,
        horizon=fields.whole("time_horizon", minimum=1, maximum=1 << 10),
        bins=fields.whole("bins", minimum=1, maximum=10**6),
        limit=1 << 14,
        dt_s=fields.number("dt_s", None, above=0.0),
    )
