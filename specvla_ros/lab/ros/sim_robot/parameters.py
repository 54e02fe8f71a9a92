# SPDX-License-Identifier: Apache-2.0
"""The parameters of the simulated robot's node."""

from dataclasses import dataclass

from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.arms import ARMS, TABLE_ARM
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.robot import IMAGE_SIZE
from specvla_ros.lab.simulation.rollout import Clock
from specvla_ros.lab.simulation.tasks import Task, choose_tasks
from specvla_ros.settings.parameter import parameter

ALL_TASKS = ("all",)
ACTIONS = "action"


@dataclass(frozen=True)
class SimRobotParameters:
    """Every parameter of the simulated robot."""

    robot: str = parameter(
        TABLE_ARM.name,
        "The arm at the table; panda and ur5e need the models in requirements/robots.txt.",
        choices=tuple(arm.name for arm in ARMS),
    )
    command: str = parameter(
        ACTIONS,
        "What moves the arm: actions, as the policy publishes them; or motion commands on ~/command/…, as arms take "
        "them that are sold.",
        choices=(ACTIONS, *COMMANDS),
    )
    record: str = parameter("", "File for what the arm really did, one row per control step; empty: none.")
    tasks: tuple[str, ...] = parameter(ALL_TASKS, "Names of the tasks, in their order in each round; [all]: every one.")
    episodes: int = parameter(3, "Episodes of each task; 0: without an end.", minimum=0, maximum=1_000_000)
    seed: int = parameter(0, "Of the first round's starts; each round's is one higher.", minimum=0, maximum=2**31 - 1)
    clock: str = parameter(
        Clock.REALTIME.value,
        "How the world's time passes while the policy decides: not at all (lockstep), or as it does (realtime).",
        choices=tuple(clock.value for clock in Clock),
    )
    real_time_factor: float = parameter(
        1.0, "Speed of the world against the wall clock, in realtime.", minimum=0.1, maximum=10.0
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
        "Lockstep: wall time after which an image counts as unanswered; the robot then holds still for one control "
        "step and a new image is sent.",
        unit="s",
        minimum=0.05,
        maximum=3600.0,
    )
    policy_lost_after_s: float = parameter(
        30.0,
        "Wall time without an action that was taken, after which the episode is aborted; it starts again when "
        "actions come.",
        unit="s",
        minimum=0.1,
        maximum=3600.0,
    )
    pause_between_s: float = parameter(
        0.5, "Wall time between two episodes, so that a watcher sees the end.", unit="s", minimum=0.0, maximum=10.0
    )
    wait_for_policy_s: float = parameter(
        0.0,
        "How long to wait before the first episode until a policy listens to the images, wall time; 0: for ever.",
        unit="s",
        minimum=0.0,
        maximum=86_400.0,
    )
    exit_when_done: bool = parameter(True, "End after the last episode; otherwise the world stands still.")

    def __post_init__(self) -> None:
        if self.commanded and self.lockstep:
            raise UserError(f"clock: lockstep waits for actions, and command is {self.command}; set clock to realtime")

    @property
    def commanded(self) -> bool:
        """Whether motion commands move the arm, and not actions."""
        return self.command != ACTIONS

    @property
    def lockstep(self) -> bool:
        """Whether the world waits for the policy."""
        return self.clock == Clock.LOCKSTEP.value

    def chosen_tasks(self) -> tuple[Task, ...]:
        """The tasks by their names.

        Raises:
            UserError: a name that is no task's.
        """
        return choose_tasks([] if self.tasks == ALL_TASKS else list(self.tasks))
