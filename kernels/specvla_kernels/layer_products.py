# SPDX-License-Identifier: Apache-2.0
"""The products of a decoder layer and of a vision tower's block, fused with their neighbours into few launches.

Few rows: norm, product, gate and residual are one launch; 6 per layer with rope_write_kv and the attention. Many rows:
the libraries' products, with fused norms and gates between them; 9 per layer. 8-bit weights: norm and gate round their
results, the products scale and add bias and residual; 10 per layer for any number of rows.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels
from specvla_kernels.fused_linear import fused_linear_triton, linear
from specvla_kernels.gated_unit import gated_unit
from specvla_kernels.product_contest import is_fused
from specvla_kernels.rmsnorm_residual import RowNorm, rmsnorm, rmsnorm_residual
from specvla_kernels.rounded_linear import Rounded, round_rows, rounded_linear

_MOST_PATCHES = 512  # of one image: small matrices, for which the libraries' products leave processors idle too

# A weight [out_features, in_features], plain or rounded to 8 bits, or a product of another kind, such as int4's.
Matrix = Tensor | Rounded | Callable[[Tensor], Tensor]


def normed_product(x: Tensor, norm: RowNorm | None, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """The product of rows [n_rows, in_features], normed if a norm is given, plus the bias."""
    if isinstance(matrix, Rounded):
        rounded = round_rows(x, matrix.values.dtype, norm=norm)
        return rounded_linear(rounded, matrix, x.dtype, bias=bias)

    def apart() -> Tensor:
        out = _product(x if norm is None else rmsnorm(x, norm), matrix)
        return out if bias is None else out + bias

    if not isinstance(matrix, Tensor) or not has_kernels(x) or (norm is None and bias is None):
        return apart()
    fused = partial(fused_linear_triton, x, matrix, norm=norm, bias=bias)
    return fused() if is_fused(fused, apart, x, matrix, "norm" if norm else "") else apart()


def product_to_add(x: Tensor, matrix: Matrix, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """The residual [n_rows, out_features] and the product of the rows, for the next norm to add.

    The second is None if the first is already their sum.
    """
    if isinstance(matrix, Rounded):
        return rounded_linear(round_rows(x, matrix.values.dtype), matrix, x.dtype, residual=residual), None
    if (total := _fused_sum(x, matrix, residual)) is not None:
        return total, None
    return residual, _product(x, matrix)


def gated_mlp(x: Tensor, added: Tensor | None, norm: RowNorm, gate_up: Matrix, down: Matrix, gate: str) -> Tensor:
    """Computes s + down(gate(gate_up(norm(s)))) for s = x + added, both [n_rows, hidden].

    `gate_up` maps to [n_rows, 2 * width]; `added` None means zero.
    """
    if isinstance(gate_up, Rounded) and isinstance(down, Rounded):
        total = x if added is None else x + added
        rounded = round_rows(normed_product(total, norm, gate_up), down.values.dtype, gate=gate)
        return rounded_linear(rounded, down, x.dtype, residual=total)
    if added is None and isinstance(gate_up, Tensor) and has_kernels(x):
        fused = partial(fused_linear_triton, x, gate_up, norm=norm, activation=gate)
        if is_fused(fused, lambda: gated_unit(F.linear(rmsnorm(x, norm), gate_up), gate), x, gate_up, "gate"):
            return _sum(fused(), down, x, owned=False)
    if added is None:
        normed, total = rmsnorm(x, norm), x
    else:
        normed, total = rmsnorm_residual(added, x, norm)
    return _sum(gated_unit(_product(normed, gate_up), gate), down, total, owned=added is not None)


def _sum(x: Tensor, matrix: Matrix, residual: Tensor, *, owned: bool) -> Tensor:
    """The residual plus the rows' product; in place if the residual is owned."""
    if (total := _fused_sum(x, matrix, residual)) is not None:
        return total
    if owned and isinstance(matrix, Tensor) and has_kernels(x) and not torch.is_grad_enabled():
        return residual.addmm_(x, matrix.T)
    return residual + _product(x, matrix)


def _fused_sum(x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor | None:
    if not isinstance(matrix, Tensor) or not has_kernels(x):
        return None
    fused = partial(fused_linear_triton, x, matrix, residual=residual)
    return fused() if is_fused(fused, lambda: residual + F.linear(x, matrix), x, matrix, "residual") else None


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    if isinstance(matrix, Rounded):
        return normed_product(x, None, matrix)
    return linear(x, matrix) if isinstance(matrix, Tensor) else matrix(x)


def gelu_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The exact GELU of x W^T + bias, x being [..., in_features]; differentiable if gradients are enabled."""

    def apart() -> Tensor:
        return F.gelu(linear(x, weight, bias))

    if x.ndim != 2 or torch.is_grad_enabled() or not has_kernels(x):
        return apart()
    fused = partial(fused_linear_triton, x, weight, bias=bias, activation="gelu")
    return fused() if is_fused(fused, apart, x, weight, "gelu", _MOST_PATCHES) else apart()


def scaled_sum(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, residual: Tensor) -> Tensor:
    """The sum residual + scale * (x W^T + bias), x being [n_rows, in_features]; a scale of None is 1."""

    def apart() -> Tensor:
        product = linear(x, weight, bias)
        return residual + product if scale is None else torch.addcmul(residual, product, scale)

    if not has_kernels(x):
        return apart()
    fused = partial(fused_linear_triton, x, weight, bias=bias, scale=scale, residual=residual)
    return fused() if is_fused(fused, apart, x, weight, "scaled residual", _MOST_PATCHES) else apart()
