# SPDX-License-Identifier: Apache-2.0
"""A linear layer without bias that reads its weight with all cores for few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 5  # so many, or 8 of an output head, are faster with the weight on the left
_FEW_ROWS_OF_HEAD = 8
_HEAD_FEATURES = 1 << 14


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product x W^T.

    On a CPU, in float32, MKL is slow for few rows. A decode step multiplies one, and MKL's matrix-vector product runs
    on one core, however many threads there are: a batched product over equal shares of the weight's rows, one per
    thread, reads them in parallel. A level of a draft tree is a few rows, which are faster with the weight as the left
    matrix: (W x^T)^T. The figures are those of benchmarks/linear.py. Half precision has other products, which
    need neither.

    Args:
        x: [n_rows, in_features].
        weight: [out_features, in_features], contiguous.

    Returns:
        [n_rows, out_features], contiguous.
    """
    n_rows, shares = x.shape[0], torch.get_num_threads()
    out_features, in_features = weight.shape
    if x.is_cuda or x.dtype.itemsize < 4:
        return F.linear(x, weight)
    if n_rows == 1 and shares > 1 and out_features % shares == 0:
        return torch.bmm(weight.view(shares, -1, in_features), x.T.expand(shares, in_features, 1)).view(1, out_features)
    most = _FEW_ROWS_OF_HEAD if out_features >= _HEAD_FEATURES else _FEW_ROWS
    return torch.mm(weight, x.T).T.contiguous() if 1 < n_rows <= most else F.linear(x, weight)
