# SPDX-License-Identifier: Apache-2.0
"""Thinking less often than acting: gives a policy's last thought to newer images.

A thought is the text that a policy writes before an action. Given with the prompt of a newer image it costs no decode
forward, and only the action is decoded. Lossy: the policy would have written another text for that image.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from specvla_ros.engine.answer_prefix import AnswerPrefix
from specvla_ros.engine.outcome import BROKEN, Drop, Outcome
from specvla_ros.engine.request import Request
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import Observation


@dataclass(frozen=True)
class Thought:
    """The text of a complete answer."""

    task: tuple[object, ...]  # what it was written for
    stamp_ns: int  # of the image that it was written from
    tokens: tuple[int, ...]


class Thoughts:
    """The last thought of each robot.

    It is given to newer images with the same instruction and epoch. An answer that is not an action voids it.

    Args:
        every_s: min seconds between the images of two thoughts; 0: each image has its own.
        codec: separates the text of an answer from its action.
    """

    def __init__(self, every_s: float, codec: Codec) -> None:
        self._every_ns, self._codec = every_s * 1e9, codec
        self._last: dict[str, Thought] = {}  # by stream

    def given_to(self, seen: Observation, *, thinking: bool) -> AnswerPrefix:
        """The start of an image's answer; `thinking`: the robot's next thought is being written."""
        last = self._last.get(seen.stream)
        if seen.answer_ids or last is None or last.task != seen.task:
            return AnswerPrefix(seen.answer_ids)
        if seen.stamp_ns - last.stamp_ns >= self._every_ns and not thinking:
            return AnswerPrefix(renews=True)
        return AnswerPrefix(last.tokens, last.stamp_ns)

    def learn(self, request: Request) -> None:
        """Keeps the thought of a complete answer, unless it was given or a newer one is known."""
        seen, text = request.observation, self._codec.text_tokens(request.tokens)
        if not self._every_ns or request.given.tokens or not text:
            return
        last = self._last.get(seen.stream)
        if last is None or last.task != seen.task or last.stamp_ns < seen.stamp_ns:
            self._last[seen.stream] = Thought(seen.task, seen.stamp_ns, text)

    def void(self, outcomes: Iterable[Outcome]) -> None:
        """Forgets the thoughts of robots with a broken answer, so that the next image has its own thought."""
        for outcome in outcomes:
            if isinstance(outcome, Drop) and outcome.reason in BROKEN:
                self.forget(outcome.observation.stream)

    def forget(self, stream: str | None = None) -> None:
        """Forgets a robot's thought; None: all."""
        self._last = {} if stream is None else {name: each for name, each in self._last.items() if name != stream}
