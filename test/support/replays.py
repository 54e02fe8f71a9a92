# SPDX-License-Identifier: Apache-2.0
"""What tests of replays share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.evaluation.replay_summary import ReplaySummary
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target

Run = Callable[..., tuple[ReplaySummary, list[dict[str, Any]], Path]]


def warm_engine(policy: Target) -> Engine:
    engine = Engine(policy, EngineSettings("ar"))
    engine.warm_up()
    return engine


def read_frames(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "frames.jsonl").read_text().splitlines()]


def drops_of(frames: list[dict[str, Any]]) -> list[str | None]:
    return [frame["drop"] and frame["drop"]["reason"] for frame in frames]


class Meddling:
    """Does something at one call of Engine.act."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, deed: Callable[[], None]) -> None:
        self.calls, self.at, self.deed = -1, at, deed  # the first call is the warm-up
        real = Engine.act

        def act(engine: Engine, observation: Observation) -> Outcome:
            self.calls += 1
            if self.calls == self.at:
                self.deed()
            return real(engine, observation)

        monkeypatch.setattr(Engine, "act", act)
