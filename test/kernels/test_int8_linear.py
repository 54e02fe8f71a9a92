# SPDX-License-Identifier: Apache-2.0
"""The int8 product: exact sums of what was rounded, row by row, whatever else is in the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import DEVICE, DTYPES
from support.nightly import examples

from specvla_kernels.int8_linear import int8_linear

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


@settings(max_examples=examples(60), deadline=None)
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


@settings(max_examples=examples(40), deadline=None)
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
