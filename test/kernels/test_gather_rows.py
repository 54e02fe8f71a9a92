# SPDX-License-Identifier: Apache-2.0
"""Rows by index and whole parts: kernel and reference fill the memory alike, and leave the rest of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES
from support.nightly import examples

from specvla_kernels.gather_rows import gather_rows_reference, gather_rows_triton

pytest.importorskip("triton")


@settings(max_examples=examples(40), deadline=None)
@given(
    picked=st.lists(st.integers(0, 6), max_size=5),
    known=st.integers(0, 4),
    size=st.sampled_from([8, 48, 1100]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_memory_holds_the_rows_and_nothing_else_changes(
    picked: list[int], known: int, size: int, dtype: torch.dtype
) -> None:
    states, *parts = torch.randn(3, 7, size, generator=torch.Generator().manual_seed(size + known)).to(DEVICE, dtype)
    rows = torch.tensor([99, *picked], dtype=torch.int64, device=DEVICE)[1:]  # less aligned than memory of its own
    whole = parts[0][1 : 1 + known], parts[1][:known]
    for run in (gather_rows_reference, gather_rows_triton):
        out = torch.full((len(picked), size), 7.0, dtype=dtype, device=DEVICE)
        one, other = torch.full((2, 6, size), 7.0, dtype=dtype, device=DEVICE)
        run(states, rows, out, whole, (one, other))
        assert out.equal(states[picked])
        for place, part in zip((one, other), whole, strict=True):
            assert place[:known].equal(part) and (place[known:] == 7.0).all()
