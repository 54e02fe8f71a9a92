"""Drafts trees with an EAGLE head, for all requests at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_kernels.layout import Ancestry, Span, pack_layout
from specvla_ros.drafting.children import Children, top_k
from specvla_ros.drafting.draft_input import DraftInput
from specvla_ros.drafting.dynamic_tree import TreeGrowth
from specvla_ros.drafting.eagle_head import EagleHead
from specvla_ros.drafting.settings import DraftSettings
from specvla_ros.drafting.tree import Tree
from specvla_ros.models.llama import LlamaDecoder


@dataclass
class _Draft:
    """One request's tree while it grows.

    Attributes:
        hidden: [beam, hidden], what the head foresees behind the newest beam's nodes.
        beams: tokens, states at the parents and ancestry of every node that the head runs over, all levels so far.
    """

    request: DraftInput
    growth: TreeGrowth
    hidden: Tensor
    tokens: list[Tensor]
    states: list[Tensor]
    parents: Tensor
    depths: Tensor
    ancestors: Tensor


class EagleDrafter:
    """Keeps the head's keys and values, one slot per request as in the target's ring.

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
        self._head = head
        self._decoder = decoder
        self._settings = settings
        self._any_token = top_k(settings.top_k)
        self.children = children or self._any_token
        self.committed_rows = slot_rows
        self.forwards = 0
        self._slot_rows = slot_rows + settings.beam_nodes
        config = head.config
        shape = (slots, self._slot_rows, config.num_key_value_heads, config.head_dim)
        self._keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self._values = torch.empty_like(self._keys)

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None) -> list[Tree]:
        """Feeds the head what was committed and grows the next trees.

        Args:
            inputs: one per request, of different slots.
            nodes: of each tree, the root included; by default those of the settings.
        """
        limits = nodes if nodes is not None else [self._settings.nodes] * len(inputs)
        drafts = [
            self._begin(request, hidden, limit)
            for request, hidden, limit in zip(inputs, self._feed(inputs), limits, strict=True)
        ]
        for level in range(self._settings.depth):
            growing = [each for each in drafts if level < min(each.request.levels, self._settings.depth)]
            if not growing:
                break
            if level:
                self._run_beams(growing)
            for each in growing:
                log_probs = self._log_probs(each.hidden)
                children = self._any_token if each.request.in_text else self.children
                each.growth.expand(*children(log_probs, each.request.place + level))
        return [each.growth.finish() for each in drafts]

    def _feed(self, inputs: Sequence[DraftInput]) -> list[Tensor]:
        """The head over the newly committed rows; [1, hidden] behind each request's last."""
        parts: list[tuple[Span, Ancestry | None]] = []
        start = 0
        for each in inputs:
            rows = len(each.hidden)
            parts.append((Span(each.slot, start, rows, each.prefix_len - rows, is_tree=False), None))
            start += rows
        following = torch.cat([each.following for each in inputs])
        hidden = self._forward(following, torch.cat([each.hidden for each in inputs]), parts)
        return [hidden[span.stop - 1 : span.stop] for span, _ in parts]

    def _begin(self, request: DraftInput, hidden: Tensor, nodes: int) -> _Draft:
        levels = min(request.levels, self._settings.depth)
        growth = TreeGrowth(request.root, levels=levels, nodes=nodes)
        none = torch.empty(0, dtype=torch.int64, device=hidden.device)
        return _Draft(request, growth, hidden, [], [], parents=none, depths=none, ancestors=none)

    def _run_beams(self, drafts: Sequence[_Draft]) -> None:
        """The head over every beam so far: one forward for all requests, with earlier levels computed again.

        The head is one layer, read from memory once per forward however many rows there are.
        """
        parts: list[tuple[Span, Ancestry | None]] = []
        start = 0
        for each in drafts:
            _add_beam(each)
            rows = len(each.parents)
            ancestry = Ancestry(each.parents, each.depths, each.ancestors)
            parts.append((Span(each.request.slot, start, rows, each.request.prefix_len, is_tree=True), ancestry))
            start += rows
        tokens = torch.cat([token for each in drafts for token in each.tokens])
        states = torch.cat([state for each in drafts for state in each.states])
        hidden = self._forward(self._decoder.embed_tokens(tokens), states, parts)
        for each, (span, _) in zip(drafts, parts, strict=True):
            each.hidden = hidden[span.stop - len(each.tokens[-1]) : span.stop]

    def _forward(self, following: Tensor, hidden: Tensor, parts: Sequence[tuple[Span, Ancestry | None]]) -> Tensor:
        self.forwards += 1
        layout = pack_layout(parts, self._slot_rows, following.device)
        rotation = self._decoder.rotation(layout.positions)
        out: Tensor = self._head(following, hidden, layout, rotation, self._keys, self._values)
        return out

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden).log_softmax(dim=-1)


def _add_beam(draft: _Draft) -> None:
    """Puts the newest beam behind those before it; its nodes were fed with what the head foresaw at their parents."""
    growth, before = draft.growth, len(draft.parents)
    width = len(growth.beam_tokens)
    nodes = torch.arange(before, before + width, device=growth.beam_tokens.device)
    own = torch.ones_like(nodes) << nodes
    if before:
        last = len(draft.tokens[-1])
        parents = before - last + growth.beam_parents
        ancestors = draft.ancestors[parents] | own
    else:
        parents, ancestors = torch.full_like(nodes, -1), own
    draft.tokens.append(growth.beam_tokens)
    draft.states.append(draft.hidden[growth.beam_parents])
    draft.depths = torch.cat((draft.depths, torch.full_like(nodes, len(draft.tokens) - 1)))
    draft.parents = torch.cat((draft.parents, parents))
    draft.ancestors = torch.cat((draft.ancestors, ancestors))
