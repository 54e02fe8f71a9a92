# SPDX-License-Identifier: Apache-2.0
"""The interface of drafters, their registration, and all of them together: one tree per request.

A drafter is one file: a class and a function that makes it, registered by name. Its own parameters are a frozen
dataclass in that file; the function returns None where they do not ask for it. Another package adds one with an entry
point of the group `specvla_ros.drafters`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, reduce
from typing import TYPE_CHECKING, Any, Protocol

from specvla_ros.errors import UserError
from specvla_ros.speculation.settings import DRAFT_FOLDER, DRAFTERS
from specvla_ros.speculation.tree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_kernels.graph_capture import Captures
    from specvla_ros.models.codecs.codec import Codec
    from specvla_ros.models.observation import Observation
    from specvla_ros.models.target import PromptLayout, Target
    from specvla_ros.speculation.settings import DraftSettings

drafter = DRAFTERS.register
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftContext:
    """Input to the function that makes a drafter."""

    settings: DraftSettings
    target: Target
    slots: int  # maximum of requests in flight
    slot_rows: int  # maximum of committed rows of a slot
    chunk_step_s: float  # seconds that one action of a chunk takes; 0: unknown
    codec: Codec  # the policy's, with as much text as may come

    def own(self, name: str) -> Any:
        return self.settings.drafters[name]


@dataclass(frozen=True)
class DraftWork:
    """Forwards for drafting, added up."""

    head_forwards: int = 0
    self_forwards: int = 0
    # Committed rows that the target's first forward read in each draft; the others read one per request.
    self_rows: int = 0
    model_forwards: int = 0
    model_rows: int = 0  # all that the draft model's forwards read, prompts included
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
    """Rows of a slot committed since the last draft, where the forward left them, gathered lazily.

    First come rows whose following rows are known, as those of a prompt, then rows that a tree's nodes wrote.
    """

    # [k, hidden], the target's last hidden states at the first rows.
    known_hidden: Tensor = field(default_factory=_no_rows)
    known_following: Tensor = field(default_factory=_no_rows)  # [k, hidden], embedding of the token after each
    # [n, hidden], last hidden states of a forward; that of other requests' rows too.
    states: Tensor = field(default_factory=_no_rows)
    nodes: tuple[int, ...] = ()  # rows of `states`, for the rows behind the known ones
    tokens: tuple[int, ...] = ()  # the token after each of these
    embed: Callable[[Tensor], Tensor] | None = None  # token ids to embeddings; needed where there are tokens

    def __len__(self) -> int:
        return len(self.known_hidden) + len(self.nodes)

    @cached_property
    def hidden(self) -> Tensor:
        """[rows, hidden], the target's last hidden states."""
        return self._joined(self.known_hidden, self.nodes, self.states.__getitem__)

    @cached_property
    def following(self) -> Tensor:
        """[rows, hidden], embedding of the token after each row."""
        return self._joined(self.known_following, self.tokens, self.embed)

    def _joined(self, known: Tensor, numbers: tuple[int, ...], found: Callable[[Tensor], Tensor] | None) -> Tensor:
        if not numbers:
            return known
        import torch

        from specvla_kernels.device import to_device

        assert found is not None
        rows = found(to_device(numbers, self.states.device))
        return torch.cat((known, rows)) if len(known) else rows

    def newest(self, n: int) -> NewRows:
        """The last rows, at most n, of those that nodes wrote."""
        cut = max(0, len(self.nodes) - n)
        return NewRows(states=self.states, nodes=self.nodes[cut:], tokens=self.tokens[cut:], embed=self.embed)

    def before_newest(self, n: int) -> NewRows:
        """The others."""
        cut = max(0, len(self.nodes) - n)
        return replace(self, nodes=self.nodes[:cut], tokens=self.tokens[:cut])


@dataclass(frozen=True)
class DraftInput:
    """One request, with the rows committed since the last draft."""

    slot: int
    prefix_len: int  # committed rows of the slot
    new: NewRows  # the last of these, committed since the last draft; after the last one comes the root
    root: Tensor  # int64 [], the last committed token, whose keys and values are not written yet
    max_depth: int  # of the tree: one less than the tokens still missing
    position: int  # action tokens committed so far, the root included: the dimension of the first drafted token
    epoch: int = 0
    layout: PromptLayout | None = None  # the rows of the prompt; None: unknown, for drafters that do not read it
    answer: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()  # what the answer to the image before, still in flight, has committed
    mid_prompt: bool = False  # these rows are a chunk of the prompt that does not end it; nothing is drafted yet
    in_text: bool = False  # the answer may still be text, which comes before the action
    observation: Observation | None = None  # what is answered, for drafters that look at it themselves
    stream: str = ""

    @property
    def begins(self) -> bool:
        """Whether these are the first rows of the slot."""
        return len(self.new) == self.prefix_len

    @property
    def prompt(self) -> tuple[int, ...]:
        return () if self.layout is None else self.layout.ids


