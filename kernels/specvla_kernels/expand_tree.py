# SPDX-License-Identifier: Apache-2.0
"""Grows the draft trees of several requests by one level: the children of a beam, the best being the next beam."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, jit, power_of_two, tl

BEAM_NODES = 8  # of a beam at once
_WARPS = 8  # one per node, whose ids it then scans without waiting for others; half where sm_120 would spill
MAX_COLUMNS = 1 << 10  # of a row in the kernel; for longer rows, the reference runs


@dataclass(frozen=True)
class Window:
    """The tolerance within which a row's ids count as the same action.

    Column 0 is the highest value, the last column the lowest. If there is one id more than values, columns 0 and 1 are
    the same value.
    """

    bins: int  # distinct values
    tolerances: Tensor  # int64 [dimensions + 1], in bins per action dimension; the last: all further ones


@dataclass(frozen=True)
class Candidates:
    """Candidates for the children of a beam's nodes."""

    # int64 [trees], the action dimension of the first level's children, one more at each further level; below 0 where
    # they may be text.
    dimensions: Tensor
    # [trees, beam, columns], of consecutive ids: logits, to be normalised over only these ids, or log-probabilities.
    # The last dimension is contiguous.
    rows: Tensor | None = None
    first_id: int = 0  # of column 0
    normalised: bool = False  # True: the rows are log-probabilities
    # Children are chosen by the mass of windows (`WindowMass` of the EAGLE drafter); None: the likeliest are.
    window: Window | None = None
    # Tokens, int64, and log-probabilities, both [trees, beam, k], of the children that are not chosen from rows: in
    # dimensions below 0, or everywhere without rows. The last dimension is contiguous.
    chosen: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Considered:
    """All children considered for the trees, in order, [trees, n]; entry i has number i + 1, the root 0."""

    tokens: Tensor
    scores: Tensor  # log-probabilities of the path; -inf: impossible, or beyond the tree's own depth
    parents: Tensor  # numbers

    @staticmethod
    def empty(trees: int, k: int, levels: int, dtype: torch.dtype, device: torch.device) -> "Considered":
        """Memory for k children of the root, then k children of each of k nodes per level; `dtype`: of the scores."""
        shape = (trees, k + (levels - 1) * k * k)
        tokens, parents = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return Considered(tokens, torch.empty(shape, dtype=dtype, device=device), parents)

    def first(self, n: int) -> "Considered":
        return Considered(self.tokens[:, :n], self.scores[:, :n], self.parents[:, :n])


@dataclass(frozen=True)
class Beam:
    """The best nodes of a level, whose children are considered next, [trees, k]."""

    tokens: Tensor
    parents: Tensor  # int64, index of each node's parent in the previous beam; 0 in the first beam
    scores: Tensor
    numbers: Tensor  # int64, see Considered
    # int64 [trees, n], of the nodes of all beams so far, this one last; bit j set: node j is an ancestor or the node
    # itself.
    ancestors: Tensor


def expand_tree(
    candidates: Candidates,
    beam: Beam | None,
    considered: Considered,
    max_depths: Tensor,
    *,
    k: int,
    level: int,
    offset: int,
    last: bool = False,
) -> Beam | None:
    """Considers k children of each node of the beam, and makes the k best of them the next beam.

    Ties go to the lowest id, and to the child that was considered first. A NaN counts as impossible. A child's score is
    never above its parent's, even if the sum of a window's mass was rounded up.

    Args:
        beam: None: only the root.
        considered: entries starting at `offset` are written.
        max_depths: int64 [trees]; a tree that has reached its maximum grows no further.
        level: of the children; 0 right after the root.
        last: makes no next beam and returns None.
    """
    rows = candidates.rows
    x = rows if candidates.chosen is None else candidates.chosen[1]
    assert x is not None
    fits = rows is None or rows.shape[2] <= MAX_COLUMNS
    run = expand_tree_triton if fits and has_kernels(x) else expand_tree_reference
    return run(candidates, beam, considered, max_depths, k=k, level=level, offset=offset, last=last)


