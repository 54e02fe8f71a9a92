# SPDX-License-Identifier: Apache-2.0
"""The target's own choice at each node: the likeliest token."""

import torch
from torch import Tensor

from specvla_kernels.compare_drafts import NO_TOKEN
from specvla_kernels.device import has_kernels, jit, tl

BLOCK = 4096  # logits per program at once: 16 per thread


def greedy_choice(logits: Tensor) -> Tensor:
    """The most likely token of each row of logits, float32 or float64 [n, vocab]: int64 [n].

    The lowest id wins a tie, on every device; NO_TOKEN for a row with a NaN. Rows are contiguous.
    """
    return greedy_choice_triton(logits) if has_kernels(logits) else greedy_choice_reference(logits)


def greedy_choice_reference(logits: Tensor) -> Tensor:
    """`greedy_choice` in PyTorch, whose argmax takes the first of equal values, and a NaN for the largest."""
    first = logits.argmax(dim=-1, keepdim=True)
    best = logits.gather(-1, first)
    return torch.where(best.isnan(), NO_TOKEN, first)[:, 0]


def greedy_choice_triton(logits: Tensor) -> Tensor:
    """`greedy_choice` as one launch, a program per row; it reads each logit once, PyTorch takes nine launches."""
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        _greedy_choice[(n,)](logits, out, logits.stride(0), vocab, BLOCK=BLOCK, num_warps=8)
    return out


@jit(do_not_specialize=["vocab"])
def _greedy_choice(logits, out, row_stride, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, likeliest(logits + row * row_stride, logits, vocab, False, BLOCK))


@jit
def likeliest(row, excluded, vocab, EXCLUDES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's choice, int64 []. EXCLUDES: logits of ids with a True in `excluded` are first set to -inf, in memory."""
    column = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)  # tl.max ignores NaN
    for start in range(0, vocab, BLOCK):
        here = start + column
        value = tl.load(row + here, here < vocab, other=float("-inf"))
        if EXCLUDES:
            left_out = tl.load(excluded + here, here < vocab, other=0) != 0
            value = tl.where(left_out, float("-inf"), value)
            tl.store(row + here, value, left_out)
        broken = broken | (value != value).to(tl.int32)
        # An id counts at -inf too: a row of only -inf still has a likeliest token, its first.
        better = (here < vocab) & ((value > best) | (place == 0x7FFFFFFF))
        best, place = tl.where(better, value, best), tl.where(better, here, place)
    chosen = tl.min(tl.where(best == tl.max(best, 0), place, 0x7FFFFFFF), 0)
    return tl.where(tl.max(broken, 0) > 0, -1, chosen).to(tl.int64)
