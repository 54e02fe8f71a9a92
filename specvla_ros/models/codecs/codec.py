# SPDX-License-Identifier: Apache-2.0
"""The interface between tokens and actions.

A codec is one file: a class, and a function, registered by name, that makes it from a `CodecContext`. Another package
adds one with an entry point of the group `specvla_ros.codecs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from specvla_kernels.compare_drafts import Comparison, Trees, compare_drafts
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.statistics import ActionStatistics, checked_statistics, spread_bins
from specvla_ros.settings.registry import Registry

Self = TypeVar("Self", bound="Codec")

CODECS = Registry("specvla_ros.codecs", [f"specvla_ros.models.codecs.{name}" for name in ("bins", "digits", "fast")])
CODEC_FOLDER = "action_tokenizer"
"""A checkpoint's folder for its codec's own files, as in LeRobot's checkpoints."""
CODEC_FILE = "processor_config.json"


@dataclass(frozen=True)
class ActionIds:
    """The token ids of actions."""

    first: int  # the lowest action token, the highest value
    stop: int  # one past the highest, the lowest value
    bins: int  # distinct values; the ids `first` and `first + 1` decode alike

    def counted_from(self, first: int) -> "ActionIds":
        return ActionIds(self.first - first, self.stop - first, self.bins)

    def contain(self, tokens: Tensor) -> Tensor:
        return (tokens >= self.first) & (tokens < self.stop)

    def compare(self, trees: Trees) -> Comparison:
        """See `TokenDistances`; a dimension is an index into the action's tokens."""
        return compare_drafts(trees, self.first, self.stop, self.bins)


class TokenDistances(Protocol):
    """Distances between tokens of an answer, computed on the device without a read-back."""

    def contain(self, tokens: Tensor) -> Tensor:
        """Mask of the action tokens, bool in the shape of `tokens`."""

    def compare(self, trees: Trees) -> Comparison:
        """Compares each drafted token with the target's own choice.

        The result's `dimensions` index the tolerances that `Codec.bound` takes; -1 where one token cannot replace the
        other within any bound. Its `distances` are in the codec's smallest steps.
        """


