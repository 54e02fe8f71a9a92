# SPDX-License-Identifier: Apache-2.0
"""Drafts a chain with the target itself, which then sees only a share of the image."""

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
        "Tokens drafted by the policy itself with few image tokens, a forward each; 0: none. For policies that write "
        "text.",
        unit="tokens",
        minimum=0,
        maximum=63,
        name="self_tokens",
    )
    image_share: float = parameter(
        0.1,
        "Share of the image's tokens that draft.self_tokens are drafted with.",
        minimum=0.001,
        maximum=1.0,
        name="self_image_share",
    )
    keep: str = parameter(
        "uniform",
        "Which of the image's tokens draft.self_tokens are drafted with: at even distances (uniform, as in LVSpec), or "
        "those most like the prompt's text (similarity).",
        choices=KEEPS,
        name="self_keep",
    )


class SelfDrafter(Drafter):
    """Decodes greedily with the target over a prompt from which most of the image is left out.

    From SpecVLM (arXiv 2508.16201), whose draft model is given a tenth of the video's tokens, of all its images
    together, in their order and at consecutive positions, as here. Rows with several RoPE positions (M-RoPE) keep
    theirs, unlike in SpecVLM's published code. SpecVLM chooses tokens in two stages: those that the prompt's text
    attends to most, averaged over heads and layers, and others at even distances. LVSpec (arXiv 2604.05650, section 4
    and appendix C) takes those at even distances alone: `evenly_spaced_rows`. No attention weights leave the kernels
    here; `most_similar_rows`, by the last hidden states of the prefill, comes near the first stage.

    A drafted token costs a forward of the whole target. Keys and values are the drafter's own: one slot per request as
    in the target's KV cache, shorter by the image rows that are left out.

    Args:
        decoder: the target; the first row of its prompts is text.
        image_share: share of these rows that is kept; at least one is.
        keep: which ones, a name in `KEPT_ROWS`.
        slot_rows: maximum of committed rows of a slot of the target's KV cache.

    Attributes:
        fed_rows: rows of what was committed that its forwards read; drafted rows are not counted.
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
        self._owed: dict[int, _Rows] = {}  # by slot: rows that are committed, but not in the KV cache yet
        self._chunks: dict[int, list[DraftInput]] = {}  # by slot: of a prompt that has not ended
        self.fed_rows = 0

    @property
    def work(self) -> DraftWork:
        return DraftWork(self_forwards=self.chains.forwards, self_rows=self.fed_rows)

    def draft(
        self, inputs: Sequence[DraftInput], nodes: Sequence[int] | None = None, *, last: bool = False
    ) -> list[Tree]:
        """Reads what was committed and goes on from there; one forward per token, for all requests together.

        A request's first input holds its whole prompt, or a chunk of it, else ValueError. `nodes`: by default what the
        drafter's tokens take.
        """
        limits = nodes if nodes is not None else [self._tokens + 1] * len(inputs)
        chains = [self._begin(request, limit - 1) for request, limit in zip(inputs, limits, strict=True)]
        self.fed_rows += sum(len(chain.inputs) for chain in chains if chain.wanted)
        self.chains.grow(chains)
        return [chain.finish() for chain in chains]

    def _begin(self, request: DraftInput, limit: int) -> Chain:
        """The chain before its first forward; where no token is wanted, that forward waits until one is."""
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
        # The last row is the root's, which in the target's slot is number `prefix_len`.
        start = request.prefix_len - self._dropped + 1 - len(rows.embeddings)
        return Chain(request.slot, request.root, wanted, start=start, inputs=rows.embeddings, positions=rows.positions)

    def _joined(self, request: DraftInput) -> DraftInput:
        """A request with the earlier chunks of its prompt: only its end tells which image rows are kept."""
        import torch

        chunks = [] if request.begins else self._chunks.pop(request.slot, [])
        if request.mid_prompt:
            # The next forward overwrites its states.
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
        """The prompt with its share of the images, and what was committed after it."""
        import torch

        from specvla_kernels.device import to_device

        layout, hidden = _layout(request), request.new.hidden
        if not layout.ids or len(hidden) < layout.rows:
            raise ValueError(
                f"the first {len(hidden)} rows of slot {request.slot} lack some of the prompt's {layout.rows}"
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
    """Rows that the drafter reads: [n, hidden], and RoPE positions [axes, n] unless they count up."""

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
        raise ValueError(f"the request of slot {request.slot} does not say what rows its prompt has")
    return request.layout


def evenly_spaced_rows(image: Tensor, text: Tensor, kept: int) -> Tensor:
    """Image rows at even distances, the first and the last among them: row floor(i (n - 1) / (kept - 1)) of n.

    LVSpec says "uniformly" and gives no formula; SpecVLM's published code spaces rows like this.
    """
    import torch

    return torch.arange(kept, device=image.device) * (len(image) - 1) // max(1, kept - 1)


def most_similar_rows(image: Tensor, text: Tensor, kept: int) -> Tensor:
    """Int64 [kept], ascending: the image rows whose last hidden states are most like those of the prompt's text.

    Cosine similarity, averaged over the text's rows; LVSpec (arXiv 2604.05650) tells by the same measure which drafted
    tokens depend on the image. `image` is [n, hidden], `text`, which comes after it, [m, hidden].
    """
    import torch.nn.functional as F

    states, words = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    similarity = states @ words.sum(dim=0)  # as good as the mean for ranking, and defined where there is no text
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
            "draft.self_tokens leaves image rows out of the prompt, and this policy's, which sees itself both ways, "
            "may begin with them: set it to 0"
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
