# SPDX-License-Identifier: Apache-2.0
"""What codecs of chunks share: action statistics, no text before the actions, and ids whose neighbours mean nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics
from specvla_ros.models.codecs.codec import ActionIds, TokenDistances

Self = TypeVar("Self", bound="ChunkCodec")


class ChunkCodec:
    """See `Codec`. Relaxed acceptance is refused, unless the codec knows how far its tokens are apart.

    Attributes:
        WRITES: what it writes, in words.
        statistics: normalised values to the robot's units.
        horizon: actions per answer.
    """

    WRITES: ClassVar[str]
    if TYPE_CHECKING:  # a field of one, computed by another

        @property
        def statistics(self) -> ActionStatistics: ...
        @property
        def horizon(self) -> int: ...

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
        @property
        def max_tokens(self) -> int: ...

    def position(self, tokens: Sequence[int]) -> int:
        return 0

    def in_text(self, tokens: Sequence[int]) -> bool:
        """Always: any token may come next, the end token included."""
        return True

    def remaining(self, tokens: Sequence[int]) -> int:
        return self.max_tokens - len(tokens)

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None

    def end(self, tokens: Sequence[int], known: int) -> int:
        for n in range(known + 1, len(tokens) + 1):
            if n == self.max_tokens or tokens[n - 1] in self.end_ids:
                return n
        return 0


@dataclass(frozen=True)
class HeadCodec(ChunkCodec):
    """For a policy that writes no tokens, whose actions come from a head: see `Target.head`.

    An answer ends with its first token, which stands for nothing.
    """

    WRITES: ClassVar[str] = "actions of a head"

    statistics: ActionStatistics
    horizon: int
    dt_s: float | None = None

    max_tokens: int = 1

    def position(self, tokens: Sequence[int]) -> int:
        return 0

    def in_text(self, tokens: Sequence[int]) -> bool:
        return False

    def remaining(self, tokens: Sequence[int]) -> int:
        return 1 - len(tokens)

    def legal_ids(self, tokens: Sequence[int]) -> range | None:
        return None

    def end(self, tokens: Sequence[int], known: int) -> int:
        return min(1, len(tokens))

    def action_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return ()

    def text_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return ()

    def problem(self, tokens: Sequence[int]) -> str:
        return ""

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        raise UserError("this policy's actions come from a head and not from tokens")

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        raise UserError("this policy's actions come from a head and not from tokens")

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return len(draft)
