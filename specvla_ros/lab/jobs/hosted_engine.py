# SPDX-License-Identifier: Apache-2.0
"""One engine shared by several processes: their frames are packed into common forwards."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.thread import Decoded, SharedEngine
from specvla_ros.lab.jobs.workers import Host
from specvla_ros.models.codecs.codec import Codec
from specvla_ros.models.observation import ONLY_CAMERA, Observation
from specvla_ros.models.target import Target

_NO_IMAGES = {ONLY_CAMERA: np.zeros((1, 1, 3), np.uint8)}


@dataclass(frozen=True)
class HostedPolicy:
    """A policy's facts, for a process without its weights; see `PolicyFacts`."""

    directory: Path
    codec: Codec
    unnorm_key: str
    cameras: tuple[str, ...]
    state_dims: int
    state_names: tuple[str, ...]
    description: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return self.description


class EngineHost:
    """The shared engine in its own process, for up to `robots` robots; see `specvla_ros.lab.jobs.workers.Shared`.

    `tick_time` maps a tick's work and its measured seconds to the seconds that it counts for. Raises UserError if the
    settings do not fit the target or the device's memory.
    """

    def __init__(
        self,
        target: Target,
        settings: EngineSettings,
        robots: int,
        tick_time: Callable[[TickWork, float], float] = lambda _, seconds: seconds,
    ) -> None:
        self._settings = settings
        self._engine = Engine(target, replace(settings, streams=robots))
        self._engine.warm_up()
        self._thread = SharedEngine(self._engine, tick_time)

    def facts(self) -> tuple[HostedPolicy, EngineSettings]:
        """The policy and the settings, as a local engine would have them."""
        target = self._engine.target
        named = (target.directory, target.codec, target.unnorm_key)
        facts = HostedPolicy(*named, target.cameras, target.state_dims, target.state_names, target.describe())
        return facts, replace(self._engine.settings, streams=self._settings.streams)

    def check_instruction(self, instruction: str) -> None:
        self._engine.check_instruction(instruction)

    def reset(self, stream: str) -> None:
        self._thread.close(stream)

    def decode(self, observation: Observation) -> Decoded:
        """Decodes an observation; the result omits its images, which are large."""
        decoded = self._thread.decode(observation, self._thread.prepared(observation)).result()
        seen = replace(decoded.outcome.observation, images=_NO_IMAGES)
        return replace(decoded, outcome=replace(decoded.outcome, observation=seen))


class HostedEngine:
    """A worker's access to an engine in another process, in which the worker is one robot.

    It decodes exactly as a local engine does, acceptance and drafts included. Its times are those of ticks shared with
    the other workers. `target` is the policy without its weights.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stream = f"worker {host.place}"
        self.target, self.settings = host.call("facts")
        self.reset()

    def reset(self) -> None:
        self._host.call("reset", self._stream)

    def check_instruction(self, instruction: str) -> None:
        self._host.call("check_instruction", instruction)

    def decode(self, observation: Observation) -> Decoded:
        decoded: Decoded = self._host.call("decode", replace(observation, stream=self._stream))
        outcome = replace(decoded.outcome, observation=observation)
        if isinstance(outcome, Action):
            outcome = replace(outcome, finished_ns=time.monotonic_ns())  # on this machine's clock, transfer included
        return replace(decoded, outcome=outcome)

    def act(self, observation: Observation) -> Outcome:
        return self.decode(observation).outcome
