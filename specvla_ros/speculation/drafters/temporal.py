# SPDX-License-Identifier: Apache-2.0
"""Drafts an answer from previous answers: no forward, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.drafters.registry import (
    DraftContext,
    Drafter,
    DraftInput,
    FinishedAnswer,
    drafter,
)
from specvla_ros.speculation.tree import Branches

if TYPE_CHECKING:
    from specvla_ros.models.codecs.codec import ActionIds

_FEWEST, _LONGEST = 2, 3  # min and max tokens matched to find a position in the previous answer


@dataclass(frozen=True)
class TemporalSettings:
    """Settings of drafting the previous action."""

    enabled: bool = parameter(False, "Also draft the previous action, held and extrapolated.", name="temporal")


@dataclass(frozen=True)
class _Memory:
    """A stream's last two actions in an instruction epoch, and its whole last answer."""

    epoch: int = 0
    last: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


_NOTHING = _Memory()


class TemporalDrafter(Drafter):
    """Stores the last two actions of a robot's instruction epoch, and the whole last answer with its text.

    A robot's actions change little between frames. The last action, held, or the line through the last two is often
    right, especially in dimensions at rest. Most of the text before an action repeats the previous image's text. If the
    previous image's answer is still in flight, its committed tokens replace the beginning of the last text.

    These drafts are never relaxed: the last action is always near the next one, so it would be accepted and repeated
    forever.
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

    def draft(self, inputs: Sequence[DraftInput], nodes: Sequence[int], *, last: bool) -> list[Branches]:
        drafts = []
        for request, limit in zip(inputs, nodes, strict=True):
            if request.in_text:
                # Only this drafter drafts after a prompt; later, text leaves half of the nodes to others.
                tokens = limit if last or not request.answer else limit // 2
                chains = [self.text(request.answer, tokens, request.stream, request.previous_answer)]
            else:
                chains = self.chains(request.epoch, request.position, request.stream)
            drafts.append(
                Branches.from_chains(chains, max_depth=request.max_depth, max_nodes=limit - 1, relaxable=False)
            )
        return drafts

    def draft_prompt(self, prompt: DraftInput, nodes: int) -> Branches:
        """Drafts the whole last answer, or its rest after a given start."""
        return self.draft([prompt], [nodes], last=True)[0]

    def text(
        self, answer: Sequence[int], tokens: int, stream: str = "", previous: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """The last answer's tokens from the position that this answer has reached.

        From any epoch, since another instruction's text has the same form. `previous`: the committed tokens of the
        previous image's answer, if still in flight.
        """
        last = self._of.get(stream, _NOTHING).answer
        before = (*previous, *last[resume(last, previous) :]) if previous else last
        at = resume(before, answer)
        return before[at : at + tokens]

    def chains(self, epoch: int, position: int, stream: str = "") -> list[tuple[int, ...]]:
        """The action tokens from dimension `position`: held, then extrapolated if different."""
        known = self._of.get(stream, _NOTHING)
        if not known.last or epoch != known.epoch:
            return []
        held = known.last[position:]
        chains = [held] if held else []
        if known.before and self._actions.first < self._actions.stop:  # else neighbouring ids are not similar
            line = tuple(map(self._beyond, known.before[position:], held))
            chains += [line] if line != held else []
        return chains

    def _beyond(self, before: int, last: int) -> int:
        token = 2 * last - before  # ids decrease by one per bin
        return max(self._actions.first, min(self._actions.stop - 1, token))


def resume(before: Sequence[int], answer: Sequence[int]) -> int:
    """The index in the previous answer from which it continues a committed prefix that may differ from its own.

    This is after the longest match of the last two or three tokens. Among equal matches the one nearest to the same
    position is taken, since words repeat and answers mostly have the same length. Without a match it is the same
    position: a number has changed, and the same number elsewhere is not an indication.
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
