# SPDX-License-Identifier: Apache-2.0
"""The dynamic draft tree of EAGLE-2 (arXiv 2406.16858, section 4): choice of children, and growth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, plan_attention
from specvla_kernels.device import to_device
from specvla_kernels.draft_rows import DraftRows, DraftSlots, beam_rows, chain_rows
from specvla_kernels.expand_tree import Beam, Candidates, Considered, Window, expand_tree
from specvla_kernels.finish_tree import GrownTrees, finish_tree
from specvla_kernels.grow_tree import grow_tree
from specvla_kernels.layout import Ancestry, PackedLayout, Span
from specvla_ros.models.codecs.codec import ActionIds
from specvla_ros.models.decoder import PackedDecoder
from specvla_ros.speculation.drafters.eagle.head import EagleHead
from specvla_ros.speculation.drafters.eagle.path_terms import PathTerms
from specvla_ros.speculation.drafters.registry import DraftInput
from specvla_ros.speculation.tree import Tree

IN_TEXT = -(1 << 20)
"""Replaces an action dimension if the child may be text; stays negative at any depth of the tree."""


@dataclass(frozen=True)
class WindowMass:
    """Chooses action tokens whose tolerance windows together cover most of the draft's probability.

    Under relaxation neighbouring bins cover the same target, so the k most likely bins are mostly one guess. Here the
    first child is the most likely bin; the mass in its window [b - r, b + r] is removed, and so on. Siblings are at
    least r + 1 bins apart. A child's score is the log of the mass that only it covers: the draft's estimate that this
    sibling will be accepted. With r = 0 these are the k most likely bins.

    Children are not placed where their window covers the most mass. If the draft is certain, every window around its
    guess covers nearly all mass, and the one with slightly more of the tails is off by up to r bins, always to the same
    side: accepted, but wrong. With that choice the nano policy hardly ever lifted a cube.
    """

    k: int
    actions: ActionIds
    bins: Tensor  # int64 [dimensions + 1], r per action dimension; the last applies to all dimensions beyond
    # Whether children may be text; in dimension `IN_TEXT` they are then the k most likely tokens.
    text: bool = False

    @staticmethod
    def from_actions(
        k: int, actions: ActionIds, dimensions: int, device: torch.device, *, text: bool = False
    ) -> "WindowMass":
        """Zero tolerance in all of the action's dimensions."""
        return WindowMass(k, actions, torch.zeros(dimensions + 1, dtype=torch.int64, device=device), text)

    def tolerate(self, bins: Sequence[int]) -> None:
        """Sets r per action dimension, 0 beyond, in the same memory, since a captured draft reads it."""
        self.bins.copy_(torch.tensor([*bins] + [0] * (len(self.bins) - len(bins))))

    @property
    def window(self) -> Window:
        return Window(self.actions.bins, self.bins)

    def ids(self, known: range) -> range | None:
        """The children's ids, whose first of `actions` is counted from the first known one; None if some are text."""
        first, stop = (known.start + action for action in (self.actions.first, self.actions.stop))
        return None if self.text else range(first, stop)

    def candidates(self, rows: Tensor, dimensions: Tensor, *, normalised: bool) -> Candidates:
        """Candidates from logits of the action ids, or from `normalised` log-probabilities of the vocabulary.

        `rows` is [trees, beam, vocab], `dimensions` int64 [trees].
        """
        likeliest = rows.topk(self.k, dim=-1) if self.text else None
        first, stop = self.actions.first, self.actions.stop
        return Candidates(
            dimensions,
            rows[..., first:stop],
            first_id=first,
            normalised=normalised,
            window=self.window,
            chosen=None if likeliest is None else (likeliest.indices, likeliest.values),
        )


def split_trees(grown: GrownTrees, sizes: list[tuple[int, int]]) -> list[Tree]:
    """Splits grown trees, given each one's number of nodes and depth."""
    trees = []
    for i, (n, depth) in enumerate(sizes):
        tokens, *ancestry = grown.numbers[:, i, :n].unbind()
        log_probs, valid = grown.log_probs[i, :n], grown.valid[i, :n]
        trees.append(Tree(tokens, Ancestry(*ancestry), log_probs, valid, relaxable=valid, depth=depth))
    return trees


