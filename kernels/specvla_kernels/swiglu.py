# SPDX-License-Identifier: Apache-2.0
"""The gate of Llama's MLP in one pass."""

import torch.nn.functional as F
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl

_BLOCK = 1024  # columns per program: 8 per thread


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second half (arXiv 2002.05202).

    Args:
        gate_up: [n_rows, 2 * width], the product of the fused matrix.

    Returns:
        [n_rows, width], dtype of gate_up; computed in float32, or in float64 for float64.
    """
    return swiglu_triton(gate_up) if has_kernels(gate_up) else swiglu_reference(gate_up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` in PyTorch, which rounds the gate before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """`swiglu` as one launch: it reads and writes each number once, where PyTorch also stores the gate and reads it."""
    n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n_rows, width)
    grid = n_rows, -(-width // _BLOCK)
    _swiglu[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=4)
    return out


@jit
def _swiglu(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, gate / (1.0 + tl.exp(-gate)) * up, mask)
