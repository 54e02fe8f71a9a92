# SPDX-License-Identifier: Apache-2.0
"""LayerNorm, and the scaled residual sum before it, in one pass."""

import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl


def layernorm_residual(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The LayerNorm (arXiv 1607.06450) of the sum residual + scale * x, and the sum: [n_rows, dim], dtype of x.

    The sum is rounded to that dtype before the norm, which is computed in float32, or in float64 for float64. `scale`
    (LayerScale, arXiv 2103.17239), weight and bias are [dim].
    """
    run = layernorm_residual_triton if has_kernels(x) else layernorm_residual_reference
    return run(x, residual, scale, weight, bias, eps)


def layernorm_residual_reference(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`layernorm_residual` in PyTorch."""
    total = residual + (x if scale is None else x * scale)
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def layernorm_residual_triton(
    x: Tensor, residual: Tensor, scale: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`layernorm_residual` as one launch, a program per row."""
    n_rows, dim = x.shape
    normed, total = x.new_empty(n_rows, dim), x.new_empty(n_rows, dim)
    _layernorm_residual[(n_rows,)](
        x, residual, weight if scale is None else scale, weight, bias, normed, total,
        x.stride(0), residual.stride(0), eps,
        SCALED=scale is not None, DIM=dim, BLOCK=power_of_two(dim), num_warps=4,
    )  # fmt: skip
    return normed, total


@jit
def _layernorm_residual(  # type: ignore[no-untyped-def]
    x, residual, scale, weight, bias, normed, total, x_stride, residual_stride, eps,
    SCALED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < DIM
    added = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if SCALED:
        added *= tl.load(scale + column, mask, other=0.0).to(tl.float32)
    both = added + tl.load(residual + row * residual_stride + column, mask, other=0.0).to(tl.float32)
    rounded = both.to(total.dtype.element_ty)
    tl.store(total + row * DIM + column, rounded, mask)
    both = rounded.to(tl.float32)
    centred = tl.where(mask, both - tl.sum(both, 0) / DIM, 0.0)
    centred *= tl.rsqrt(tl.sum(centred * centred, 0) / DIM + eps)
    factor = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask, other=0.0).to(tl.float32)
    tl.store(normed + row * DIM + column, centred * factor + offset, mask)
