# SPDX-License-Identifier: Apache-2.0
"""Engines with several requests in flight, and what is fed to them."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.pace import Pace
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target

PICTURES = 5
PACES = st.builds(
    Pace,
    in_flight=st.integers(1, 3),
    max_forwards_left=st.sampled_from([1.0, 2.0, 5.0, math.inf]),
    spread=st.sampled_from([1, 2, 4]),
    drafts=st.booleans(),
    ahead=st.booleans(),
)


def frame(stamp_ns: int, picture: int, *, epoch: int = 1) -> Observation:
    image = np.random.default_rng(picture).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return Observation(image, "put carrot on plate", stamp_ns, epoch=epoch)


def plain_tokens(policy: Target) -> Callable[[int], tuple[int, ...]]:
    """The plain decoder's tokens for a picture."""
    engine = Engine(policy, EngineSettings("ar"))

    @lru_cache
    def tokens(picture: int) -> tuple[int, ...]:
        engine.reset()
        action = engine.act(frame(1, picture))
        assert isinstance(action, Action)
        return action.tokens

    return tokens


def poisoned(policy: Target, chosen: EngineSettings) -> Engine:
    engine = Engine(policy, chosen)
    engine.cache.keys.fill_(float("nan"))
    engine.cache.values.fill_(float("nan"))
    return engine


def fed(engine: Engine, frames: Sequence[Observation]) -> list[Outcome]:
    """Every frame as soon as there is room, until all have ended."""
    ended: list[Outcome] = []
    left = list(frames)
    while left or engine.busy:
        if left and engine.has_room:
            ended += engine.submit(left.pop(0))
        ended += engine.tick()
    return ended


def failing_tick(engine: Engine) -> list[Outcome]:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    handle = require_openvla(engine.target).decoder.register_forward_pre_hook(fail)
    try:
        return engine.tick()
    finally:
        handle.remove()
