"""From a request's tokens to the action that leaves the engine, or to why there is none."""

import time

import numpy as np

from specvla_ros.engine.answer import AnswerFormat
from specvla_ros.engine.outcome import Action, Drop, DropReason, Outcome
from specvla_ros.engine.request import Request
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.checkpoint import Target


def outcome_of(
    request: Request, policy: Target, answer: AnswerFormat, settings: EngineSettings, *, in_flight: int
) -> Outcome:
    """What a request with a complete answer ends in.

    Args:
        in_flight: requests in flight, this one included.
    """
    tokens = answer.action(request.tokens)
    strangers = [token for token in tokens if not policy.action_tokenizer.is_action(token)]
    if strangers:
        return Drop(request.observation, DropReason.NOT_AN_ACTION, f"token {strangers[0]} is no action token")
    values = policy.action(tokens)
    if not np.isfinite(values).all():
        return Drop(request.observation, DropReason.NOT_FINITE, f"the action is {values.tolist()}")
    return Action(
        observation=request.observation,
        names=policy.action_names,
        values=values,
        tokens=tokens,
        timings=request.timings(),
        record=request.record(settings.mode, settings.acceptance.rule, in_flight),
        finished_ns=time.monotonic_ns(),
    )
