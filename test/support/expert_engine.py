# SPDX-License-Identifier: Apache-2.0
"""The scripted expert in the place of the engine: decides from the true state of the moment that it is shown."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, DecodeRecord, Outcome, StageTimings
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.tasks import TASKS, Task
from specvla_ros.models.codecs.bins import ActionTokenizer, BinsCodec
from specvla_ros.models.codecs.statistics import ActionStatistics
from specvla_ros.models.observation import ONLY_CAMERA, Observation

STATISTICS = ActionStatistics(
    "expert",
    np.array([-0.05] * 3 + [-0.2] * 3 + [0.0]),
    np.array([0.05] * 3 + [0.2] * 3 + [1.0]),
    np.array([True] * 6 + [False]),
)


class ExpertEngine:
    """Answers as an engine in mode `ar` does: a tick with the prompt, then one per token.

    Args:
        robot: whose state is looked at when an observation is submitted.
    """

    target = SimpleNamespace(
        codec=BinsCodec(ActionTokenizer(32000), STATISTICS),
        cameras=(ONLY_CAMERA,),
        state_dims=0,
        state_names=(),
        directory=Path("expert"),
    )

    def __init__(self, robot: TableRobot) -> None:
        self.robot = robot
        self.last_work = TickWork()
        self.reset()

    def reset(self) -> None:
        self._waiting: tuple[Observation, np.ndarray] | None = None
        self._ticks = 0

    def check_instruction(self, instruction: str) -> None:
        self._task(instruction)

    def measure_ticks(self) -> None:
        """There is no pace to choose."""

    @property
    def has_room(self) -> bool:
        return not self.busy

    @property
    def busy(self) -> bool:
        return self._waiting is not None

    def submit(self, observation: Observation) -> list[Outcome]:
        assert self._waiting is None
        self._waiting = (observation, demonstrate(self._task(observation.instruction), self.robot.state()))
        self._ticks = 0
        return []

    def tick(self) -> list[Outcome]:
        assert self._waiting is not None
        first, last = self._ticks == 0, self._ticks == 6
        self.last_work = TickWork(images=int(first), prompts=int(first), trees=int(not first), nodes=int(not first))
        self._ticks += 1
        if not last:
            return []
        observation, values = self._waiting
        self._waiting = None
        return [
            Action(
                observation=observation,
                names=ACTION_NAMES,
                actions=values[None],
                tokens=(0,) * 7,
                timings=StageTimings(),
                record=DecodeRecord("ar"),
                finished_ns=1,
            )
        ]

    @staticmethod
    def _task(instruction: str) -> Task:
        return next(task for task in TASKS if task.instruction == instruction)


def as_engine(expert: ExpertEngine) -> Engine:
    """For what is written for engines: the expert has all of them that a rollout uses."""
    return cast(Engine, expert)
