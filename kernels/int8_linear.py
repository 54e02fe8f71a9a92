"""A linear layer whose weights and activations are both int8 (W8A8)."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_ROWS = 32  # cuBLAS' int8 product refuses 16 rows and fewer; up to 32 it is read-bound, so padding costs nothing
_LEAST_MAXIMUM = 1e-30  # of a row: a row of zeros must not be divided by zero


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product x W^T with every row of x rounded to int8 by a scale of its own (arXiv 2208.07339, vector-wise).

    Integers add up exactly, so that a row's result does not depend, to the last bit, on the rows beside it.
    torchao 0.18 has the same product, but prints the activations to look for a word in them, which waits for the
    device in every layer (pytorch/ao#4872), and falls back to float32 for 16 rows and fewer: nothing is read back here.

    Args:
        x: [n_rows, in_features], any floating dtype; a row with a NaN or infinity gives nothing finite.
        weight: int8 [out_features, in_features], contiguous; both multiples of 8 on CUDA.
        scales: floating [out_features], what one step of each of the weight's rows stands for.

    Returns:
        [n_rows, out_features], dtype of x; scaled in float32, or in float64 for float64.
    """
    n_rows = x.shape[0]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    steps = wide.abs().amax(dim=1, keepdim=True).clamp(min=_LEAST_MAXIMUM) / 127
    rounded = (wide / steps).round().to(torch.int8)
    if x.is_cuda and n_rows < _LEAST_ROWS:
        rounded = F.pad(rounded, (0, 0, 0, _LEAST_ROWS - n_rows))
    sums = torch._int_mm(rounded, weight.T)[:n_rows]
    return (sums.to(wide.dtype) * steps * scales).to(x.dtype)
