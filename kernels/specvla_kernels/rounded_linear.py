# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights and activations are int8 or float8: rounded rows, and their product.

Each row has its own scale, so that its result does not depend on the other rows (arXiv 2208.07339, vector-wise).
Rounding is fused into the launch that computes the rows, scaling into that of the product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl, widest
from specvla_kernels.gated_unit import gated, gated_unit_reference
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_reference

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The rounded magnitude of a row's largest value."""
LEAST_MAXIMUM = 1e-30  # of a row, so that a row of zeros is not divided by zero
_WEIGHT_ROWS = 1024

# By rows of a tile: columns, depth, stages and warps. The fastest on an H200 of those that fit the 99 KiB of sm_120.
_TILES = {
    16: ((32, 256, 6, 4), (64, 128, 4, 4)),
    32: ((32, 256, 4, 4), (64, 128, 4, 4)),
    64: ((32, 256, 4, 4), (64, 128, 4, 4), (128, 128, 4, 4)),
}
_MOST_ROWS = 64  # of a tile


@dataclass(frozen=True)
class Rounded:
    """Rows of activations or of a weight, each in its own step."""

    values: Tensor  # int8 or float8_e4m3fn [n_rows, width], contiguous
    steps: Tensor  # float32 [n_rows], float64 for float64


def round_rows(x: Tensor, dtype: torch.dtype, *, norm: RowNorm | None = None, gate: str = "") -> Rounded:
    """Rounds rows, plain, normed or gated, to int8 (half to even) or float8_e4m3fn.

    x is [n_rows, width], or [n_rows, 2 * width] with a gate. A row with a NaN or infinity gives no finite value.
    """
    run = round_rows_triton if has_kernels(x) else round_rows_reference
    return run(x, dtype, norm=norm, gate=gate)


