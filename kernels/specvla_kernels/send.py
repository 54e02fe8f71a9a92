"""Numbers from the host to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of numbers that the host knows.

    A copy from memory that is not pinned makes the host wait until the GPU has done all that it was given.

    Args:
        numbers: nested as `torch.tensor` takes them.
        device: where they go.
        dtype: of the tensor.
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
