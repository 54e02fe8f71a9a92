"""A linear layer without bias that uses all cores for a single row."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product x W^T.

    A decode step multiplies one row, and MKL's matrix-vector product runs on one core, however many threads there are.
    A batched product over equal shares of the weight's rows, one per thread, reads them in parallel; the figures are
    those of benchmarks/linear.py.

    Args:
        x: [n_rows, in_features].
        weight: [out_features, in_features], contiguous.

    Returns:
        [n_rows, out_features].
    """
    shares = torch.get_num_threads()
    out_features, in_features = weight.shape
    if x.shape[0] != 1 or x.is_cuda or shares == 1 or out_features % shares:
        return F.linear(x, weight)
    return torch.bmm(weight.view(shares, -1, in_features), x.T.expand(shares, in_features, 1)).view(1, out_features)
