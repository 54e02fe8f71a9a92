# SPDX-License-Identifier: Apache-2.0
"""FLy beside a plain reading of its paper, on random chains: with the paper's numbers, others, and without window."""

import math

import numpy as np
import pytest
import torch
from support.verifications import make_tree, verify_tree

from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.speculation.accept import AcceptReason, accept
from specvla_ros.speculation.rules.fly import Fly

_NO_ACTIONS = ActionIds(first=1000, stop=1001, bins=1)
_ROOT = 0
_CHAINS = 600
_NUMBERS = {
    "paper": (6, 0.3),
    "no window": (0, 0.3),
    "no gate": (6, 0.0),
    "neither": (0, 0.0),
    "ablation": (4, 0.3),
    "ours": (2, 0.3),
    "narrow": (1, 0.7),
}


def plain_reading(draft: list[int], logits: np.ndarray, window: int, theta: float) -> list[int]:
    """What the paper commits, position by position: gate, then window, and all from the first rejection on is dropped.

    Args:
        draft: K tokens.
        logits: [K + 1, vocab], the target's at each draft's position and after the last.
    """
    k, vocab = len(draft), logits.shape[1]
    target = [int(row.argmax()) for row in logits]
    match = [draft[j] == target[j] for j in range(k)]
    for j in range(1, k + 1):  # positions count from 1, as in the paper
        if match[j - 1]:
            continue
        shifted = logits[j - 1] - logits[j - 1].max()
        p = np.exp(shifted) / np.exp(shifted).sum()
        h = -sum(float(x) * math.log(x) for x in p if x > 0) / math.log(vocab)
        if h < theta:
            return [*draft[: j - 1], target[j - 1]]  # deterministic: strict
        if j + window > k:
            return [*draft[: j - 1], target[j - 1]]  # out of bounds
        mismatches = sum(1 - match[i - 1] for i in range(j + 1, j + window + 1))
        if mismatches > 0:
            return [*draft[: j - 1], target[j - 1]]  # the target corrects itself
    return [*draft, target[k]]


@pytest.mark.parametrize("numbers", _NUMBERS)
def test_random_chains_are_judged_as_the_paper_says(numbers: str) -> None:
    window, theta = _NUMBERS[numbers]
    rng = np.random.default_rng(sorted(_NUMBERS).index(numbers))
    loosened = whole = 0
    for _ in range(_CHAINS):
        k = int(rng.choice([1, 3, 8, 15, 25]))
        vocab = int(rng.choice([8, 40]))
        sharpness = rng.choice([0.5, 3.0, 10.0], size=(k + 1, 1))
        logits = (rng.normal(size=(k + 1, vocab)) * sharpness).astype(np.float32).astype(np.float64)
        draft = [int(row.argmax()) if rng.random() < 0.85 else int(rng.integers(vocab)) for row in logits[:k]]
        wanted = plain_reading(draft, logits, window, theta)
        case = verify_tree(
            make_tree([_ROOT, *draft], list(range(-1, k))), torch.from_numpy(logits), actions=_NO_ACTIONS
        )
        (row,) = accept(Fly(theta, window), case.verification()).tolist()
        width = k + 1
        assert row[width : width + row[-1]] == wanted
        reasons = row[3 * width : 3 * width + row[-1]]
        loosened += AcceptReason.DEFERRED in reasons
        whole += len(wanted) == k + 1
    assert loosened > 20 and whole > 0
    assert (whole == _CHAINS) == (numbers == "neither")


def test_without_a_window_the_last_drafted_token_can_be_excused() -> None:
    unsure = torch.zeros(3, 8)
    unsure[:, 5] = 0.1
    case = verify_tree(make_tree([_ROOT, 5, 3], [-1, 0, 1]), unsure, actions=_NO_ACTIONS)
    committed = {window: int(accept(Fly(0.3, window), case.verification())[0, -1]) - 1 for window in (0, 1)}
    assert committed == {0: 2, 1: 1}
