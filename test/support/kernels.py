# SPDX-License-Identifier: Apache-2.0
"""What the kernel tests share: they run in Triton's interpreter, or on a GPU where there is one."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specvla_kernels import layer_products
from specvla_kernels.device import HAS_TRITON
from specvla_kernels.product_contest import FEW_ROWS

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


@contextmanager
def forced(fused: bool) -> Iterator[None]:
    """Takes our fused launch of a product, or the libraries' product, wherever the rows allow it."""
    Make = Callable[[], Tensor]

    def is_fused(ours: Make, apart: Make, x: Tensor, weight: Tensor, kind: str, most_rows: int = FEW_ROWS) -> bool:
        return fused and x.shape[0] <= most_rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_products, "is_fused", is_fused)
        yield


def _hasten_interpreter() -> None:
    """Without what takes half of the interpreter's time for nothing; it reaches into the Triton that is pinned.

    Whether integers overflow is computed for every sum, and asserted with an option alone that nobody can set. And for
    every call of every function the members of Triton's modules are listed anew.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, _ in inspect.getmembers(package, is_builtin)]

    def patch_builtin(package: Any, *passed: Any) -> None:  # Triton 3.2 passes no scope
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *passed)

    interpreter._patch_builtin = patch_builtin
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if HAS_TRITON and DEVICE.type == "cpu":
    _hasten_interpreter()
