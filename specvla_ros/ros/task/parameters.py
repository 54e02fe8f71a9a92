# SPDX-License-Identifier: Apache-2.0
"""The parameters of the task node."""

from dataclasses import dataclass
from enum import Enum

from specvla_ros.settings.parameter import parameter


class Judge(str, Enum):
    """Who says that a task is done."""

    NONE = "none"  # nobody: the time limit is the end
    TOPIC = "topic"  # a message on ~/succeeded
    SIM_EPISODE = "sim_episode"  # the simulated robot


@dataclass(frozen=True)
class TaskParameters:
    """Every parameter of the task node."""

    judge: str = parameter(
        Judge.NONE.value,
        "Who says that a task is done: nobody (the time limit is its end), a std_msgs/Bool on ~/succeeded, or the "
        "simulated robot.",
        choices=tuple(judge.value for judge in Judge),
    )
    time_limit_s: float = parameter(
        60.0, "Time limit of a goal that gives none, on the node's clock.", unit="s", minimum=0.1, maximum=86_400.0
    )
    max_silence_s: float = parameter(
        10.0,
        "Wall time without an action after which a task has failed; 0: never.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
    )
