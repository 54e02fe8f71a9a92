# SPDX-License-Identifier: Apache-2.0
"""LVSpec once more, token by token from the text of its paper (arXiv 2604.05650): what the rule is held against."""

from fractions import Fraction
from math import floor

import numpy as np

from specvla_ros.speculation.rules.lvspec import LVSpec


def plain_reading(
    draft: list[int], target: list[int], hidden: np.ndarray, visual: np.ndarray, rule: LVSpec
) -> tuple[int, list[int]]:
    """Equations 6 to 11 and 2, token by token: how many drafts are accepted, and what is committed."""
    k = len(draft)
    relevance = []
    for state in hidden:
        cosines = [float(state @ row / np.linalg.norm(state) / np.linalg.norm(row)) for row in visual]
        highest = sorted(cosines, reverse=True)[: rule.top_n]
        relevance.append(sum(highest) / len(highest))
    loose = sorted(range(k), key=relevance.__getitem__)[: floor(Fraction(str(rule.loose_share)) * k)]
    length = 0
    for i in range(k):
        match = draft[i] == target[i]
        elsewhere = any(target[i] == draft[j] for j in range(k) if abs(i - j) <= rule.shift)
        if not (match or i in loose or (rule.shift > 0 and elsewhere)):
            break
        length += 1
    return length, [*draft[:length], target[length]]
