# SPDX-License-Identifier: Apache-2.0
"""Age of the image acted on, success and jumps with mode `auto`, with each further mechanism and with all of them.

python -m benchmarks.robot.mechanisms --episodes 10

Bundled policies in closed loop on paired starts, at the stage times of emulated devices. The driver's control follows
all actions of an answer. An episode has its task's nominal time.

A jump is the difference between the first own action of a new answer that is not past when it arrives, and what the
answer before has for that time: one of its actions, or rest if they are over. An answer of one action is compared with
the action before.
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

from benchmarks.harness import Episodes, Out, Seed, chosen_names, finish, mean_ratio, of_devices, result_head
from benchmarks.results_page import RESULTS, weights_digest
from benchmarks.speed.age import quantile_of_age
from specvla_ros import Action, Engine, EngineSettings
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.planning.stage_times import read_stage_times
from specvla_ros.lab.simulation.driven_robot import DrivenRobot
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, Rollout, TickTime, tick_time
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.settings import WeightFormat
from specvla_ros.models.target import Target

ALONE, ALL = "auto", "all"
_PLAIN: dict[str, Any] = {
    "mode": "auto",
    "partial_actions": False,
    "tail": "whole",
    "commit": "none",
    "think_every_s": 0.0,
}
_FIRST = {"partial_actions": True, "tail": "needed"}
_COMMIT = {"commit": "executed"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {  # by policy; those that apply to its answers
    "digits": {ALONE: {}, "first actions": _FIRST, "commit": _COMMIT, ALL: _FIRST | _COMMIT},
    "reasoning": {ALONE: {}, "think every 1 s": {"think_every_s": 1.0}, "think every 4 s": {"think_every_s": 4.0}},
}
CELLS = {
    "digits-orin": ("digits", "orin", WeightFormat.NONE),
    "digits-orin-w8a8": ("digits", "orin", WeightFormat.W8A8),
    "digits-thor": ("digits", "thor", WeightFormat.NONE),
    "digits-rtx5090": ("digits", "rtx5090", WeightFormat.NONE),
    "reasoning-orin": ("reasoning", "orin", WeightFormat.NONE),
    "reasoning-orin-w8a8": ("reasoning", "orin", WeightFormat.W8A8),
}


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
    actions: list[Action] = field(default_factory=list)  # at the first publication of each answer
    jumps: list[np.ndarray] = field(default_factory=list)  # float64 [6] each


def main(
    context: typer.Context,
    episodes: Episodes = 10,
    seed: Seed = 7000,
    cells: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CELLS)}. Empty: all.")] = "",
    out: Out = RESULTS / "mechanisms.json",
) -> None:
    """Runs all episodes with all settings."""
    rows, digests = [], {}
    for policy, device, weights in (CELLS[name] for name in chosen_names("--cells", cells, CELLS)):
        directory, decoding = find_policy(Path(policy))
        digests[policy] = weights_digest(directory)
        own = replace(engine_settings_from(params_file=decoding), **_PLAIN)
        target, alone = load_target(directory, device="cpu", quantization=weights.value), Run()
        pace = tick_time(read_stage_times(device, weights=weights))
        for name, changes in SETTINGS[policy].items():
            run = _run(target, replace(own, **changes), pace, range(seed, seed + episodes))
            alone = alone if alone.episodes else run
            row = {"policy": policy, "device": device, "weights": weights.value, "with": name}
            rows.append(row | _figures(run, alone))
            print(rows[-1], file=sys.stderr, flush=True)
    head = (
        result_head(context) | of_devices(sorted({device for _, device, _ in CELLS.values()})) | {"weights_of": digests}
    )
    finish(head | {"first_seed": seed, "episodes_per_task": episodes, "rows": rows}, out)


def _run(policy: Target, settings: EngineSettings, pace: TickTime, seeds: Sequence[int]) -> Run:
    engine, robot, run = Engine(policy, settings), Recorded(), Run()
    engine.warm_up()
    first: list[tuple[Action, int]] = []  # first publication of each answer, and how much was received before it

    def note(action: Action) -> None:
        first.append((action, len(robot.received) - 1))

    rollout = Rollout(engine, robot, Clock.REALTIME, pace, on_act=note, chunks=True)
    for seed in seeds:
        for task in TASKS:
            episode = run.episodes[task.name, seed] = rollout.run(task.name, seed)
            run.actions += [action for action, _ in first]
            for (before, _), (action, received), late_s in zip(first, first[1:], episode.latency_s[1:], strict=False):
                run.jumps.append(_jump(before, robot.received[received - 1], action, late_s))
            first.clear()
            robot.received.clear()
    robot.close()
    return run


def _jump(before: Action, plan: np.ndarray, action: Action, late_s: float) -> np.ndarray:
    """See the module; `plan`: all actions of the answer before, `late_s`: age of the image when it is acted on."""
    if len(plan) == 1:
        return np.asarray(action.values - plan[0])[:6]
    first = max(action.given, min(math.floor(late_s / ACTION_DT_S + 1e-6), len(action.actions) - 1))
    apart_s = (action.observation.stamp_ns - before.observation.stamp_ns) * 1e-9
    there = first + round(apart_s / ACTION_DT_S)
    planned = plan[there] if there < len(plan) else np.zeros(len(action.names))
    return np.asarray(action.actions[first] - planned)[:6]


def _figures(run: Run, alone: Run) -> dict[str, Any]:
    found = [*run.episodes.values()]
    both = [(alone.episodes[key].picture_age_s, each.picture_age_s) for key, each in run.episodes.items()]
    ages = [(before, now) for before, now in both if before and now]
    ends = [(*zip(each.acted_s, each.latency_s, strict=True), (each.time_s, 0.0)) for each in found if each.acted_s]
    old = [action for action in run.actions if action.text_ns != action.observation.stamp_ns]
    mm = np.linalg.norm([jump[:3] for jump in run.jumps], axis=1) * 1e3
    deg = np.linalg.norm([jump[3:] for jump in run.jumps], axis=1) * 180 / math.pi
    return {
        "picture_age_s": statistics.fmean(now for _, now in ages),
        "picture_age_p95_s": statistics.fmean(quantile_of_age(acted, 0.95) for acted in ends),
        "age_ratio": mean_ratio([now / before for before, now in ages]),
        "starts": len(ages),
        "success": compare_episodes(alone.episodes, run.episodes).as_json(),
        "latency_s": statistics.fmean(latency for each in found for latency in each.latency_s),
        "answers_per_s": sum(each.steps for each in found) / sum(each.time_s for each in found),
        "forwards_to_first": statistics.fmean(each.record.forwards for each in run.actions),
        "given_actions": statistics.fmean(each.given for each in run.actions),
        "given_texts": len(old) / len(run.actions),
        "jump": {"seams": len(mm)}
        | {f"mm_{name}": float(np.quantile(mm, share)) for name, share in (("median", 0.5), ("p95", 0.95))}
        | {"deg_p95": float(np.quantile(deg, 0.95))},
        "drops": dict(sum((Counter(each.drops) for each in found), Counter())),
    }


if __name__ == "__main__":
    typer.run(main)
