# SPDX-License-Identifier: Apache-2.0
"""Selects the accepted path through each request's tree, by an acceptance rule's mask."""

import torch
from torch import Tensor

from specvla_kernels.compare_drafts import MIN_NODES, NO_TOKEN, Comparison, Trees
from specvla_kernels.device import has_kernels, jit, power_of_two, tl

NO_NODE = -1  # pads a path
MIN_PATH = 8  # one compilation for all shorter paths
TARGET = 0  # the reason of a token that was not drafted: the target's own


def accept_tree(trees: Trees, comparison: Comparison, accept_mask: Tensor, reasons: Tensor, max_depth: int) -> Tensor:
    """Chooses the path that each request commits: the longest whose nodes are all accepted.

    Ties go to the path nearest to the target's own choices (sum of distances), then to the likelier draft, then to the
    first node. Under any rule, a path excludes nodes that are not valid, nodes that are neither relaxable nor the
    target's choice, and nodes after a NaN, where it ends with NO_TOKEN as its last token.

    Args:
        accept_mask: bool [requests, n, n] or [requests, 1, n]; row e, column j: on a path that ends at node e, node j
            may be committed. Read only where j is e or an ancestor of e, and not at the root.
        reasons: int64 [requests, n], why each node is accepted.

    Returns:
        int64 [requests, 4 * (max_depth + 1) + 1]: the path's nodes from the root, padded with NO_NODE; the token
        committed after each, the last one the target's own, padded with NO_TOKEN; each token's distance from the
        target's choice and its reason (TARGET for the last), padded with 0; and the number of nodes, which is also the
        number of tokens.
    """
    run = accept_tree_triton if has_kernels(trees.log_probs) else accept_tree_reference
    return run(trees, comparison, accept_mask, reasons, max_depth)


def accept_tree_reference(
    trees: Trees, comparison: Comparison, accept_mask: Tensor, reasons: Tensor, max_depth: int
) -> Tensor:
    """`accept_tree` in PyTorch."""
    nodes = torch.arange(trees.tokens.shape[1], device=trees.tokens.device)
    on_path = trees.on_path
    # A loose rule would commit tokens that were drafted after a NaN, and so hide the NaN from the caller.
    allowed = trees.valid & (trees.relaxable | comparison.exact) & (comparison.wanted != NO_TOKEN)
    accepted = (accept_mask & allowed[:, None]) | (nodes == 0)
    candidates = (accepted | ~on_path).all(dim=2) & on_path.any(dim=2)
    distance = (on_path * comparison.distances[:, None]).sum(dim=2)
    likelihood = torch.nan_to_num(trees.log_probs, nan=-torch.inf, neginf=-torch.inf)
    for score in (trees.depths, -distance, likelihood):
        score = torch.where(candidates, score.to(torch.float64), -torch.inf)
        candidates = candidates & (score == score.amax(dim=1, keepdim=True))
    end = torch.where(candidates, nodes, len(nodes)).amin(dim=1, keepdim=True)

    steps = torch.arange(max_depth + 1, device=end.device)
    on_chosen = (trees.ancestors.gather(1, end) >> nodes) & 1 == 1
    at = (trees.depths[:, None] == steps[:, None]) & on_chosen[:, None]  # [requests, max_depth + 1, n]
    path = torch.where(at, nodes, NO_NODE).amax(dim=2)
    after = torch.cat((path[:, 1:], torch.full_like(path[:, :1], NO_NODE)), dim=1)
    drafted, node = after >= 0, after.clamp(min=0)
    depth = trees.depths.gather(1, end)
    tokens = torch.where(drafted, trees.tokens.gather(1, node), NO_TOKEN)
    tokens = torch.where(steps == depth, trees.choices.gather(1, end), tokens)
    distances = torch.where(drafted, comparison.distances.gather(1, node), 0)
    reasons = torch.where(drafted, reasons.gather(1, node), TARGET)
    return torch.cat((path, tokens, distances, reasons, depth + 1), dim=1)


