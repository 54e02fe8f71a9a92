"""Statistics of successes and failures."""

from math import comb, sqrt

_Z_95 = 1.959963984540054


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson 1927): honest at 0, at 1 and for few episodes.

    Args:
        successes: 0 to n.
        n: episodes; 0 gives (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, _Z_95**2
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 / (1 + z2 / n) * sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two settings succeed alike (McNemar 1947), from the pairs in which they differ.

    Args:
        only_first: episodes in which the first setting alone succeeded.
        only_second: those of the second alone.
    """
    n = only_first + only_second
    tail = sum(comb(n, k) for k in range(min(only_first, only_second) + 1)) / 2**n
    return min(1.0, 2 * tail)


def paired_difference(only_first: int, only_second: int, n: int) -> tuple[float, float, float]:
    """The second setting's success rate less the first's, with a 95 % interval (Agresti and Min 2005).

    Half a pair is added to each of the four cells, so that pairs which never differ do not count as certainty.

    Args:
        only_first: pairs in which the first setting alone succeeded.
        only_second: those of the second alone.
        n: pairs; 0 gives (0, -1, 1).
    """
    if n == 0:
        return 0.0, -1.0, 1.0
    lost, won, pairs = only_first + 0.5, only_second + 0.5, n + 2.0
    middle = (won - lost) / pairs
    half = _Z_95 * sqrt(lost + won - (won - lost) ** 2 / pairs) / pairs
    return (only_second - only_first) / n, max(-1.0, middle - half), min(1.0, middle + half)
