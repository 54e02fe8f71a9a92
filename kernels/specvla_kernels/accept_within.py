# SPDX-License-Identifier: Apache-2.0
"""Acceptance by distance only: comparison, tolerance and selection of the path in one launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.accept_tree import MIN_PATH, TARGET, accept_tree_reference, write_path
from specvla_kernels.compare_drafts import MIN_NODES, PackedTrees, compare, compare_drafts_reference
from specvla_kernels.device import has_kernels, jit, power_of_two, tl


@dataclass(frozen=True)
class Within:
    """Tolerances for accepted drafts, and the reason reported for exact and near ones."""

    # int64 [dimensions + 2], accepted distance in bins from the target's choice per action dimension, then for all
    # further dimensions, then for tokens without a dimension; None: only the target's own choice.
    tolerances: Tensor | None
    exact: int
    near: int


def accept_within(trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int) -> Tensor:
    """`accept_tree` for a rule that accepts the target's choice, or tokens near it, anywhere on a path.

    `ids` are first, stop and bins, as `compare_drafts` takes them.
    """
    run = accept_within_triton if has_kernels(trees.nodes.log_probs) else accept_within_reference
    return run(trees, within, ids, max_depth)


def accept_within_reference(trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int) -> Tensor:
    """`accept_within` in PyTorch."""
    if max_depth == 0:
        return _roots_alone(trees)
    padded = trees.padded()
    comparison = compare_drafts_reference(padded, *ids)
    accepted = comparison.exact
    if within.tolerances is not None:
        dimensions = comparison.dimensions.clamp(max=len(within.tolerances) - 2)
        accepted = accepted | (comparison.distances <= within.tolerances[dimensions])
    reasons = torch.where(comparison.exact, within.exact, within.near)
    return accept_tree_reference(padded, comparison, accepted[:, None], reasons, max_depth)


def _roots_alone(trees: PackedTrees) -> Tensor:
    """The walk of trees of one node in four operators: plain decoding on a CPU is mostly their dispatch."""
    choices = trees.choices if trees.rows is None else trees.choices[trees.rows[:, 0]]
    none = torch.zeros_like(choices)
    return torch.stack((none, choices, none, torch.full_like(choices, TARGET), torch.ones_like(choices)), dim=1)


def accept_within_triton(trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int) -> Tensor:
    """`accept_within` as one launch, a program per request."""
    n, rows, tolerances = trees.max_nodes, trees.rows, within.tolerances
    choices = trees.choices.contiguous()
    out = choices.new_empty(trees.requests, 4 * (max_depth + 1) + 1)
    block = power_of_two(n, MIN_NODES)
    _accept_within[(trees.requests,)](
        *(column.contiguous() for column in trees.nodes), choices,
        choices if rows is None else rows, trees.positions, choices if tolerances is None else tolerances,
        out, *ids, len(choices), n, max_depth + 1, 0 if tolerances is None else len(tolerances),
        EXACT=within.exact, NEAR=within.near, PACKED=rows is not None, RELAXED=tolerances is not None,
        BLOCK=block, BLOCK_PATH=power_of_two(max_depth + 1, MIN_PATH), num_warps=max(4, block // 8),
    )  # fmt: skip
    return out


@jit(
    do_not_specialize=["n_rows", "n_nodes", "n_steps", "n_tolerances"],
    do_not_specialize_on_alignment=[
        "tokens", "parents", "depths", "ancestors", "log_probs", "valid", "relaxable", "choices", "rows", "positions",
        "tolerances", "out",
    ],
)  # fmt: skip
def _accept_within(  # type: ignore[no-untyped-def]
    tokens, parents, depths, ancestors, log_probs, valid, relaxable, choices, rows, positions, tolerances, out,
    first_id, stop_id, bins, n_rows, n_nodes, n_steps, n_tolerances,
    EXACT: tl.constexpr, NEAR: tl.constexpr, PACKED: tl.constexpr, RELAXED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    there, at = n < n_nodes, n.to(tl.int64)
    if PACKED:
        at = tl.load(rows + request * n_nodes + n, there, other=n_rows)
        there = at < n_rows
    token, depth = tl.load(tokens + at, there, other=-1), tl.load(depths + at, there, other=-1)
    path, parent = tl.load(ancestors + at, there, other=0), tl.load(parents + at, there, other=0)
    drafted = there & (parent >= 0)
    above = tl.maximum(parent, 0)
    if PACKED:
        above = tl.load(rows + request * n_nodes + above, drafted, other=0)
    want = tl.load(choices + above, drafted, other=-1)
    position = tl.load(positions + request)
    distance, dimension = compare(token, want, drafted, path, n, position, first_id, stop_id, bins)

    is_exact = (token == want) & drafted
    accepted = is_exact
    if RELAXED:
        # The last tolerance is for tokens without a dimension, the one before it for all further dimensions.
        place = tl.where(dimension < 0, n_tolerances - 1, tl.minimum(dimension, n_tolerances - 2))
        accepted = accepted | (distance <= tl.load(tolerances + place, there, other=-1))
    is_valid, is_relaxable = tl.load(valid + at, there, other=0) != 0, tl.load(relaxable + at, there, other=0) != 0
    accepted = (accepted & is_valid & (is_relaxable | is_exact) & (want != -1)) | (n == 0)
    on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1  # row e, column j: j is an ancestor of e, or e
    candidate = (tl.sum((on_path & (accepted == 0)[None, :]).to(tl.int32), 1) == 0) & (path != 0)
    reason = tl.where(is_exact, EXACT, NEAR).to(tl.int64)
    likelihood = tl.load(log_probs + at, there, other=float("-inf"))
    choice = tl.load(choices + at, there, other=-1)
    row = out + request * (4 * n_steps + 1)
    write_path(row, n, token, depth, path, distance, reason, likelihood, choice, candidate, n_steps, BLOCK, BLOCK_PATH)
