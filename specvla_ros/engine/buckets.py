"""Which sizes of forward are captured: few enough to capture them all, near enough to the real ones to waste little."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import Target

_TILE_ROWS = 64  # of a matrix product: a part of a tile takes as long as a whole one
_PART = 8  # above 512 rows a bucket is at most an eighth larger than the power of two below it asks for


@dataclass(frozen=True, order=True)
class Bucket:
    """One size of forward.

    Args:
        rows: of the forward, those that no segment has included.
        longest: rows of a segment at most; decides the attention's tiles.
    """

    rows: int
    longest: int


@dataclass(frozen=True)
class ForwardSizes:
    """Which forwards an engine's settings can lead to.

    Args:
        slots: requests in flight at most; one of them at most has rows of its prompt in a forward.
        nodes: of a tree at most, the root included; also of what is verified behind a prompt.
        chunks: rows of a prompt that a forward may carry, ascending, at least one.
    """

    slots: int
    nodes: int
    chunks: tuple[int, ...]

    @staticmethod
    def from_settings(policy: Target, settings: EngineSettings) -> "ForwardSizes":
        """Those of a policy whose prompts may have any length that a slot has rows for."""
        prompts = range(policy.image_tokens + 1, policy.image_tokens + settings.max_text_tokens + 1)
        chunks = {rows for length in prompts for rows in _chunks(length, settings.chunks)}
        return ForwardSizes(settings.slots, settings.tree_nodes, tuple(sorted(chunks)))

    @property
    def segments(self) -> int:
        """Of one forward at most: a tree of each request, and the end of a prompt in front of the newest one's."""
        return self.slots + 1

    def bucket(self, lengths: Sequence[int]) -> Bucket | None:
        """The bucket of a forward; None for one that the settings cannot lead to.

        Args:
            lengths: rows of each segment.
        """
        longest = self._longest(max(lengths))
        if len(lengths) > self.segments or not longest:
            return None
        rows = padded_rows(sum(lengths))
        return Bucket(rows, min(longest, rows))

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a forward of these settings can have, ascending."""
        others = (self.slots - 1) * self.nodes
        ranges = [(1, others + self.nodes, self.nodes)]
        ranges += [(rows, rows + others + self.nodes - 1, self._longest(rows)) for rows in self.chunks]
        found = {Bucket(rows, min(longest, rows)) for least, most, longest in ranges for rows in _paddings(least, most)}
        return tuple(sorted(found))

    def _longest(self, length: int) -> int:
        """What attention is tiled for in a forward whose longest segment has so many rows; 0: there is none such."""
        return next((most for most in (self.nodes, self.chunks[-1]) if length <= most), 0)


def padded_rows(rows: int) -> int:
    """Rows of the smallest bucket that holds so many: powers of two, then multiples of a tile or an eighth."""
    power = 1 << (rows - 1).bit_length()
    step = min(power, max(_TILE_ROWS, power // _PART))
    return -(-rows // step) * step


def _paddings(least: int, most: int) -> Iterator[int]:
    """The buckets' rows for so many rows to so many."""
    rows = padded_rows(least)
    yield rows
    while rows < most:
        rows = padded_rows(rows + 1)
        yield rows


def _chunks(length: int, forwards: int) -> set[int]:
    """Rows of the shares of a prompt; see Share.of."""
    rows = -(-length // forwards)
    return {rows, length % rows or rows}
