# SPDX-License-Identifier: Apache-2.0
"""The seam between tokens and actions.

A codec is one file: a class and a function that makes it from a `CodecContext`, registered by name; another package
adds one with an entry point of the group `specvla_ros.codecs`.
"""

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

Self = TypeVar("Self", bound="ChunkCodec")

CODECS = Registry("specvla_ros.codecs", [f"specvla_ros.models.codecs.{name}" for name in ("bins", "digits", "fast")])
CODEC_FOLDER = "action_tokenizer"
"""Where a checkpoint keeps what its codec needs beside config.json, as LeRobot's do."""
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
        """See `TokenDistances`; a dimension is a place among the action's tokens."""
        return compare_drafts(trees, self.first, self.stop, self.bins)


class TokenDistances(Protocol):
    """How far apart two tokens of an answer are, on the device and without a read-back."""

    def contain(self, tokens: Tensor) -> Tensor:
        """Bool of the shape of tokens: which of them stand for actions."""

    def compare(self, trees: Trees) -> Comparison:
        """Each drafted token beside the target's own choice.

        Its `dimensions` count the codec's steps, as `Codec.bound` takes their tolerances; -1 where one token cannot
        stand for the other within any bound. Its `distances` are in the codec's smallest steps.
        """


@runtime_checkable
class SaysNumbers(Protocol):
    """Optional: a codec whose answers say one number of an action after the other."""

    def begun(self, tokens: Sequence[int]) -> np.ndarray:
        """The completed numbers at the beginning of an answer, float64 [n], action by action, in robot units.

        Tokens that follow do not change them: `decode` gives the same numbers. None after a token that makes the answer
        stand for no action.
        """

    def otherwise(self, drafts: Sequence[Sequence[int]], answer: Sequence[int]) -> list[tuple[int, ...]]:
        """How the number that an answer has begun may go on to its end; nothing where a draft begins it so."""


class Codec(Protocol):
    """Tokens to actions [horizon, dims] and back."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def unnorm_key(self) -> str:
        """Dataset whose action statistics apply; empty where there is no choice."""

    @property
    def horizon(self) -> int:
        """Actions per answer."""

    @property
    def dt_s(self) -> float | None:
        """Seconds that one action takes, as the training data was recorded; None where the checkpoint does not say."""

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest usual actions of the training data, float64 [dims] each, in the robot's units."""

    @property
    def action_ids(self) -> ActionIds: ...
    @property
    def distances(self) -> TokenDistances: ...
    @property
    def max_tokens(self) -> int:
        """Length of the longest answer."""

    def with_text(self, max_text: int) -> "Codec":
        """The same codec with up to `max_text` tokens of text before the actions."""

    def position(self, tokens: Sequence[int]) -> int:
        """Where an answer so far stands, for `distances`: of bins the index of the next action token."""

    def in_text(self, tokens: Sequence[int]) -> bool:
        """Whether the next token may be text."""

    def remaining(self, tokens: Sequence[int]) -> int:
        """Maximum number of tokens still to come."""

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        """The ids that may come next; None: any."""

    def end(self, tokens: Sequence[int], known: int) -> int:
        """Length of the answer if it is complete, else 0; the first `known` tokens did not complete it."""

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a complete answer that stand for its actions."""

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The text of a complete answer, without what ends it."""

    def problem(self, tokens: Sequence[int]) -> str:
        """Why a complete answer stands for no action; empty: it does."""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Action tokens to float64 [horizon, dims] in the robot's units."""

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """Actions [horizon, dims] in the robot's units to the nearest action tokens."""

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        """Index at which a drafted answer continues after a committed beginning that may differ from its own."""

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Actions [horizon, dims] in the robot's units to the scale of the training data, about [-1, 1]."""

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        """The largest acceptance tolerance, in steps as for `bound`, within physical bounds.

        UserError if the bounds do not fit the policy's actions.
        """

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        """One tolerance for all moving dimensions, or one per dimension, to one per step as for `bound`.

        UserError if their number does not fit.
        """

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        """How far an accepted action can be from the target's own: float64 [horizon, dims] in the robot's units.

        `bins`: acceptance tolerances, one per action token (bins), number (digits) or coefficient (FAST).
        """


