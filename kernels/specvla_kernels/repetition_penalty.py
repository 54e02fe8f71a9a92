# SPDX-License-Identifier: Apache-2.0
"""The choice at each node of several trees under a repetition penalty: of earlier ids, and those on the node's path."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, tl
from specvla_kernels.greedy_choice import BLOCK, greedy_choice_reference, likeliest
from specvla_kernels.layout import MAX_TREE_NODES

_IDS = 256  # earlier ids per program at once


@dataclass(frozen=True)
class EarlierIds:
    """The ids before each tree's root, root included, and the trees' places among the packed nodes.

    Args:
        ids: int64 [all trees' ids], those of a tree all different.
        of_nodes: int64 [3, nodes], per node: the first row of its tree, the first of its ids, and the one after the
            last.
    """

    ids: Tensor
    of_nodes: Tensor

    @staticmethod
    def numbers(ids: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """The numbers of `ids` and `of_nodes` from each tree's earlier ids, repeated or not, and its nodes."""
        flat: list[int] = []
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        for mine, size in zip(ids, sizes, strict=True):
            row, first = len(columns[0]), len(flat)
            flat += {*mine}
            for column, number in zip(columns, (row, first, len(flat)), strict=True):
                column += [number] * size
        return flat, [*columns[0], *columns[1], *columns[2]]


def penalised_choice(
    logits: Tensor,
    penalty: float,
    tokens: Tensor,
    ancestors: Tensor,
    earlier: EarlierIds,
    excluded: Tensor | None = None,
) -> Tensor:
    """Divides positive logits of ids that were before by the penalty and multiplies negative ones, in place.

    As transformers' RepetitionPenaltyLogitsProcessor (CTRL, arXiv 1909.05858): each id once, however often it was
    before.

    Args:
        logits: float32 or float64 [nodes, vocab], rows contiguous.
        tokens, ancestors: int64 [nodes], of all trees side by side. A root counts with the earlier ids only.
        excluded: bool [vocab], True for ids whose logits are set to -inf after the penalty; None: no id.

    Returns:
        int64 [nodes], `greedy_choice` of the changed logits.
    """
    run = penalised_choice_triton if has_kernels(logits) else penalised_choice_reference
    return run(logits, penalty, tokens, ancestors, earlier, excluded)


def penalised_choice_reference(
    logits: Tensor,
    penalty: float,
    tokens: Tensor,
    ancestors: Tensor,
    earlier: EarlierIds,
    excluded: Tensor | None = None,
) -> Tensor:
    """`penalised_choice` in PyTorch."""
    n, vocab = logits.shape
    rows, (first_rows, first_ids, end_ids) = torch.arange(n, device=logits.device), earlier.of_nodes
    seen = torch.zeros(n, vocab, dtype=torch.uint8, device=logits.device)
    there = torch.arange(len(earlier.ids), device=logits.device)
    mine = (there >= first_ids[:, None]) & (there < end_ids[:, None])
    seen.scatter_add_(1, earlier.ids.expand(n, -1), mine.to(torch.uint8))
    above = rows - first_rows[:, None]  # [node, other]: the other's number in the node's tree
    on_path = (
        (above > 0) & (above < MAX_TREE_NODES) & (ancestors[:, None] >> above.clamp(0, MAX_TREE_NODES - 1) & 1 == 1)
    )
    seen.scatter_add_(1, tokens.clamp(0, vocab - 1).expand(n, n), on_path.to(torch.uint8))
    changed = torch.where(logits < 0, logits * penalty, logits / penalty)
    logits.copy_(torch.where(seen > 0, changed, logits))
    if excluded is not None:
        logits.masked_fill_(excluded, -torch.inf)
    return greedy_choice_reference(logits)


def penalised_choice_triton(
    logits: Tensor,
    penalty: float,
    tokens: Tensor,
    ancestors: Tensor,
    earlier: EarlierIds,
    excluded: Tensor | None = None,
) -> Tensor:
    """`penalised_choice` as one launch, a program per node."""
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        # A product with the reciprocal, as PyTorch divides by a number on a GPU.
        _penalised_choice[(n,)](
            logits, tokens, ancestors, earlier.ids, earlier.of_nodes, logits if excluded is None else excluded, out,
            logits.stride(0), vocab, n, penalty, 1 / penalty,
            EXCLUDES=excluded is not None, NODES=MAX_TREE_NODES, IDS=_IDS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out


@jit(
    do_not_specialize=["vocab", "n_nodes"],
    do_not_specialize_on_alignment=["tokens", "ancestors", "ids", "of_nodes"],
)
def _penalised_choice(  # type: ignore[no-untyped-def]
    logits, tokens, ancestors, ids, of_nodes, excluded, out, row_stride, vocab, n_nodes, penalty, reciprocal,
    EXCLUDES: tl.constexpr, NODES: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    row = logits + node * row_stride
    first = tl.load(of_nodes + node)
    start, end = tl.load(of_nodes + n_nodes + node), tl.load(of_nodes + 2 * n_nodes + node)
    n = tl.arange(0, NODES)
    path = tl.load(ancestors + node)
    on_path = (((path >> n.to(tl.int64)) & 1) == 1) & (n > 0) & (first + n < n_nodes)
    token = tl.load(tokens + first + n, on_path, other=-1)
    token = tl.where(on_path, tl.minimum(tl.maximum(token, 0), vocab - 1), -1)
    # A logit changes once: by the first node of the path with its id, unless the id was before the root.
    twice = (token[:, None] == token[None, :]) & (n[None, :] < n[:, None])
    counts = on_path & (tl.sum(twice.to(tl.int32), 1) == 0)
    place = tl.arange(0, IDS)
    for at in range(start, end, IDS):
        there = at + place < end
        earlier = tl.load(ids + at + place, there, other=-2)
        value = tl.load(row + earlier, there, other=0.0)
        tl.store(row + earlier, tl.where(value < 0, value * penalty, value * reciprocal), there)
        before = token[:, None] == earlier[None, :]
        counts = counts & (tl.sum(before.to(tl.int32), 1) == 0)
    value = tl.load(row + token, counts, other=0.0)
    tl.store(row + token, tl.where(value < 0, value * penalty, value * reciprocal), counts)
    tl.debug_barrier()  # all threads see the changed logits
    tl.store(out + node, likeliest(row, excluded, vocab, EXCLUDES, BLOCK))
