# SPDX-License-Identifier: Apache-2.0
"""A linear layer with int8 weights and activations (W8A8), using torch's own products.

On a CPU, torch's product of two int8 matrices is fast only with special instructions, otherwise slower than float32.
The packed products in torch (FBGEMM's and oneDNN's) read a weight once for all rows, with a quarter of float32's bytes.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.rounded_linear import LARGEST, LEAST_MAXIMUM, round_rows

_LEAST_ROWS = 32  # cuBLAS' int8 product refuses 16 rows and fewer; up to 32 it is read-bound, so padding costs nothing
_ZERO = 128  # a rounded activation of 0 as an unsigned byte
_PROBED_SHAPE, _PROBED_ROWS = (256, 2048), (1, 2, 7, 33)

_MOST = torch.tensor(LARGEST[torch.int8])  # division by a number would round twice

Sums = Callable[[Tensor], Tensor]
"""Maps rows of integers from -127 to 127, float32 [n_rows, in_features], to exact products, rounded: float32."""


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product x W^T with every row of x rounded to int8 with its own scale (arXiv 2208.07339, vector-wise).

    Integer sums are exact, so a row's result does not depend on the other rows, to the last bit. torchao 0.18 has the
    same product, but prints the activations, which waits for the device in every layer (pytorch/ao#4872), and falls
    back to float32 for 16 rows and fewer. Scaled in float32, or in float64 for float64.

    Args:
        x: [n_rows, in_features], any floating dtype; a row with a NaN or infinity gives no finite value.
        weight: int8 [out_features, in_features], contiguous; both multiples of 8 on CUDA.
        scales: float32 [out_features], the step of each row of the weight; float64 for float64.
    """
    rows = round_rows(x, torch.int8)
    values = F.pad(rows.values, (0, 0, 0, max(0, _LEAST_ROWS - len(x)))) if x.is_cuda else rows.values
    sums = torch._int_mm(values, weight.T)[: len(x)]
    return (sums.to(rows.steps.dtype) * rows.steps[:, None] * scales).to(x.dtype)


class PackedInt8:
    """A weight packed for a CPU, with its scales; a call computes `int8_linear`. Rows are independent."""

    def __init__(self, sums: Sums, scales: Tensor, weights: int) -> None:
        self._sums, self._scales = sums, scales
        self.nbytes = weights + scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        # As `round_rows`, in fewer operations: for few rows, calling them takes longer than computing them.
        wide = x.float()
        steps = wide.abs().amax(dim=1, keepdim=True).clamp_(min=LEAST_MAXIMUM).div_(_MOST)
        return self._sums(wide.div(steps).round_()).mul_(steps).mul_(self._scales).to(x.dtype)


def pack_int8(weight: Tensor, scales: Tensor) -> PackedInt8 | None:
    """Packs an int8 weight [out_features, in_features] with float32 scales [out_features], in host memory.

    Returns None if none of torch's packed products is exact on this processor.
    """
    pack = packed_product()
    return PackedInt8(pack(weight), scales, weight.numel()) if pack is not None else None


@cache
def packed_product() -> Callable[[Tensor], Sums] | None:
    """The first packed product with exact sums on this processor, in order of speed with few rows; None if none has.

    Tried with the largest values: without VNNI instructions, FBGEMM adds pairs of products in 16 bits and overflows
    silently.
    """
    for pack in (_by_fbgemm, _by_onednn, _by_fbgemm_in_halves):
        try:
            if _is_exact(pack):
                return pack
        except (RuntimeError, AttributeError):  # not in this torch, or not on this processor
            continue
    return None


def _by_onednn(weight: Tensor) -> Sums:
    out_features, in_features = weight.shape
    packed = torch.ops.onednn.qlinear_prepack(weight, [1, in_features])
    ones, zeros = torch.ones(out_features), torch.zeros(out_features, dtype=torch.int32)

    def sums(rounded: Tensor) -> Tensor:
        shifted = (rounded + _ZERO).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            shifted, 1.0, _ZERO, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return sums


def _by_fbgemm(weight: Tensor) -> Sums:
    multiply = _fbgemm(weight)
    return lambda rounded: multiply(rounded, 1.0, _ZERO)


def _by_fbgemm_in_halves(weight: Tensor) -> Sums:
    """For processors without VNNI: activations in two halves of at most 128, so that two products fit into 16 bits."""
    multiply = _fbgemm(weight)

    def sums(rounded: Tensor) -> Tensor:
        n_rows, shifted = len(rounded), rounded.to(torch.int16) + _ZERO
        lower = shifted >> 1
        halves = multiply(torch.cat((lower, shifted - lower)).float() - _ZERO // 2, 1.0, _ZERO // 2)
        return halves[:n_rows].add_(halves[n_rows:])

    return sums


def _fbgemm(weight: Tensor) -> Callable[[Tensor, float, int], Tensor]:
    """FBGEMM's product of float32 rows with integer values; called with the rows, their scale and their zero."""
    ones, zeros = torch.ones(len(weight), dtype=torch.float64), torch.zeros(len(weight), dtype=torch.int64)
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"  # kept by the weight
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors are deprecated, but packing needs one
            rows = torch._make_per_channel_quantized_tensor(weight, ones, zeros, 0)
            packed = torch.ops.quantized.linear_prepack(rows)
    finally:
        torch.backends.quantized.engine = before
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return lambda rows, scale, zero: multiply(rows, scale, zero, packed)


def _is_exact(pack: Callable[[Tensor], Sums]) -> bool:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=generator, dtype=torch.int8)
    weight = draw(-128, 128, _PROBED_SHAPE)
    weight[:3] = torch.tensor([[-128], [127], [-127]])
    sums = pack(weight)
    for n_rows in _PROBED_ROWS:
        rows = draw(-127, 128, (n_rows, _PROBED_SHAPE[1])).float()
        rows[0], rows[-1] = 127, -127
        # Float64 is exact here; rounded to float32 like a product's integers.
        if not torch.equal(sums(rows), (rows.double() @ weight.double().T).float()):
            return False
    return True
