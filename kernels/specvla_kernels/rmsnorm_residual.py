# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, and the residual sum before it, in one pass."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm (arXiv 1910.07467) of rows: x / sqrt(mean(x^2) + eps) * weight [hidden]."""

    weight: Tensor
    eps: float
    unit_offset: bool = False  # the weight is added to 1 (Gemma)


def rmsnorm(x: Tensor, norm: RowNorm) -> Tensor:
    """The norm of [n_rows, hidden]; the reference takes any [..., hidden]."""
    return rmsnorm_triton(x, norm) if has_kernels(x) else rmsnorm_reference(x, norm)


def rmsnorm_residual(x: Tensor, residual: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
    """The norm of the sum of both, and the sum: [n_rows, hidden], dtype of x.

    The sum is rounded to that dtype before the norm, which is computed in float32, or in float64 for float64.
    """
    return (rmsnorm_residual_triton if has_kernels(x) else rmsnorm_residual_reference)(x, residual, norm)


def rmsnorm_reference(x: Tensor, norm: RowNorm) -> Tensor:
    """`rmsnorm` in PyTorch."""
    if not norm.unit_offset:
        return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)  # float32 weights under autocast
    whole = torch.promote_types(x.dtype, torch.float32)  # half precision would round 1 + w, and what it scales
    return F.rms_norm(x.to(whole), norm.weight.shape, 1 + norm.weight.to(whole), norm.eps).to(x.dtype)


def rmsnorm_residual_reference(x: Tensor, residual: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` in PyTorch."""
    total = residual + x
    return rmsnorm_reference(total, norm), total


def rmsnorm_triton(x: Tensor, norm: RowNorm) -> Tensor:
    """`rmsnorm` as one launch, a program per row."""
    return _launch(x, None, norm)[0]


def rmsnorm_residual_triton(x: Tensor, residual: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
    """`rmsnorm_residual` as one launch, a program per row."""
    return _launch(x, residual, norm)


def _launch(x: Tensor, residual: Tensor | None, norm: RowNorm) -> tuple[Tensor, Tensor]:
    n_rows, hidden = x.shape
    normed = x.new_empty(n_rows, hidden)
    total, carried = (x, x) if residual is None else (x.new_empty(n_rows, hidden), residual)
    _rmsnorm_residual[(n_rows,)](
        x, carried, norm.weight, normed, total, x.stride(0), carried.stride(0), norm.eps,
        RESIDUAL=residual is not None, UNIT_OFFSET=norm.unit_offset,
        HIDDEN=hidden, BLOCK=power_of_two(hidden), num_warps=8,
    )  # fmt: skip
    return normed, total


@jit
def _rmsnorm_residual(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, total, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    both = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        both += tl.load(residual + row * residual_stride + column, mask, other=0.0).to(tl.float32)
        rounded = both.to(total.dtype.element_ty)
        tl.store(total + row * HIDDEN + column, rounded, mask)
        both = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(both * both, 0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    tl.store(normed + row * HIDDEN + column, both * scale * factor, mask)
