# SPDX-License-Identifier: Apache-2.0
"""The requests' shares of one tick, and the engine's one primitive: segments in a packed forward.

A prefill is a chain of prompt embeddings, whole or as a chunk after a committed prefix. A decode step is a tree of one
node. A verification is a tree of drafted tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specvla_kernels.device import to_device
from specvla_kernels.layout import Ancestry, PackedLayout, Span, pack_layout
from specvla_ros.engine.kv_cache import KVCache
from specvla_ros.engine.mailbox import Waiting
from specvla_ros.engine.request import Request
from specvla_ros.engine.verifier import Commit, VerifyInput
from specvla_ros.models.target import Decoder, ForwardResult
from specvla_ros.speculation.drafters.registry import DraftInput, DraftWork, FinishedAnswer, NewRows


@dataclass(frozen=True)
class Segment:
    """One request's share of a packed forward; raises ValueError if its parts are inconsistent."""

    slot: int
    prefix_len: int  # rows already committed in the slot
    inputs: Tensor  # embeddings [n, hidden], or int64 token ids [n]
    # None for a chain; in a tree, -1 marks a node that follows the prefix directly (the root).
    ancestry: Ancestry | None = None
    # Number of last nodes that need logits: 0 for a chunk that does not end the prompt, 1 for the end of a prefill, n
    # for a tree.
    wanted: int = 1
    # int64 [axes, n], for a model with several RoPE positions per row: those of a chain's rows, or those of a tree's
    # root repeated in each of its rows; None: positions count up with the slot's rows.
    positions: np.ndarray | None = None
    sees_all: bool = False  # every row of a chain sees all of it (the prompt of a prefix language model)

    def __post_init__(self) -> None:
        n = len(self)
        if n == 0:
            raise ValueError("a segment needs at least one node")
        if not 0 <= self.wanted <= n:
            raise ValueError(f"wanted must be 0 to {n}, got {self.wanted}")
        if self.ancestry is not None and len(self.ancestry) != n:
            raise ValueError(f"{n} nodes have an ancestry of {len(self.ancestry)}")
        if self.positions is not None and self.positions.shape[1] != n:
            raise ValueError(f"{n} nodes have {self.positions.shape[1]} positions")

    def __len__(self) -> int:
        return self.inputs.shape[0]


@dataclass(frozen=True)
class PackedBatch:
    """Concatenated segments, ready for one forward."""

    embeddings: Tensor  # [n_rows, hidden]
    layout: PackedLayout
    wanted_rows: Tensor  # int64 [n_wanted], rows whose logits are computed, in segment order


def spans_of(segments: Sequence[Segment], slot_rows: int) -> list[Span]:
    """The segments' positions in the packed forward, one after the other.

    Raises ValueError if two segments of a slot are not contiguous, or one does not fit its slot.
    """
    ends: dict[int, int] = {}
    spans: list[Span] = []
    start = 0
    for segment in segments:
        n, prefix_len = len(segment), segment.prefix_len
        if ends.get(segment.slot, prefix_len) != prefix_len:
            raise ValueError(f"two segments of slot {segment.slot} are not contiguous")
        is_tree = segment.ancestry is not None
        ends[segment.slot] = -1 if is_tree else prefix_len + n  # nothing can follow a tree
        if prefix_len + n > slot_rows:
            raise ValueError(f"{prefix_len} committed rows and {n} nodes do not fit a slot of {slot_rows} rows")
        spans.append(Span(segment.slot, start, n, prefix_len, is_tree=is_tree, sees_all=segment.sees_all))
        start += n
    return spans


def wanted_rows(segments: Sequence[Segment], spans: Sequence[Span]) -> list[int]:
    """The packed rows whose logits are wanted, in segment order."""
    pairs = zip(segments, spans, strict=True)
    return [row for segment, span in pairs for row in range(span.stop - segment.wanted, span.stop)]


def pack(segments: Sequence[Segment], slot_rows: int, embed: Callable[[Tensor], Tensor]) -> PackedBatch:
    """Concatenates segments; a slot's second segment is a tree that starts where its first, a chain, ends.

    `embed` maps token ids [n] to embeddings [n, hidden]. Raises ValueError as `spans_of` does.
    """
    spans = spans_of(segments, slot_rows)
    parts = [(span, segment.ancestry) for span, segment in zip(spans, segments, strict=True)]
    embedded = [s.inputs if s.inputs.is_floating_point() else embed(s.inputs) for s in segments]
    device = embedded[0].device
    return PackedBatch(
        embeddings=embedded[0] if len(embedded) == 1 else torch.cat(embedded),
        layout=pack_layout(parts, slot_rows, device, _first_positions(segments, spans, device)),
        wanted_rows=to_device(wanted_rows(segments, spans), device),
    )


