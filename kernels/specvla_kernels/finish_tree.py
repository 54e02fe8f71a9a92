# SPDX-License-Identifier: Apache-2.0
"""Finishes the draft trees of several requests, from the best of all considered children."""

from typing import NamedTuple

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl
from specvla_kernels.expand_tree import Considered
from specvla_kernels.layout import Ancestry

_ENTRIES = 1 << 10  # per program at once; more would not fit its registers


class GrownTrees(NamedTuple):
    """Finished trees, batched; node 0 is the root, with parent -1, and unused nodes come last."""

    numbers: Tensor  # int64 [4, trees, n]: tokens, and parents, depths and ancestors of Ancestry; 0 for unused nodes
    log_probs: Tensor  # 0 for the root and -inf for unused nodes
    valid: Tensor  # True where log_probs are above -inf

    @staticmethod
    def empty(trees: int, nodes: int, dtype: torch.dtype, device: torch.device) -> "GrownTrees":
        """Memory for trees of so many nodes; `dtype`: of the log-probabilities."""
        return GrownTrees(
            torch.empty(4, trees, nodes, dtype=torch.int64, device=device),
            torch.empty(trees, nodes, dtype=dtype, device=device),
            torch.empty(trees, nodes, dtype=torch.bool, device=device),
        )

    @staticmethod
    def of_best(considered: Considered, max_nodes: int) -> "GrownTrees":
        """Memory for the best of all considered children."""
        trees, n = considered.scores.shape
        return GrownTrees.empty(trees, 1 + min(max_nodes - 1, n), considered.scores.dtype, considered.scores.device)


