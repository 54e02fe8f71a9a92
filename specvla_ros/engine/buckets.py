# SPDX-License-Identifier: Apache-2.0
"""Buckets: few enough sizes of forward to capture them all, near enough to the real ones to waste little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from specvla_kernels.graph_capture import TILE_ROWS, padded_rows, paddings
from specvla_kernels.product_contest import seconds
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.target import Decoder, Target

_STEP = 16  # rows of the smallest tile that a product may end with
_AS_FAST = 0.99


@dataclass(frozen=True, order=True)
class Bucket:
    """One size of forward.

    Args:
        rows: rows of the forward, those that no segment has included.
        longest: maximum of rows in a segment; decides the attention's tiles.
    """

    rows: int
    longest: int


@dataclass(frozen=True)
class ForwardSizes:
    """Which forwards an engine's settings can lead to.

    Args:
        slots: maximum of requests in flight; at most one of them has rows of its prompt in a forward.
        nodes: maximum in a tree, the root included; also of what is verified after a prompt.
        prompts: lengths that a prompt may have, in rows; at least one.
        forwards: that a prompt is spread over.
        measured: sizes that were found on the device, see `measured_on`; empty: they go by a rule.
    """

    slots: int
    nodes: int
    prompts: tuple[int, ...]
    forwards: int = 1
    measured: tuple[int, ...] = ()

    @staticmethod
    def from_settings(policy: Target, settings: EngineSettings) -> "ForwardSizes":
        """Those of a policy whose prompts may have any length that a slot has rows for."""
        prompts = range(policy.image_tokens + 1, policy.image_tokens + settings.max_text_tokens + 1)
        return ForwardSizes(settings.slots, settings.tree_nodes, tuple(prompts), settings.chunks)

    def measured_on(self, decoder: Decoder) -> "ForwardSizes":
        """With the sizes where a tile of the device's products ends; unchanged on a CPU.

        The decoder's products are timed.
        """
        if decoder.device.type != "cuda":
            return self
        most = max(bucket.rows for bucket in replace(self, measured=()).buckets())
        # Above one tile, where weights are not all that is waited for.
        tried = range(TILE_ROWS + _STEP, most + 1, _STEP)
        x = torch.randn(most, decoder.config.hidden_size, device=decoder.device).to(decoder.dtype)
        times = {rows: seconds(partial(decoder.products, x[:rows]), decoder.device) for rows in tried}
        return replace(self, measured=worth_capturing(times))

    @property
    def segments(self) -> int:
        """Of one forward at most: a tree of each request, and the end of a prompt in front of the newest one's."""
        return self.slots + 1

    @property
    def wanted(self) -> int:
        """Rows of one forward at most whose logits are wanted: all nodes of all trees."""
        return self.slots * self.nodes

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Rows of a prompt that a forward may carry, ascending."""
        found = set()
        for length in self.prompts:
            rows = self.chunk_rows(length)
            found |= {rows, length % rows or rows}
        return tuple(sorted(found))

    def chunk_rows(self, length: int) -> int:
        """Rows of each chunk of a prompt but the last.

        With measured sizes, a chunk takes the rows that its forward would be padded with beside the trees of the
        others.
        """
        rows = even_rows(length, self.forwards)
        if self.measured:
            rows = min(length, padded_rows(rows + self._others, self.measured) - self._others)
        return rows

    def bucket(self, lengths: Sequence[int]) -> Bucket | None:
        """The bucket of a forward with segments of these lengths; None: the settings cannot lead to it."""
        longest = self._longest(max(lengths))
        if len(lengths) > self.segments or not longest:
            return None
        rows = padded_rows(sum(lengths), self.measured)
        return Bucket(rows, min(longest, rows))

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a forward of these settings can have, ascending."""
        others, measured = self._others, self.measured
        ranges = [(1, others + self.nodes, self.nodes)]
        ranges += [(rows, rows + others + self.nodes - 1, self._longest(rows)) for rows in self.chunks]
        found = {
            Bucket(rows, min(longest, rows)) for low, high, longest in ranges for rows in paddings(low, high, measured)
        }
        return tuple(sorted(found))

    @property
    def _others(self) -> int:
        """Rows of the other requests' trees at most, beside a prompt."""
        return (self.slots - 1) * self.nodes

    def _longest(self, length: int) -> int:
        """The rows that attention is tiled for if the longest segment has so many; 0: there is none such."""
        return next((limit for limit in (self.nodes, self.chunks[-1]) if length <= limit), 0)


def even_rows(length: int, forwards: int) -> int:
    """Rows of each chunk but the last of a prompt that is spread evenly."""
    return -(-length // forwards)


def worth_capturing(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes, by their seconds, that are faster than every larger one, ascending."""
    found: list[int] = []
    least = float("inf")
    for rows in sorted(seconds, reverse=True):
        if seconds[rows] < _AS_FAST * least:
            found.append(rows)
        least = min(least, seconds[rows])
    return tuple(reversed(found))