def _first_positions(segments: Sequence[Segment], spans: Sequence[Span], device: torch.device) -> Tensor | None:
    """Int64 [axes, n_rows]; None if no segment has its own positions."""
    axes = next((len(segment.positions) for segment in segments if segment.positions is not None), 0)
    if not axes:
        return None
    rows = [first_positions(segment, span, axes) for segment, span in zip(segments, spans, strict=True)]
    return to_device(np.concatenate(rows, axis=1).tolist(), device)


def first_positions(segment: Segment, span: Span, axes: int) -> np.ndarray:
    """The segment's own positions, or positions that count up with the slot's rows: int64 [axes, n]."""
    if segment.positions is not None:
        return segment.positions
    rows = np.zeros(span.length, np.int64) if span.is_tree else np.arange(span.length)
    return np.tile(span.prefix_len + rows, (axes, 1))


def packed_forward(decoder: Decoder, segments: Sequence[Segment], cache: KVCache) -> ForwardResult:
    """Runs any mix of prefills, chunks, decode steps and trees, and writes their keys and values to the KV cache.

    Returns logits of each segment's last `wanted` nodes and hidden states of all nodes, in segment order, equal up to
    rounding to those of a separate forward per segment.
    """
    batch = pack(segments, cache.slot_rows, decoder.embed_tokens)
    return decoder(batch.embeddings, batch.layout, batch.wanted_rows, cache.keys, cache.values)


@dataclass
class ScheduledRequest:
    """One request's share of a tick: images ahead of a prompt, a chunk, the prompt's end with a tree, or a tree."""

    request: Request
    prompt_rows: int  # number of its prompt rows; 0 after the prompt, and if `ahead`
    ends_prompt: bool
    ahead: bool = False  # the vision towers process its images beside the forward, which has no rows of it
    # [n, hidden], last hidden states of the whole forward, valid until the next one.
    states: Tensor = field(default_factory=lambda: torch.empty(0))
    rows: range = range(0)  # this share's rows of `states`

    @staticmethod
    def next_share(request: Request) -> "ScheduledRequest":
        if request.ahead and not request.tokens_per_forward:
            return ScheduledRequest(request, 0, ends_prompt=False, ahead=True)
        left = max(0, request.layout.rows - request.prefix_len)
        rows = min(left, request.chunk_rows)
        return ScheduledRequest(request, rows, ends_prompt=0 < left == rows)

    @property
    def begins(self) -> bool:
        """True before the commit of its request's first share."""
        return not self.request.tokens_per_forward

    @property
    def prefills(self) -> bool:
        return self.ahead or self.prompt_rows > 0

    @property
    def given_rows(self) -> int:
        """Number of its prompt rows that hold given tokens of the answer, which are a prompt's last rows."""
        request = self.request
        left = request.layout.rows - request.prefix_len - self.prompt_rows
        return max(0, min(self.prompt_rows, len(request.given.tokens) - left)) if self.prompt_rows else 0

    @property
    def prompt_share(self) -> float:
        """The fraction of its prompt, without given tokens, in this share."""
        request = self.request
        return (self.prompt_rows - self.given_rows) / (request.layout.rows - len(request.given.tokens))

    @property
    def verifies(self) -> bool:
        """True if the share yields tokens, i.e. once its prompt is complete or ends."""
        return self.ends_prompt or not self.prefills

    def segments(self) -> list[Segment]:
        request = self.request
        if self.ahead:
            return []
        tree, start = request.tree, request.prefix_len
        n = len(tree)
        if not self.prompt_rows:
            positions = request.layout.tree_root_positions(start, n)
            return [Segment(request.slot, start, tree.tokens, tree.ancestry, wanted=n, positions=positions)]
        stop = start + self.prompt_rows
        chain = Segment(
            request.slot,
            start,
            request.prompt[start:stop],
            wanted=int(self.ends_prompt),
            positions=request.layout.positions_of(start, stop),
            sees_all=not request.layout.causal,
        )
        if not self.ends_prompt or n == 1:
            return [chain]
        positions = request.layout.tree_root_positions(stop, n - 1)
        return [chain, Segment(request.slot, stop, tree.tokens[1:], tree.below, wanted=n - 1, positions=positions)]

    def keep_visual(self) -> None:
        """Copies the hidden states of the image's rows, for rules that read them."""
        begin = self.request.prefix_len
        for rows in self.request.layout.visual_rows:
            start, stop = max(0, rows.start - begin), min(self.prompt_rows, rows.stop - begin)
            if start < stop:
                self.request.visual.append(self.hidden[start:stop].clone())  # the next forward overwrites them

    def verify_input(self) -> VerifyInput:
        request = self.request
        return VerifyInput(
            tree=request.tree,
            position=request.codec.position(request.tokens),
            slot=request.slot,
            root_row=request.root_row,
            rule=request.rule,
            visual=request.visual,
            ids=(*request.layout.ids, *request.tokens),
        )

    def chunk_input(self) -> DraftInput:
        """Input to a drafter for a chunk that does not end the prompt; no tree grows from it."""
        request = self.request
        start, stop = request.prefix_len - self.prompt_rows, request.prefix_len
        new = NewRows(self.hidden, request.prompt[start + 1 : stop + 1])
        return self._input(new, request.tree.tokens[0], max_depth=0, position=0, mid_prompt=True)

    def prompt_input(self, previous_answer: tuple[int, ...]) -> DraftInput:
        """Input to a drafter for the tree that the prompt's own forward verifies, see DraftInput."""
        left = self.request.codec.remaining(self.request.tokens)
        return self._answer_input(NewRows(), self.request.tree.tokens[0], left, previous_answer)

    def draft_input(
        self, commit: Commit, embed: Callable[[Tensor], Tensor], previous_answer: tuple[int, ...] = ()
    ) -> DraftInput:
        """Input to a drafter for the rows that a commit has made final; `previous_answer`: see DraftInput."""
        request = self.request
        known = max(0, self.prompt_rows - 1)  # the answer follows the prompt's last row
        root = self.rows.stop - len(request.tree)
        new = NewRows(
            self.states[self.rows.start :][:known],
            request.prompt[len(request.prompt) - known :],
            self.states,
            nodes=tuple(root + node for node in commit.nodes),
            tokens=commit.tokens,
            embed=embed,
        )
        left = request.codec.remaining(request.tokens)
        return self._answer_input(new, commit.tokens_on_device[-1], left - 1, previous_answer)

    def _answer_input(self, new: NewRows, root: Tensor, max_depth: int, previous_answer: tuple[int, ...]) -> DraftInput:
        codec, answer = self.request.codec, tuple(self.request.tokens)
        return self._input(
            new,
            root,
            max_depth=max_depth,
            position=codec.position(answer),
            answer=answer,
            previous_answer=previous_answer,
            in_text=codec.in_text(answer),
        )

    def _input(self, new: NewRows, root: Tensor, **others: Any) -> DraftInput:
        request, seen = self.request, self.request.observation
        others |= dict(epoch=seen.epoch, layout=request.layout, observation=seen, stream=seen.stream)
        return DraftInput(request.slot, request.prefix_len, new, root, **others)

    @property
    def hidden(self) -> Tensor:
        """Last hidden states of this share's rows, [rows, hidden]; the tree's come last."""
        return self.states[self.rows.start : self.rows.stop]

    @property
    def tree_hidden(self) -> Tensor:
        return self.hidden[-len(self.request.tree) :]


