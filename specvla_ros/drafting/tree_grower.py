"""Grows trees with a draft head, for all requests in the same launches and without reading anything back."""

from dataclasses import replace

import torch
from torch import Tensor

from specvla_kernels.attention_plan import AttentionPlan, plan_attention
from specvla_kernels.layout import PackedLayout, Span
from specvla_ros.drafting.beams import Beams
from specvla_ros.drafting.children import Children, top_k
from specvla_ros.drafting.draft_start import DraftStart
from specvla_ros.drafting.dynamic_tree import GrownTrees, TreeGrowth
from specvla_ros.drafting.eagle_head import EagleHead
from specvla_ros.models.llama import LlamaDecoder


class TreeGrower:
    """The head with its keys and values, one slot per request as in the target's ring.

    Args:
        head: the draft head.
        decoder: the target, whose embeddings and output head it shares.
        k: children per node, and nodes of a beam.
        nodes: of a tree at most, the root included.
        slots: requests in flight at most.
        slot_rows: of a slot, the nodes that the head runs over included.
        children: how a node's children are chosen.

    Attributes:
        keys: [slots, slot_rows, kv_heads, head_dim].
        values: like keys.
        hidden_size: of the states.
    """

    def __init__(
        self,
        head: EagleHead,
        decoder: LlamaDecoder,
        *,
        k: int,
        nodes: int,
        slots: int,
        slot_rows: int,
        children: Children,
    ) -> None:
        self._head = head
        self._decoder = decoder
        self._k = k
        self._nodes = nodes
        self._any_token = top_k(k)
        self._children = children
        self._slot_rows = slot_rows
        self._plans: dict[tuple[int, int, bool], AttentionPlan] = {}
        config = head.config
        self.hidden_size = config.hidden_size
        shape = (slots, slot_rows, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.empty_like(self.keys)

    def forward(self, following: Tensor, hidden: Tensor, layout: PackedLayout) -> Tensor:
        """The head over packed rows; see EagleHead."""
        rotation = self._decoder.rotation(layout.positions)
        out: Tensor = self._head(following, hidden, layout, rotation, self.keys, self.values)
        return out

    def foresee(self, start: DraftStart, following: Tensor, hidden: Tensor) -> Tensor:
        """The head over each request's newest committed rows.

        Args:
            start: with their number, `rows`; without spans, which are those of trees.
            following: [trees, n, hidden], as in EagleHead; of each request the first `rows` count. The others are
                computed too, into rows of its slot that are not committed.
            hidden: like following.

        Returns:
            [trees, hidden], the states behind each request's last.
        """
        assert not start.spans
        nodes = torch.arange(following.shape[1], device=following.device)
        last = start.rows[:, None] - 1
        layout = self._layout(start, start.prefix_lens - start.rows, nodes.minimum(last))
        states = self.forward(following.flatten(0, 1), hidden.flatten(0, 1), layout).view_as(hidden)
        return states.gather(1, last[:, :, None].expand(-1, -1, states.shape[2]))[:, 0]

    def grow(self, start: DraftStart, foreseen: Tensor, levels: int, texts: Tensor | None = None) -> GrownTrees:
        """Trees behind committed rows that the head has seen.

        Args:
            start: where they begin.
            foreseen: [trees, hidden], the head's states behind the last committed rows.
            levels: of the highest tree, at least one.
            texts: bool [trees], whether the drafted tokens may be text; None: none may.
        """
        growth, beams = TreeGrowth(start.roots, start.levels), Beams(start.levels)
        states = foreseen[:, None]
        for level in range(levels):
            if level:
                beams.add(growth, states)
                states = self._over(beams, start)[:, -self._k :]
            growth.expand(*self._children_of(states, start.places + level, texts))
        return growth.finish(start.nodes, self._nodes)

    def _layout(
        self, start: DraftStart, first_rows: Tensor, offsets: Tensor, ancestors: Tensor | None = None
    ) -> PackedLayout:
        """Of as many rows for each request.

        Args:
            start: whose requests.
            first_rows: int64 [requests], the slots' rows that they begin at.
            offsets: int64 [requests, n], of the positions from there.
            ancestors: int64 [requests, n], of trees; None: chains.
        """
        n = offsets.shape[1]
        begin = start.slots * self._slot_rows + first_rows
        is_tree = ancestors is not None
        layout = PackedLayout(
            tuple(Span(slot, i * n, n, prefix, is_tree) for i, (slot, prefix) in enumerate(start.spans)),
            positions=(first_rows[:, None] + offsets).flatten(),
            kv_rows=(begin[:, None] + torch.arange(n, device=offsets.device)).flatten(),
            ancestors=(torch.zeros_like(offsets) if ancestors is None else ancestors).flatten(),
        )
        if not start.spans:
            plan = self._plan(start.slots, first_rows, n, is_tree)
            layout.plans[plan.group, self.keys.shape[2]] = plan
        return layout

    def _over(self, beams: Beams, start: DraftStart) -> Tensor:
        """The head over every beam so far: [trees, n, hidden].

        The head is one layer, read from memory once per forward however many rows there are: earlier levels are
        computed again.
        """
        assert beams.states is not None
        layout = self._layout(start, start.prefix_lens, beams.depths, beams.ancestors)
        following = self._decoder.embed_tokens(beams.tokens.flatten())
        return self.forward(following, beams.states.flatten(0, 1), layout).view_as(beams.states)

    def _children_of(self, states: Tensor, places: Tensor, texts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens and scores [trees, beam, k] behind states [trees, beam, hidden]."""
        trees, beam = states.shape[:2]
        log_probs = self._decoder.logits(states.flatten(0, 1)).log_softmax(dim=-1)
        places = places.repeat_interleave(beam)
        tokens, scores = self._children(log_probs, places)
        if texts is not None:
            is_text = texts.repeat_interleave(beam)[:, None]
            any_tokens, any_scores = self._any_token(log_probs, places)
            tokens, scores = torch.where(is_text, any_tokens, tokens), torch.where(is_text, any_scores, scores)
        return tokens.view(trees, beam, -1), scores.view(trees, beam, -1)

    def _plan(self, slots: Tensor, first_rows: Tensor, n: int, is_tree: bool) -> AttentionPlan:
        """The attention's table where the device alone knows the places."""
        key = (len(slots), n, is_tree)
        if key not in self._plans:  # made before a capture, by the run that goes before it
            kv_heads = self.keys.shape[2]
            self._plans[key] = plan_attention(
                [Span(0, i * n, n, 0, is_tree) for i in range(len(slots))],
                group=self._head.config.num_attention_heads // kv_heads,
                kv_heads=kv_heads,
                slot_rows=self._slot_rows,
                device=slots.device,
            )
        plan = self._plans[key]
        places = torch.stack((slots, first_rows), dim=1).to(torch.int32)
        places = places.repeat_interleave(len(plan.tiles) // len(slots), dim=0)
        return replace(plan, tiles=torch.cat((places, plan.tiles[:, 2:]), dim=1))
