# SPDX-License-Identifier: Apache-2.0
"""Anytime-valid tests and confidence sequences of a mean: one may look after every value, and stop when one likes.

A null hypothesis is a mean of at most m. A gambler against it stakes a fraction f of what they have on each value, at
odds that are fair if the mean is m: after n values they have the product of 1 - f + f (x - low) / (m - low). If the
null hypothesis is true this grows to 1 / alpha with a probability of at most alpha, however long it goes on (Ville
1939; Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference", section 2).
The e-value is the mean over gamblers of all fractions (Robbins' method of mixtures; Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting", section 5).
"""

from collections.abc import Sequence

import numpy as np

_FRACTIONS = (np.arange(64) + 0.5) / 64
_HALVINGS = 30  # of an interval; beyond what is shown of a bound


def log_e_values(values: Sequence[float] | np.ndarray, mean: float, low: float) -> np.ndarray:
    """Natural logarithms of the evidence against a mean of at most `mean`, after each value.

    Args:
        values: float [..., n], none below `low`, each drawn alike and whatever the ones before were.
        mean: of the null hypothesis, above `low`.
        low: the smallest value that there may be.

    Returns:
        float64 [..., n].
    """
    shares = (np.asarray(values, dtype=np.float64) - low) / (mean - low)
    won = np.log1p(_FRACTIONS * (shares[..., None] - 1.0)).cumsum(axis=-2)
    most = won.max(axis=-1)
    return np.asarray(most + np.log(np.exp(won - most[..., None]).mean(axis=-1)))


def lower_bound(values: Sequence[float] | np.ndarray, low: float, high: float, alpha: float) -> float:
    """What the mean is above, wrongly so at any time with a probability of at most alpha.

    Args:
        values: float [n], from `low` to `high`, as of `log_e_values`.
        low: the smallest value that there may be.
        high: the largest.
        alpha: the probability.
    """
    # The evidence falls as the mean of the null hypothesis rises: each gambler's does.
    below, above = low, high
    for _ in range(_HALVINGS if len(values) else 0):
        middle = (below + above) / 2
        refuted = log_e_values(values, middle, low).max() >= -np.log(alpha)
        below, above = (middle, above) if refuted else (below, middle)
    return below


def confidence_interval(
    values: Sequence[float] | np.ndarray, low: float, high: float, alpha: float
) -> tuple[float, float]:
    """What holds the mean, at all times together with a probability of at least 1 - alpha; as `lower_bound`."""
    mirrored = -np.asarray(values, dtype=np.float64)
    return lower_bound(values, low, high, alpha / 2), -lower_bound(mirrored, -high, -low, alpha / 2)
