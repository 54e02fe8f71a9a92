# SPDX-License-Identifier: Apache-2.0
"""Continuing the motion: gives the actions that the robot executes while an answer is computed, as its first tokens.

The idea is that of real-time chunking (arXiv 2506.07339), which inpaints the chunks of a diffusion policy. For a policy
that writes its actions they are tokens like any others, computed with the prompt. Lossy: from its image alone the
policy might have written others.

Action j of an answer is for the time from j dt to (j + 1) dt after its image. If the first of its own actions is out at
age A of the image, the robot has then executed, from the answer before, the actions that end by then:

    d = floor(A / dt)

An image that is n = round(t / dt) actions younger than the one before starts at that answer's action n.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specvla_ros.engine.answer_prefix import NO_PREFIX, AnswerPrefix
from specvla_ros.engine.outcome import BROKEN, Action, Outcome
from specvla_ros.engine.request import Request
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec, SaysNumbers
from specvla_ros.models.observation import Observation


@dataclass(frozen=True)
class Chunk:
    """The known actions of an answer."""

    task: tuple[object, ...]  # what it was written for
    stamp_ns: int  # of its image
    tokens: tuple[int, ...]
    actions: int  # number of complete actions in the tokens


class ExecutedActions:
    """The newest published answer of each robot, which the next one continues if none is in flight.

    An answer that is not an action is never continued.

    Args:
        codec, step_s: the policy's, and dt, the duration of an action in seconds; see `check`.
    """

    def __init__(self, codec: Codec, step_s: float) -> None:
        self._codec, self._step_s = codec, step_s
        self._last: dict[str, Chunk] = {}  # by stream

    def check(self, *, causal_prompt: bool, ensemble: int) -> None:
        """Raises UserError if a policy's answers cannot start with actions of the one before."""
        leave = "leave decode.commit at none"
        if self._codec.horizon < 2:
            raise UserError(f"decode.commit is for answers of several actions, and this policy's have one: {leave}")
        if not isinstance(self._codec, SaysNumbers):
            raise UserError(
                "decode.commit gives the tokens of executed actions, but each token of this policy stands for all "
                f"actions of a chunk: {leave}"
            )
        if not causal_prompt:
            raise UserError(
                "this policy's prompt attends bidirectionally, so the start of an answer cannot be given: " + leave
            )
        if ensemble > 1:
            raise UserError(
                "decode.ensemble averages actions, so the robot executes none that the policy wrote: set it to 0, or "
                "decode.commit to none"
            )
        if not self._step_s:
            raise UserError(
                "decode.commit needs the duration of an action, which the checkpoint does not give: set "
                "decode.chunk_step_s, or decode.commit to none"
            )

    def given_to(self, seen: Observation, age_s: float, before: Request | None) -> AnswerPrefix:
        """The start of an image's answer.

        Args:
            age_s: expected age of the image when the first of its own actions is out.
            before: its robot's newest request in flight; None: none.
        """
        last = self._last.get(seen.stream) if before is None else self._begun(before)
        if seen.answer_ids or last is None or last.task != seen.task:
            return AnswerPrefix(seen.answer_ids)
        first = max(0, round((seen.stamp_ns - last.stamp_ns) * 1e-9 / self._step_s))
        executed = math.floor(age_s / self._step_s + 1e-9)
        stop = min(first + executed, last.actions, first + self._codec.horizon - 1)
        if stop <= first:
            return NO_PREFIX
        assert isinstance(self._codec, SaysNumbers)
        return AnswerPrefix(self._codec.tokens_of_actions(last.tokens, first, stop), actions=stop - first)

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Keeps each robot's newest published actions; a broken answer voids them."""
        for outcome in outcomes:
            seen = outcome.observation
            if isinstance(outcome, Action):
                self._last[seen.stream] = Chunk(seen.task, seen.stamp_ns, outcome.tokens, len(outcome.actions))
            elif outcome.reason in BROKEN:
                self.forget(seen.stream)

    def forget(self, stream: str | None = None) -> None:
        """Forgets a robot's answer; None: all."""
        self._last = {} if stream is None else {name: each for name, each in self._last.items() if name != stream}

    def _begun(self, request: Request) -> Chunk:
        seen, tokens = request.observation, tuple(request.tokens)
        assert isinstance(self._codec, SaysNumbers)
        actions = len(self._codec.completed_numbers(tokens)) // len(self._codec.names)
        return Chunk(seen.task, seen.stamp_ns, tokens, actions)