@dataclass(frozen=True)
class DraftPrompt:
    """A prompt whose own forward may verify a draft of at most `max_depth` tokens, those of the longest answer."""

    epoch: int
    max_depth: int
    in_text: bool
    stamp_ns: int
    stream: str = ""
    ahead: tuple[int, ...] = ()  # as in DraftInput


@dataclass(frozen=True)
class FinishedAnswer:
    """An answer that stands for an action: all its tokens, and the action tokens in which it ends.

    Not `whole`: it was ended after some of its actions, and its tokens may break off within a number.
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
        """Forwards for drafting so far."""
        return DraftWork()

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        """One tree per request, of different slots; called once per tick, whether or not anything may be drafted.

        The next call may overwrite them. `nodes`: maximum of each tree, the root included. `last`: whether no drafter
        comes after this one; others leave nodes to it.
        """

    def draft_prompt(self, prompt: DraftPrompt, root: Tensor, nodes: int) -> Tree | None:
        """A tree that a prompt's own forward may verify, without hidden states; None: nothing.

        Its root, int64 [1], stands for the prompt's last row, and its token is not read; `nodes` includes the root.
        """
        return None

    def set_tolerance(self, bins: tuple[int, ...]) -> None:
        """Takes the tolerance of acceptance, in bins per action token."""
        return

    def observe(self, answer: FinishedAnswer) -> None:
        """Takes a finished answer."""
        return

    def forget(self, stream: str | None = None) -> None:
        """Forgets the earlier answers of a stream; None: of all."""
        return

    def capture(self, captures: Captures) -> None:
        """See Capturable."""
        return

    def release(self) -> None:
        """See Capturable."""
        return


def make_drafters(context: DraftContext, *, wanted: bool, needed: bool) -> tuple[Drafters, str]:
    """The drafters that the settings ask for, in the order in which they take nodes; none where none are `wanted`.

    None, with the reason, where none can be had and the user allowed to go on without. `needed`: it is an error that
    there is nothing to draft with. Raises UserError for that, or where a drafter does not fit the target.
    """
    if not wanted:
        return Drafters(context, {}), ""
    try:
        made = {name: entry.make(context) for name, entry in DRAFTERS.entries().items()}
        by_name = {name: drafter for name, drafter in made.items() if drafter is not None}
        if needed and not by_name:
            raise UserError(
                f"decode.mode spec has nothing to draft with: {context.target.directory / DRAFT_FOLDER} is not there; "
                "set draft.head to a draft head's directory (specvla train-draft makes one), or draft.model to that of "
                "a smaller policy, or draft.temporal to true, or draft.chunk_shift where answers are chunks of digits "
                "or FAST tokens; a policy that writes text may also draft for itself (draft.self_tokens)"
            )
    except UserError as error:
        if not context.settings.fallback_to_ar:
            raise
        _log.warning("decoding plainly, as draft.fallback_to_ar allows: %s", error)
        return Drafters(context, {}), str(error)
    return Drafters(context, by_name), ""


class Drafters:
    """Grows the tree that a request's next forward verifies, with all drafters, of which there may be none."""

    def __init__(self, context: DraftContext, by_name: dict[str, Drafter]) -> None:
        import torch

        self.by_name, self._nodes = by_name, context.settings.nodes
        self._prompt_end = Tree.from_root(torch.zeros(1, dtype=torch.int64, device=context.target.decoder.device))

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    @property
    def work(self) -> DraftWork:
        """Forwards for drafting so far."""
        return sum((drafter.work for drafter in self.by_name.values()), start=DraftWork())

    def draft(self, inputs: Sequence[DraftInput]) -> list[Tree]:
        """One tree per request, of at most `draft.nodes` nodes."""
        left = [self._nodes] * len(inputs)
        trees = [[Tree.from_root(request.root)] for request in inputs]
        for i, drafter in enumerate(self.by_name.values(), start=1):
            drafted = drafter.draft(inputs, left, last=i == len(self.by_name))
            for mine, tree in zip(trees, drafted, strict=True):
                mine.append(tree)
            left = [nodes - len(tree) + 1 for nodes, tree in zip(left, drafted, strict=True)]
        return [_joined(mine) for mine in trees]

    def draft_prompt(self, prompt: DraftPrompt) -> Tree:
        """The tree that a prompt's own forward may verify."""
        left = self._nodes
        trees = [self._prompt_end]
        for drafter in self.by_name.values():
            tree = drafter.draft_prompt(prompt, self._prompt_end.tokens, left)
            if tree is not None:
                trees.append(tree)
                left -= len(tree) - 1
        return _joined(trees)

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


def _joined(trees: Sequence[Tree]) -> Tree:
    """One tree of all; those that know probabilities come last in the drafters' order, and first here."""
    return reduce(Tree.joined_with, reversed(trees))
