# SPDX-License-Identifier: Apache-2.0
"""The action `policy/ask`: a question about the picture that the policy acts on, answered beside its actions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from action_msgs.msg import GoalStatus
from rclpy.action import ActionServer, CancelResponse
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.task import Future
from rclpy.time import Time
from std_msgs.msg import Header

from specvla_ros.action import Ask
from specvla_ros.engine.outcome import Question

_LOOK_S = 0.05
_PICTURE_S = 10.0  # without one, after which there is no answer

Goal = Any  # ServerGoalHandle, generic in some versions of rclpy and not in others


@dataclass
class _Run:
    """A goal that is being answered."""

    goal: Goal
    question: Question
    begun_s: float = field(default_factory=time.monotonic)
    ended: Future = field(default_factory=Future)
    fed_back: int = 0  # tokens
    why: str = ""  # it was ended without an answer


class AskServer:
    """Serves one question at a time.

    Args:
        node: the policy's.
        submit: gives a question to the engine, or says in it why not.
        text_of: an answer's tokens in words.
    """

    def __init__(self, node: Node, submit: Callable[[Question], None], text_of: Callable[[Sequence[int]], str]) -> None:
        self._submit, self._text_of = submit, text_of
        self._run: _Run | None = None
        self._server = ActionServer(
            node, Ask, "~/ask", execute_callback=self._execute, cancel_callback=lambda _: CancelResponse.ACCEPT
        )
        # Steady: an answer must not wait for a simulated clock that stands still.
        self._timer = node.create_timer(_LOOK_S, self._look, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._timer.cancel()

    def end(self, why: str) -> None:
        """Ends the question that is being answered, without an answer."""
        run = self._run
        if run is not None:
            self._end(run, why)

    async def _execute(self, goal: Goal) -> Ask.Result:
        if self._run is not None:
            goal.abort()
            return Ask.Result(message="another question is being answered: ask again when it is")
        self._run = run = _Run(goal, Question(str(goal.request.question)))
        self._submit(run.question)
        self._timer.reset()
        await run.ended
        question = run.question
        problem = run.why or question.problem
        if goal.status == GoalStatus.STATUS_CANCELING:
            goal.canceled()
        elif problem:
            goal.abort()
        else:
            goal.succeed()
        return Ask.Result(
            answer="" if problem else self._text_of(question.tokens),
            message=problem,
            header=_header(question),
            tokens=len(question.tokens),
            forwards=question.forwards,
            duration_s=time.monotonic() - run.begun_s,
        )

    def _look(self) -> None:
        run = self._run
        if run is None:
            return
        question = run.question
        if question.done:
            self._end(run)
        elif run.goal.status == GoalStatus.STATUS_CANCELING:
            self._end(run, "canceled")
        elif question.observation is None and time.monotonic() - run.begun_s > _PICTURE_S:
            self._end(
                run,
                f"no picture to answer about came within {_PICTURE_S:g} s: is the policy active and not paused, are "
                "there images and an instruction?",
            )
        elif len(question.tokens) > run.fed_back:
            run.fed_back = len(question.tokens)
            run.goal.publish_feedback(Ask.Feedback(answer=self._text_of(question.tokens)))

    def _end(self, run: _Run, why: str = "") -> None:
        run.why, run.question.cancelled = why, bool(why)
        self._run = None
        self._timer.cancel()
        run.ended.set_result(None)


def _header(question: Question) -> Header:
    seen = question.observation
    if seen is None:
        return Header()
    return Header(stamp=Time(nanoseconds=seen.stamp_ns).to_msg(), frame_id=seen.frame_id)
