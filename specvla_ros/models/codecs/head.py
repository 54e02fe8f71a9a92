# SPDX-License-Identifier: Apache-2.0
"""The codec of a policy that writes no tokens: a head gives its actions (OpenVLA-OFT)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics
from specvla_ros.models.codecs.codec import ActionIds


@dataclass(frozen=True)
class HeadCodec:
    """Answers that end with their first token, which stands for nothing. See `Codec`, and `Target.head`.

    Args:
        statistics: smallest and largest usual values.
        horizon: actions per answer.
        dt_s: see `Codec`.
    """

    statistics: ActionStatistics
    horizon: int
    dt_s: float | None = None

    max_tokens: int = 1

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
        """None."""
        return ActionIds(0, 0, bins=1)

    def with_text(self, max_text: int) -> "HeadCodec":
        """See `Codec`.

        Raises:
            UserError: it is not 0.
        """
        if max_text:
            raise UserError("this policy writes nothing: leave decode.max_reasoning_tokens at 0")
        return self

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
        """See `Codec`.

        Raises:
            UserError: always: no token stands for an action.
        """
        raise UserError("this policy's actions come from a head and not from tokens")

    def encode(self, actions: np.ndarray) -> tuple[int, ...]:
        """See `decode`."""
        raise UserError("this policy's actions come from a head and not from tokens")

    def resume(self, draft: Sequence[int], answer: Sequence[int]) -> int:
        return len(draft)

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        return self.statistics.normalise(actions)

    def bins_within(self, *, metres: float, radians: float, gripper_bins: int) -> tuple[int, ...]:
        raise UserError("this policy writes no tokens that could be accepted for others: leave the tolerance out")

    def spread_bins(self, bins: Sequence[int], gripper_bins: int) -> tuple[int, ...]:
        """See `Codec`.

        Raises:
            UserError: a tolerance is given.
        """
        if any(bins):
            raise UserError(
                "this policy writes no tokens that could be accepted for others: leave acceptance.bins at 0"
            )
        return ()

    def bound(self, bins: Sequence[int]) -> np.ndarray:
        return np.zeros((self.horizon, len(self.names)))
