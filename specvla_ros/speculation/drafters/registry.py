# SPDX-License-Identifier: Apache-2.0
"""The interface of drafters, their registration, and their combination into one tree per request.

A drafter is one file: a class and a factory function, registered by name. Its parameters are a frozen dataclass in that
file; the factory returns None if they disable the drafter. Other packages add drafters with entry points of the group
`specvla_ros.drafters`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, reduce
from typing import TYPE_CHECKING, Any, Protocol

from specvla_ros.errors import UserError
from specvla_ros.speculation.settings import DRAFTERS, NO_HEAD
from specvla_ros.speculation.tree import NO_BRANCHES, Branches, Tree, with_branches

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_kernels.graph_capture import Captures
    from specvla_ros.models.codecs.codec import Codec
    from specvla_ros.models.observation import Observation
    from specvla_ros.models.target import PromptLayout, Target
    from specvla_ros.speculation.settings import DraftSettings

drafter = DRAFTERS.register
_FEWEST_NODES = 2  # of a tree: its root and a draft
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftContext:
    """Input to a drafter's factory function."""

    settings: DraftSettings
    target: Target
    slots: int  # max requests in flight
    slot_rows: int  # max committed rows of a slot
    chunk_step_s: float  # duration of one chunk action in seconds; 0 if unknown
    codec: Codec  # the policy's, with the max length of text

    def own(self, name: str) -> Any:
        return self.settings.drafters[name]


