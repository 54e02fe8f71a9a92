# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose float32 product a CPU takes from the faster of torch's libraries."""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 5  # so many are faster with a small weight on the left
_LARGE = 1 << 20  # elements of a weight from which on oneDNN, which first looks up what it compiled, is the faster


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x W^T, and the bias: [..., in_features] to [..., out_features], contiguous; so is the weight.

    On a CPU, in float32, MKL is slow for few rows, and on a processor that is not Intel's for many too. Its
    matrix-vector product, a decode step's, runs on one core: a batched product over equal shares of the weight's rows,
    one per thread, reads them in parallel. More rows go to oneDNN where the weight is large, and have no gradient; of a
    small one, a few rows are faster with the weight as the left matrix: (W x^T)^T. The figures are those of
    benchmarks/speed/linear.py.
    """
    n_rows = x.shape[:-1].numel()
    if x.is_cuda or x.dtype != torch.float32 or not n_rows:
        return F.linear(x, weight, bias)
    if n_rows > 1 and weight.numel() >= _LARGE and _has_onednn() and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if x.ndim != 2 or bias is not None:
        return F.linear(x, weight, bias)
    shares, (out_features, in_features) = torch.get_num_threads(), weight.shape
    if n_rows == 1 and shares > 1 and out_features % shares == 0:
        return torch.bmm(weight.view(shares, -1, in_features), x.T.expand(shares, in_features, 1)).view(1, out_features)
    return torch.mm(weight, x.T).T.contiguous() if 1 < n_rows <= _FEW_ROWS else F.linear(x, weight)


def _has_onednn() -> bool:
    """Whether this torch has oneDNN's product of plain matrices, which torch.compile uses too."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