class TreeGrowth:
    """Trees growing level by level on the device; the host knows all shapes.

    A tree stops at its own `max_depths`, int64 [trees]. `k` is the number of children per node and of nodes in the
    beam. The beam holds the best nodes of the newest depth, whose children, at `level`, are considered next; None for
    the root.
    """

    def __init__(self, roots: Tensor, max_depths: Tensor, *, k: int, levels: int) -> None:
        self._roots, self._max_depths = roots, max_depths
        self._k, self._levels = k, levels
        self._considered: Considered | None = None
        self._count = 0
        self.level = 0
        self.beam: Beam | None = None

    @property
    def beam_tokens(self) -> Tensor:
        """Tokens of the beam's nodes, int64 [trees, beam]; at first the roots."""
        return self._roots[:, None] if self.beam is None else self.beam.tokens

    def consider(self, candidates: Candidates, dtype: torch.dtype) -> None:
        """Considers the beam's children, with scores of a dtype, and makes the best of them the next beam."""
        if self._considered is None:
            self._considered = Considered.empty(len(self._roots), self._k, self._levels, dtype, self._roots.device)
        offset, self._count = self._count, self._count + self.beam_tokens.shape[1] * self._k
        self.beam = expand_tree(
            candidates,
            self.beam,
            self._considered,
            self._max_depths,
            k=self._k,
            level=self.level,
            offset=offset,
            last=self.level + 1 == self._levels,
        )
        self.level += 1

    def finish(self, nodes: Tensor, max_nodes: int, out: GrownTrees | None = None) -> GrownTrees:
        """The best of all considered nodes, ordered by depth; see `finish_tree`."""
        assert self._considered is not None
        considered = self._considered.first(self._count)
        return finish_tree(considered, self._roots, nodes, k=self._k, levels=self.level, max_nodes=max_nodes, out=out)


def tree_size(depth: int, k: int, max_nodes: int) -> int:
    """Number of nodes of a finished tree with its root, if the best k nodes of each depth have k children."""
    return min(max_nodes, 1 + k + (depth - 1) * k * k)


@dataclass(frozen=True)
class DraftStart:
    """The numbers of several DraftInputs on the device, readable by captured growth."""

    where: DraftSlots  # the requests' rows in the head's KV cache
    nodes: Tensor  # int64 [requests], max nodes of each tree including the root
    # int64 [requests], the action dimension of the first drafted tokens; IN_TEXT if they may be text.
    dimensions: Tensor
    roots: Tensor
    # Slot and prefix_len of each request, on the host; empty for captured work, which may not depend on them.
    spans: tuple[tuple[int, int], ...] = ()
    COLUMNS: ClassVar[int] = 7

    @staticmethod
    def columns(inputs: Sequence[DraftInput], nodes: Sequence[int], *, roots: Sequence[int]) -> list[tuple[int, ...]]:
        """The input to `TreeGrower.start`: `COLUMNS` columns with one number per request."""
        rows = [(each.slot, each.prefix_len, len(each.new), each.max_depth) for each in inputs]
        dimensions = [IN_TEXT if each.in_text else each.position for each in inputs]
        return [*zip(*rows, strict=True), tuple(nodes), tuple(dimensions), tuple(roots)]