@dataclass(frozen=True)
class DraftWork:
    """Running totals of the forwards for drafting."""

    head_forwards: int = 0
    self_forwards: int = 0
    # Committed rows read by the target's first forward of each draft; later forwards read one row per request.
    self_rows: int = 0
    model_forwards: int = 0
    model_rows: int = 0  # all rows read by the draft model's forwards, including prompts
    model_images: int = 0

    def __add__(self, other: DraftWork) -> DraftWork:
        return DraftWork(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def since(self, before: DraftWork) -> DraftWork:
        return DraftWork(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@cache
def _no_rows() -> Tensor:
    import torch

    return torch.empty(0, 0)


@dataclass(frozen=True)
class NewRows:
    """Rows of a slot committed since the last draft, gathered lazily from the forward's output.

    Rows with known following embeddings, such as a prompt's, come first, then rows written by a tree's nodes.
    """

    # [k, hidden], the target's last hidden states at the known rows.
    known_hidden: Tensor = field(default_factory=_no_rows)
    known_following: Tensor = field(default_factory=_no_rows)  # [k, hidden], embedding of each next token
    # [n, hidden], last hidden states of a forward, including other requests' rows.
    states: Tensor = field(default_factory=_no_rows)
    nodes: tuple[int, ...] = ()  # the rows in `states` that follow the known rows
    tokens: tuple[int, ...] = ()  # the token after each node
    embed: Callable[[Tensor], Tensor] | None = None  # maps token ids to embeddings; required with `tokens`

    def __len__(self) -> int:
        return len(self.known_hidden) + len(self.nodes)

    @cached_property
    def hidden(self) -> Tensor:
        """The target's last hidden states, [rows, hidden]."""
        return self._joined(self.known_hidden, lambda rows, _: self.states[rows])

    @cached_property
    def following(self) -> Tensor:
        """Embedding of the token after each row, [rows, hidden]."""

        def embedded(_: Tensor, tokens: Tensor) -> Tensor:
            assert self.embed is not None
            return self.embed(tokens)

        return self._joined(self.known_following, embedded)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Rows of the nodes and their tokens on the device, int64 [n] each."""
        from specvla_kernels.device import to_device

        rows, tokens = to_device((self.nodes, self.tokens), self.states.device).unbind()
        return rows, tokens

    def _joined(self, known: Tensor, found: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        import torch

        if not self.nodes:
            return known
        rows = found(*self._numbers)
        return torch.cat((known, rows)) if len(known) else rows

    def newest(self, n: int) -> NewRows:
        """The last n rows written by nodes, or fewer."""
        cut = max(0, len(self.nodes) - n)
        return NewRows(states=self.states, nodes=self.nodes[cut:], tokens=self.tokens[cut:], embed=self.embed)

    def before_newest(self, n: int) -> NewRows:
        """The rows not in `newest(n)`."""
        cut = max(0, len(self.nodes) - n)
        return replace(self, nodes=self.nodes[:cut], tokens=self.tokens[:cut])


@dataclass(frozen=True)
class DraftInput:
    """One request and its rows committed since the last draft.

    For `draft_prompt` there are no new rows, the root is the prompt's last row, whose token is not read, and the answer
    is its given start.
    """

    slot: int
    prefix_len: int  # committed rows of the slot
    new: NewRows  # the last of these rows, committed since the last draft; the root follows them
    root: Tensor  # int64 [], the last committed token, whose keys and values are not written yet
    max_depth: int  # of the tree: the number of missing tokens less one
    position: int  # of the first drafted token, see `Codec.position`; for bins, its dimension
    epoch: int = 0
    layout: PromptLayout | None = None  # the prompt's rows; None if unknown, for drafters that do not read it
    answer: tuple[int, ...] = ()
    previous_answer: tuple[int, ...] = ()  # committed tokens of the previous image's answer, if still in flight
    mid_prompt: bool = False  # the rows are a chunk that does not end the prompt; nothing is drafted yet
    in_text: bool = False  # the answer may still be in the text before the action
    observation: Observation | None = None  # for drafters that process the image themselves
    stream: str = ""

    @property
    def begins(self) -> bool:
        """True if these are the slot's first rows."""
        return len(self.new) == self.prefix_len

    @property
    def root_token(self) -> int:
        """The root, as the host knows it; read back if the newest row has no token."""
        return self.new.tokens[-1] if self.new.tokens else int(self.root)

    @property
    def prompt(self) -> tuple[int, ...]:
        return () if self.layout is None else self.layout.ids


@dataclass(frozen=True)
class FinishedAnswer:
    """An answer that decodes to an action: all its tokens, and the action tokens at its end.

    If not `whole`, it was ended early after some of its actions, and its tokens may end within a number.
    """

    epoch: int
    tokens: tuple[int, ...]
    action: tuple[int, ...]
    stamp_ns: int
    stream: str = ""
    whole: bool = True


class Drafter(Protocol):
    """Drafts a tree per request. Only `draft` is required; the other methods have defaults."""

    @property
    def work(self) -> DraftWork:
        """Running totals of forwards for drafting."""
        return DraftWork()

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> Sequence[Tree | Branches]:
        """Drafts for each request; called once per tick, even if nothing may be drafted.

        A draft is a tree grown on the device or, if the host knows its tokens, the branches below the root. The
        requests have different slots. The next call may overwrite the trees. `nodes`: max nodes of each draft including
        the root. `last`: True if no drafter follows; otherwise some nodes should be left to it.
        """

    def draft_prompt(self, prompt: DraftInput, nodes: int) -> Tree | Branches:
        """Drafts what the prompt's own forward verifies, without hidden states. `nodes` includes the root."""
        return NO_BRANCHES

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        """Sets the acceptance tolerance in bins per action token."""
        return

    def observe(self, answer: FinishedAnswer) -> None:
        """Learns from a finished answer."""
        return

    def forget(self, stream: str | None = None) -> None:
        """Forgets a stream's earlier answers; None: of all streams."""
        return

    def capture(self, captures: Captures) -> None:
        """See Capturable."""
        return

    def release(self) -> None:
        """See Capturable."""
        return


def make_drafters(context: DraftContext, *, wanted: bool, needed: bool) -> tuple[Drafters, str]:
    """Makes the drafters enabled by the settings, in the order in which they take nodes; none if not `wanted`.

    Raises UserError if a drafter does not fit the target, or if none is available but one is `needed`. If the user
    allows the fallback, returns no drafters and the reason instead.
    """
    if not wanted:
        return Drafters(context, {}), ""
    try:
        made = {name: entry.make(context) for name, entry in DRAFTERS.entries().items()}
        by_name = {name: drafter for name, drafter in made.items() if drafter is not None}
        if needed and not by_name:
            head = context.settings.head_directory(context.target.directory)
            absent = f"{head} does not exist" if head is not None else f"draft.head is {NO_HEAD}"
            raise UserError(
                f"decode.mode spec has no drafter: {absent}; set "
                "draft.head to a draft head's directory (specvla train-draft makes one), draft.model to a smaller "
                "policy's, draft.temporal to true, or draft.chunk_shift to true if answers are chunks of digits or "
                "FAST tokens; a policy that writes text can also draft for itself (draft.self_tokens)"
            )
    except UserError as error:
        if not context.settings.fallback_to_ar:
            raise
        _log.warning("decoding plainly (draft.fallback_to_ar): %s", error)
        return Drafters(context, {}), str(error)
    return Drafters(context, by_name), ""


class Drafters:
    """Grows the tree for a request's next forward with all drafters, possibly none.

    Attributes:
        free_rows: rows of a forward that the trees of several requests share; 0: each may have `draft.nodes`.
    """

    def __init__(self, context: DraftContext, by_name: dict[str, Drafter]) -> None:
        import torch

        self.by_name, self._nodes, self.free_rows = by_name, context.settings.nodes, 0
        self._device = context.target.decoder.device
        # Where a prompt's forward verifies no draft.
        self._prompt_end = Tree.from_root(torch.zeros(1, dtype=torch.int64, device=self._device))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @property
    def work(self) -> DraftWork:
        """Running totals of forwards for drafting."""
        return sum((drafter.work for drafter in self.by_name.values()), start=DraftWork())

    def draft(self, inputs: Sequence[DraftInput]) -> list[Tree]:
        """Drafts one tree per request, with at most `draft.nodes` nodes, and if several grow, in the free rows."""
        left = [self._most_nodes(sum(each.max_depth > 0 for each in inputs))] * len(inputs)
        drafts: list[list[Tree | Branches]] = [[] for _ in inputs]
        for i, drafter in enumerate(self.by_name.values(), start=1):
            drafted = drafter.draft(inputs, left, last=i == len(self.by_name))
            for mine, draft in zip(drafts, drafted, strict=True):
                mine.append(draft)
            left = [nodes - _added(draft) for nodes, draft in zip(left, drafted, strict=True)]
        return self._joined(
            [Tree.from_root(request.root) for request in inputs], drafts, lambda i: inputs[i].root_token
        )

    def _most_nodes(self, trees: int) -> int:
        if trees < 2 or not self.free_rows:
            return self._nodes
        return min(self._nodes, max(_FEWEST_NODES, self.free_rows // trees))

    def draft_prompt(self, prompt: DraftInput) -> Tree:
        """Drafts the tree to be verified by a prompt's own forward, below the prompt's last row."""
        left = self._nodes
        drafts: list[Tree | Branches] = []
        for drafter in self.by_name.values():
            drafts.append(drafter.draft_prompt(prompt, left))
            left -= _added(drafts[-1])
        return self._joined([self._prompt_end], [drafts], lambda _: 0)[0]

    def _joined(
        self, roots: Sequence[Tree], drafts: Sequence[Sequence[Tree | Branches]], token_of: Callable[[int], int]
    ) -> list[Tree]:
        """Each request's drafts in one tree; those with probabilities come first, and last in the drafters' order.

        `token_of` gives the token of a request's root.
        """
        grew = [[each for each in reversed(mine) if isinstance(each, Tree)] for mine in drafts]
        trees = [reduce(Tree.joined_with, mine, root) for root, mine in zip(roots, grew, strict=True)]
        known = [[each for each in reversed(mine) if isinstance(each, Branches) and len(each)] for mine in drafts]
        some = [i for i, mine in enumerate(known) if mine]
        if some:
            grown = [trees[i] if len(trees[i]) > 1 else None for i in some]
            more = with_branches([*map(token_of, some)], grown, [known[i] for i in some], self._device)
            for i, tree in zip(some, more, strict=True):
                trees[i] = tree
        return trees

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        for drafter in self.by_name.values():
            drafter.set_tolerance(bins)

    def observe(self, answer: FinishedAnswer) -> None:
        for drafter in self.by_name.values():
            drafter.observe(answer)

    def forget(self, stream: str | None = None) -> None:
        for drafter in self.by_name.values():
            drafter.forget(stream)

    def capture(self, captures: Captures) -> None:
        for drafter in self.by_name.values():
            drafter.capture(captures)

    def release(self) -> None:
        for drafter in self.by_name.values():
            drafter.release()


def _added(draft: Tree | Branches) -> int:
    """Number of nodes below the root."""
    return len(draft) - isinstance(draft, Tree)
