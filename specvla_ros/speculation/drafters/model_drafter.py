# SPDX-License-Identifier: Apache-2.0
"""Drafts a chain with a smaller model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_ros.models.target import PromptLayout, Target
from specvla_ros.speculation.drafters.chains import Chain, ChainDecoder, common_prefix
from specvla_ros.speculation.drafters.registry import Drafter, DraftInput, DraftWork
from specvla_ros.speculation.tree import Tree


@dataclass
class _Slot:
    """What a slot of the draft model's KV cache holds.

    Attributes:
        layout: of the draft model's own prompt; None: not read yet.
        answer: tokens whose rows come after it.
        drafted: what was drafted after these; the rows of all but the last are there too.
    """

    layout: PromptLayout | None = None
    answer: tuple[int, ...] = ()
    drafted: Sequence[Tensor] = field(default_factory=tuple)


class ModelDrafter(Drafter):
    """Decodes greedily with a model of its own: the draft model of speculative decoding, as FLy takes one.

    It sees what the target sees: the image goes through its own vision, and image and prompt through its own prefill,
    in the first forward of a request's first draft. It keeps a KV slot per request beside the target's. After a
    verification the slot is rolled back to what was committed: rows of drafted tokens that were accepted stay, those
    after them are overwritten. Which ones is known once the drafted tokens are read back: one copy per draft, of
    tokens that have long been computed.

    Args:
        model: of the target's vocabulary.
        tokens: maximum of a chain (K).
        slots: maximum of requests in flight.
        slot_rows: maximum of rows of a slot: prompt, answer and chain.
        lookup: tokens that prompt lookup drafts for a forward of the model, see `ChainDecoder`; 0: none.

    Attributes:
        chains: the model's decoder over the drafter's own keys and values.
        images: that went through the model's vision.
    """

    def __init__(self, model: Target, *, tokens: int, slots: int, slot_rows: int, lookup: int = 0) -> None:
        self._model = model
        self._tokens = tokens
        self._slots: dict[int, _Slot] = {}
        self.chains = ChainDecoder(model.decoder, slots=slots, slot_rows=slot_rows, lookup=lookup)
        self.images = 0

    @property
    def work(self) -> DraftWork:
        """Forwards of the model, rows that they read, and images."""
        return DraftWork(model_forwards=self.chains.forwards, model_rows=self.chains.rows, model_images=self.images)

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        """A chain per request; one forward per token, for all requests together."""
        for request in inputs:
            if request.begins:
                self._slots[request.slot] = _Slot()
        wanted = [
            0 if request.mid_prompt else max(0, min(limit - 1, self._tokens, request.max_depth))
            for request, limit in zip(inputs, nodes, strict=True)
        ]
        self._roll_back([request for request, tokens in zip(inputs, wanted, strict=True) if tokens])
        chains = [self._begin(request, tokens) for request, tokens in zip(inputs, wanted, strict=True)]
        self.chains.grow(chains)
        for request, chain in zip(inputs, chains, strict=True):
            if chain.wanted:
                self._slots[request.slot].drafted = chain.tokens
        return [chain.finish() for chain in chains]

    def _roll_back(self, requests: Sequence[DraftInput]) -> None:
        """Leaves in each slot what was committed, but the root, whose row gives the first logits."""
        slots = [self._slots[request.slot] for request in requests]
        drafted = [token for slot in slots for token in slot.drafted[:-1]]
        read = iter(torch.stack(drafted).tolist() if drafted else ())
        for slot, request in zip(slots, requests, strict=True):
            held = (*slot.answer, *(next(read) for _ in slot.drafted[:-1]))
            slot.answer, slot.drafted = held[: common_prefix(held, request.answer[:-1])], ()

    def _begin(self, request: DraftInput, wanted: int) -> Chain:
        """The chain before its first forward."""
        root = request.root
        if not wanted:
            return Chain(request.slot, root, 0, start=0, inputs=torch.empty(0, device=root.device))
        slot, decoder = self._slots[request.slot], self._model.decoder
        inputs = decoder.embed_tokens(to_device(request.answer[len(slot.answer) :], decoder.device))
        layout, start, both_ways = slot.layout, 0, 0
        if layout is None:
            layout, prompt = self._prompt(request)
            slot.layout, inputs = layout, torch.cat((prompt, inputs))
            both_ways = 0 if layout.causal else layout.rows
        else:
            start = layout.rows + len(slot.answer)
        slot.answer = request.answer
        positions = layout.positions_of(start, start + len(inputs))
        return Chain(
            request.slot,
            root,
            wanted,
            start=start,
            inputs=inputs,
            text=[*request.prompt, *request.answer],
            positions=None if positions is None else to_device(positions.tolist(), decoder.device),
            both_ways=both_ways,
        )

    def _prompt(self, request: DraftInput) -> tuple[PromptLayout, Tensor]:
        """The model's own rows of the images and the prompt's ids, and their embeddings [n, hidden]."""
        if request.observation is None:
            raise ValueError(f"slot {request.slot} has no observation for the draft model to see")
        self.images += 1
        observation = replace(request.observation, prompt_ids=request.prompt)
        layout = self._model.prompt_layout(observation)
        return layout, self._model.prompt_embeddings(observation, layout.ids)
