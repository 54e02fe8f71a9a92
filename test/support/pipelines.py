# SPDX-License-Identifier: Apache-2.0
"""Engines with several requests in flight, and what is fed to them."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.models.families.openvla.target import require_openvla
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target

PICTURES = 5


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


def failing_tick(engine: Engine) -> list[Outcome]:
    def fail(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    handle = require_openvla(engine.target).decoder.register_forward_pre_hook(fail)
    try:
        return engine.tick()
    finally:
        handle.remove()
