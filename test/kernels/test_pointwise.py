# SPDX-License-Identifier: Apache-2.0
"""The norm behind a residual, and the MLP's gate: the kernels against the references in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES, TOLERANCES

from specvla_kernels.rmsnorm_residual import rmsnorm_residual_reference, rmsnorm_residual_triton
from specvla_kernels.swiglu import swiglu_reference, swiglu_triton

pytest.importorskip("triton")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 3, 192, 1000, 4096]), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_a_norm_behind_a_residual(n_rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(n_rows, 2 * hidden, generator=generator) * 5).to(DEVICE, dtype)
    x, residual = wide.chunk(2, dim=1)  # strided rows
    weight = torch.randn(hidden, generator=generator).to(DEVICE, dtype)

    normed, total = rmsnorm_residual_triton(x, residual, weight, 1e-6)

    # Triton's interpreter cuts bfloat16 off where a GPU rounds it.
    torch.testing.assert_close(total.double(), x.double() + residual.double(), **TOLERANCES[dtype])
    expected, _ = rmsnorm_residual_reference(total.double(), torch.zeros_like(total).double(), weight.double(), 1e-6)
    torch.testing.assert_close(normed.double(), expected, **TOLERANCES[dtype])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 7, 480, 1024, 1500]), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_a_gate(n_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(n_rows, 2 * width, generator=generator) * 5).to(DEVICE, dtype)
    expected = swiglu_reference(gate_up.double())
    torch.testing.assert_close(swiglu_triton(gate_up).double(), expected, **TOLERANCES[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy
def test_a_gate_far_from_zero_is_closed_or_open() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=DEVICE)
    assert swiglu_triton(gate_up).tolist() == [[0.0, 200.0]]
