# SPDX-License-Identifier: Apache-2.0
"""The int8 product: exact sums of what was rounded, row by row, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES

from specvla_kernels.int8_linear import (
    int8_linear,
    round_rows_reference,
    round_rows_triton,
    scale_sums_reference,
    scale_sums_triton,
)

ALL_DTYPES = (*DTYPES, torch.float64)


def matrix(out_features: int, in_features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    return weight.to(DEVICE), (torch.rand(out_features, generator=generator) * 0.02 + 1e-3).to(DEVICE)


def activations(n_rows: int, in_features: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-3, 3, (n_rows, 1), generator=generator)
    return (torch.randn(n_rows, in_features, generator=generator) * sizes).to(DEVICE, dtype)


@settings(max_examples=60, deadline=None)
@given(
    n_rows=st.sampled_from([1, 2, 16, 17, 31, 32, 70]),
    shape=st.sampled_from([(8, 8), (24, 64), (288, 96), (64, 288)]),
    dtype=st.sampled_from(ALL_DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_error_is_that_of_rounding_activations(
    n_rows: int, shape: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    weight, scales = matrix(*shape, seed)
    x = activations(n_rows, shape[1], dtype, seed)
    result = int8_linear(x, weight, scales)
    assert result.dtype == dtype
    real = weight.double() * scales.double()[:, None]
    half_step = x.double().abs().amax(dim=1, keepdim=True) / 127 / 2
    expected = x.double() @ real.T
    rounding = torch.finfo(dtype).eps * expected.abs() + 1e-5 * half_step  # of the result, and of the scales
    assert ((result.double() - expected).abs() <= half_step * real.abs().sum(dim=1) * 1.001 + rounding).all()


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 69), max_size=5, unique=True),
    dtype=st.sampled_from(ALL_DTYPES),
    seed=st.integers(0, 1000),
)
def test_a_row_gets_the_same_to_the_last_bit_in_any_batch(cuts: list[int], dtype: torch.dtype, seed: int) -> None:
    weight, scales = matrix(96, 64, seed)
    x = activations(70, 64, dtype, seed)
    whole = int8_linear(x, weight, scales)
    parts = [int8_linear(part, weight, scales) for part in x.tensor_split(sorted(cuts))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_what_is_not_finite_stays_so_in_its_row_alone(dtype: torch.dtype) -> None:
    weight, scales = matrix(24, 16, seed=1)
    x = activations(4, 16, dtype, seed=1)
    clean = int8_linear(x, weight, scales)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    result = int8_linear(x, weight, scales)
    assert not result[1:3].isfinite().any()
    assert torch.equal(result[[0, 3]], clean[[0, 3]])


def test_a_row_of_zeros_gives_zeros() -> None:
    weight, scales = matrix(24, 16, seed=2)
    assert not int8_linear(torch.zeros(3, 16, device=DEVICE), weight, scales).any()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's numpy, in float16
@settings(max_examples=40, deadline=None)
@given(
    n_rows=st.integers(1, 5),
    padding=st.integers(0, 3),
    width=st.sampled_from([1, 64, 480, 2048, 5000]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_the_kernels_are_the_references_to_the_last_bit(
    n_rows: int, padding: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    pytest.importorskip("triton")
    x = activations(n_rows, 2 * width, dtype, seed)[:, :width]  # strided rows
    x[0] *= seed % 3 > 0
    rounded, steps = round_rows_triton(x, n_rows + padding)
    expected, expected_steps = round_rows_reference(x, n_rows + padding)
    assert torch.equal(steps, expected_steps)
    assert torch.equal(rounded, expected)
    sums = torch.randint(-(2**27), 2**27, (n_rows + padding, width), dtype=torch.int32, device=DEVICE)
    scales = torch.rand(width, device=DEVICE) * 1e-3
    found = scale_sums_triton(sums, steps, scales, torch.float32)
    assert torch.equal(found, scale_sums_reference(sums, steps, scales, torch.float32))
    assert scale_sums_triton(sums, steps, scales, dtype).dtype == dtype


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's numpy
def test_the_kernels_keep_what_is_not_finite() -> None:
    pytest.importorskip("triton")
    x = torch.randn(3, 3000, device=DEVICE)
    x[1, 2999], x[2, 5] = float("nan"), float("inf")
    rounded, steps = round_rows_triton(x, 3)
    out = scale_sums_triton(rounded.to(torch.int32), steps, torch.ones(3000, device=DEVICE), torch.float32)
    assert out.isfinite().all(dim=1).tolist() == [True, False, False]
    assert not out[1:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchaos_product(dtype: torch.dtype) -> None:
    """But for the step: torchao divides a row's maximum by 127.5, so that it does not fit into int8 itself."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 288, bias=False).to(DEVICE, dtype).requires_grad_(False)
    torchao.quantize_(linear, torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    x = activations(33, 96, dtype, seed=3)
    theirs = linear(x)
    weight: Any = linear.weight  # of torchao's class by now
    ours = int8_linear(x, weight.qdata, weight.scale.flatten())
    size = theirs.float().norm(dim=1)
    assert ((ours - theirs).float().norm(dim=1) < 0.02 * size).all()
