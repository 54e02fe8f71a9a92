# SPDX-License-Identifier: Apache-2.0
"""The target's uncertainty after each node: the entropy of its distribution."""

import math

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl

_BLOCK = 4096  # logits per program at once: 16 per thread


def uncertainty(logits: Tensor, terms: int = 0) -> Tensor:
    """Entropy of each row of logits, float32 [n, vocab]: float32 [n]; NaN for a row with a NaN or an infinite maximum.

    The whole distribution's entropy is divided by ln(vocab), so that 1 is the largest (FLy, arXiv 2511.22972). Rows are
    contiguous.

    Args:
        terms: how many of the likeliest tokens count; the sum over them is in nats. 0: all tokens, normalised.
    """
    return uncertainty_triton(logits, terms) if has_kernels(logits) else uncertainty_reference(logits, terms)


def uncertainty_reference(logits: Tensor, terms: int = 0) -> Tensor:
    """`uncertainty` in PyTorch."""
    probabilities = logits.softmax(dim=-1)
    if terms:
        likeliest = probabilities.topk(min(terms, probabilities.shape[-1]), dim=-1).values
        return torch.special.entr(likeliest).sum(dim=-1)
    return torch.special.entr(probabilities).sum(dim=-1) / math.log(probabilities.shape[-1])


def uncertainty_triton(logits: Tensor, terms: int = 0) -> Tensor:
    """`uncertainty` as one launch, a program per row; after the first pass the row is read from the cache."""
    n, vocab = logits.shape
    out = logits.new_empty(n)
    if n:
        most = 1.0 if terms else math.log(vocab)
        _uncertainty[(n,)](logits, out, logits.stride(0), vocab, most, TERMS=terms, BLOCK=_BLOCK, num_warps=8)
    return out


@jit(do_not_specialize=["vocab", "most"])
def _uncertainty(  # type: ignore[no-untyped-def]
    logits, out, row_stride, vocab, most, TERMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    own, column = logits + tl.program_id(0).to(tl.int64) * row_stride, tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        largest = tl.maximum(largest, tl.load(own + start + column, start + column < vocab, other=float("-inf")))
    first = tl.max(largest, 0)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        below = tl.load(own + start + column, start + column < vocab, other=float("-inf")) - first
        share = tl.exp(below)
        total += share
        weighted += tl.where(share > 0, share * below, 0.0)
    whole = tl.sum(total, 0)
    if TERMS == 0:
        found = tl.log(whole) - tl.sum(weighted, 0) / whole
    else:
        # From the largest logit down, one distinct value at a time: all tokens of a value have the same term.
        found, left, top = whole * 0.0, TERMS, first
        for _ in range(TERMS):
            equal, lower = tl.zeros((BLOCK,), tl.int32), tl.full((BLOCK,), float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                value = tl.load(own + start + column, start + column < vocab, other=float("-inf"))
                equal += (value == top).to(tl.int32)
                lower = tl.maximum(lower, tl.where(value < top, value, float("-inf")))
            taken = tl.minimum(tl.sum(equal, 0), left)
            share = tl.exp(top - first) / whole
            found += tl.where(share > 0, -taken * share * tl.log(share), 0.0)
            left -= taken
            top = tl.max(lower, 0)
    tl.store(out + tl.program_id(0), found / most)
