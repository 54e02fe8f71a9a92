# SPDX-License-Identifier: Apache-2.0
"""The norm behind a residual, and the MLP's gate: the kernels against the references in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES
from support.nightly import examples

from specvla_kernels.gated_unit import GATES, gated_unit_reference, gated_unit_triton
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_reference, rmsnorm_residual_triton, rmsnorm_triton

pytest.importorskip("triton")


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 3, 192, 1000, 4096]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_norm_behind_a_residual(n_rows: int, hidden: int, dtype: torch.dtype, unit_offset: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(n_rows, 2 * hidden, generator=generator) * 5).to(DEVICE, dtype)
    x, residual = wide.chunk(2, dim=1)  # strided rows
    norm = RowNorm(torch.randn(hidden, generator=generator).to(DEVICE, dtype), 1e-6, unit_offset)

    normed, total = rmsnorm_residual_triton(x, residual, norm)

    # Triton's interpreter cuts bfloat16 off where a GPU rounds it.
    torch.testing.assert_close(total.double(), x.double() + residual.double(), **TOLERANCES[dtype])
    exact = RowNorm(norm.weight.double(), norm.eps, unit_offset)
    torch.testing.assert_close(normed.double(), rmsnorm_reference(total.double(), exact), **TOLERANCES[dtype])
    alone = rmsnorm_triton(x, norm)
    torch.testing.assert_close(alone.double(), rmsnorm_reference(x.double(), exact), **TOLERANCES[dtype])


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 7, 480, 1024, 1500]),
    st.sampled_from(DTYPES),
    st.sampled_from(list(GATES)),
    st.integers(0, 1000),
)
def test_a_gate(n_rows: int, width: int, dtype: torch.dtype, gate: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(n_rows, 2 * width, generator=generator) * 5).to(DEVICE, dtype)
    expected = gated_unit_reference(gate_up.double(), gate)
    torch.testing.assert_close(gated_unit_triton(gate_up, gate).double(), expected, **TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy
@pytest.mark.parametrize("gate", list(GATES))
def test_a_gate_far_from_zero_is_closed_or_open(gate: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    assert gated_unit_triton(gate_up, gate).tolist() == [[0.0, 200.0]]
