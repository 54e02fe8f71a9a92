# SPDX-License-Identifier: Apache-2.0
"""Acceptance by distance, or by FLy's deferred window: comparison, decision and selection of the path in one launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.accept_tree import MIN_PATH, TARGET, accept_tree_reference, write_path
from specvla_kernels.compare_drafts import MIN_NODES, PackedTrees, Trees, compare, compare_drafts_reference
from specvla_kernels.device import has_kernels, jit, power_of_two, tl
from specvla_kernels.uncertainty import uncertainty


@dataclass(frozen=True)
class Deferral:
    """FLy's excuse for a draft that is not the target's choice (arXiv 2511.22972): see `excused`."""

    theta: float  # uncertainty from which the target's choice may be overruled; -inf: always
    window: int  # drafts that must follow in the tree
    follow: int  # drafts that follow on the path and must be the target's choices
    terms: int  # see `uncertainty`


@dataclass(frozen=True)
class Within:
    """The drafts that a rule accepts besides the target's choices, and the reasons reported for both."""

    # int64 [dimensions + 2], accepted distance in bins from the target's choice per action dimension, then for all
    # further dimensions, then for tokens without a dimension; None: only the target's own choice.
    tolerances: Tensor | None
    exact_reason: int
    relaxed_reason: int
    deferral: Deferral | None = None


def accept_within(
    trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int, logits: Tensor | None = None
) -> Tensor:
    """`accept_tree` for a rule that accepts the target's choice, tokens near it, or those that `excused` excuses.

    Args:
        ids: first, stop and bins, as `compare_drafts` takes them.
        logits: the target's, float32 [nodes, vocab]; read for a deferral, which takes a launch more.
    """
    unsure = None
    if within.deferral is not None and max_depth:
        assert logits is not None, "a deferral needs the logits"
        unsure = uncertainty(logits, within.deferral.terms)
    run = accept_within_triton if has_kernels(trees.nodes.log_probs) else accept_within_reference
    return run(trees, within, ids, max_depth, unsure)


def excused(trees: Trees, exact: Tensor, unsure: Tensor, deferral: Deferral) -> Tensor:
    """Bool [requests, n, n], row e, column j: on a path that ends at node e, node j need not be the target's choice.

    The target must be uncertain at j, the next `follow` nodes of the path must be its choices, and the tree must have
    `window` valid depths below j. `unsure`: [requests, n], see `uncertainty`; `exact`: see `Comparison`.
    """
    depths, on_path = trees.depths, trees.on_path
    later, here = depths[:, :, None], depths[:, None]
    within = (later > here) & (later <= here + deferral.follow)  # [requests, k, j]: k lies in j's window
    counts = on_path.to(torch.float32) @ (exact[:, :, None] & within).to(torch.float32)  # [requests, e, j]
    reach = torch.where(on_path & trees.valid[:, :, None], later, 0).amax(dim=1)
    is_open = (unsure >= deferral.theta).gather(1, trees.parents.clamp(min=0))  # closed where it is NaN
    return (counts == deferral.follow) & (is_open & (depths + deferral.window <= reach))[:, None]


def accept_within_reference(
    trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int, unsure: Tensor | None = None
) -> Tensor:
    """`accept_within` in PyTorch."""
    if max_depth == 0:
        return _roots_alone(trees)
    padded = trees.padded()
    comparison = compare_drafts_reference(padded, *ids)
    accepted = comparison.exact
    if within.tolerances is not None:
        dimensions = comparison.dimensions.clamp(max=len(within.tolerances) - 2)
        accepted = accepted | (comparison.distances <= within.tolerances[dimensions])
    mask = accepted[:, None]
    if within.deferral is not None and unsure is not None:
        of_nodes = unsure[None] if trees.rows is None else unsure[trees.rows.clamp(max=len(unsure) - 1)]
        mask = mask | excused(padded, comparison.exact, of_nodes, within.deferral)
    reasons = torch.where(comparison.exact, within.exact_reason, within.relaxed_reason)
    return accept_tree_reference(padded, comparison, mask, reasons, max_depth)