def expand_tree_reference(
    candidates: Candidates,
    beam: Beam | None,
    considered: Considered,
    max_depths: Tensor,
    *,
    k: int,
    level: int,
    offset: int,
    last: bool = False,
) -> Beam | None:
    """`expand_tree` in PyTorch."""
    tokens, scores = choose_children(replace(candidates, dimensions=candidates.dimensions + level), k)
    scores = torch.nan_to_num(scores, nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
    width = tokens.shape[1]
    if beam is None:
        totals, parents = scores.flatten(1), torch.zeros_like(tokens).flatten(1)
    else:
        totals = (beam.scores[:, :, None] + scores).flatten(1)
        parents = beam.numbers[:, :, None].expand(-1, -1, k).flatten(1)
    totals = torch.where(level < max_depths[:, None], totals, -torch.inf)
    written = slice(offset, offset + width * k)
    considered.tokens[:, written] = tokens.flatten(1)
    considered.scores[:, written] = totals
    considered.parents[:, written] = parents
    return None if last else best_of(considered, beam, k=k, offset=offset, width=width)


def choose_children(candidates: Candidates, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [trees, beam, k], the best first."""
    if candidates.rows is None:
        assert candidates.chosen is not None
        return candidates.chosen
    log_probs = candidates.rows if candidates.normalised else candidates.rows.log_softmax(dim=-1)
    log_probs = torch.nan_to_num(log_probs, nan=-torch.inf, neginf=-torch.inf)
    if candidates.window is None:
        scores, columns = log_probs.sort(dim=-1, descending=True, stable=True)
        columns, scores = columns[..., :k], scores[..., :k]
    else:
        columns, scores = _by_mass(log_probs, candidates.window, candidates.dimensions, k)
    tokens = columns + candidates.first_id
    if candidates.chosen is None:
        return tokens, scores
    is_text = (candidates.dimensions < 0)[:, None, None]
    return tuple(torch.where(is_text, *pair) for pair in zip(candidates.chosen, (tokens, scores), strict=True))  # type: ignore[return-value]


def _by_mass(log_probs: Tensor, window: Window, dimensions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns and scores [trees, beam, k]: repeatedly the likeliest bin, after which its window's mass is removed."""
    r = window.tolerances[dimensions.clamp(0, len(window.tolerances) - 1)][:, None, None]
    bins, n = torch.arange(window.bins, device=log_probs.device), log_probs.shape[-1]
    probabilities = log_probs.exp().flip(-1)  # the lowest value first
    highest = probabilities[..., window.bins - 1 :].sum(dim=-1, keepdim=True)
    left = torch.cat((probabilities[..., : window.bins - 1], highest), dim=-1)
    # The likelier one of the two ids that share the highest value: policies use only one of them.
    top = log_probs[..., : 1 + n - window.bins].argmax(dim=-1, keepdim=True)
    columns, scores = [], []
    for _ in range(k):
        likeliest = left == left.amax(dim=-1, keepdim=True)
        bin_ = torch.where(likeliest, bins, len(bins)).amin(dim=-1, keepdim=True)
        near = (bins - bin_).abs() <= r
        columns.append(torch.where(bin_ == window.bins - 1, top, n - 1 - bin_))
        scores.append(torch.where(near, left, 0.0).sum(dim=-1, keepdim=True).log())
        left = torch.where(near, 0.0, left)
    return torch.cat(columns, dim=-1), torch.cat(scores, dim=-1)


def best_of(considered: Considered, beam: Beam | None, *, k: int, offset: int, width: int) -> Beam:
    """The next beam in PyTorch: the best k of the entries at `offset`, children of the beam's `width` nodes."""
    level = slice(offset, offset + width * k)
    scores = considered.scores[:, level]
    order = torch.arange(k, device=scores.device).expand(len(scores), k)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k] if width > 1 else order
    parents, before = best // k, 0 if beam is None else beam.ancestors.shape[1]
    ancestors = torch.ones_like(parents) << torch.arange(before, before + k, device=parents.device)
    if beam is not None:
        ancestors = ancestors | beam.ancestors.gather(1, before - width + parents)
        ancestors = torch.cat((beam.ancestors, ancestors), dim=1)
    tokens = considered.tokens[:, level].gather(1, best)
    return Beam(tokens, parents, scores.gather(1, best), offset + 1 + best, ancestors)


def expand_tree_triton(
    candidates: Candidates,
    beam: Beam | None,
    considered: Considered,
    max_depths: Tensor,
    *,
    k: int,
    level: int,
    offset: int,
    last: bool = False,
) -> Beam | None:
    """`expand_tree` as one launch, a program per tree; raises ValueError for rows of more than 1024 columns."""
    rows, window, chosen = candidates.rows, candidates.window, candidates.chosen
    if rows is not None and rows.shape[2] > MAX_COLUMNS:
        raise ValueError(f"rows of {rows.shape[2]} ids exceed the kernel's {MAX_COLUMNS}")
    trees, width, columns = (rows if rows is not None else chosen[0]).shape  # type: ignore[index]
    whole, scores = considered.tokens, considered.scores
    before = 0 if beam is None else beam.ancestors.shape[1]
    made = Beam(
        *(whole.new_empty(trees, k), whole.new_empty(trees, k), scores.new_empty(trees, k)),
        *(whole.new_empty(trees, k), whole.new_empty(trees, before + k)),
    )
    old = beam or made
    # Placeholders for arguments that the launch does not read.
    given = chosen or (whole, scores)
    values = scores if rows is None else rows
    tolerances = max_depths if window is None else window.tolerances
    _expand_tree[(trees,)](
        values, *given, tolerances, candidates.dimensions, max_depths, old.scores, old.numbers, old.ancestors,
        whole, scores, considered.parents, made.tokens, made.parents, made.scores, made.numbers, made.ancestors,
        values.stride(0), values.stride(1) if rows is not None else 0,
        given[0].stride(0), given[0].stride(1), given[1].stride(0), given[1].stride(1), whole.stride(0),
        offset, level, candidates.first_id, columns, len(tolerances) - 1, before,
        BINS=window.bins if window else 0, SHARED=bool(window and columns > window.bins), ROWS=rows is not None,
        NORMALISED=candidates.normalised, CHOSEN=chosen is not None, FIRST=beam is None, LAST=last,
        WIDTH=width, K=k, BLOCK_WIDTH=min(power_of_two(width), BEAM_NODES), BLOCK_K=power_of_two(k),
        BLOCK_LEVEL=power_of_two(width * k), BLOCK_COLUMNS=power_of_two(columns), BLOCK_NODES=64,
        num_warps=_WARPS // 2 if rows is not None and chosen is not None else _WARPS,
    )  # fmt: skip
    return None if last else made


@jit(
    do_not_specialize=[
        "row_stride", "node_stride", "token_stride", "token_node_stride", "score_stride", "score_node_stride",
        "considered_stride", "offset", "level", "first_id", "columns", "last_dimension", "before",
    ],
    do_not_specialize_on_alignment=[
        "rows", "given_tokens", "given_scores", "tolerances", "dimensions", "max_depths", "beam_scores",
        "beam_numbers", "beam_ancestors", "tokens", "scores", "parents", "next_tokens", "next_parents",
        "next_scores", "next_numbers", "next_ancestors",
    ],
)  # fmt: skip
def _expand_tree(  # type: ignore[no-untyped-def]
    rows, given_tokens, given_scores, tolerances, dimensions, max_depths, beam_scores, beam_numbers, beam_ancestors,
    tokens, scores, parents, next_tokens, next_parents, next_scores, next_numbers, next_ancestors,
    row_stride, node_stride, token_stride, token_node_stride, score_stride, score_node_stride, considered_stride,
    offset, level, first_id, columns, last_dimension, before,
    BINS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, NORMALISED: tl.constexpr, CHOSEN: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_LEVEL: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    infinity = float("inf")
    child = tl.arange(0, BLOCK_K)
    dimension = tl.load(dimensions + tree) + level
    grows = level < tl.load(max_depths + tree)
    entries = tree * considered_stride + offset
    for begin in range(0, WIDTH, BLOCK_WIDTH):
        node = begin + tl.arange(0, BLOCK_WIDTH)
        there = node < WIDTH
        pairs = there[:, None] & (child < K)[None, :]
        if CHOSEN:
            at = tree * token_stride + node[:, None] * token_node_stride + child[None, :]
            token = tl.load(given_tokens + at, pairs, other=0)
            at = tree * score_stride + node[:, None] * score_node_stride + child[None, :]
            score = tl.load(given_scores + at, pairs, other=-infinity).to(tl.float32)
        else:
            token = tl.zeros((BLOCK_WIDTH, BLOCK_K), tl.int64)
            score = tl.full((BLOCK_WIDTH, BLOCK_K), -infinity, tl.float32)
        if ROWS:
            column = tl.arange(0, BLOCK_COLUMNS)
            inside = there[:, None] & (column < columns)[None, :]
            at = tree * row_stride + node[:, None] * node_stride + column[None, :]
            x = tl.load(rows + at, inside, other=-infinity).to(tl.float32)
            found, gained = best_columns(
                x, inside, dimension, tolerances, columns, last_dimension,
                BINS, SHARED, NORMALISED, K, BLOCK_WIDTH, BLOCK_K, BLOCK_COLUMNS,
            )  # fmt: skip
            if CHOSEN:
                token = tl.where(dimension < 0, token, first_id + found.to(tl.int64))
                score = tl.where(dimension < 0, score, gained)
            else:
                token = first_id + found.to(tl.int64)
                score = gained
        total, number = tl.zeros((BLOCK_WIDTH,), tl.float32), tl.zeros((BLOCK_WIDTH,), tl.int64)
        if not FIRST:
            total = tl.load(beam_scores + tree * WIDTH + node, there, other=0.0)
            number = tl.load(beam_numbers + tree * WIDTH + node, there, other=0)
        at = entries + node[:, None] * K + child[None, :]
        store_children(tokens + at, scores + at, parents + at, pairs, token, score, total, number, grows)
    if not LAST:
        tl.debug_barrier()  # all threads see the children of all nodes
        best_child = child
        if WIDTH > 1:
            best_child = best_entries(scores + entries, WIDTH * K, K, BLOCK_K, BLOCK_LEVEL)
        mine = child < K
        to = tree * K + child
        tl.store(next_tokens + to, tl.load(tokens + entries + best_child, mine, other=0), mine)
        tl.store(next_scores + to, tl.load(scores + entries + best_child, mine, other=0.0), mine)
        tl.store(next_numbers + to, (offset + 1 + best_child).to(tl.int64), mine)
        parent = best_child // K
        tl.store(next_parents + to, parent.to(tl.int64), mine)
        bits = tl.full((BLOCK_K,), 1, tl.int64) << (before + child).to(tl.int64)
        next_row = next_ancestors + tree * (before + K)
        if not FIRST:
            old = beam_ancestors + tree * before
            bits = bits | tl.load(old + before - WIDTH + parent, mine, other=0)
            earlier = tl.arange(0, BLOCK_NODES)
            copied = tl.load(old + earlier, earlier < before, other=0)
            tl.store(next_row + earlier, copied, earlier < before)
        tl.store(next_row + before + child, bits, mine)


@jit
def best_columns(  # type: ignore[no-untyped-def]
    x, inside, dimension, tolerances, columns, last_dimension,
    BINS: tl.constexpr, SHARED: tl.constexpr, NORMALISED: tl.constexpr, K: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns and log-probabilities [BLOCK_WIDTH, BLOCK_K] of the children in rows x, as `choose_children` chooses."""
    infinity = float("inf")
    child = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_COLUMNS)
    if not NORMALISED:
        x = x - tl.max(x, 1)[:, None]
        x = x - tl.log(tl.sum(tl.exp(x), 1))[:, None]
    x = tl.where(x == x, x, -infinity)
    found = tl.zeros((BLOCK_WIDTH, BLOCK_K), tl.int32)
    gained = tl.full((BLOCK_WIDTH, BLOCK_K), -infinity, tl.float32)
    if BINS > 0:
        r = tl.load(tolerances + tl.minimum(tl.maximum(dimension, 0), last_dimension)).to(tl.int32)
        bin_of = tl.minimum(columns - 1 - column, BINS - 1)[None, :]
        left = tl.where(inside, tl.exp(x), -1.0)
        top = tl.zeros((BLOCK_WIDTH,), tl.int32)
        if SHARED:
            first = (column == 0)[None, :]
            second = (column == 1)[None, :]
            ahead = tl.max(tl.where(second, x, -infinity), 1) > tl.max(tl.where(first, x, -infinity), 1)
            top = ahead.to(tl.int32)
            share = tl.sum(tl.where(first, left, 0.0), 1)[:, None]
            left = tl.where(first, -1.0, tl.where(second, left + share, left))
        for i in range(K):
            best = tl.max(left, 1)[:, None]
            bin_ = tl.min(tl.where(left == best, bin_of, BINS), 1)
            near = (tl.abs(bin_of - bin_[:, None]) <= r) & (left >= 0.0)
            mass = tl.log(tl.sum(tl.where(near, left, 0.0), 1))
            where_ = tl.where(bin_ == BINS - 1, top, columns - 1 - bin_)
            found = tl.where((child == i)[None, :], where_[:, None], found)
            gained = tl.where((child == i)[None, :], mass[:, None], gained)
            left = tl.where(near, 0.0, left)
    else:
        open_ = inside
        for i in range(K):
            best = tl.max(tl.where(open_, x, -infinity), 1)
            where_ = tl.min(tl.where(open_ & (x == best[:, None]), column[None, :], BLOCK_COLUMNS), 1)
            found = tl.where((child == i)[None, :], where_[:, None], found)
            gained = tl.where((child == i)[None, :], best[:, None], gained)
            open_ = open_ & (column[None, :] != where_[:, None])
    return found, gained


@jit
def store_children(  # type: ignore[no-untyped-def]
    to_tokens, to_scores, to_parents, pairs, token, score, total, number, grows
):
    """Writes children [nodes, k] of nodes with a total and a number; impossible ones where the tree does not grow."""
    score = tl.where(score == score, tl.minimum(score, 0.0), -float("inf"))
    score = tl.where(grows, total[:, None] + score, -float("inf"))
    tl.store(to_tokens, token, pairs)
    tl.store(to_scores, score, pairs)
    tl.store(to_parents, tl.zeros_like(token) + number[:, None], pairs)


@jit
def best_entries(  # type: ignore[no-untyped-def]
    scores, n: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Indices of the best K of n scores, [BLOCK_K], the first of equal ones."""
    infinity = float("inf")
    nth, entry = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK)
    left = entry < n
    score = tl.load(scores + entry, left, other=-infinity)
    best = nth
    for i in range(K):
        highest = tl.max(tl.where(left, score, -infinity), 0)
        at = tl.min(tl.where(left & (score == highest), entry, BLOCK), 0)
        best = tl.where(nth == i, at, best)
        left = left & (entry != at)
    return best
