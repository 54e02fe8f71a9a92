# SPDX-License-Identifier: Apache-2.0
"""Statistics of success: rates, paired comparisons, and anytime-valid tests and intervals.

The null hypothesis is a mean of at most m. A gambler bets against it and stakes a fraction f of the capital on each
value, at odds that are fair if the mean is m. After n values the capital is the product of 1 - f + f (x - low) / (m -
low). If the null hypothesis is true, the capital ever reaches 1 / alpha with a probability of at most alpha (Ville
1939; Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference", section 2).
The e-value is the mean capital over gamblers of all fractions (Robbins' method of mixtures; Waudby-Smith and Ramdas
2024, "Estimating means of bounded random variables by betting", section 5).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

Z_95 = 1.959963984540054  # half-width of a normal distribution's central 95 %, in standard deviations


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson 1927); valid at 0, at 1 and for few or no episodes."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, Z_95**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value for equal success of two settings (McNemar 1947), from the pairs in which they differ."""
    n = only_first + only_second
    tail = sum(comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired_difference(only_first: int, only_second: int, n: int) -> tuple[float, float, float]:
    """The second setting's success rate minus the first's, with a 95 % interval (Agresti and Min 2005).

    Half a pair is added to each of the four cells, so that pairs which never differ do not imply certainty. Without
    pairs the result is (0, -1, 1).
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

    @property
    def percent(self) -> str:
        """The share in percent. It reads 0 or 100 only if no or every episode succeeded."""
        near_an_end = 0.0 < self.value < 0.005 or 0.995 <= self.value < 1.0
        return f"{100 * self.value:.{int(near_an_end)}f} %"

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.percent} [{100 * low:.0f}, {100 * high:.0f}]"


@dataclass(frozen=True)
class PairedComparison:
    """Two settings on the same tasks and seeds."""

    first: Rate
    second: Rate
    only_first: int  # pairs in which only the first succeeded
    only_second: int
    p: float  # see `mcnemar_p`

    @staticmethod
    def from_pairs(pairs: Sequence[tuple[bool, bool]]) -> "PairedComparison":
        """Builds the comparison from the success of the first and the second setting in each pair."""
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
        """The second's success minus the first's in percentage points, and its 95 % interval."""
        middle, low, high = paired_difference(self.only_first, self.only_second, self.first.n)
        return 100 * middle, 100 * low, 100 * high

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"first": self.first.as_json(), "second": self.second.as_json()}

    def __str__(self) -> str:
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*self.points)


_FRACTIONS = (np.arange(64) + 0.5) / 64
_HALVINGS = 30  # bisection steps; finer than any displayed bound


def log_e_values(values: Sequence[float] | np.ndarray, mean: float, low: float) -> np.ndarray:
    """Natural logarithms of the e-values against a mean of at most `mean`, after each value: float64 [..., n].

    Args:
        values: float [..., n], at least `low`, each from the same distribution regardless of the earlier ones.
        mean: the null hypothesis' mean, above `low`.
        low: the smallest possible value.
    """
    shares = (np.asarray(values, dtype=np.float64) - low) / (mean - low)
    won = np.log1p(_FRACTIONS * (shares[..., None] - 1.0)).cumsum(axis=-2)
    most = won.max(axis=-1)
    return np.asarray(most + np.log(np.exp(won - most[..., None]).mean(axis=-1)))


def lower_bound(values: Sequence[float] | np.ndarray, low: float, high: float, alpha: float) -> float:
    """An anytime-valid lower bound of the mean of values in [low, high]; ever wrong with probability at most alpha."""
    # Each gambler's evidence, and so their mean, falls as the null hypothesis' mean rises.
    below, above = low, high
    for _ in range(_HALVINGS if len(values) else 0):
        middle = (below + above) / 2
        refuted = log_e_values(values, middle, low).max() >= -np.log(alpha)
        below, above = (middle, above) if refuted else (below, middle)
    return below


def confidence_interval(
    values: Sequence[float] | np.ndarray, low: float, high: float, alpha: float
) -> tuple[float, float]:
    """An anytime-valid interval: with probability at least 1 - alpha it contains the mean after every value."""
    mirrored = -np.asarray(values, dtype=np.float64)
    return lower_bound(values, low, high, alpha / 2), -lower_bound(mirrored, -high, -low, alpha / 2)
