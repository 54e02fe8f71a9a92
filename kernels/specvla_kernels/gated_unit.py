# SPDX-License-Identifier: Apache-2.0
"""The gate of an MLP in one pass."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl

_BLOCK = 1024  # columns per program: 8 per thread

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""The activations, by their names in `DecoderVariant.gate`."""


def gated_unit(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """Applies a gate, one of `GATES`, to the first half of the columns, times the second (GLU, arXiv 2002.05202).

    Maps [n_rows, 2 * width] to [n_rows, width]; computed in float32, or in float64 for float64.
    """
    return (gated_unit_triton if has_kernels(gate_up) else gated_unit_reference)(gate_up, gate)


def gated_unit_reference(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """`gated_unit` in PyTorch, which rounds the activation before the product."""
    first, second = gate_up.chunk(2, dim=-1)
    return GATES[gate](first) * second


def gated_unit_triton(gate_up: Tensor, gate: str = "silu") -> Tensor:
    """`gated_unit` as one launch: it reads and writes each number once, PyTorch also the activation's."""
    n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n_rows, width)
    grid = n_rows, -(-width // _BLOCK)
    _gated_unit[grid](gate_up, out, gate_up.stride(0), GATE=gate, WIDTH=width, BLOCK=_BLOCK, num_warps=4)
    return out


@jit
def gated(first, second, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gated product of float32 values."""
    if GATE == "silu":
        return first / (1.0 + tl.exp(-first)) * second
    else:  # noqa: RET505 (the compiler must not see both)
        # tanh(z) = 1 - 2 / (exp(2 z) + 1), which neither overflows nor cancels where it matters
        z = 0.7978845608028654 * (first + 0.044715 * first * first * first)
        return first * (1.0 - 1.0 / (tl.exp(2.0 * z) + 1.0)) * second


@jit
def _gated_unit(  # type: ignore[no-untyped-def]
    gate_up, out, stride, GATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    first = tl.load(gate_up + row * stride + column, mask, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * stride + WIDTH + column, mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gated(first, second, GATE), mask)