class TreeGrower:
    """The head with its KV cache, [slots, slot_rows, kv_heads, head_dim], one slot per request.

    Args:
        decoder: the target, whose embeddings and output head it shares.
        k: children per node, and nodes of a beam.
        nodes: max nodes of a tree including the root.
        slot_rows: rows of a slot, including those of nodes processed by the head.
        window: chooses a node's children, with tokens counted from the first of `ids`; None: the most likely (EAGLE-2).
        ids: the ids possible in an answer. Other rows of the output head are not read, and each node's probability is
            normalised over these ids, since the target always says one of them. Normalised over the whole vocabulary,
            every node would lose probability at each level to impossible ids. None: the whole vocabulary, as published.
    """

    def __init__(
        self,
        head: EagleHead,
        decoder: PackedDecoder,
        *,
        k: int,
        nodes: int,
        slots: int,
        slot_rows: int,
        window: WindowMass | None = None,
        ids: range | None = None,
    ) -> None:
        self.head, self.decoder = head, decoder
        self._k, self._nodes, self._slot_rows = k, nodes, slot_rows
        self._window, self._ids = window, ids
        self._plans: dict[tuple[int, int, bool], AttentionPlan] = {}
        config = head.config
        self.hidden_size = config.hidden_size
        self.parallel_depth = head.parallel_depth
        self._after_end = torch.arange(head.parallel_depth, device=decoder.device)
        few = ids if ids is None or window is None else window.ids(ids)
        self._terms = PathTerms.from_head(head, decoder, few, None if window is None else window.window)
        if self._terms is None and head.parallel_depth > 1:
            of_token, self._of_above, given = head.branch_weights()
            path_logits = decoder.logits(given.T.clone(memory_format=torch.contiguous_format), ids)
            # [hidden, rank], [rank, rank] and [rank, ids]; an id that has no logit gets none from a path.
            self._branch = of_token.T, (self._of_above @ given).T, path_logits.nan_to_num(neginf=0.0)
        shape = (slots, slot_rows, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.empty_like(self.keys)

    def start(self, columns: Tensor) -> DraftStart:
        """Makes a start from int64 [COLUMNS, requests], as given by `DraftStart.columns`."""
        slots, prefix_lens, rows, max_depths, nodes, dimensions, roots = columns.unbind()
        (cos, sin), embed = self.decoder.rotations(self.keys.device), self.decoder.embed_tokens
        tables = (cos, sin, embed.weight, embed.scale)
        where = DraftSlots(slots, prefix_lens, rows, max_depths, self._slot_rows, *tables)
        return DraftStart(where, nodes, dimensions, roots)

    def start_of(self, inputs: Sequence[DraftInput], nodes: Sequence[int]) -> DraftStart:
        """Copies the requests' numbers and each tree's max nodes to the roots' device."""
        roots = torch.stack([request.root for request in inputs])
        columns = to_device(DraftStart.columns(inputs, nodes, roots=[0] * len(inputs)), roots.device)
        spans = tuple((request.slot, request.prefix_len) for request in inputs)
        return replace(self.start(columns), roots=roots, spans=spans)

    def masks(self, depth: int) -> Tensor:
        """Mask rows after the last committed one for a tree of this depth, [n, hidden]; none if not a parallel head."""
        return self.head.mask_rows[: depth - 1]

    def forward(self, fused: Tensor, layout: PackedLayout) -> Tensor:
        """Runs the head on packed rows; see EagleHead."""
        return self.head(fused, layout, self.decoder.rotation(layout.positions), self.keys, self.values)

    @property
    def spare_row(self) -> int:
        """Index of a row never used by a committed row."""
        return self._slot_rows - 1

    def places(self, inputs: Sequence[DraftInput]) -> tuple[list[int], list[int]]:
        """Positions of the requests' new rows, and their rows among all slots'."""
        positions: list[int] = []
        rows: list[int] = []
        for request in inputs:
            mine = range(request.prefix_len - len(request.new), request.prefix_len)
            positions += mine
            rows += [request.slot * self._slot_rows + row for row in mine]
        return positions, rows

    def keep(self, following: Tensor, hidden: Tensor, places: Tensor) -> None:
        """Writes keys and values of committed rows at `places` (int64 [2, n]) without a prediction."""
        positions, kv_rows = places
        fused, rotation = self.head.fuse(following, hidden), self.decoder.rotation(positions)
        self.head.layer.write_kv(fused, *rotation, kv_rows, self.keys, self.values)

    def predict(self, start: DraftStart, following: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """The head's states after each request's newest committed row and its masks, [trees, 1 + masks, hidden].

        `following` and `hidden` are [trees, n, hidden], as in EagleHead. Only the first `rows` of each request count;
        after them is room for the masks of `depth`. The others are computed into uncommitted rows of its slot. `start`
        must not have spans, which are for trees.
        """
        assert not start.spans
        masks = len(self.masks(depth))
        plan = self._plan(*hidden.shape[:2], is_tree=False)
        rows = chain_rows(start.where, following, hidden, plan.tiles, masks=masks)
        ends = rows.ends[:, None]
        ends = ends + self._after_end[: 1 + masks] if masks else ends
        return self._over(rows, start, plan, masked=ends[:, 1:])[ends]

    def memory(self, trees: int, depth: int) -> GrownTrees:
        """Memory to grow trees of a given depth into."""
        dtype = torch.promote_types(self.keys.dtype, torch.float32)  # the logits' dtype
        return GrownTrees.empty(trees, tree_size(depth, self._k, self._nodes), dtype, self.keys.device)

    def check(self, trees: int, depth: int) -> None:
        """See `PathTerms.check`."""
        if self._terms is not None:
            self._terms.check(trees, depth, k=self._k, max_nodes=self._nodes)

    def grow(self, start: DraftStart, predicted: Tensor, depth: int, out: GrownTrees | None = None) -> GrownTrees:
        """Grows trees after committed rows that the head has read, in `out` (see `memory`) or new memory.

        `predicted`, [trees, n, hidden], has the head's states after the last committed rows and, for a parallel head,
        after each of the tree's masks. `depth`: that of the deepest tree, at least 1.
        """
        if self._terms is not None:
            weight = self._terms.of_states[:depth].flatten(0, 1)
            products = self.decoder.output_products(predicted[:, :depth].flatten(0, 1), weight)
            logits = self._terms.logits(products.unflatten(0, (-1, depth)), start.dimensions)
            sizes = dict(k=self._k, max_nodes=self._nodes)
            return grow_tree(logits, start.roots, start.where.max_depths, start.nodes, **sizes, out=out)
        growth = TreeGrowth(start.roots, start.where.max_depths, k=self._k, levels=depth)
        if self.parallel_depth > 1:
            self._expand_all(growth, start, predicted[:, :depth])
        else:
            self._expand_levels(growth, start, predicted, depth)
        return growth.finish(start.nodes, self._nodes, out)

    def _expand_levels(self, growth: TreeGrowth, start: DraftStart, states: Tensor, depth: int) -> None:
        """Grows one level per forward of the head, over the previous level's beam."""
        where, inputs = start.where, None
        for _ in range(depth):
            if (beam := growth.beam) is not None:
                trees, n = beam.ancestors.shape
                plan = self._plan(trees, n, is_tree=True)
                rows = beam_rows(where, beam, states, inputs, plan.tiles)
                inputs = rows.inputs
                earlier = n - rows.inputs.shape[1]
                states = self._over(rows, start, plan, earlier=earlier).view(trees, n - earlier, -1)[:, -self._k :]
            self._consider(growth, self._logits(states), start.dimensions)

    def _expand_all(self, growth: TreeGrowth, start: DraftStart, states: Tensor) -> None:
        """Grows every level from one forward, where any id may be drafted; see `EagleHead.branched`.

        A node's logits are those of its depth's state, and of what its path changes, [trees, beam, rank].
        """
        trees = len(states)
        of_token, onward, branch_logits = (each.expand(trees, -1, -1) for each in self._branch)
        logits, above = self._logits(states), states @ self._of_above.T
        path: Tensor | None = None
        for level, rows in enumerate(logits.split(1, dim=1)):
            if growth.beam is not None:
                embedded, parents = self.decoder.embed_tokens(growth.beam.tokens), growth.beam.parents[:, :, None]
                new = torch.baddbmm(above[:, level - 1 : level], embedded, of_token)
                if path is not None:
                    new = torch.baddbmm(new, path.gather(1, parents.expand(-1, -1, path.shape[2])), onward)
                path = new
                rows = torch.baddbmm(rows, path.to(rows.dtype), branch_logits)
            self._consider(growth, rows, start.dimensions)

    def _over(
        self,
        rows: DraftRows,
        start: DraftStart,
        plan: AttentionPlan,
        *,
        earlier: int = 0,
        masked: Tensor | None = None,
    ) -> Tensor:
        """Runs the head on rows, [requests * n, hidden].

        Args:
            earlier: nodes of each tree that are in its slot already.
            masked: int64 [requests, masks], the rows that are masks.
        """
        n = rows.inputs.shape[1]
        spans = tuple(
            Span(slot, i * n, n, prefix + earlier, is_tree=True, earlier=earlier)
            for i, (slot, prefix) in enumerate(start.spans)
        )
        plans = {(plan.group, self.keys.shape[2]): plan}
        layout = PackedLayout(spans, rows.positions, rows.kv_rows, rows.ancestors, plans)
        fused = self.head.project(rows.inputs.flatten(0, 1))
        if masked is not None and masked.shape[1]:
            fused[masked] = self.head.mask_rows[: masked.shape[1]]
        return self.head(fused, layout, (rows.cos, rows.sin), self.keys, self.values)

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [trees, n, ids] from states [trees, n, hidden]."""
        return self.decoder.logits(states.flatten(0, 1), self._ids).view(*states.shape[:2], -1)

    def _consider(self, growth: TreeGrowth, logits: Tensor, dimensions: Tensor) -> None:
        """Adds the next level, from logits [trees, beam, ids] and the first level's action dimension, int64 [trees]."""
        ids = self._ids
        # For the whole vocabulary the most likely are chosen first, as its softmax exceeds the kernel's size limit.
        rows = logits.log_softmax(dim=-1) if ids is None else logits
        if self._window is not None:
            candidates = self._window.candidates(rows, dimensions, normalised=ids is None)
            if ids is not None:
                candidates = replace(candidates, first_id=candidates.first_id + ids.start)
        elif ids is not None:
            candidates = Candidates(dimensions, rows, first_id=ids.start)
        else:
            best = rows.topk(self._k, dim=-1)
            candidates = Candidates(dimensions, chosen=(best.indices, best.values))
        growth.consider(candidates, logits.dtype)

    def _plan(self, requests: int, n: int, *, is_tree: bool) -> AttentionPlan:
        """An attention plan for rows known only to the device, which writes its table before each forward."""
        key = (requests, n, is_tree)
        if key not in self._plans:  # made in the run before a capture
            kv_heads = self.keys.shape[2]
            self._plans[key] = plan_attention(
                [Span(0, i * n, n, 0, is_tree) for i in range(requests)],
                group=self.head.config.num_attention_heads // kv_heads,
                kv_heads=kv_heads,
                slot_rows=self._slot_rows,
                device=self.keys.device,
            )
        return self._plans[key]
