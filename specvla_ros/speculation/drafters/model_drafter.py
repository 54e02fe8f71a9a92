# SPDX-License-Identifier: Apache-2.0
"""Drafts a chain with a smaller policy of the same vocabulary, with its own prompt and KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.prompt_lookup import common_prefix
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, DraftWork, drafter

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.models.target import PromptLayout, Target
    from specvla_ros.speculation.drafters.chains import Chain
    from specvla_ros.speculation.tree import Tree


@dataclass(frozen=True)
class DraftModelSettings:
    """Checkpoint and number of tokens of a smaller policy that drafts."""

    directory: str = parameter(
        "",
        "Directory of the draft model, a smaller policy with the same vocabulary; empty: none.",
        name="model",
    )
    tokens: int = parameter(
        15,
        "Tokens drafted by the draft model, one of its forwards each unless draft.model_lookup_tokens saves some.",
        unit="tokens",
        minimum=1,
        maximum=63,
        name="model_tokens",
    )
    lookup_tokens: int = parameter(
        0,
        "Tokens looked up in prompt and answer and verified by each forward of the draft model (FLy's multi-level "
        "acceleration); 0: none. Gives the same drafts in fewer forwards.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="model_lookup_tokens",
    )
    center_crop: bool = parameter(False, "Same as center_crop, for the draft model.", name="model_center_crop")


@dataclass
class _Slot:
    """Contents of a slot of the draft model's KV cache: its own prompt, and the rows of `answer` after it."""

    layout: PromptLayout | None = None
    answer: tuple[int, ...] = ()
    # Tokens drafted after these; the slot also has the rows of all but the last.
    drafted: Sequence[Tensor] = field(default_factory=tuple)


class ModelDrafter(Drafter):
    """Decodes greedily with a separate draft model, as in FLy.

    It sees the target's inputs: the image goes through its own vision, and image and prompt through its own prefill in
    the first forward of a request's first draft. It has its own KV slot per request. After a verification the slot is
    rolled back to the committed tokens: rows of accepted drafts stay, later ones are overwritten. To find these, the
    host reads back the drafted tokens: one copy per draft, of tokens computed long before.

    Args:
        model: has the target's vocabulary.
        tokens: max length of a chain (K).
        slot_rows: max rows of a slot: prompt, answer and chain.
        lookup: see `ChainDecoder`; 0: none.
    """

    def __init__(self, model: Target, *, tokens: int, slots: int, slot_rows: int, lookup: int = 0) -> None:
        from specvla_ros.speculation.drafters.chains import ChainDecoder

        self._model, self._tokens = model, tokens
        self._slots: dict[int, _Slot] = {}
        self.chains = ChainDecoder(model.decoder, slots=slots, slot_rows=slot_rows, lookup=lookup)
        self.images = 0

    @property
    def work(self) -> DraftWork:
        return DraftWork(model_forwards=self.chains.forwards, model_rows=self.chains.rows, model_images=self.images)

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        """Drafts a chain per request, one forward per token for all requests together."""
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
        """Rolls each slot back to the committed tokens without the root, whose row gives the first logits."""
        import torch

        slots = [self._slots[request.slot] for request in requests]
        drafted = [token for slot in slots for token in slot.drafted[:-1]]
        read = iter(torch.stack(drafted).tolist() if drafted else ())
        for slot, request in zip(slots, requests, strict=True):
            held = (*slot.answer, *(next(read) for _ in slot.drafted[:-1]))
            slot.answer, slot.drafted = held[: common_prefix(held, request.answer[:-1])], ()

    def _begin(self, request: DraftInput, wanted: int) -> Chain:
        import torch

        from specvla_kernels.device import to_device
        from specvla_ros.speculation.drafters.chains import Chain

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
        """The model's own layout of the images and the prompt's ids, and their embeddings [n, hidden]."""
        if request.observation is None:
            raise ValueError(f"slot {request.slot} has no observation for the draft model")
        self.images += 1
        observation = replace(request.observation, prompt_ids=request.prompt)
        layout = self._model.prompt_layout(observation)
        return layout, self._model.prompt_embeddings(observation, layout.ids)


@drafter("model", settings=DraftModelSettings, order=40)
def _model(context: DraftContext) -> Drafter | None:
    own: DraftModelSettings = context.own("model")
    if not own.directory:
        return None
    target = context.target
    model = _load(own, target)
    check_vocabulary(model, target)
    if model.cameras not in ((), target.cameras):
        raise UserError(
            f"draft.model: {model.directory} needs images of the cameras {', '.join(model.cameras)}, but the policy "
            f"uses {', '.join(target.cameras) or 'none'}"
        )
    if model.state_dims not in (0, target.state_dims):
        raise UserError(
            f"draft.model: {model.directory} needs a robot state of {model.state_dims} numbers, but the policy uses "
            f"{target.state_dims}"
        )
    slot_rows = context.slot_rows - target.image_tokens + model.image_tokens + own.tokens
    longest = model.decoder.config.max_position_embeddings
    if slot_rows > longest:
        raise UserError(
            f"the draft model {model.directory} needs {slot_rows} rows for a prompt, an answer and its draft, but "
            f"has {longest} positions: lower decode.max_text_tokens, decode.max_reasoning_tokens or draft.model_tokens"
        )
    return ModelDrafter(model, tokens=own.tokens, slots=context.slots, slot_rows=slot_rows, lookup=own.lookup_tokens)


def _load(own: DraftModelSettings, target: Target) -> Target:
    """Loads the draft model on the target's device, and in its dtype if checkpoints can be loaded in it."""
    from specvla_ros.models.checkpoint import DTYPES, load_target

    dtype = str(target.decoder.dtype).removeprefix("torch.")
    try:
        return load_target(
            Path(own.directory),
            device=str(target.decoder.device),
            dtype=dtype if dtype in DTYPES else "float32",
            unnorm_key=target.unnorm_key,
            center_crop=own.center_crop,
            action_head=target.action_head,
        )
    except UserError as error:
        raise UserError(f"draft.model: {error}") from None


def check_vocabulary(model: Target, target: Target) -> None:
    """Raises UserError if a token id differs in meaning between the two.

    Without a tokenizer only the sizes are compared.
    """
    refused = f"draft.model {model.directory} cannot draft for {target.directory}: "
    sizes = [each.decoder.config.vocab_size for each in (model, target)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{refused}it has {sizes[0]} token ids, but the policy has {sizes[1]}")
    ids = [each.codec.action_ids for each in (model, target)]
    if all(each.bins > 1 for each in ids) and ids[0] != ids[1]:  # other codecs' actions are words of the vocabulary
        ranges = [f"{each.first} to {each.stop - 1} for {each.bins} bins" for each in ids]
        raise UserError(f"{refused}its action tokens are {ranges[0]}, but the policy's are {ranges[1]}")
    if model.tokenizer is None or target.tokenizer is None:
        return
    theirs, ours = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if theirs != ours:
        word = min((word for word, id_ in (theirs.items() ^ ours.items())))
        meant = [vocab.get(word, "none") for vocab in (theirs, ours)]
        raise UserError(f"{refused}their tokenizers differ, e.g. {word!r} is token {meant[0]} and {meant[1]}")