def _roots_alone(trees: PackedTrees) -> Tensor:
    """The walk of trees of one node in four operators: plain decoding on a CPU is mostly their dispatch."""
    choices = trees.choices if trees.rows is None else trees.choices[trees.rows[:, 0]]
    none = torch.zeros_like(choices)
    return torch.stack((none, choices, none, torch.full_like(choices, TARGET), torch.ones_like(choices)), dim=1)


def accept_within_triton(
    trees: PackedTrees, within: Within, ids: tuple[int, int, int], max_depth: int, unsure: Tensor | None = None
) -> Tensor:
    """`accept_within` as one launch, a program per request."""
    n, rows, tolerances = trees.max_nodes, trees.rows, within.tolerances
    deferral = within.deferral or Deferral(0.0, 0, 0, 0)
    choices = trees.choices.contiguous()
    out = choices.new_empty(trees.requests, 4 * (max_depth + 1) + 1)
    block = power_of_two(n, MIN_NODES)
    _accept_within[(trees.requests,)](
        *(column.contiguous() for column in trees.nodes), choices,
        choices if rows is None else rows, trees.positions, choices if tolerances is None else tolerances,
        choices if unsure is None else unsure, out, *ids, len(choices), n, max_depth + 1,
        0 if tolerances is None else len(tolerances), deferral.theta, deferral.window, deferral.follow,
        within.exact_reason, within.relaxed_reason,
        PACKED=rows is not None, RELAXED=tolerances is not None, DEFERS=unsure is not None,
        BLOCK=block, BLOCK_PATH=power_of_two(max_depth + 1, MIN_PATH), num_warps=max(4, block // 8),
    )  # fmt: skip
    return out


@jit(
    do_not_specialize=[
        "n_rows", "n_nodes", "n_steps", "n_tolerances", "theta", "window", "follow", "exact_reason", "relaxed_reason",
    ],
    do_not_specialize_on_alignment=[
        "tokens", "parents", "depths", "ancestors", "log_probs", "valid", "relaxable", "choices", "rows", "positions",
        "tolerances", "unsure", "out",
    ],
)  # fmt: skip
def _accept_within(  # type: ignore[no-untyped-def]
    tokens, parents, depths, ancestors, log_probs, valid, relaxable, choices, rows, positions, tolerances,
    unsure, out, first_id, stop_id, bins, n_rows, n_nodes, n_steps, n_tolerances, theta, window, follow,
    exact_reason, relaxed_reason,
    PACKED: tl.constexpr, RELAXED: tl.constexpr, DEFERS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
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
    allowed = is_valid & (is_relaxable | is_exact) & (want != -1)
    bit = tl.full((BLOCK,), 1, tl.int64) << n.to(tl.int64)
    kept = tl.sum(tl.where((accepted & allowed) | (n == 0), bit, 0), 0)  # of each path, as bits
    if DEFERS:
        on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1  # row e, column j: j is an ancestor of e, or e
        above_by = depth[:, None] - depth[None, :]
        agrees = tl.sum((on_path & (above_by < follow) & is_exact[None, :]).to(tl.int32), 1) == follow
        # Each node that ends a window of the target's choices excuses the node before the window, on all paths through
        # it. No two nodes of a path excuse the same one, so that sums of bits are unions.
        excuses = tl.sum(tl.where(on_path & (above_by == follow) & agrees[:, None], bit[None, :], 0), 1)
        excused = tl.sum(tl.where(on_path, excuses[None, :], 0), 1)
        reach = tl.max(tl.where(on_path & is_valid[:, None], depth[:, None], 0), 0)
        is_open = tl.load(unsure + above, drafted, other=float("nan")) >= theta
        kept = kept | (excused & tl.sum(tl.where(allowed & is_open & (depth + window <= reach), bit, 0), 0))
    candidate = ((path & kept) == path) & (path != 0)
    reason = tl.where(is_exact, exact_reason, relaxed_reason).to(tl.int64)
    likelihood = tl.load(log_probs + at, there, other=float("-inf"))
    choice = tl.load(choices + at, there, other=-1)
    row = out + request * (4 * n_steps + 1)
    write_path(row, n, token, depth, path, distance, reason, likelihood, choice, candidate, n_steps, BLOCK, BLOCK_PATH)
