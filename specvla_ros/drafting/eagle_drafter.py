"""Drafts trees with an EAGLE head, for all requests at once."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specvla_kernels.capture_check import fill_at_random
from specvla_kernels.graph_capture import Capture
from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_kernels.send import send
from specvla_ros.drafting.children import Children, top_k
from specvla_ros.drafting.draft_check import check_inputs, check_trees
from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.draft_start import DraftStart
from specvla_ros.drafting.dynamic_tree import GrownTrees, nodes_of
from specvla_ros.drafting.eagle_head import EagleHead
from specvla_ros.drafting.settings import DraftSettings
from specvla_ros.drafting.static_draft import MOST_ROWS, StaticDraft
from specvla_ros.drafting.tree import Tree
from specvla_ros.drafting.tree_grower import TreeGrower
from specvla_ros.models.llama import LlamaDecoder


class EagleDrafter:
    """Feeds the head what was committed, and grows trees behind it.

    Args:
        head: the draft head.
        decoder: the target, whose embeddings and output head it shares.
        settings: the tree's size.
        slots: requests in flight at most.
        slot_rows: committed rows of a slot at most.
        children: how a node's children are chosen; by default, and where text may come, the likeliest.

    Attributes:
        committed_rows: of a slot at most.
        forwards: of the head since it was made.
    """

    def __init__(
        self,
        head: EagleHead,
        decoder: LlamaDecoder,
        settings: DraftSettings,
        *,
        slots: int,
        slot_rows: int,
        children: Children | None = None,
    ) -> None:
        self._decoder = decoder
        self._settings = settings
        self.committed_rows = slot_rows
        self.forwards = 0
        self._slots = slots
        self._slot_rows = slot_rows + max(settings.beam_nodes, MOST_ROWS)
        self._captured: dict[tuple[int, int], StaticDraft] = {}  # by requests that grow and levels
        self._grower = TreeGrower(
            head,
            decoder,
            k=settings.top_k,
            nodes=settings.nodes,
            slots=slots,
            slot_rows=self._slot_rows,
            children=children or top_k(settings.top_k),
        )

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None) -> list[Tree]:
        """Feeds the head what was committed and grows the next trees.

        Args:
            inputs: one per request, of different slots.
            nodes: of each tree, the root included; by default, and at most, those of the settings.
        """
        limits = nodes if nodes is not None else [self._settings.nodes] * len(inputs)
        sizes = {
            each.slot: (min(each.levels, self._settings.depth), limit)
            for each, limit in zip(inputs, limits, strict=True)
            if each.levels > 0 and limit > 1
        }
        growing = [each for each in inputs if each.slot in sizes]
        if not growing:
            self._feed(inputs)
            return [Tree.of_root(each.root) for each in inputs]
        most, highest = [limit for _, limit in sizes.values()], max(levels for levels, _ in sizes.values())
        in_text = any(each.in_text for each in growing)
        static = None if in_text else self._captured.get((len(growing), highest))
        if static is None:
            grown = self._grow(inputs, growing, most, highest)
        else:
            self._feed([rows for each in inputs if (rows := _ahead(each, MOST_ROWS if each.slot in sizes else 0))])
            self.forwards += highest
            grown = static([_newest(each) for each in growing], most)
        k = self._settings.top_k
        trees = iter(grown.split([(nodes_of(levels, k, limit), levels) for levels, limit in sizes.values()]))
        return [next(trees) if each.slot in sizes else Tree.of_root(each.root) for each in inputs]

    def capture(self, capture: Capture, levels: int) -> int:
        """See Capturable: a draft of every number of requests and of levels. Every slot is written to.

        Args:
            capture: makes work repeatable.
            levels: that a tree may have where no text comes.
        """
        if self._settings.nodes == 1:  # nothing ever grows
            return 0
        fill_at_random(self._grower.keys, self._grower.values)
        for requests in range(self._slots, 0, -1):  # the largest first: the others then find memory in its pool
            for height in range(min(levels, self._settings.depth), 0, -1):
                static = StaticDraft(self._grower, requests=requests, levels=height, capture=capture)
                self._check(static, requests, height)
                self._captured[requests, height] = static
        return len(self._captured)

    def release(self) -> None:
        """See Capturable."""
        self._captured = {}

    def _check(self, static: StaticDraft, requests: int, levels: int) -> None:
        """Compares a captured draft with the same work launch by launch, and with a draft of other shapes."""
        inputs = check_inputs(self._decoder, requests, levels, prefix_len=max(1, self.committed_rows // 2))
        nodes = [self._settings.nodes] * requests
        expected = self._grow(inputs, inputs, nodes, levels)
        found = static(inputs, nodes)
        what = f"a captured draft of {requests} trees with {levels} levels"
        check_trees(found, static.run(), dtype=torch.float32, what=what)
        check_trees(found, expected, dtype=self._decoder.dtype, what=what)

    def _feed(self, inputs: Sequence[DraftInput]) -> dict[int, Tensor]:
        """The head over the newly committed rows: by slot, [hidden] behind the last of them."""
        if not inputs:
            return {}
        parts: list[tuple[Span, Ancestry | None]] = []
        start = 0
        for each in inputs:
            rows = len(each.hidden)
            parts.append((Span(each.slot, start, rows, each.prefix_len - rows, is_tree=False), None))
            start += rows
        following = torch.cat([each.following for each in inputs])
        self.forwards += 1
        layout = pack_layout(parts, self._slot_rows, following.device)
        hidden = self._grower.forward(following, torch.cat([each.hidden for each in inputs]), layout)
        return {span.slot: hidden[span.stop - 1] for span, _ in parts}

    def _grow(
        self, inputs: Sequence[DraftInput], growing: Sequence[DraftInput], nodes: Sequence[int], levels: int
    ) -> GrownTrees:
        """Feeds all requests' rows and grows the trees of some, launch by launch."""
        fed = self._feed(inputs)
        self.forwards += levels - 1
        texts = [each.in_text for each in growing]
        in_text = send(texts, self._decoder.device, torch.bool) if any(texts) else None
        foreseen = torch.stack([fed[each.slot] for each in growing])
        return self._grower.grow(DraftStart.of(growing, nodes), foreseen, levels, in_text)


def _newest(request: DraftInput) -> DraftInput:
    """With as many rows as a captured draft takes."""
    return replace(request, hidden=request.hidden[-MOST_ROWS:], following=request.following[-MOST_ROWS:])


def _ahead(request: DraftInput, left: int) -> DraftInput | None:
    """Without so many of its newest rows; None: it has no others."""
    rows = len(request.hidden) - left
    if rows <= 0:
        return None
    hidden, following = request.hidden[:rows], request.following[:rows]
    return replace(request, hidden=hidden, following=following, prefix_len=request.prefix_len - left)