def accept_tree_triton(
    trees: Trees, comparison: Comparison, accept_mask: Tensor, reasons: Tensor, max_depth: int
) -> Tensor:
    """`accept_tree` as one launch, a program per request."""
    requests, n = trees.tokens.shape
    out = trees.tokens.new_empty(requests, 4 * (max_depth + 1) + 1)
    columns = (
        trees.tokens, trees.depths, trees.ancestors, trees.log_probs, trees.valid, trees.relaxable, trees.choices,
        comparison.wanted, comparison.exact, comparison.distances, reasons,
    )  # fmt: skip
    mask = accept_mask if accept_mask.stride(2) == 1 else accept_mask.contiguous()
    row_stride = mask.stride(1) if mask.shape[1] > 1 else 0
    block, path_block = power_of_two(n, MIN_NODES), power_of_two(max_depth + 1, MIN_PATH)
    _accept_tree[(requests,)](
        *(column.contiguous() for column in columns), mask, out, mask.stride(0), row_stride, n, max_depth + 1,
        BLOCK=block, BLOCK_PATH=path_block, num_warps=max(4, block // 8),  # 64 nodes would not fit 4 warps' registers
    )  # fmt: skip
    return out


@jit(
    do_not_specialize=["mask_stride", "mask_row_stride", "n_nodes", "n_steps"],
    do_not_specialize_on_alignment=[
        "tokens", "depths", "ancestors", "log_probs", "valid", "relaxable", "choices", "wanted", "exact", "distances",
        "reasons", "accept_mask", "out",
    ],
)  # fmt: skip
def _accept_tree(  # type: ignore[no-untyped-def]
    tokens, depths, ancestors, log_probs, valid, relaxable, choices, wanted, exact, distances, reasons, accept_mask,
    out, mask_stride, mask_row_stride, n_nodes, n_steps,
    BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    there, at = n < n_nodes, request * n_nodes + n
    token, depth = tl.load(tokens + at, there, other=-1), tl.load(depths + at, there, other=-1)
    path, distance = tl.load(ancestors + at, there, other=0), tl.load(distances + at, there, other=0)
    is_valid, is_relaxable = tl.load(valid + at, there, other=0) != 0, tl.load(relaxable + at, there, other=0) != 0
    is_exact = tl.load(exact + at, there, other=0) != 0
    allowed = is_valid & (is_relaxable | is_exact) & (tl.load(wanted + at, there, other=-1) != -1)

    on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1  # row e, column j: j is an ancestor of e, or e
    # 32-bit offsets: 64-bit addresses of all pairs would not fit the registers.
    pairs = n[:, None] * mask_row_stride + n[None, :]
    accepted = tl.load(accept_mask + request * mask_stride + pairs, on_path & there[None, :], other=0) != 0
    accepted = (accepted & allowed[None, :]) | (n == 0)[None, :]
    candidate = (tl.sum((on_path & ~accepted).to(tl.int32), 1) == 0) & (path != 0)
    likelihood = tl.load(log_probs + at, there, other=float("-inf"))
    choice, reason = tl.load(choices + at, there, other=-1), tl.load(reasons + at, there, other=0)
    row = out + request * (4 * n_steps + 1)
    write_path(row, n, token, depth, path, distance, reason, likelihood, choice, candidate, n_steps, BLOCK, BLOCK_PATH)


@jit
def write_path(  # type: ignore[no-untyped-def]
    out, n, token, depth, path, distance, reason, likelihood, choice, candidate, n_steps,
    BLOCK: tl.constexpr, BLOCK_PATH: tl.constexpr,
):  # fmt: skip
    """Chooses the end node among the candidates and writes its path; arguments are [BLOCK] each, in registers."""
    candidate = candidate & (depth == tl.max(tl.where(candidate, depth, -1), 0))
    on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1
    total = tl.sum(tl.where(on_path, distance[None, :], 0), 1)
    candidate = candidate & (total == tl.min(tl.where(candidate, total, 1 << 40), 0))
    likelihood = tl.where(likelihood != likelihood, float("-inf"), tl.minimum(likelihood, 3.4028234663852886e38))
    candidate = candidate & (likelihood == tl.max(tl.where(candidate, likelihood, float("-inf")), 0))
    end = tl.min(tl.where(candidate, n, BLOCK), 0)

    # The path's nodes, and the drafted tokens one step further.
    is_end = n == end
    end_path = tl.sum(tl.where(is_end, path, 0), 0)
    end_depth = tl.sum(tl.where(is_end, depth, 0), 0)
    chosen = tl.sum(tl.where(is_end, choice, 0), 0)
    step = tl.arange(0, BLOCK_PATH)
    on_chosen = ((end_path >> n.to(tl.int64)) & 1) == 1
    here = on_chosen[None, :] & (depth[None, :] == step[:, None])
    after = on_chosen[None, :] & (depth[None, :] == step[:, None] + 1)
    node = tl.max(tl.where(here, n[None, :], -1), 1).to(tl.int64)
    drafted = tl.sum(tl.where(after, token[None, :] + 1, 0), 1) - 1  # -1 where there is none
    committed = tl.where(step == end_depth, chosen, drafted)
    written = step < n_steps
    tl.store(out + step, node, written)
    tl.store(out + n_steps + step, committed, written)
    tl.store(out + 2 * n_steps + step, tl.sum(tl.where(after, distance[None, :], 0), 1), written)
    tl.store(out + 3 * n_steps + step, tl.sum(tl.where(after, reason[None, :], 0), 1), written)
    tl.store(out + 4 * n_steps, end_depth + 1)