def rounded_linear(
    x: Rounded, weight: Rounded, dtype: torch.dtype, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The sum residual + x W^T + bias; sums of int8 are exact, those of float8 are float32."""
    run = rounded_linear_triton if has_kernels(x.steps) else rounded_linear_reference
    return run(x, weight, dtype, bias=bias, residual=residual)


def round_weight(weight: Tensor, dtype: torch.dtype) -> Rounded:
    """`round_rows` of a weight, some rows at a time, so that memory holds no second copy."""
    parts = [round_rows(rows, dtype) for rows in weight.split(_WEIGHT_ROWS)]
    return Rounded(torch.cat([part.values for part in parts]), torch.cat([part.steps for part in parts]))


def round_rows_reference(x: Tensor, dtype: torch.dtype, *, norm: RowNorm | None = None, gate: str = "") -> Rounded:
    """`round_rows` in PyTorch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm is not None:
        wide = rmsnorm_reference(wide, norm)
    if gate:
        wide = gated_unit_reference(wide, gate)
    most = torch.full((), LARGEST[dtype], dtype=wide.dtype, device=wide.device)  # division by a number rounds twice
    steps = wide.abs().amax(dim=1, keepdim=True).clamp(min=LEAST_MAXIMUM) / most
    scaled = wide / steps
    return Rounded((scaled.round() if dtype == torch.int8 else scaled).to(dtype), steps[:, 0])


def rounded_linear_reference(
    x: Rounded, weight: Rounded, dtype: torch.dtype, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`rounded_linear` in PyTorch."""
    exact = torch.float64 if x.values.dtype == torch.int8 else x.steps.dtype  # float64 sums of int8 products are exact
    sums = (x.values.to(exact) @ weight.values.to(exact).T).to(x.steps.dtype)
    out = sums * x.steps[:, None] * weight.steps
    if bias is not None:
        out = out + bias
    return (out if residual is None else residual + out).to(dtype)


def round_rows_triton(x: Tensor, dtype: torch.dtype, *, norm: RowNorm | None = None, gate: str = "") -> Rounded:
    """`round_rows` as one launch, a program per row, which holds the whole row."""
    n_rows, width = x.shape[0], x.shape[1] // (2 if gate else 1)
    rounded = torch.empty(n_rows, width, dtype=dtype, device=x.device)
    steps = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    _round_rows[(n_rows,)](
        x, norm.weight if norm else x, rounded, steps, x.stride(0), norm.eps if norm else 0.0,
        NORM=norm is not None, UNIT_OFFSET=norm is not None and norm.unit_offset, GATE=gate,
        LARGEST=LARGEST[dtype], LEAST=LEAST_MAXIMUM, WIDTH=width, BLOCK=block, WIDEN=x.device.type == "cpu",
        num_warps=16 if block > 1 << 13 else 8,
    )  # fmt: skip
    return Rounded(rounded, steps)


def rounded_linear_triton(
    x: Rounded, weight: Rounded, dtype: torch.dtype, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`rounded_linear` as one launch, a program per tile; tiles of the same part of the weight are consecutive."""
    (n_rows, depth), width = x.values.shape, len(weight.values)
    block_m = min(_MOST_ROWS, power_of_two(n_rows, 16))
    row_tiles = -(-n_rows // block_m)
    block_n, block_k, stages, warps = widest(_TILES[block_m], row_tiles, width, x.values.device)
    block_k = min(block_k, power_of_two(depth, 32))
    out = torch.empty(n_rows, width, dtype=dtype, device=x.values.device)
    given = out if residual is None else residual
    _rounded_linear[(row_tiles, -(-width // block_n))](
        x.values, x.steps, weight.values, weight.steps, out if bias is None else bias, given, out,
        n_rows, given.stride(0), BIAS=bias is not None, RESIDUAL=residual is not None,
        DEPTH=depth, WIDTH=width, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        INT8=x.values.dtype == torch.int8, WIDEN=out.device.type == "cpu", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@jit
def _round_rows(  # type: ignore[no-untyped-def]
    x, norm_weight, rounded, steps, x_stride, eps,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, GATE: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.load(norm_weight + column, mask, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            factor += 1.0
        value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * factor
    if GATE != "":
        value = gated(value, tl.load(x + row * x_stride + WIDTH + column, mask, other=0.0).to(tl.float32), GATE)
    # A row's padding stays zero even with a unit offset; tl.max ignores NaN.
    largest = tl.max(tl.abs(value), 0)
    broken = tl.max((value != value).to(tl.int32), 0)
    step = tl.where(broken > 0, float("nan"), tl.div_rn(tl.maximum(largest, LEAST), LARGEST))
    tl.store(steps + row, step)
    scaled = tl.div_rn(value, step)
    if rounded.dtype.element_ty == tl.int8:
        # Floats of this size are 1 apart: adding it rounds, half to even.
        scaled = (scaled + 12582912.0) - 12582912.0
    elif WIDEN:
        scaled = _nearest_float8(scaled)
    tl.store(rounded + row * WIDTH + column, scaled.to(rounded.dtype.element_ty), mask)


@jit
def _nearest_float8(x):  # type: ignore[no-untyped-def]
    """The nearest float8_e4m3fn value; the interpreter drops the carry when rounding reaches a power of two."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, nearest)  # subnormal: a grid of 2^-9


@jit(do_not_specialize=["n_rows"])
def _rounded_linear(  # type: ignore[no-untyped-def]
    x, steps, weight, scales, bias, residual, out, n_rows, residual_stride,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT8: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < n_rows, column < WIDTH
    k = tl.arange(0, BLOCK_K)
    rows = x + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
    weights = weight + column.to(tl.int64)[:, None] * DEPTH + k[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT8 else tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            values = tl.load(rows + start, is_row[:, None], other=0.0)
            matrix = tl.load(weights + start, is_column[:, None], other=0.0)
        else:
            inside = (start + k < DEPTH)[None, :]
            values = tl.load(rows + start, is_row[:, None] & inside, other=0.0)
            matrix = tl.load(weights + start, is_column[:, None] & inside, other=0.0)
        if INT8:
            sums = tl.dot(values, tl.trans(matrix), sums, out_dtype=tl.int32)
        elif WIDEN:
            sums = tl.dot(values.to(tl.float32), tl.trans(matrix).to(tl.float32), sums, input_precision="ieee")
        else:
            # Hopper's float8 sums keep 14 bits, so each block's sum is added in float32.
            sums = tl.dot(values, tl.trans(matrix), sums, max_num_imprecise_acc=BLOCK_K)
    unit = tl.load(scales + column, is_column, other=0.0)[None, :]
    result = sums.to(tl.float32) * tl.load(steps + row, is_row, other=0.0)[:, None] * unit
    if BIAS:
        result += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    inside_out = is_row[:, None] & is_column[None, :]
    if RESIDUAL:
        carried = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        result += tl.load(carried, inside_out, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], result, inside_out)
