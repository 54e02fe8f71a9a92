# SPDX-License-Identifier: Apache-2.0
"""What runs the operators, Triton or PyTorch, and how the host's numbers reach the device."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class _Annotations:
    """Enough of Triton's language for a kernel's signature to be read."""

    constexpr = int


def _left_alone(kernel: Any = None, **options: Any) -> Any:
    """In place of `triton.jit`, which is also called with options alone."""
    return kernel if kernel is not None else _left_alone


def _wanted() -> bool:
    interprets = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return interprets or "triton" in sys.modules or torch.cuda.is_available()


tl: Any = _Annotations
jit: Any = _left_alone
HAS_TRITON = False
if _wanted():
    with suppress(ImportError):
        tl, jit = import_module("triton.language"), import_module("triton").jit
        HAS_TRITON = True


def has_kernels(x: Tensor) -> bool:
    """Whether the operators run as Triton kernels on such a tensor; they hold no float64 arithmetic."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def blocks(least: int, most: int) -> list[int]:
    """Sides of blocks, powers of two: from the least to the one that holds the most."""
    return [1 << bits for bits in range(least.bit_length() - 1, power_of_two(most, least).bit_length())]


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is not below n, nor below another one: the sides of a kernel's blocks."""
    return max(least, 1 << max(0, n - 1).bit_length())


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of numbers that the host knows.

    A copy from memory that is not pinned makes the host wait until the GPU has done all that it was given.

    Args:
        numbers: nested as `torch.tensor` takes them.
        device: where they go.
        dtype: of the tensor.
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
