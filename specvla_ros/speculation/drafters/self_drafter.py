# SPDX-License-Identifier: Apache-2.0
"""Drafts a chain with the target itself on a fraction of the image tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import DraftContext, Drafter, DraftInput, DraftWork, NewRows, drafter

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.models.target import Decoder, PromptLayout
    from specvla_ros.speculation.drafters.chains import Chain
    from specvla_ros.speculation.tree import Tree

KEEPS = ("uniform", "similarity")


@dataclass(frozen=True)
class SelfDraftSettings:
    """Settings of drafting with the target itself."""

    tokens: int = parameter(
        0,
        "Tokens drafted by the policy itself with few image tokens, one forward each; 0: none. For policies that write "
        "text.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="self_tokens",
    )
    image_share: float = parameter(
        0.1,
        "Share of the image's tokens kept for draft.self_tokens.",
        minimum=0.001,
        maximum=1.0,
        name="self_image_share",
    )
    keep: str = parameter(
        "uniform",
        "Image tokens kept for draft.self_tokens: evenly spaced (uniform, as in LVSpec), or those most similar to the "
        "prompt's text (similarity).",
        choices=KEEPS,
        name="self_keep",
    )


class SelfDrafter(Drafter):
    """Decodes greedily with the target over a prompt without most of its image tokens.

    From SpecVLM (arXiv 2508.16201), whose draft model gets a tenth of the video's tokens over all its images, in order
    and at consecutive positions, as here. Rows with several RoPE positions (M-RoPE) keep theirs, unlike in SpecVLM's
    published code. SpecVLM chooses tokens in two stages: those with the most attention from the prompt's text, averaged
    over heads and layers, and evenly spaced ones. LVSpec (arXiv 2604.05650, section 4 and appendix C) uses evenly
    spaced ones only: `evenly_spaced_rows`. Our kernels do not return attention weights; `most_similar_rows`, based on
    the prefill's last hidden states, approximates the first stage.

    A drafted token costs a forward of the whole target. The drafter has its own KV cache: one slot per request as in
    the target's, shorter by the omitted image rows.

    Args:
        decoder: the target; the first row of its prompts is text.
        image_share: share of the image rows to keep, at least one row.
        keep: how they are chosen, a name in `KEPT_ROWS`.
        slot_rows: max committed rows of a slot of the target's KV cache.

    Attributes:
        fed_rows: number of committed rows read by its forwards, without drafted rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        image_tokens: int,
        image_share: float,
        keep: str,
        tokens: int,
        slots: int,
        slot_rows: int,
    ) -> None:
        from specvla_ros.speculation.drafters.chains import ChainDecoder

        self._decoder, self._rows_to_keep, self._tokens = decoder, KEPT_ROWS[keep], tokens
        self.kept_image_tokens = min(image_tokens, max(1, round(image_share * image_tokens)))
        self._dropped = image_tokens - self.kept_image_tokens
        self.chains = ChainDecoder(decoder, slots=slots, slot_rows=slot_rows - self._dropped + tokens)
        self._owed: dict[int, _Rows] = {}  # by slot: committed rows not in the KV cache yet
        self._chunks: dict[int, list[DraftInput]] = {}  # by slot: chunks of an unfinished prompt
        self.fed_rows = 0

    @property
    def work(self) -> DraftWork:
        return DraftWork(self_forwards=self.chains.forwards, self_rows=self.fed_rows)

    def draft(
        self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None, *, last: bool = False
    ) -> list[Tree]:
        """Reads the committed rows and drafts the next tokens, one forward per token for all requests together.

        A request's first input must hold its whole prompt or a chunk of it, else ValueError. `nodes`: by default enough
        for the drafter's tokens.
        """
        limits = nodes if nodes is not None else [self._tokens + 1] * len(inputs)
        chains = [self._begin(request, limit - 1) for request, limit in zip(inputs, limits, strict=True)]
        self.fed_rows += sum(len(chain.inputs) for chain in chains if chain.wanted)
        self.chains.grow(chains)
        return [chain.finish() for chain in chains]

    def _begin(self, request: DraftInput, limit: int) -> Chain:
        """The chain before its first forward, which is deferred if no token is wanted yet."""
        from specvla_ros.speculation.drafters.chains import Chain

        request = self._joined(request)
        if request.mid_prompt:
            return Chain(request.slot, request.root, 0, start=0, inputs=request.new.following)
        first = request.begins
        before = self._owed.pop(request.slot, None)
        rows = self._pruned(request) if first else self._committed(request)
        if before is not None and not first:
            rows = before.and_then(rows)
        wanted = max(0, min(limit, self._tokens, request.max_depth))
        if not wanted:
            self._owed[request.slot] = rows
        # The last row is the root's, which is row `prefix_len` of the target's slot.
        start = request.prefix_len - self._dropped + 1 - len(rows.embeddings)
        return Chain(request.slot, request.root, wanted, start=start, inputs=rows.embeddings, positions=rows.positions)

    def _joined(self, request: DraftInput) -> DraftInput:
        """Adds the earlier chunks of its prompt to a request: the image rows to keep are known only at the end."""
        import torch

        chunks = [] if request.begins else self._chunks.pop(request.slot, [])
        if request.mid_prompt:
            # A copy, since the next forward overwrites the states.
            kept = NewRows(request.new.hidden.clone(), request.new.following)
            self._chunks[request.slot] = [*chunks, replace(request, new=kept)]
        elif chunks:
            parts = [each.new for each in (*chunks, request)]
            hidden, following = (torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "following"))
            return replace(request, new=NewRows(hidden, following))
        return request

    def _committed(self, request: DraftInput) -> _Rows:
        stop = request.prefix_len + 1
        positions = self._positions(_layout(request), stop - len(request.new), stop)
        return _Rows(request.new.following, positions)

    def _pruned(self, request: DraftInput) -> _Rows:
        """The prompt with its share of the image rows, and the rows committed after it."""
        import torch

        from specvla_kernels.device import to_device

        layout, hidden = _layout(request), request.new.hidden
        if not layout.ids or len(hidden) < layout.rows:
            raise ValueError(
                f"slot {request.slot} starts with {len(hidden)} rows, fewer than the prompt's {layout.rows}"
            )
        visual = [row for rows in layout.visual_rows for row in rows]
        after_images = visual[-1] + 1 if visual else layout.rows
        images = to_device(visual, hidden.device)
        kept = images[self._rows_to_keep(hidden[images], hidden[after_images : layout.rows], self.kept_image_tokens)]
        stop = request.prefix_len + 1
        others = to_device(sorted(set(range(stop)).difference(visual)), hidden.device)
        order = torch.cat((others, kept)).sort().values
        first = self._decoder.embed_tokens(to_device(layout.ids[:1], hidden.device))
        positions = self._positions(layout, 0, stop)
        # `following` holds the embeddings of all rows but the first.
        embeddings = torch.cat((first, request.new.following))[order]
        return _Rows(embeddings, None if positions is None else positions[:, order])

    def _positions(self, layout: PromptLayout, start: int, stop: int) -> Tensor | None:
        from specvla_kernels.device import to_device

        positions = layout.positions_of(start, stop)
        return None if positions is None else to_device(positions.tolist(), self._decoder.device)


