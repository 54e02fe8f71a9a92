# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weights and activations are both int8 (W8A8), by torch's own product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.rounded_linear import round_rows

_LEAST_ROWS = 32  # cuBLAS' int8 product refuses 16 rows and fewer; up to 32 it is read-bound, so padding costs nothing


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
    rows = round_rows(x, torch.int8)
    values = F.pad(rows.values, (0, 0, 0, max(0, _LEAST_ROWS - len(x)))) if x.is_cuda else rows.values
    sums = torch._int_mm(values, weight.T)[: len(x)]
    return (sums.to(rows.steps.dtype) * rows.steps[:, None] * scales).to(x.dtype)
