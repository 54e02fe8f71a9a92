# SPDX-License-Identifier: Apache-2.0
"""When each mode looks and when it answers: the engine with the nano policy at a device's stage times, emulated.

The engine's own scheduler decides which pictures it takes and when answers are out: plain decoding answers late and
seldom, several frames in flight often and overlapping. The fault suite plays these times back, with an expert's values.
"""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.robot.driving import modes
from specvla_ros.engine.engine import Engine
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.planning.stage_times import read_stage_times
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.rollout import Clock, Rollout, tick_time
from specvla_ros.models.checkpoint import load_target


@dataclass(frozen=True)
class Timing:
    """The times of one mode's actions, in their order, which begin again when they are over.

    Args:
        mode: its name.
        pictured_s: when the picture of each was taken.
        published_s: when each was out.
        lasts_s: after which they begin again.
    """

    mode: str
    pictured_s: tuple[float, ...]
    published_s: tuple[float, ...]
    lasts_s: float

    def as_json(self) -> dict[str, float]:
        """What a reader wants to know of it."""
        pictured_s, published_s = np.array(self.pictured_s), np.array(self.published_s)
        latency_s = published_s - pictured_s
        return {
            "actions": len(self.pictured_s),
            "action_rate_hz": len(self.pictured_s) / self.lasts_s,
            "latency_p50_s": float(np.median(latency_s)),
            "latency_max_s": float(latency_s.max()),
            "in_flight": max(int(((pictured_s <= moment) & (moment < published_s)).sum()) for moment in pictured_s),
        }


class _Watched(TableRobot):
    """Notes the picture of each action that it is given."""

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        self.passed_s = 0.0
        self.pictured_s: list[float] = []

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        super().take(values, age_s)
        self.pictured_s.append(self.passed_s - age_s)

    def advance(self) -> None:
        super().advance()
        self.passed_s += self.control_dt


def record_timings(device: str, names: list[str]) -> dict[str, Timing]:
    """One episode of each mode at the stage times of a device."""
    policy, robot = load_target(nano_policy()), _Watched()
    chosen = modes() | {"auto": replace(modes()["spec"], mode="auto")}
    found = {}
    for name in names:
        rollout = Rollout(Engine(policy, chosen[name]), robot, Clock.REALTIME, tick_time(read_stage_times(device)))
        result = rollout.run("put_red", 0)
        pictured_s = np.maximum(0.0, np.array(robot.pictured_s).round(6))
        published_s = pictured_s + result.latency_s
        found[name] = Timing(name, tuple(pictured_s.tolist()), tuple(published_s.tolist()), float(robot.passed_s))
    robot.close()
    return found
