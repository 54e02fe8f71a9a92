# SPDX-License-Identifier: Apache-2.0
"""The entropy of a row: kernel, reference and the definition agree, ties, infinities and NaN included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE
from support.nightly import examples

from specvla_kernels.uncertainty import uncertainty_reference, uncertainty_triton

pytest.importorskip("triton")

VALUES = st.sampled_from([-math.inf, -40.0, -2.0, 0.0, 1.0, 1.0, 1.5, math.inf, math.nan])


def as_defined(row: list[float], terms: int) -> float:
    largest = max(row, key=lambda value: math.inf if math.isnan(value) else value)
    if not math.isfinite(largest):
        return math.nan
    weights = [math.exp(value - largest) for value in row]
    shares = sorted((weight / sum(weights) for weight in weights), reverse=True)
    entropy = -sum(share * math.log(share) for share in shares[: terms or None] if share > 0)
    return entropy if terms else entropy / math.log(len(row))


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.lists(st.lists(VALUES, min_size=4, max_size=4), min_size=1, max_size=3),
    vocab=st.sampled_from([4, 40, 4096, 9001]),
    others=st.sampled_from([-math.inf, -3.0, 1.0]),
    terms=st.sampled_from([0, 3]),
)
def test_kernel_reference_and_definition_agree(rows: list[list[float]], vocab: int, others: float, terms: int) -> None:
    logits = torch.full((len(rows), vocab), others)
    logits[:, [0, 1, vocab // 2, vocab - 1]] = torch.tensor(rows)
    expected = torch.tensor([as_defined(row, terms) for row in logits.tolist()])
    for run in (uncertainty_reference, uncertainty_triton):
        torch.testing.assert_close(run(logits.to(DEVICE), terms).cpu(), expected, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_a_flat_row_is_as_unsure_as_can_be() -> None:
    flat = torch.zeros(2, 5000, device=DEVICE)
    for run in (uncertainty_reference, uncertainty_triton):
        torch.testing.assert_close(run(flat).cpu(), torch.ones(2), atol=2e-5, rtol=0.0)