@dataclass(frozen=True)
class CodecContext:
    """What a codec is made from."""

    directory: Path  # the checkpoint, for the codec's own files
    norm_stats: Mapping[str, Any]  # the checkpoint's action statistics by dataset
    unnorm_key: str  # the dataset whose statistics apply; empty: the only one
    vocab_size: int  # token ids in the vocabulary, padding rows not counted
    bins: int  # bin edges per action dimension
    end_ids: frozenset[int] = frozenset()  # they end the answer of a policy that writes text before its action

    @property
    def statistics(self) -> ActionStatistics:
        return checked_statistics(self.directory, self.norm_stats, self.unnorm_key)


def make_codec(name: str, context: CodecContext) -> Codec:
    """The codec of a name; UserError if there is none, or the checkpoint does not fit it."""
    known = CODECS.entries()
    if name not in known:
        raise UserError(f"{context.directory}: there is no action codec '{name}'; known: {', '.join(known)}")
    codec: Codec = known[name].make(context)
    return codec


class ChunkCodec:
    """What codecs with action statistics share. See `Codec`.

    As it stands, an answer has `max_tokens` tokens, all of them actions, and relaxed acceptance is refused.

    Attributes:
        WRITES: what it writes, in words.
        statistics: normalised values to the robot's units.
    """

    WRITES: ClassVar[str]
    if TYPE_CHECKING:  # a field of one, computed by another

        @property
        def statistics(self) -> ActionStatistics: ...
        @property
        def horizon(self) -> int: ...
        @property
        def max_tokens(self) -> int: ...

    @property
    def names(self) -> tuple[str, ...]:
        return self.statistics.names

    @property
    def unnorm_key(self) -> str:
        return self.statistics.unnorm_key

    @property
    def action_range(self) -> tuple[np.ndarray, np.ndarray]:
        return self.statistics.low, self.statistics.high

    @property
    def action_ids(self) -> ActionIds:
        """Empty: drafts and rules that rely on neighbours being close leave these tokens alone."""
        return ActionIds(0, 0, bins=1)

    @property
    def distances(self) -> TokenDistances:
        return self.action_ids

    def with_text(self: Self, max_text: int) -> Self:
        if max_text:
            raise UserError(f"this policy writes {self.WRITES} and no text: leave decode.max_reasoning_tokens at 0")
        return self

    def position(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def in_text(self, tokens: Sequence[int]) -> bool:
        return False

    def remaining(self, tokens: Sequence[int]) -> int:
        return self.max_tokens - len(tokens)

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None

    def end(self, tokens: Sequence[int], known: int) -> int:
        return self.max_tokens if len(tokens) >= self.max_tokens else 0

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens)

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return ()

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return min(len(answer), len(draft))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        return self.statistics.normalise(actions)

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        raise UserError(f"{self.WRITES} have no tolerance in metres and radians: leave it out, for strict acceptance")

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        if any(bins):
            raise UserError(f"{self.WRITES} have no bins: leave acceptance.bins at 0, for strict acceptance")
        return ()

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, len(self.names)))


class WrittenChunkCodec(ChunkCodec):
    """For answers that one of `end_ids` ends, which belongs to them; at the latest after `max_tokens`."""

    if TYPE_CHECKING:

        @property
        def end_ids(self) -> frozenset[int]: ...

    def in_text(self, tokens: Sequence[int]) -> bool:
        """Always: any token may come next, the end token included."""
        return True

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            if n == self.max_tokens or tokens[n - 1] in self.end_ids:
                return n
        return 0

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        return spread_bins(bins, self.statistics.mask.tolist(), gripper_bins) * self.horizon
