# SPDX-License-Identifier: Apache-2.0
"""What the kernel tests share: they run in Triton's interpreter, or on a GPU where there is one."""

from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Against float64: the rounding of the result, and of the weights that half-precision attention multiplies values by.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: dict(atol=2e-5, rtol=2e-5),
    torch.bfloat16: dict(atol=2e-2, rtol=2e-2),
    torch.float16: dict(atol=3e-3, rtol=3e-3),
}


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as it may be found: what is read before it is written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


NEW_EMPTY = torch.Tensor.new_empty


def poisoned_empty(x: torch.Tensor, *size: Any, **kinds: Any) -> torch.Tensor:
    """`Tensor.new_empty`, with what is read before it is written made to show."""
    made = NEW_EMPTY(x, *size, **kinds)
    return made.fill_(torch.nan) if made.is_floating_point() else made
