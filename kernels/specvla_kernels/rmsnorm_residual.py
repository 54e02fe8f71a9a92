# SPDX-License-Identifier: Apache-2.0
"""The residual sum and the norm after it, in one pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl


def rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of both, and its RMSNorm (arXiv 1910.07467): s / sqrt(mean(s^2) + eps) * weight.

    Args:
        x: [n_rows, hidden], what a layer's half adds.
        residual: like x.
        weight: [hidden], any floating dtype.
        eps: added to the mean square.

    Returns:
        The norm and the sum, [n_rows, hidden], dtype of x. The sum is rounded to it before the norm, which is computed
        in float32, or in float64 for float64.
    """
    run = rmsnorm_residual_triton if has_kernels(x) else rmsnorm_residual_reference
    return run(x, residual, weight, eps)


def rmsnorm_residual_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` in PyTorch."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight.to(total.dtype), eps), total


def rmsnorm_residual_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` as one launch, a program per row."""
    n_rows, hidden = x.shape
    normed, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _rmsnorm_residual[(n_rows,)](
        x, residual, weight, normed, total, x.stride(0), residual.stride(0), eps,
        HIDDEN=hidden, BLOCK=power_of_two(hidden), num_warps=8,
    )  # fmt: skip
    return normed, total


@jit
def _rmsnorm_residual(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, total, x_stride, residual_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    added = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    carried = tl.load(residual + row * residual_stride + column, mask, other=0.0).to(tl.float32)
    both = (added + carried).to(total.dtype.element_ty)
    tl.store(total + row * HIDDEN + column, both, mask)
    both = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(both * both, 0) / HIDDEN + eps)
    scaled = both * scale * tl.load(weight + column, mask, other=0.0).to(tl.float32)
    tl.store(normed + row * HIDDEN + column, scaled, mask)