@runtime_checkable
class SaysNumbers(Protocol):
    """Optional: a codec whose answers spell an action's numbers one after the other."""

    def completed_numbers(self, tokens: Sequence[int]) -> np.ndarray:
        """The completed numbers at the start of an answer, float64 [n], action by action, in robot units.

        Later tokens do not change them: `decode` gives the same numbers. Numbers after a token that makes the answer
        invalid are left out.
        """

    def tokens_of_actions(self, tokens: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
        """The tokens of an answer's complete actions from `first` to before `stop`, as another answer starts."""

    def other_continuations(self, drafts: Sequence[Sequence[int]], answer: Sequence[int]) -> list[tuple[int, ...]]:
        """Possible continuations of an answer's unfinished number; empty if a draft has the same unfinished number."""


class Codec(ABC):
    """Tokens to actions [horizon, dims] and back; the base class of all codecs.

    By default an answer has `max_tokens` tokens, all of them action tokens, and relaxed acceptance is refused.

    Attributes:
        WRITES: the kind of answer, for messages.
        statistics: normalised values to the robot's units.
        horizon: actions per answer.
        dt_s: duration of one action in the training data in seconds; None if the checkpoint does not give it.
        max_tokens: length of the longest answer.
    """

    WRITES: ClassVar[str]
    # Fields in some codecs, properties in others; a field would take an inherited property as its default.
    if TYPE_CHECKING:

        @property
        def statistics(self) -> ActionStatistics: ...
        @property
        def horizon(self) -> int: ...
        @property
        def dt_s(self) -> float | None: ...
        @property
        def max_tokens(self) -> int: ...

    @abstractmethod
    def problem(self, tokens: Sequence[int]) -> str:
        """Reason why a complete answer is not a valid action; empty if it is."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Decodes action tokens to float64 [horizon, dims] in the robot's units."""

    @abstractmethod
    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Encodes actions [horizon, dims] in the robot's units as the nearest action tokens."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.statistics.names

    @property
    def unnorm_key(self) -> str:
        """Dataset whose action statistics are used; empty if there is no choice."""
        return self.statistics.unnorm_key

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest usual actions of the training data, float64 [dims] each, in the robot's units."""
        return self.statistics.action_range

    @property
    def action_ids(self) -> ActionIds:
        """By default empty: drafters and rules that rely on neighbouring ids being close then ignore these tokens."""
        return ActionIds(0, 0, bins=1)

    @property
    def distances(self) -> TokenDistances:
        return self.action_ids

    def with_text(self: Self, max_text: int) -> Self:
        """The same codec with up to `max_text` tokens of text before the actions; by default it refuses any."""
        if max_text:
            raise UserError(f"this policy writes {self.WRITES}, not text: leave decode.max_reasoning_tokens at 0")
        return self

    def position(self, tokens: Sequence[int]) -> int:
        """Position of an unfinished answer, for `distances`; for bins, the index of the next action token."""
        return len(tokens)

    def in_text(self, tokens: Sequence[int]) -> bool:
        """True if the next token may be text."""
        return False

    def remaining(self, tokens: Sequence[int]) -> int:
        """Maximum number of tokens still to come."""
        return self.max_tokens - len(tokens)

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        """The ids that may come next; None: any."""
        return None

    def end(self, tokens: Sequence[int], known: int) -> int:
        """Length of the answer if it is complete, else 0; the first `known` tokens did not complete it."""
        return self.max_tokens if len(tokens) >= self.max_tokens else 0

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The action tokens of a complete answer."""
        return tuple(tokens)

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The text tokens of a complete answer, without its end token."""
        return ()

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        """Index at which a drafted answer continues after a committed beginning that may differ from the draft's."""
        return min(len(answer), len(draft))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Scales actions [horizon, dims] in the robot's units as in the training data, to about [-1, 1]."""
        return self.statistics.normalise(actions)

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        """The largest acceptance tolerance, in steps as for `bound`, within physical bounds.

        Raises UserError if the bounds do not fit the policy's actions.
        """
        raise UserError(
            f"{self.WRITES} have no tolerance in metres and radians: leave acceptance.tolerance_m and tolerance_rad "
            "at 0"
        )

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        """Expands one tolerance for all moving dimensions, or one per dimension, to one per step as for `bound`.

        Raises UserError if their number does not fit.
        """
        if any(bins):
            raise UserError(f"{self.WRITES} have no bins: leave acceptance.bins at 0")
        return ()

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        """Maximum deviation of an accepted action from the target's own, float64 [horizon, dims] in robot units.

        `bins`: acceptance tolerances, one per action token (bins), number (digits) or coefficient (FAST).
        """
        return np.zeros((self.horizon, len(self.names)))


class WrittenChunkCodec(Codec):
    """The base class for answers that end with one of `end_ids`, which is part of them, or after `max_tokens`."""

    if TYPE_CHECKING:

        @property
        def end_ids(self) -> frozenset[int]: ...

    def in_text(self, tokens: Sequence[int]) -> bool:
        """Always true: any token may come next, including the end token."""
        return True

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            if n == self.max_tokens or tokens[n - 1] in self.end_ids:
                return n
        return 0

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return spread_bins(bins, self.statistics.moves, gripper_bins) * self.horizon


@dataclass(frozen=True)
class CodecContext:
    """The inputs for making a codec."""

    directory: Path  # the checkpoint, for the codec's own files
    norm_stats: Mapping[str, Any]  # the checkpoint's action statistics by dataset
    unnorm_key: str  # the dataset whose statistics are used; empty: the only one
    vocab_size: int  # token ids in the vocabulary, padding rows not counted
    bins: int  # bin edges per action dimension
    end_ids: frozenset[int] = frozenset()  # end tokens of a policy that writes text before its action

    @property
    def statistics(self) -> ActionStatistics:
        return checked_statistics(self.directory, self.norm_stats, self.unnorm_key)


def make_codec(name: str, context: CodecContext) -> Codec:
    """Makes the codec of a name; UserError if it is unknown, or the checkpoint does not fit it."""
    known = CODECS.entries()
    if name not in known:
        raise UserError(f"{context.directory}: unknown action codec '{name}'; known: {', '.join(known)}")
    codec: Codec = known[name].make(context)
    return codec
