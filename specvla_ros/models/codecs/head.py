# SPDX-License-Identifier: Apache-2.0
"""The codec of a policy that writes no tokens: a head gives its actions (OpenVLA-OFT)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.models.codecs.bins import ActionStatistics
from specvla_ros.models.codecs.chunk import ChunkCodec


@dataclass(frozen=True)
class HeadCodec(ChunkCodec):
    """Answers that end with their first token, which stands for nothing. See `Codec`, and `Target.head`.

    Args:
        statistics: smallest and largest usual values.
        horizon: actions per answer.
        dt_s: see `Codec`.
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
