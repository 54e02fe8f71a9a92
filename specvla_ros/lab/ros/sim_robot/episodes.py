# SPDX-License-Identifier: Apache-2.0
"""What the simulated robot keeps about its episodes. No ROS here."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specvla_ros.lab.simulation.tasks import TASKS, Task
from specvla_ros.models.families.openvla.prompt import normalise_instruction


class EpisodeState(IntEnum):
    """As in SimEpisode.msg."""

    RUNNING = 0
    SUCCEEDED = 1
    FAILED = 2
    ABORTED = 3


@dataclass(frozen=True)
class Start:
    """One episode to be run.

    Args:
        index: number of the episode, from 0.
        task: task whose instruction the policy gets at the start.
        seed: seed of the world.
    """

    index: int
    task: Task
    seed: int


def episode_starts(tasks: Sequence[Task], rounds: int, seed: int) -> Iterator[Start]:
    """All tasks with the first seed, then all with the next one.

    Args:
        tasks: tasks of a round, in their order.
        rounds: episodes of each task; 0: without an end.
        seed: seed of the first round.
    """
    rounds_to_run = range(rounds) if rounds else itertools.count()
    for number in rounds_to_run:
        for position, task in enumerate(tasks):
            yield Start(number * len(tasks) + position, task, seed + number)


def task_of(instruction: str) -> Task | None:
    """The task that an instruction asks for, however it is written; None: there is none."""
    wanted = normalise_instruction(instruction)
    return next((task for task in TASKS if normalise_instruction(task.instruction) == wanted), None)


@dataclass
class Episode:
    """The episode that is running, or the one that ran last.

    Args:
        start: how it began.
        task: task that is judged now.
        began_ns: stamp of its start; nothing older than this can be an answer to one of its images.
        steps_per_action: number of control steps in the time of an action.
    """

    start: Start
    task: Task
    began_ns: int
    steps_per_action: int
    state: EpisodeState = EpisodeState.RUNNING
    detail: str = ""
    steps: int = 0  # control steps since the start
    judged_from: int = 0  # control step at which the judged task was given
    actions: int = 0
    ignored: int = 0  # actions that were not taken
    holds: int = 0  # lockstep: images without an answer that could be taken

    @property
    def running(self) -> bool:
        """Whether it may still succeed."""
        return self.state is EpisodeState.RUNNING

    @property
    def out_of_time(self) -> bool:
        """Whether the judged task has had its number of steps."""
        return self.steps - self.judged_from >= self.task.max_steps * self.steps_per_action

    def summary(self, control_dt: float) -> str:
        """How it went, for the log; `control_dt` in seconds."""
        return (
            f"episode {self.start.index}, {self.task.name}, seed {self.start.seed}: {self.state.name.lower()} after "
            f"{self.steps * control_dt:.2f} s, {self.actions} actions taken, {self.ignored} ignored, {self.holds} holds"
            + (f" ({self.detail})" if self.detail else "")
        )

    def judge(self, task: Task) -> None:
        """Another task is judged from now on, with all of its time."""
        self.task = task
        self.judged_from = self.steps


@dataclass
class Tally:
    """Episodes that are over; those that are to start again are not."""

    finished: int = 0
    succeeded: int = 0

    def add(self, state: EpisodeState) -> None:
        """Counts an episode that is over."""
        self.finished += 1
        self.succeeded += state is EpisodeState.SUCCEEDED
