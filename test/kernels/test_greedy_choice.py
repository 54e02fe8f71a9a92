# SPDX-License-Identifier: Apache-2.0
"""The likeliest token: kernel, reference and a plain loop agree, ties and NaN included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.nightly import examples

from specvla_kernels.greedy_choice import greedy_choice_reference, greedy_choice_triton

pytest.importorskip("triton")

VALUES = st.sampled_from([-math.inf, -2.0, 0.0, 1.0, 1.5, math.inf, math.nan])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from([3, 4096, 9001]))
def test_the_lowest_id_wins_and_a_nan_is_no_choice(rows: list[list[float]], vocab: int) -> None:
    logits = torch.full((len(rows), vocab), -3.0)
    logits[:, [0, vocab // 2, vocab - 1]] = torch.tensor(rows)
    expected = [
        -1 if any(map(math.isnan, row)) else min(range(vocab), key=lambda i: -values[i])
        for row, values in zip(rows, logits.tolist(), strict=True)
    ]
    logits = logits.to(DEVICE)
    assert greedy_choice_reference(logits).tolist() == expected
    assert greedy_choice_triton(logits).tolist() == expected


def test_a_row_of_minus_infinity_has_its_first_token() -> None:
    logits = torch.full((2, 5000), -math.inf, device=DEVICE)
    assert greedy_choice_triton(logits).tolist() == [0, 0] == greedy_choice_reference(logits).tolist()