@dataclass(frozen=True)
class TickWork:
    """The work of one tick, from which its time on another device can be predicted."""

    images: int = 0  # processed by the vision tower; beside the forward if it has no prompt
    prompts: float = 0.0  # in the forward, without given tokens; a chunk counts as its fraction of the prompt
    given: int = 0  # rows of given answer tokens, computed with their prompt
    trees: int = 0  # requests in the forward that are past their prompt
    nodes: int = 0  # in these trees
    drafting: DraftWork = field(default_factory=DraftWork)
    head_prompts: float = 0.0  # prompts fed to the draft head; a chunk counts as its fraction


@dataclass
class Batch:
    """The work of one tick."""

    shares: list[ScheduledRequest]  # each request's share of the forward, oldest frame first
    # The frame that starts in this tick, until `Scheduler.begin` turns it into a request.
    admitted: Waiting | None = None
    finished: list[FinishedAnswer] = field(default_factory=list)  # completed answers that decode to an action
    answered: list[Request] = field(default_factory=list)  # their requests, and those whose action came too late
    # `time.monotonic_ns()` at the start of the tick; the wait of a frame that starts in it ends here.
    started_ns: int = field(default_factory=time.monotonic_ns)
    vision_s: float = 0.0  # vision tower time in this tick, known after the read-back

    @property
    def verified(self) -> list[ScheduledRequest]:
        return [share for share in self.shares if share.verifies]

    @property
    def ahead(self) -> list[ScheduledRequest]:
        """At most one."""
        return [share for share in self.shares if share.ahead]

    @property
    def work(self) -> TickWork:
        """The work of the forward; drafting is added later."""
        return TickWork(
            images=sum(share.begins for share in self.shares),
            prompts=sum(share.prompt_share for share in self.shares),
            given=sum(share.given_rows for share in self.shares),
            trees=sum(not share.ends_prompt for share in self.verified),
            nodes=sum(len(share.request.tree) - share.ends_prompt for share in self.verified),
        )

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic_ns() - self.started_ns) * 1e-9
