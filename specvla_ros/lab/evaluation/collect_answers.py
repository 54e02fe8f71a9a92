# SPDX-License-Identifier: Apache-2.0
"""`specvla collect-answers`: the policy's own answers, in which later ones are looked up."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.frame_sources import lossless
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target


@dataclass
class CollectedAnswers:
    """What a policy answered.

    Attributes:
        answers: each different one once, in the order they came.
        frames: that were asked about.
        dropped: frames without an action, by reason.
    """

    answers: dict[tuple[int, ...], None] = field(default_factory=dict)
    frames: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def collect_answers(
    policy: Target, frames: Iterable[Observation], on_frame: Callable[[int], None] | None = None
) -> CollectedAnswers:
    """Has a policy answer frames one after the other; its drafts change nothing.

    Raises:
        UserError: it answers with single actions, or not one frame with actions.
    """
    if policy.codec.horizon < 2:
        raise UserError(
            "earlier answers are looked up for policies that answer with several actions; this one gives a single one: "
            "set draft.temporal in their place"
        )
    engine = Engine(policy, lossless(policy, EngineSettings()))
    found = CollectedAnswers()
    for frame in frames:
        if frame.stamp_ns <= engine.mailbox.last_stamp_ns:  # another bag or episode
            engine.reset()
        outcome = engine.act(frame)
        found.frames += 1
        if isinstance(outcome, Drop):
            found.dropped[outcome.reason.value] += 1
        else:
            found.answers[outcome.tokens] = None
        if on_frame is not None:
            on_frame(found.frames)
    if not found.answers:
        raise UserError(f"the policy answered none of {found.frames} images with actions: {dict(found.dropped)}")
    return found
