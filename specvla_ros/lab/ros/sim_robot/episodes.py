# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's parameters and the state of its episodes, independent of ROS."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.arms import ALL_ARMS, choose_arm
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.robot import IMAGE_SIZE
from specvla_ros.lab.simulation.rollout import Clock
from specvla_ros.lab.simulation.tasks import TASKS, Task, choose_tasks
from specvla_ros.models.observation import normalise_instruction
from specvla_ros.settings.parameter import parameter

ALL_TASKS = ("all",)
ACTIONS = "action"


@dataclass(frozen=True)
class SimRobotParameters:
    """Every parameter of the simulated robot."""

    robot: str = parameter(
        TABLE_ARM.name,
        "The arm at the table; others than table need requirements/robots.txt. so101 and aloha have their own tasks.",
        choices=tuple(arm.name for arm in ALL_ARMS),
    )
    command: str = parameter(
        ACTIONS,
        "Input that moves the arm: the policy's actions, or motion commands on ~/command/…, in the formats that "
        "commercial arms accept.",
        choices=(ACTIONS, *COMMANDS),
    )
    record: str = parameter("", "File that records the arm's true motion, one row per control step; empty: none.")
    tasks: tuple[str, ...] = parameter(ALL_TASKS, "Names of the tasks, in the order of each round; [all]: all tasks.")
    episodes: int = parameter(3, "Episodes of each task; 0: no limit.", minimum=0, maximum=1_000_000)
    seed: int = parameter(0, "Seed of the first round; incremented each round.", minimum=0, maximum=2**31 - 1)
    clock: str = parameter(
        Clock.REALTIME.value,
        "World time while the policy decides: it stands still (lockstep) or keeps running (realtime).",
        choices=tuple(clock.value for clock in Clock),
    )
    real_time_factor: float = parameter(
        1.0, "Speed of the world relative to the wall clock, in realtime.", minimum=0.1, maximum=10.0
    )
    camera_rate_hz: float = parameter(
        20.0,
        "Images per simulated second, in realtime; rounded to whole control steps.",
        unit="Hz",
        minimum=0.5,
        maximum=20.0,
    )
    image_size: int = parameter(IMAGE_SIZE, "Height and width of the images.", unit="pixels", minimum=16, maximum=640)
    action_timeout_s: float = parameter(
        5.0,
        "Lockstep: wall time after which an image counts as unanswered. The robot then holds still for one control "
        "step and sends a new image.",
        unit="s",
        minimum=0.05,
        maximum=3600.0,
    )
    policy_lost_after_s: float = parameter(
        30.0,
        "Wall time without a taken action or command after which the episode is aborted; it restarts when they "
        "arrive again.",
        unit="s",
        minimum=0.1,
        maximum=3600.0,
    )
    pause_between_s: float = parameter(
        0.5, "Wall time between two episodes, so that viewers see the end.", unit="s", minimum=0.0, maximum=10.0
    )
    wait_for_policy_s: float = parameter(
        0.0,
        "Maximum wall time to wait for a policy before the first episode; 0: no limit.",
        unit="s",
        minimum=0.0,
        maximum=86_400.0,
    )
    exit_when_done: bool = parameter(True, "Exit after the last episode; otherwise the world stands still.")

    def __post_init__(self) -> None:
        if self.commanded and self.lockstep:
            raise UserError(f"clock: lockstep waits for actions, but command is {self.command}; set clock to realtime")

    @property
    def commanded(self) -> bool:
        """True if motion commands, not actions, move the arm."""
        return self.command != ACTIONS

    @property
    def lockstep(self) -> bool:
        return self.clock == Clock.LOCKSTEP.value

    def chosen_tasks(self) -> tuple[Task, ...]:
        """Returns the chosen tasks; raises UserError for an unknown name."""
        return choose_tasks([] if self.tasks == ALL_TASKS else self.tasks, choose_arm(self.robot).tasks)


class EpisodeState(IntEnum):
    """The states of SimEpisode.msg."""

    RUNNING = 0
    SUCCEEDED = 1
    FAILED = 2
    ABORTED = 3


@dataclass(frozen=True)
class Start:
    """One episode to be run."""

    index: int  # number of the episode, from 0
    task: Task  # gives the policy's first instruction
    seed: int  # of the start state


def episode_starts(tasks: Sequence[Task], rounds: int, seed: int) -> Iterator[Start]:
    """All tasks with the first seed, then all with the next one, and so on; 0 rounds: endless."""
    for number in range(rounds) if rounds else itertools.count():
        for position, task in enumerate(tasks):
            yield Start(number * len(tasks) + position, task, seed + number)


def task_of(instruction: str, tasks: tuple[Task, ...] = TASKS) -> Task | None:
    """The one of an arm's tasks with this instruction after normalisation, or None."""
    wanted = normalise_instruction(instruction)
    return next((task for task in tasks if normalise_instruction(task.instruction) == wanted), None)


@dataclass
class Episode:
    """The running episode, or the last one."""

    start: Start
    task: Task  # the task being judged
    began_ns: int  # stamp of its start; its images are never older
    steps_per_action: int  # control steps per action
    state: EpisodeState = EpisodeState.RUNNING
    detail: str = ""
    steps: int = 0  # control steps since the start
    judged_from: int = 0  # control step at which the judged task was given
    actions: int = 0
    ignored: int = 0  # actions not taken
    holds: int = 0  # lockstep: images without a usable answer

    @property
    def out_of_time(self) -> bool:
        """True once the judged task's steps are used up."""
        return self.steps - self.judged_from >= self.task.max_steps * self.steps_per_action

    def summary(self, control_dt: float) -> str:
        """A line for the log; `control_dt` is in seconds."""
        return (
            f"episode {self.start.index}, {self.task.name}, seed {self.start.seed}: {self.state.name.lower()} after "
            f"{self.steps * control_dt:.2f} s, {self.actions} actions taken, {self.ignored} ignored, {self.holds} holds"
            + (f" ({self.detail})" if self.detail else "")
        )

    def judge(self, task: Task) -> None:
        """Judges another task from now on, with its full time."""
        self.task, self.judged_from = task, self.steps


@dataclass
class Tally:
    """Counts of finished episodes, without those that will restart."""

    finished: int = 0
    succeeded: int = 0

    def add(self, state: EpisodeState) -> None:
        self.finished += 1
        self.succeeded += state is EpisodeState.SUCCEEDED
