# SPDX-License-Identifier: Apache-2.0
"""Grows whole draft trees of several requests, where one forward has given the logits of every level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl
from specvla_kernels.expand_tree import (
    BEAM_NODES,
    MAX_COLUMNS,
    Beam,
    Candidates,
    Considered,
    Window,
    best_columns,
    best_entries,
    expand_tree_reference,
    store_children,
)
from specvla_kernels.finish_tree import GrownTrees, block_sizes, finish_tree_reference, write_tree

_WARPS = 16  # with 8 or fewer, some GPUs' registers spill


@dataclass(frozen=True)
class PathLogits:
    """Terms of the logits of all children, float32, over consecutive ids.

    The logits of a level's children are the sum of what each state adds, from the root's level to their own, and of
    what each token on their path adds.
    """

    states: Tensor  # [trees, levels, levels, ids]: [:, i, j] is added by the state of level i, j levels below it
    tokens: Tensor  # [n, ids, ids], n at least levels - 1: [j, t] is added by id t, j levels below its children
    dimensions: Tensor  # int64 [trees], the action dimension of the first level's children; for `window`
    first_id: int = 0
    window: Window | None = None  # as for `Candidates`


def grow_tree(
    logits: PathLogits,
    roots: Tensor,
    max_depths: Tensor,
    nodes: Tensor,
    *,
    k: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """The trees that `expand_tree` grows level by level and `finish_tree` finishes.

    Args:
        logits: of at most 1024 ids, and at least k.
        roots: int64 [trees], tokens.
        max_depths: int64 [trees]; a tree that has reached its maximum grows no further.
        nodes, max_nodes, out: as for `finish_tree`.
    """
    run = grow_tree_triton if has_kernels(logits.states) else grow_tree_reference
    return run(logits, roots, max_depths, nodes, k=k, max_nodes=max_nodes, out=out)


def grow_tree_reference(
    logits: PathLogits,
    roots: Tensor,
    max_depths: Tensor,
    nodes: Tensor,
    *,
    k: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """`grow_tree` in PyTorch."""
    (trees, levels), states = logits.states.shape[:2], logits.states
    considered = Considered.empty(trees, k, levels, states.dtype, states.device)
    beam: Beam | None = None
    paths, offset = roots.new_empty(len(roots), 1, 0), 0  # columns of the tokens from each node up, without the root's
    for level in range(levels):
        rows = _level_logits(logits, paths, level)
        candidates = Candidates(logits.dimensions, rows, logits.first_id, window=logits.window)
        given = dict(k=k, level=level, offset=offset)
        offset += rows.shape[1] * k
        beam = expand_tree_reference(candidates, beam, considered, max_depths, **given, last=level + 1 == levels)
        if beam is not None:
            above = paths.gather(1, beam.parents[:, :, None].expand(-1, -1, level))
            paths = torch.cat((beam.tokens[:, :, None] - logits.first_id, above), dim=2)
    return finish_tree_reference(considered, roots, nodes, k=k, levels=levels, max_nodes=max_nodes, out=out)


def _level_logits(logits: PathLogits, paths: Tensor, level: int) -> Tensor:
    """Logits [trees, beam, ids] of the children of nodes with paths [trees, beam, level]."""
    rows = logits.states[:, 0, level, None]
    for i in range(1, level + 1):
        rows = rows + logits.states[:, i, level - i, None]
    for j in range(level):
        rows = rows + logits.tokens[j][paths[:, :, j]]
    return rows


def grow_tree_triton(
    logits: PathLogits,
    roots: Tensor,
    max_depths: Tensor,
    nodes: Tensor,
    *,
    k: int,
    max_nodes: int,
    out: GrownTrees | None = None,
) -> GrownTrees:
    """`grow_tree` as one launch, a program per tree; raises ValueError for more than 1024 ids."""
    trees, levels, _, columns = logits.states.shape
    if columns > MAX_COLUMNS:
        raise ValueError(f"{columns} ids exceed the kernel's {MAX_COLUMNS}: grow the tree level by level")
    considered = Considered.empty(trees, k, levels, logits.states.dtype, roots.device)
    window, made = logits.window, out or GrownTrees.of_best(considered, max_nodes)
    n, size = considered.tokens.shape[1], made.valid.shape[1]
    node_of = torch.empty(trees, n + 1, dtype=torch.int32, device=roots.device)
    tolerances = max_depths if window is None else window.tolerances  # not read without a window
    _grow_tree[(trees,)](
        logits.states, logits.tokens, tolerances, logits.dimensions, max_depths, roots, nodes,
        considered.tokens, considered.scores, considered.parents,
        considered.scores.new_empty(trees, k), considered.tokens.new_empty(trees, k), *made, node_of,
        levels, logits.first_id, columns, len(tolerances) - 1, n, size, trees,
        BINS=window.bins if window else 0, SHARED=bool(window and columns > window.bins), K=k,
        BLOCK_WIDTH=min(power_of_two(k), BEAM_NODES), BLOCK_K=power_of_two(k),
        BLOCK_LEVEL=power_of_two(k * k), BLOCK_COLUMNS=power_of_two(columns), **block_sizes(n, size, levels),
        num_warps=_WARPS,
    )  # fmt: skip
    return made


@jit(
    do_not_specialize=["levels", "first_id", "columns", "last_dimension", "n", "size", "trees"],
    do_not_specialize_on_alignment=[
        "state_logits", "token_logits", "tolerances", "dimensions", "max_depths", "roots", "nodes", "tokens",
        "scores", "parents", "beam_scores", "beam_numbers", "numbers", "log_probs", "valid", "node_of",
    ],
)  # fmt: skip
def _grow_tree(  # type: ignore[no-untyped-def]
    state_logits, token_logits, tolerances, dimensions, max_depths, roots, nodes, tokens, scores, parents,
    beam_scores, beam_numbers, numbers, log_probs, valid, node_of,
    levels, first_id, columns, last_dimension, n, size, trees,
    BINS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_LEVEL: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, DOUBLINGS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    child, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_COLUMNS)
    max_depth = tl.load(max_depths + tree)
    beam_scores += tree * K
    beam_numbers += tree * K
    own = tree * n
    tl.store(beam_scores, 0.0)  # at first, the beam is the root
    tl.store(beam_numbers, tl.zeros((), tl.int64))
    tl.debug_barrier()
    offset, width = 0, 1
    for level in range(levels):
        dimension = tl.load(dimensions + tree) + level
        for begin in range(0, width, BLOCK_WIDTH):
            node = begin + tl.arange(0, BLOCK_WIDTH)
            there = node < width
            inside = there[:, None] & (column < columns)[None, :]
            number = tl.load(beam_numbers + node, there, other=0)
            x = tl.where(inside, 0.0, -float("inf"))
            for i in range(level + 1):
                at = ((tree * levels + i) * levels + level - i) * columns + column
                x += tl.load(state_logits + at, column < columns, other=0.0)[None, :]
            ancestor = number
            for j in range(level):
                entry = own + ancestor - 1
                token = tl.load(tokens + entry, there, other=0) - first_id
                at = (j * columns + token[:, None]) * columns + column[None, :]
                x += tl.load(token_logits + at, inside, other=0.0)
                ancestor = tl.load(parents + entry, there, other=0)
            found, gained = best_columns(
                x, inside, dimension, tolerances, columns, last_dimension,
                BINS, SHARED, False, K, BLOCK_WIDTH, BLOCK_K, BLOCK_COLUMNS,
            )  # fmt: skip
            to = own + offset + node[:, None] * K + child[None, :]
            pairs = there[:, None] & (child < K)[None, :]
            total = tl.load(beam_scores + node, there, other=0.0)
            token = first_id + found.to(tl.int64)
            grows = level < max_depth
            store_children(tokens + to, scores + to, parents + to, pairs, token, gained, total, number, grows)
        tl.debug_barrier()  # all threads see the children of all nodes
        if level + 1 < levels:
            best = child  # those of the root
            if level > 0:
                best = best_entries(scores + own + offset, K * K, K, BLOCK_K, BLOCK_LEVEL)
            mine = child < K
            tl.store(beam_scores + child, tl.load(scores + own + offset + best, mine), mine)
            tl.store(beam_numbers + child, (offset + 1 + best).to(tl.int64), mine)
            tl.debug_barrier()  # and the next beam
        offset += width * K
        width = K
    write_tree(
        tree, tokens, scores, parents, roots, nodes, numbers, log_probs, valid, node_of, n, n, K, size, trees,
        DOUBLINGS, BLOCK, BLOCK_ENTRIES,
    )  # fmt: skip
