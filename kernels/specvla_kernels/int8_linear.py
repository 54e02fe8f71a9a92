# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weights and activations are both int8 (W8A8)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl

_LEAST_ROWS = 32  # cuBLAS' int8 product refuses 16 rows and fewer; up to 32 it is read-bound, so padding costs nothing
_LEAST_MAXIMUM = 1e-30  # of a row: a row of zeros must not be divided by zero
_BLOCK = 2048  # columns that a program has in hand


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product x W^T with every row of x rounded to int8 by a scale of its own (arXiv 2208.07339, vector-wise).

    Integers add up exactly, so that a row's result does not depend, to the last bit, on the rows beside it.
    torchao 0.18 has the same product, but prints the activations to look for a word in them, which waits for the
    device in every layer (pytorch/ao#4872), and falls back to float32 for 16 rows and fewer: nothing is read back here.

    Args:
        x: [n_rows, in_features], any floating dtype; a row with a NaN or infinity gives nothing finite.
        weight: int8 [out_features, in_features], contiguous; both multiples of 8 on CUDA.
        scales: float32 [out_features], what one step of each of the weight's rows stands for; float64 in float64.

    Returns:
        [n_rows, out_features], dtype of x; scaled in float32, or in float64 for float64.
    """
    n_rows = x.shape[0]
    padded_rows = max(n_rows, _LEAST_ROWS) if x.is_cuda else n_rows
    on_kernels = has_kernels(x)
    rounded, steps = (round_rows_triton if on_kernels else round_rows_reference)(x, padded_rows)
    sums = torch._int_mm(rounded, weight.T)
    return (scale_sums_triton if on_kernels else scale_sums_reference)(sums, steps, scales, x.dtype)


def round_rows_reference(x: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
    """Rows in steps of a 127th of their largest value, halves to the even one.

    Args:
        x: [n_rows, width], any floating dtype.
        padded_rows: rows of the result, at least as many as there are; those after them are zero.

    Returns:
        int8 [padded_rows, width]; and the steps [n_rows], float32, or float64 for float64.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # On CUDA torch divides by a number by way of its reciprocal, which rounds twice.
    most = torch.full((), 127, dtype=wide.dtype, device=wide.device)
    steps = wide.abs().amax(dim=1, keepdim=True).clamp(min=_LEAST_MAXIMUM) / most
    rounded = (wide / steps).round().to(torch.int8)
    return F.pad(rounded, (0, 0, 0, padded_rows - x.shape[0])), steps[:, 0]


def round_rows_triton(x: Tensor, padded_rows: int) -> tuple[Tensor, Tensor]:
    """`round_rows_reference` as one launch, a program per row."""
    n_rows, width = x.shape
    rounded = torch.empty(padded_rows, width, dtype=torch.int8, device=x.device)
    steps = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    _round_rows[(padded_rows,)](
        x, rounded, steps, n_rows, x.stride(0), LEAST=_LEAST_MAXIMUM, WIDTH=width, BLOCK=_BLOCK, num_warps=8
    )
    return rounded, steps


def scale_sums_reference(sums: Tensor, steps: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of products of steps, in units.

    Args:
        sums: int32 [padded_rows, width].
        steps: floating [n_rows], of the rows.
        scales: floating [width], of the columns.
        dtype: of the result.

    Returns:
        [n_rows, width]; rows after the last step are left out.
    """
    return (sums[: len(steps)].to(steps.dtype) * steps[:, None] * scales).to(dtype)


def scale_sums_triton(sums: Tensor, steps: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale_sums_reference` as one launch."""
    n_rows, width = len(steps), sums.shape[1]
    out = torch.empty(n_rows, width, dtype=dtype, device=sums.device)
    _scale_sums[(n_rows, -(-width // _BLOCK))](sums, steps, scales, out, WIDTH=width, BLOCK=_BLOCK, num_warps=8)
    return out


@jit
def _round_rows(  # type: ignore[no-untyped-def]
    x, rounded, steps, n_rows, x_stride, LEAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)  # tl.maximum and tl.max pass over NaN
    for start in range(0, WIDTH, BLOCK):
        mask = (start + column < WIDTH) & (row < n_rows)
        value = tl.load(x + row * x_stride + start + column, mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        broken = broken | (value != value).to(tl.int32)
    step = tl.div_rn(tl.maximum(tl.max(largest, 0), LEAST), 127.0)
    step = tl.where(tl.max(broken, 0) > 0, float("nan"), step)
    tl.store(steps + row, step, row < n_rows)
    for start in range(0, WIDTH, BLOCK):
        inside = start + column < WIDTH
        value = tl.load(x + row * x_stride + start + column, inside & (row < n_rows), other=0.0).to(tl.float32)
        # Floats of this size lie 1 apart: adding it rounds, halves to the even one.
        whole = (tl.div_rn(value, step) + 12582912.0) - 12582912.0
        tl.store(rounded + row * WIDTH + start + column, whole.to(tl.int8), inside)


@jit
def _scale_sums(sums, steps, scales, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    sum_ = tl.load(sums + row * WIDTH + column, mask, other=0).to(tl.float32)
    unit = tl.load(scales + column, mask, other=0.0)
    tl.store(out + row * WIDTH + column, sum_ * tl.load(steps + row) * unit, mask)
