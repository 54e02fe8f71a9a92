# SPDX-License-Identifier: Apache-2.0
"""Statistics of results: success rates and their paired comparison."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from typing import Any

Z_95 = 1.959963984540054  # standard deviations of a normal distribution on either side of its mean that hold 95 %


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson 1927): honest at 0, at 1 and for few episodes, even none."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, Z_95**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two settings succeed alike (McNemar 1947), from the pairs in which they differ."""
    n = only_first + only_second
    tail = sum(comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired_difference(only_first: int, only_second: int, n: int) -> tuple[float, float, float]:
    """The second setting's success rate less the first's, with a 95 % interval (Agresti and Min 2005).

    Half a pair is added to each of the four cells, so that pairs which never differ do not count as certainty; without
    pairs it is (0, -1, 1).
    """
    if n == 0:
        return 0.0, -1.0, 1.0
    lost, won, pairs = only_first + 0.5, only_second + 0.5, n + 2.0
    middle = (won - lost) / pairs
    half = Z_95 * sqrt(lost + won - (won - lost) ** 2 / pairs) / pairs
    return (only_second - only_first) / n, max(-1.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Rate:
    """A share of episodes with its 95 % Wilson interval."""

    successes: int
    n: int

    @property
    def value(self) -> float:
        return self.successes / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.n)

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {"successes": self.successes, "episodes": self.n, "rate": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


@dataclass(frozen=True)
class PairedComparison:
    """Two settings on the same tasks and seeds."""

    first: Rate
    second: Rate
    only_first: int  # pairs in which the first alone succeeded
    only_second: int
    p: float  # of `mcnemar_p`

    @staticmethod
    def from_pairs(pairs: Sequence[tuple[bool, bool]]) -> "PairedComparison":
        """From whether the first and whether the second setting succeeded, pair by pair."""
        only_first = sum(first and not second for first, second in pairs)
        only_second = sum(second and not first for first, second in pairs)
        return PairedComparison(
            first=Rate(sum(first for first, _ in pairs), len(pairs)),
            second=Rate(sum(second for _, second in pairs), len(pairs)),
            only_first=only_first,
            only_second=only_second,
            p=mcnemar_p(only_first, only_second),
        )

    @property
    def points(self) -> tuple[float, float, float]:
        """The second's success less the first's in percentage points, and its 95 % interval."""
        middle, low, high = paired_difference(self.only_first, self.only_second, self.first.n)
        return 100 * middle, 100 * low, 100 * high

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"first": self.first.as_json(), "second": self.second.as_json()}

    def __str__(self) -> str:
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*self.points)
