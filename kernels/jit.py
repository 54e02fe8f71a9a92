"""Triton where it is installed; without it every operator is its PyTorch reference."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class _Annotations:
    """Enough of Triton's language for a kernel's signature to be read."""

    constexpr = int


def _left_alone(kernel: Any) -> Any:
    return kernel


try:
    tl: Any = import_module("triton.language")
    jit: Any = import_module("triton").jit
    HAS_TRITON = True
except ImportError:
    tl, jit = _Annotations, _left_alone
    HAS_TRITON = False


def has_kernels(x: Tensor) -> bool:
    """Whether the operators run as Triton kernels on such a tensor; they hold no float64 arithmetic."""
    return HAS_TRITON and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n: the sides of a kernel's blocks."""
    return 1 << max(0, n - 1).bit_length()
