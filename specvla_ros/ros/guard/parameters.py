# SPDX-License-Identifier: Apache-2.0
"""The parameters of the guard."""

from dataclasses import dataclass

from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.settings.parameter import parameter, section


@dataclass(frozen=True)
class GuardParameters:
    """Every parameter of the guard; none changes while it runs."""

    guard: GuardSettings = section(GuardSettings)
    realtime_priority: int = parameter(
        10,
        "Priority of the guard's threads under SCHED_FIFO, where the system allows it; 0: ordinary.",
        minimum=0,
        maximum=99,
    )
    black_box_s: float = parameter(
        120.0, "How much of the past is written on a stop; 0: no black box.", unit="s", minimum=0.0, maximum=3600.0
    )
    black_box_dir: str = parameter("~/.ros/black_box", "Where stops are written, one MCAP file each.")
    black_box_files: int = parameter(20, "How many files are kept there; the oldest go.", minimum=1, maximum=10_000)
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics.", unit="s", minimum=0.05, maximum=60.0)
