# SPDX-License-Identifier: Apache-2.0
"""Effect of continuing the motion (decode.commit) in closed loop, on paired starts.

python -m benchmarks.robot.commit --episodes 10

The digits policy with its own decoding settings, at the stage times of emulated devices. The driver's control follows
all actions of its answers. A jump is the difference between the first own action of a new answer that is not past when
it arrives, and the action that the answer before had for that time, or rest if it had none.
"""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import (
    Episodes,
    Out,
    Seed,
    chosen_names,
    finish,
    mean_ratio,
    of_devices,
    of_weights,
    result_head,
)
from benchmarks.results_page import RESULTS
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.planning.device import known_devices
from specvla_ros.lab.simulation.driven_robot import DrivenRobot
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target

POLICY = "digits"


class Recorded(DrivenRobot):
    """A driven arm that records what it is given of each answer: first the start, at last all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[np.ndarray] = []

    def take(self, values: np.ndarray, age_s: float = 0.0) -> None:
        self.received.append(values)
        super().take(values, age_s)


@dataclass
class Run:
    """The episodes of one setting."""

    episodes: dict[tuple[str, int], EpisodeResult] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)  # actions of each answer
    jumps: list[np.ndarray] = field(default_factory=list)  # float64 [6] each


def main(
    context: typer.Context,
    episodes: Episodes = 10,
    seed: Seed = 7000,
    devices: Annotated[str, typer.Option(help="Emulated devices, comma-separated.")] = "orin,thor",
    out: Out = RESULTS / "commit.json",
) -> None:
    """Runs all episodes with and without decode.commit on every device."""
    directory, decoding = find_policy(Path(POLICY))
    own, names = engine_settings_from(params_file=decoding), chosen_names("--devices", devices, known_devices())
    policy, rows = load_target(directory, device="cpu"), []
    for device in names:
        without = Run()
        for commit in ("none", "executed"):
            run = _run(policy, replace(own, commit=commit), device, range(seed, seed + episodes))
            without = without if without.episodes else run
            rows.append({"device": device, "commit": commit} | _figures(run, without))
            print(rows[-1], file=sys.stderr, flush=True)
    head = result_head(context) | of_weights(directory) | of_devices(names) | {"policy": POLICY}
    finish(head | {"mode": own.mode, "first_seed": seed, "episodes_per_task": episodes, "rows": rows}, out)


def _run(policy: Target, settings: EngineSettings, device: str, seeds: Sequence[int]) -> Run:
    engine, robot, run = Engine(policy, settings), Recorded(), Run()
    engine.warm_up()
    first: list[tuple[Action, int]] = []  # first publication of each answer, and how much was received before it

    def note(action: Action) -> None:
        first.append((action, len(robot.received) - 1))

    rollout = Rollout(engine, robot, Clock.REALTIME, tick_time(device), on_act=note, chunks=True)
    for seed in seeds:
        for task in TASKS:
            episode = run.episodes[task.name, seed] = rollout.run(task.name, seed)
            run.given += [action.given for action, _ in first]
            for (before, _), (action, received), late_s in zip(first, first[1:], episode.latency_s[1:], strict=False):
                run.jumps.append(_jump(before, robot.received[received - 1], action, late_s))
            first.clear()
            robot.received.clear()
    return run


def _jump(before: Action, plan: np.ndarray, action: Action, late_s: float) -> np.ndarray:
    """See the module; `plan`: all actions of the answer before, `late_s`: age of the image when it is acted on."""
    first = max(action.given, min(math.floor(late_s / ACTION_DT_S + 1e-6), len(action.actions) - 1))
    apart_s = (action.observation.stamp_ns - before.observation.stamp_ns) * 1e-9
    there = first + round(apart_s / ACTION_DT_S)
    planned = plan[there] if there < len(plan) else np.zeros(len(action.names))
    return np.asarray(action.actions[first] - planned)[:6]


def _figures(run: Run, without: Run) -> dict[str, Any]:
    found = [*run.episodes.values()]
    both = [(without.episodes[key].picture_age_s, each.picture_age_s) for key, each in run.episodes.items()]
    ages = [(before, now) for before, now in both if before and now]
    mm = np.linalg.norm([jump[:3] for jump in run.jumps], axis=1) * 1e3
    deg = np.linalg.norm([jump[3:] for jump in run.jumps], axis=1) * 180 / math.pi
    return {
        "picture_age_s": statistics.fmean(now for _, now in ages),
        "age_ratio": mean_ratio([now / before for before, now in ages]),
        "starts": len(ages),
        "success": compare_episodes(without.episodes, run.episodes).as_json(),
        "latency_s": statistics.fmean(latency for each in found for latency in each.latency_s),
        "actions_per_s": sum(each.steps for each in found) / sum(each.time_s for each in found),
        "given": statistics.fmean(run.given),
        "jump": {"seams": len(mm)}
        | {f"mm_{name}": float(np.quantile(mm, share)) for name, share in (("median", 0.5), ("p95", 0.95))}
        | {"deg_p95": float(np.quantile(deg, 0.95))},
        "drops": dict(sum((Counter(each.drops) for each in found), Counter())),
    }


if __name__ == "__main__":
    typer.run(main)