@dataclass(frozen=True)
class _Rows:
    """Rows to be read by the drafter: [n, hidden], and RoPE positions [axes, n] unless they count up."""

    embeddings: Tensor
    positions: Tensor | None

    def and_then(self, others: _Rows) -> _Rows:
        import torch

        positions = None
        if self.positions is not None and others.positions is not None:
            positions = torch.cat((self.positions, others.positions), dim=1)
        return _Rows(torch.cat((self.embeddings, others.embeddings)), positions)


def _layout(request: DraftInput) -> PromptLayout:
    if request.layout is None:
        raise ValueError(f"the request of slot {request.slot} has no prompt layout")
    return request.layout


def evenly_spaced_rows(image: Tensor, text: Tensor, kept: int) -> Tensor:
    """Evenly spaced image rows including the first and the last: row floor(i (n - 1) / (kept - 1)) of n.

    LVSpec says "uniformly" without a formula; this is the spacing of SpecVLM's published code.
    """
    import torch

    return torch.arange(kept, device=image.device) * (len(image) - 1) // max(1, kept - 1)


def most_similar_rows(image: Tensor, text: Tensor, kept: int) -> Tensor:
    """Int64 [kept], ascending: the image rows whose last hidden states are most similar to the prompt text's.

    The measure is cosine similarity averaged over the text's rows, which LVSpec (arXiv 2604.05650) also uses to find
    drafted tokens that depend on the image. `image` is [n, hidden]; `text`, which follows it, is [m, hidden].
    """
    import torch.nn.functional as F

    states, words = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    similarity = states @ words.sum(dim=0)  # ranks like the mean, and is defined without text
    return similarity.topk(kept).indices.sort().values


KEPT_ROWS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "uniform": evenly_spaced_rows,
    "similarity": most_similar_rows,
}


@drafter("self", settings=SelfDraftSettings, order=30)
def _self(context: DraftContext) -> Drafter | None:
    own: SelfDraftSettings = context.own("self")
    if not own.tokens:
        return None
    if not context.target.causal_prompt:
        raise UserError(
            "draft.self_tokens omits image rows, but this policy's prompt attends bidirectionally and may start with "
            "them: set it to 0"
        )
    return SelfDrafter(
        context.target.decoder,
        image_tokens=context.target.image_tokens,
        image_share=own.image_share,
        keep=own.keep,
        tokens=own.tokens,
        slots=context.slots,
        slot_rows=context.slot_rows,
    )
