# SPDX-License-Identifier: Apache-2.0
"""Compares each drafted token with the target's own choice: equality, distance in bins, and dimension."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl

NO_TOKEN = -1  # the target has no choice: its logits have a NaN, or nothing chooses the token (the root's)
MIN_NODES = 16  # one compilation for all smaller trees


@dataclass(frozen=True)
class Trees:
    """The trees of several requests after their forward, padded to the same number of nodes, 64 at most.

    Padding has a parent but no ancestors, not even itself; its other columns are not read. All are [requests, n].
    """

    tokens: Tensor  # int64; node 0 is the root
    parents: Tensor  # int64; only the root's parent is -1
    depths: Tensor  # int64
    ancestors: Tensor  # int64; bit j set: node j is an ancestor or the node itself
    log_probs: Tensor  # float32, the draft's log-probability of the path to the node
    valid: Tensor  # bool; False: never accepted
    relaxable: Tensor  # bool; False: accepted only if it is the target's own choice
    choices: Tensor  # int64, the target's greedy choice after each node; NO_TOKEN where its logits have a NaN
    # int64 [requests], position of each unfinished answer; for bins, the action dimension of the next token.
    positions: Tensor

    @cached_property
    def on_path(self) -> Tensor:
        """Bool [requests, n, n]: column j is an ancestor of row e, or e itself."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (self.ancestors[:, :, None] >> nodes) & 1 == 1

    @property
    def drafted_before(self) -> Tensor:
        """Bool [requests, n, n]: column j is a drafted ancestor of row e, neither e itself nor the root."""
        depths = self.depths
        return self.on_path & (depths[:, None] < depths[:, :, None]) & (depths[:, None] > 0)

    @property
    def wanted(self) -> Tensor:
        """The target's choice after each node's parent, int64 [requests, n]; NO_TOKEN at the root."""
        return torch.where(self.parents < 0, NO_TOKEN, self.choices.gather(1, self.parents.clamp(min=0)))


class Nodes(NamedTuple):
    """The nodes of several trees, concatenated: columns [nodes] as in `Trees`, with indices within their tree."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    log_probs: Tensor
    valid: Tensor
    relaxable: Tensor


@dataclass(frozen=True)
class PackedTrees:
    """The trees of several requests after their forward, as packed."""

    nodes: Nodes
    choices: Tensor  # of all nodes
    positions: Tensor  # by request
    # int64 [requests, n], each node's index among all; padding has an index after the last. None: one request.
    rows: Tensor | None = None

    @property
    def requests(self) -> int:
        return self.positions.shape[0]

    @property
    def max_nodes(self) -> int:
        return (self.choices if self.rows is None else self.rows).shape[-1]

    def padded(self) -> Trees:
        if self.rows is None:
            nodes = Nodes(*(column[None] for column in self.nodes))
            return Trees(*nodes, self.choices[None], self.positions)
        last = len(self.choices) - 1
        there, rows = self.rows <= last, self.rows.clamp(max=last)
        nodes = Nodes(*(column[rows] for column in self.nodes))
        nodes = nodes._replace(
            parents=torch.where(there, nodes.parents, 0),
            ancestors=torch.where(there, nodes.ancestors, 0),
            valid=nodes.valid & there,
        )
        return Trees(*nodes, self.choices[rows], self.positions)


@dataclass(frozen=True)
class Comparison:
    """Comparison of each node's token with the target's choice after the node's parent, [requests, n]."""

    wanted: Tensor  # int64, that choice; NO_TOKEN at the root
    exact: Tensor  # bool, True if the token is the target's choice
    # int64, distance in bins; 0 at the root. Two different text tokens are 1 apart; text and an action, the number of
    # bins.
    distances: Tensor
    dimensions: Tensor  # int64, the action dimension of the token where both are action tokens, else -1

    @staticmethod
    def where_near(trees: Trees, wanted: Tensor, near: Tensor, apart: Tensor, dimensions: Tensor) -> "Comparison":
        """Compares tokens that are not bins; all tensors are [requests, n].

        `near` is True where a token may replace the wanted one: the distance is then `apart`. Elsewhere it is 0 for
        equal tokens and 1 for different ones. The values at the root are not read.
        """
        drafted = trees.parents >= 0
        near = near & drafted
        different = (trees.tokens != wanted).to(torch.int64)
        return Comparison(
            wanted=wanted,
            exact=(trees.tokens == wanted) & drafted,
            distances=torch.where(drafted, torch.where(near, apart, different), 0),
            dimensions=torch.where(near, dimensions, -1),
        )