def finish_tree(
    considered: Considered,
    roots: Tensor,
    nodes: Tensor,
    *,
    k: int,
    levels: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """Selects the best of all considered children, in order of depth, with the parents of all of them.

    A child's score is never above its parent's, and ties, as in low precision, go to the first considered. A child
    without its parent, which the published code can choose, therefore cannot occur.

    Args:
        considered: k children of the root, then k children of each of k nodes per level.
        roots: int64 [trees], tokens.
        nodes: int64 [trees], maximum nodes of each finished tree, the root included; at least 1.
        max_nodes: maximum of any tree, known to the host, at most 64: n = min(max_nodes, 1 + considered children).
        out: memory for the result; None: allocates it.
    """
    run = finish_tree_triton if has_kernels(considered.scores) else finish_tree_reference
    return run(considered, roots, nodes, k=k, levels=levels, max_nodes=max_nodes, out=out)


def finish_tree_reference(
    considered: Considered,
    roots: Tensor,
    nodes: Tensor,
    *,
    k: int,
    levels: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """`finish_tree` in PyTorch."""
    tokens, scores, parents = considered.tokens, considered.scores, considered.parents
    n = tokens.shape[1]
    kept = min(max_nodes - 1, n)
    indices, roots = torch.arange(n, device=tokens.device), roots[:, None]
    ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    # Children beyond a tree's own limit go after all others, where they are not parents.
    chosen = torch.where(indices[:kept] < nodes[:, None] - 1, ranked, n).sort(dim=1).values
    node_of = torch.zeros_like(roots).repeat(1, n + 2)
    node_of.scatter_(1, chosen + 1, (indices[:kept] + 1).expand_as(chosen))
    there, chosen = chosen < n, chosen.clamp(max=n - 1)
    above = torch.where(there, node_of.gather(1, parents.gather(1, chosen)), 0)
    ancestry = Ancestry.on_device(torch.cat((torch.full_like(roots, -1), above), dim=1), levels)
    of_root = torch.ones_like(roots, dtype=torch.bool)
    tokens = torch.cat((roots, tokens.gather(1, chosen)), dim=1)
    numbers = torch.stack((tokens, ancestry.parents, ancestry.depths, ancestry.ancestors))
    log_probs = torch.where(there, scores.gather(1, chosen), -torch.inf)
    log_probs = torch.cat((torch.zeros_like(roots, dtype=scores.dtype), log_probs), dim=1)
    numbers = torch.where(torch.cat((of_root, there), dim=1), numbers, 0)
    made = GrownTrees(numbers, log_probs, log_probs > -torch.inf)
    for memory, each in zip(out or (), made, strict=out is not None):
        memory.copy_(each)
    return out or made


def finish_tree_triton(
    considered: Considered,
    roots: Tensor,
    nodes: Tensor,
    *,
    k: int,
    levels: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """`finish_tree` as one launch, a program per tree."""
    trees, n = considered.tokens.shape
    made = out or GrownTrees.of_best(considered, max_nodes)
    size = made.valid.shape[1]
    node_of = torch.empty(trees, n + 1, dtype=torch.int32, device=roots.device)
    _finish_tree[(trees,)](
        considered.tokens, considered.scores, considered.parents, roots, nodes, *made,
        node_of, considered.tokens.stride(0), n, k, size, trees,
        **block_sizes(n, size, levels), num_warps=max(4, power_of_two(size, 16) // 8),
    )  # fmt: skip
    return made


def block_sizes(n: int, size: int, levels: int) -> dict[str, int]:
    """Constants of `write_tree` for trees of `size` nodes from n considered children."""
    entries = min(power_of_two(n, 16), _ENTRIES)
    return dict(DOUBLINGS=levels.bit_length(), BLOCK=power_of_two(size, 16), BLOCK_ENTRIES=entries)


@jit(
    do_not_specialize=["considered_stride", "n", "k", "size", "trees"],
    do_not_specialize_on_alignment=[
        "tokens", "scores", "parents", "roots", "nodes", "numbers", "log_probs", "valid", "node_of",
    ],
)  # fmt: skip
def _finish_tree(  # type: ignore[no-untyped-def]
    tokens, scores, parents, roots, nodes, numbers, log_probs, valid, node_of, considered_stride, n, k, size, trees,
    DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
    write_tree(
        tl.program_id(0).to(tl.int64), tokens, scores, parents, roots, nodes, numbers, log_probs, valid, node_of,
        considered_stride, n, k, size, trees, DOUBLINGS, BLOCK, BLOCK_ENTRIES,
    )  # fmt: skip


@jit
def write_tree(  # type: ignore[no-untyped-def]
    tree, tokens, scores, parents, roots, nodes, numbers, log_probs, valid, node_of, considered_stride, n, k, size,
    trees, DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Writes one finished tree; all threads see what is considered."""
    block = tl.arange(0, BLOCK_ENTRIES)
    own_scores = scores + tree * considered_stride
    kept = tl.minimum(tl.minimum(tl.load(nodes + tree).to(tl.int32), size) - 1, n)
    # No score is above 0: the bits of its magnitude, as an integer, order scores from the best.
    worst, spare = 0, kept  # key of the last kept child, found bit by bit; number of kept ones with that key
    for i in range(31):
        tried = worst | (1 << (30 - i))
        better = 0
        for begin in range(0, n, BLOCK_ENTRIES):
            score = tl.load(own_scores + begin + block, begin + block < n, other=float("nan"))
            better += tl.sum(((score == score) & (tl.abs(score).to(tl.int32, bitcast=True) < tried)).to(tl.int32), 0)
        spare = tl.where(better < kept, kept - better, spare)
        worst = tl.where(better < kept, tried, worst)
    own_nodes = node_of + tree * (n + 1)
    row, plane = tree * size, trees.to(tl.int64) * size
    tl.store(own_nodes, 0)
    nodes_before, worst_before = 0, 0
    for begin in range(0, n, BLOCK_ENTRIES):
        entry = begin + block
        at = tree * considered_stride + entry
        score = tl.load(scores + at, entry < n, other=float("nan"))
        key = tl.abs(score).to(tl.int32, bitcast=True)
        of_worst = ((score == score) & (key == worst)).to(tl.int32)
        first_of_worst = (of_worst == 1) & (worst_before + tl.cumsum(of_worst, 0) <= spare)
        chosen = (((score == score) & (key < worst)) | first_of_worst) & (kept > 0)
        node = nodes_before + tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(own_nodes + 1 + entry, node, chosen)
        tl.debug_barrier()  # the numbers of all nodes are visible to their children
        parent = tl.load(own_nodes + tl.load(parents + at, chosen, other=0), chosen, other=0)
        depth = tl.where(entry < k, 1, 2 + (entry - k) // (k * k))
        tl.store(numbers + row + node, tl.load(tokens + at, chosen, other=0), chosen)
        tl.store(numbers + plane + row + node, parent.to(tl.int64), chosen)
        tl.store(numbers + 2 * plane + row + node, depth.to(tl.int64), chosen)
        tl.store(log_probs + row + node, score, chosen)
        tl.store(valid + row + node, score > float("-inf"), chosen)
        nodes_before += tl.sum(chosen.to(tl.int32), 0)
        worst_before += tl.sum(of_worst, 0)

    place = tl.arange(0, BLOCK)
    is_root, empty = place == 0, (place > kept) & (place < size)
    other = is_root | empty
    own = numbers + row + place
    tl.store(own, tl.where(is_root, tl.load(roots + tree), 0), other)
    tl.store(own + plane, tl.where(is_root, -1, 0).to(tl.int64), other)
    tl.store(own + 2 * plane, tl.zeros((BLOCK,), tl.int64), other)
    tl.store(log_probs + row + place, tl.where(is_root, 0.0, float("-inf")), other)
    tl.store(valid + row + place, is_root, other)
    tl.debug_barrier()  # and all parents to the whole tree
    filled = place <= kept
    up = tl.load(own + plane, filled, other=-1).to(tl.int32)
    path = tl.where(filled, tl.full((BLOCK,), 1, tl.int64) << place.to(tl.int64), 0)
    for _ in range(DOUBLINGS):  # a path of 1, 2, 4, ... nodes
        is_up = up[:, None] == place[None, :]
        path = path | tl.sum(tl.where(is_up, path[None, :], 0), 1)
        up = tl.sum(tl.where(is_up, up[None, :] + 1, 0), 1) - 1
    tl.store(own + 3 * plane, path, place < size)
