# SPDX-License-Identifier: Apache-2.0
"""Fills a draft head's static memory: rows by their index, and others as they lie."""

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl

_BLOCK = 1024  # elements of a row that a program moves: 8 per thread

Pair = tuple[Tensor, Tensor]


def gather_rows(states: Tensor, rows: Tensor, out: Tensor, whole: Pair, places: Pair) -> None:
    """Copies `states[rows]` to `out`, and each tensor of `whole` to the first rows of its place.

    Args:
        states: [n, size], all tensors' rows are contiguous and of one dtype.
        rows: int64 [m], contiguous.
        out: [m, size].
        whole: [k, size] each; k may be 0.
        places: at least k rows each.
    """
    run = gather_rows_triton if has_kernels(states) else gather_rows_reference
    run(states, rows, out, whole, places)


def gather_rows_reference(states: Tensor, rows: Tensor, out: Tensor, whole: Pair, places: Pair) -> None:
    """`gather_rows` in PyTorch."""
    torch.index_select(states, 0, rows, out=out)
    for place, part in zip(places, whole, strict=True):
        place[: len(part)] = part


def gather_rows_triton(states: Tensor, rows: Tensor, out: Tensor, whole: Pair, places: Pair) -> None:
    """`gather_rows` as one launch, a program per row and block of it."""
    size, m = states.shape[1], len(rows)
    if n := m + len(whole[0]):
        block = min(_BLOCK, 1 << (size - 1).bit_length())
        _gather_rows[(n, -(-size // block))](
            states, rows, out, *(part.contiguous() for part in whole), *places, m, SIZE=size, BLOCK=block, num_warps=4
        )


@jit(do_not_specialize=["m"], do_not_specialize_on_alignment=["rows"])
def _gather_rows(  # type: ignore[no-untyped-def]
    states, rows, out, one, other, one_place, other_place, m, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if row < m:
        tl.store(out + row * SIZE + column, tl.load(states + tl.load(rows + row) * SIZE + column, mask), mask)
    else:
        at = (row - m) * SIZE + column
        tl.store(one_place + at, tl.load(one + at, mask), mask)
        tl.store(other_place + at, tl.load(other + at, mask), mask)
