"""One piece of a forward with what it must read and compute, and the contestants that do it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels import device as jit
from specvla_kernels.device import has_kernels
from specvla_ros.planning.cost import Part

TRITON, PYTORCH, COMPILED, UNQUANTISED = "Triton", "PyTorch", "torch.compile", "unquantised"


@dataclass(frozen=True)
class Case:
    """One row of the tables.

    Args:
        name: the kernel or stage.
        batch: what it is done on.
        rows: of that.
        parts: bytes and operations, one behind the other.
        calls: each contestant, or why it is not one here.
    """

    name: str
    batch: str
    rows: int
    parts: tuple[Part, ...]
    calls: dict[str, Callable[[], object] | str]


def with_and_without_kernels(call: Callable[[], object], x: Tensor) -> dict[str, Callable[[], object] | str]:
    """The same call on the Triton kernels, where they run, and on their PyTorch references.

    Args:
        call: of the public operators, which choose between the two.
        x: any of its operands.
    """

    def on_references() -> object:
        found, jit.HAS_TRITON = jit.HAS_TRITON, False
        try:
            return call()
        finally:
            jit.HAS_TRITON = found

    return {TRITON: call if has_kernels(x) else _why_no_kernels(x), PYTORCH: on_references}


def _why_no_kernels(x: Tensor) -> str:
    return "Triton is missing, or the dtype has no kernels" if x.is_cuda else "Triton kernels run on a GPU only"


def compiled(call: Callable[..., object], *operands: object) -> Callable[[], object] | str:
    """A reference behind torch.compile.

    Args:
        call: the reference.
        operands: what it is given.
    """
    if not any(isinstance(each, Tensor) and each.is_cuda for each in operands):
        return "compiled on a GPU only"
    fused = torch.compile(call, dynamic=False)
    return lambda: fused(*operands)
