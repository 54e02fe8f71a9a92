# SPDX-License-Identifier: Apache-2.0
"""A linear layer: alone, or with the norm before it and activation, scale and residual after it in one launch.

With few rows, the time is that of reading the weight; separate launches around the product add time without reads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import jit, power_of_two, tl, widest
from specvla_kernels.gated_unit import GATES, gated, gated_unit_reference
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm_reference

# By rows of a tile: columns, depth, stages and warps. The fastest on an H200 of those that fit the 99 KiB of sm_120.
_TILES = {
    16: ((32, 128, 6, 4), (64, 128, 4, 4)),
    32: ((32, 128, 6, 4), (64, 64, 4, 4)),
    64: ((32, 128, 4, 8), (64, 64, 4, 4)),
}
# With a norm or a gate: each tile norms its rows again, and gate and up take twice the columns. With 64 rows, both fill
# the registers of 4 warps (sm_87, Triton 3.2).
_NORMED_TILES = {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 3, 8)}
_MOST_ROWS = 64  # of a tile
_COMPILED_ROWS = 8  # of a tree, for which a compiled layer is faster
_LARGE = 1 << 21  # minimum multiplications for which oneDNN is faster, despite its lookup of compiled kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x W^T plus the bias, [..., in_features] to [..., out_features]; contiguous, as is the weight.

    On a CPU in float32, MKL is slow for few rows, and on processors other than Intel's for many rows too. Its
    matrix-vector product, used in a decode step, runs on one core: a batched product over equal shares of the weight's
    rows, one per thread, reads them in parallel. More rows go to oneDNN, without a gradient, unless rows and weight are
    few. A compiled layer's number of rows is unknown, so it counts as 8. Measured by benchmarks/speed/linear.py.
    """
    n_rows = x.shape[0] if x.ndim == 2 else x.shape[:-1].numel()
    if x.is_cuda or x.dtype != torch.float32 or not n_rows:
        return F.linear(x, weight, bias)
    counted = n_rows if isinstance(n_rows, int) else _COMPILED_ROWS
    if n_rows > 1 and counted * weight.numel() >= _LARGE and _has_onednn() and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if x.ndim != 2 or bias is not None:
        return F.linear(x, weight, bias)
    shares, (out_features, in_features) = torch.get_num_threads(), weight.shape
    if n_rows == 1 and shares > 1 and out_features % shares == 0:
        return torch.bmm(weight.view(shares, -1, in_features), x.T.expand(shares, in_features, 1)).view(1, out_features)
    return F.linear(x, weight)


def _has_onednn() -> bool:
    """True if this torch has oneDNN's product of plain matrices, which torch.compile uses too."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fused_linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: RowNorm | None = None,
    bias: Tensor | None = None,
    activation: str = "",
    scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The sum residual + scale * activation(norm(x) W^T + bias), with each part optional.

    The kernel rounds once, at the end; this reference rounds after every part.

    Args:
        x: [n_rows, in_features].
        weight: [out_features, in_features], contiguous, dtype of x.
        bias: [out_features].
        activation: `gelu` (exact), or one of `GATES`: the weight's first half of rows is the gate, the second half is
            multiplied by it, and the result's width is half of out_features.
        scale: [width], per column (LayerScale).
        residual: [n_rows, width], added last.
    """
    out = linear(x if norm is None else rmsnorm_reference(x, norm), weight)
    if bias is not None:
        out = out + bias
    if activation:
        out = F.gelu(out) if activation == "gelu" else gated_unit_reference(out, activation)
    if scale is not None:
        out = out * scale
    return out if residual is None else residual + out


def fused_linear_triton(
    x: Tensor,
    weight: Tensor,
    *,
    norm: RowNorm | None = None,
    bias: Tensor | None = None,
    activation: str = "",
    scale: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linear_reference` as one launch, a program per tile of the result.

    A row's norm scales the result, since the sum of squares is known only after the last column. In float16, the rows
    times the norm's weight must therefore not overflow.
    """
    n_rows, in_features = x.shape
    width = len(weight) // 2 if activation in GATES else len(weight)
    block_m = min(_MOST_ROWS, power_of_two(n_rows, 16))
    row_tiles = -(-n_rows // block_m)
    normed = norm is not None or activation in GATES
    tile = _NORMED_TILES[block_m] if normed else widest(_TILES[block_m], row_tiles, width, x.device)
    block_n, block_k, stages, warps = tile
    block_k = min(block_k, power_of_two(in_features, 16))
    if x.itemsize == 4:
        block_k = min(block_k, 32)
    out = x.new_empty(n_rows, width)
    given = residual if residual is not None else out
    _fused_linear[(row_tiles, -(-width // block_n))](
        x, weight, norm.weight if norm else out, bias if bias is not None else out,
        scale if scale is not None else out, given, out,
        n_rows, x.stride(0), given.stride(0), norm.eps if norm else 0.0,
        NORM=norm is not None, UNIT_OFFSET=norm is not None and norm.unit_offset, BIAS=bias is not None,
        ACTIVATION=activation, GATED=activation in GATES, SCALED=scale is not None, RESIDUAL=residual is not None,
        DEPTH=in_features, WIDTH=width, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        WIDEN=x.device.type == "cpu", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["n_rows"])
def _fused_linear(  # type: ignore[no-untyped-def]
    x, weight, norm_weight, bias, scales, residual, out, n_rows, x_stride, residual_stride, eps,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, RESIDUAL: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < n_rows, column < WIDTH
    k = tl.arange(0, BLOCK_K)
    rows = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weights = weight + column.to(tl.int64)[:, None] * DEPTH + k[None, :]
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    beside = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # the factor of a gate
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            values = tl.load(rows + start, is_row[:, None], other=0.0)
            matrix = tl.load(weights + start, is_column[:, None], other=0.0)
        else:
            inside = (start + k < DEPTH)[None, :]
            values = tl.load(rows + start, is_row[:, None] & inside, other=0.0)
            matrix = tl.load(weights + start, is_column[:, None] & inside, other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            squares += wide * wide
            factor = tl.load(norm_weight + start + k, start + k < DEPTH, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                factor += 1.0
            values = (wide * factor[None, :]).to(values.dtype)
        result = dot(values, tl.trans(matrix), result, WIDEN)
        if GATED:
            if DEPTH % BLOCK_K == 0:
                second = tl.load(weights + start + WIDTH * DEPTH, is_column[:, None], other=0.0)
            else:
                second = tl.load(weights + start + WIDTH * DEPTH, is_column[:, None] & inside, other=0.0)
            beside = dot(values, tl.trans(second), beside, WIDEN)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / DEPTH + eps)[:, None]
        result *= scale
        beside *= scale
    if BIAS:
        result += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = gated(result, beside, ACTIVATION)
    elif ACTIVATION == "gelu":
        result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476))
    if SCALED:
        result *= tl.load(scales + column, is_column, other=0.0).to(tl.float32)[None, :]
    inside_out = is_row[:, None] & is_column[None, :]
    if RESIDUAL:
        carried = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        result += tl.load(carried, inside_out, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], result, inside_out)


@jit
def dot(a, b, sum_, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the product in float32; widens in Triton's interpreter, which treats bfloat16's bits as integers."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum_, input_precision="ieee")
    else:  # noqa: RET505 (the compiler must not see both)
        return tl.dot(a, b, sum_, input_precision="ieee")