def compare_drafts(trees: Trees, first: int, stop: int, bins: int) -> Comparison:
    """Compares every node with the target.

    Action ids range from `first`, the highest value, to below `stop`; `bins` is the number of distinct values: the ids
    `first` and `first + 1` decode alike.
    """
    run = compare_drafts_triton if has_kernels(trees.log_probs) else compare_drafts_reference
    return run(trees, first, stop, bins)


def compare_drafts_reference(trees: Trees, first: int, stop: int, bins: int) -> Comparison:
    """`compare_drafts` in PyTorch."""
    tokens, is_root = trees.tokens, trees.parents < 0
    wanted = trees.wanted
    is_action, wants_action = ((ids >= first) & (ids < stop) & ~is_root for ids in (tokens, wanted))
    token_bin, wanted_bin = ((stop - 1 - ids).clamp(0, bins - 1) for ids in (tokens, wanted))
    text = torch.where(is_action ^ wants_action, bins, (tokens != wanted).to(torch.int64))
    both = is_action & wants_action
    distances = torch.where(both, (token_bin - wanted_bin).abs(), text)
    earlier = (trees.on_path & is_action[:, None]).sum(dim=2) - is_action.to(torch.int64)
    return Comparison(
        wanted=wanted,
        exact=(tokens == wanted) & ~is_root,
        distances=torch.where(is_root, 0, distances),
        dimensions=torch.where(both, trees.positions[:, None] + earlier, -1),
    )


def compare_drafts_triton(trees: Trees, first: int, stop: int, bins: int) -> Comparison:
    """`compare_drafts` as one launch, a program per request."""
    requests, n = trees.tokens.shape
    wanted, distances, dimensions = (trees.tokens.new_empty(requests, n) for _ in range(3))
    exact = trees.valid.new_empty(requests, n)
    columns = (trees.tokens, trees.parents, trees.ancestors, trees.choices, trees.positions)
    _compare_drafts[(requests,)](
        *(column.contiguous() for column in columns), wanted, exact, distances, dimensions, first, stop, bins, n,
        BLOCK=power_of_two(n, MIN_NODES), num_warps=4,
    )  # fmt: skip
    return Comparison(wanted, exact, distances, dimensions)


_POINTERS = ["tokens", "parents", "ancestors", "choices", "positions", *(field.name for field in fields(Comparison))]


@jit(do_not_specialize=["n_nodes"], do_not_specialize_on_alignment=_POINTERS)
def _compare_drafts(  # type: ignore[no-untyped-def]
    tokens, parents, ancestors, choices, positions, wanted, exact, distances, dimensions,
    first_id, stop_id, bins, n_nodes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    there, at = n < n_nodes, request * n_nodes + n
    token = tl.load(tokens + at, there, other=-1)
    parent, path = tl.load(parents + at, there, other=0), tl.load(ancestors + at, there, other=0)
    drafted = there & (parent >= 0)
    want = tl.load(choices + request * n_nodes + tl.maximum(parent, 0), drafted, other=-1)

    position = tl.load(positions + request)
    distance, dimension = compare(token, want, drafted, path, n, position, first_id, stop_id, bins)
    tl.store(wanted + at, want, there)
    tl.store(exact + at, (token == want) & drafted, there)
    tl.store(distances + at, distance, there)
    tl.store(dimensions + at, dimension, there)


@jit
def compare(token, want, drafted, path, n, position, first_id, stop_id, bins):  # type: ignore[no-untyped-def]
    """Distances and dimensions of nodes; [nodes] each, in registers."""
    is_action = (token >= first_id) & (token < stop_id) & drafted
    wants_action = (want >= first_id) & (want < stop_id)
    both = is_action & wants_action
    text = tl.where(is_action != wants_action, bins, (token != want).to(tl.int32)).to(tl.int64)
    token_bin = tl.minimum(tl.maximum(stop_id - 1 - token, 0), bins - 1)
    want_bin = tl.minimum(tl.maximum(stop_id - 1 - want, 0), bins - 1)
    distance = tl.where(drafted, tl.where(both, tl.abs(token_bin - want_bin), text), 0)

    on_path = ((path[:, None] >> n[None, :].to(tl.int64)) & 1) == 1  # row e, column j: j is an ancestor of e, or e
    earlier = tl.sum((on_path & is_action[None, :]).to(tl.int32), 1) - is_action.to(tl.int32)
    return distance, tl.where(both, position + earlier, -1)
