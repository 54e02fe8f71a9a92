# SPDX-License-Identifier: Apache-2.0
"""Drafts an answer from those before it: no forward, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import (
    DraftContext,
    Drafter,
    DraftInput,
    DraftPrompt,
    FinishedAnswer,
    drafter,
)
from specvla_ros.speculation.tree import Branches, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from specvla_ros.models.codecs.codec import ActionIds

_FEWEST, _LONGEST = 2, 3  # tokens by which a place in the answer before is found again


@dataclass(frozen=True)
class TemporalSettings:
    """Settings of drafting the previous action."""

    enabled: bool = parameter(False, "Draft the previous action too, held and extrapolated.", name="temporal")


@dataclass(frozen=True)
class _Memory:
    """Of one stream: the last two actions of an instruction epoch, and the last answer whole."""

    epoch: int = 0
    last: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


_NOTHING = _Memory()


class TemporalDrafter(Drafter):
    """Remembers the last two actions of a robot's instruction epoch, and the last answer whole, with its text.

    A robot's actions change little from frame to frame, so that the last one, held, or the line through the last two is
    often right, above all in the dimensions that rest; and most of what a policy writes before it acts, it wrote one
    image ago. Where the answer to the image before is still in flight, what it has committed takes the place of the
    beginning of the last text.

    These drafts are never relaxed: the last action is near the next one by its nature, and accepted because it is near
    it would be repeated for ever.
    """

    def __init__(self, actions: ActionIds) -> None:
        self._actions = actions
        self._of: dict[str, _Memory] = {}  # by stream

    def observe(self, answer: FinishedAnswer) -> None:
        known = self._of.get(answer.stream, _NOTHING)
        before = known.last if answer.epoch == known.epoch else ()
        self._of[answer.stream] = _Memory(answer.epoch, answer.action, before, answer.tokens)

    def forget(self, stream: str | None = None) -> None:
        self._of = {} if stream is None else {name: each for name, each in self._of.items() if name != stream}

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Tree]:
        trees = []
        for request, limit in zip(inputs, nodes, strict=True):
            if request.in_text:
                # After a prompt nothing else drafts; later, text leaves half of the nodes to the others.
                tokens = limit if last or not request.answer else limit // 2
                chains = [self.text(request.answer, tokens, request.stream, request.ahead)]
            else:
                chains = self.chains(request.epoch, request.position, request.stream)
            branches = Branches.from_chains(chains, max_depth=request.max_depth, max_nodes=limit - 1)
            trees.append(branches.tree(request.root, relaxable=False))
        return trees

    def draft_prompt(self, prompt: DraftPrompt, root: Tensor, nodes: int) -> Tree | None:
        """The whole of the last answer."""
        stream, ahead = prompt.stream, prompt.ahead
        chains = [self.text((), nodes, stream, ahead)] if prompt.in_text else self.chains(prompt.epoch, 0, stream)
        branches = Branches.from_chains(chains, max_depth=prompt.max_depth, max_nodes=nodes - 1)
        return branches.tree(root, relaxable=False) if len(branches) else None

    def text(
        self, answer: Sequence[int], tokens: int, stream: str = "", ahead: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """What followed in the last answer from the place that this one has reached.

        In whatever epoch that was: another instruction's text has the same form. `ahead`: see DraftInput.
        """
        last = self._of.get(stream, _NOTHING).answer
        before = (*ahead, *last[resume(last, ahead) :]) if ahead else last
        at = resume(before, answer)
        return before[at : at + tokens]

    def chains(self, epoch: int, position: int, stream: str = "") -> list[tuple[int, ...]]:
        """The action tokens from dimension `position` on: held, then extrapolated where that differs."""
        known = self._of.get(stream, _NOTHING)
        if not known.last or epoch != known.epoch:
            return []
        held = known.last[position:]
        chains = [held] if held else []
        if known.before:
            line = tuple(map(self._beyond, known.before[position:], held))
            chains += [line] if line != held else []
        return chains

    def _beyond(self, before: int, last: int) -> int:
        token = 2 * last - before  # ids fall by one from bin to bin
        return max(self._actions.first, min(self._actions.stop - 1, token))


def resume(before: Sequence[int], answer: Sequence[int]) -> int:
    """Where the answer before goes on from a committed beginning that may differ from its own: an index of `before`.

    Behind the longest match of the last tokens, two or three; of several as long, the one that is the fewest tokens
    from the same place: the same words come again and again, and an answer is mostly as long as the one before. At the
    same place where there is none: a number has changed, and one like it elsewhere is no sign.
    """
    here = len(answer)

    def matched(at: int) -> int:
        pairs = zip(reversed(before[max(0, at - _LONGEST) : at]), reversed(answer[-_LONGEST:]), strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), min(at, here, _LONGEST))

    places = range(1, len(before) + 1) if here else ()
    best = max(places, key=lambda at: (matched(at), -abs(at - here)), default=0)
    return best if here and matched(best) >= _FEWEST else min(here, len(before))


@drafter("temporal", settings=TemporalSettings, order=10)
def _temporal(context: DraftContext) -> Drafter | None:
    own: TemporalSettings = context.own("temporal")
    return TemporalDrafter(context.target.codec.action_ids) if own.enabled else None
