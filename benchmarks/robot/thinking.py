# SPDX-License-Identifier: Apache-2.0
"""Effect of thinking less often than acting (decode.think_every_s) in closed loop, on paired starts.

python -m benchmarks.robot.thinking --episodes 10
python -m benchmarks.robot.thinking --episodes 10 --mode ar --every 0,10 --out benchmarks/results/thinking_ar.json

The reasoning policy at the stage times of an emulated Orin, with its own decoding settings (mode spec), then plainly. A
jump is the difference between successive actions of an episode; at a seam the later action follows another thought.
"""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import Episodes, Out, Seed, finish, mean_ratio, of_devices, of_weights, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.simulate import make_robot
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, Rollout, tick_time
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target

POLICY, DEVICE = "reasoning", "orin"


@dataclass
class Run:
    """The episodes of one setting, and the actions that the robot took in each."""

    episodes: dict[tuple[str, int], EpisodeResult] = field(default_factory=dict)
    actions: list[list[Action]] = field(default_factory=list)


def main(
    context: typer.Context,
    episodes: Episodes = 10,
    seed: Seed = 7000,
    mode: Annotated[str, typer.Option(help="Decoding mode; empty: the policy's own.")] = "",
    every: Annotated[str, typer.Option(help="Values of decode.think_every_s, comma-separated.")] = "0,1,4",
    out: Out = RESULTS / "thinking.json",
) -> None:
    """Runs all episodes with every setting."""
    directory, decoding = find_policy(Path(POLICY))
    own = engine_settings_from(mode=mode, params_file=decoding)
    policy, rows = load_target(directory, device="cpu"), []
    without = Run()
    for seconds in map(float, every.split(",")):
        run = _run(policy, replace(own, think_every_s=seconds), range(seed, seed + episodes))
        without = without if without.episodes else run
        rows.append({"think_every_s": seconds} | _figures(run, without))
        print(rows[-1], file=sys.stderr, flush=True)
    head = result_head(context) | of_weights(directory) | of_devices((DEVICE,)) | {"policy": POLICY}
    finish(head | {"mode": own.mode, "first_seed": seed, "episodes_per_task": episodes, "rows": rows}, out)


def _run(policy: Target, settings: EngineSettings, seeds: Sequence[int]) -> Run:
    engine, run = Engine(policy, settings), Run()
    engine.warm_up()

    def take(action: Action) -> None:
        run.actions[-1].append(action)

    rollout = Rollout(engine, make_robot("table"), Clock.REALTIME, tick_time(DEVICE), on_act=take)
    for seed in seeds:
        for task in TASKS:
            run.actions.append([])
            run.episodes[task.name, seed] = rollout.run(task.name, seed)
    return run


def _figures(run: Run, without: Run) -> dict[str, Any]:
    found = [*run.episodes.values()]
    ages = [each.picture_age_s for each in found if each.picture_age_s]
    both = [(without.episodes[key].picture_age_s, each.picture_age_s) for key, each in run.episodes.items()]
    pairs = [pair for episode in run.actions for pair in pairwise(episode)]
    seams = [pair for pair in pairs if pair[0].text_ns != pair[1].text_ns]
    within = [pair for pair in pairs if pair[0].text_ns == pair[1].text_ns]
    actions = [action for episode in run.actions for action in episode]
    given = [action for action in actions if action.text_ns != action.observation.stamp_ns]
    return {
        "picture_age_s": statistics.fmean(ages),
        "age_ratio": mean_ratio([now / before for before, now in both if before and now]),
        "success": compare_episodes(without.episodes, run.episodes).as_json(),
        "latency_s": statistics.fmean(latency for each in found for latency in each.latency_s),
        "given_share": len(given) / len(actions),
        "thought_age_s": statistics.fmean((each.observation.stamp_ns - each.text_ns) * 1e-9 for each in actions),
        "forwards_given": _forwards(given),
        "forwards_own": _forwards([action for action in actions if action.text_ns == action.observation.stamp_ns]),
        "jump_at_seams": _jumps(seams),
        "jump_within": _jumps(within),
        "drops": dict(sum((Counter(each.drops) for each in found), Counter())),
    }


def _forwards(actions: Sequence[Action]) -> float | None:
    return statistics.fmean(action.record.forwards for action in actions) if actions else None


def _jumps(pairs: Sequence[tuple[Action, Action]]) -> dict[str, float] | None:
    """Number of pairs, and median and 95th percentile of their differences in millimetres and degrees."""
    if not pairs:
        return None
    steps = np.array([later.values[:6] - earlier.values[:6] for earlier, later in pairs])
    mm = np.linalg.norm(steps[:, :3], axis=1) * 1e3
    deg = np.linalg.norm(steps[:, 3:], axis=1) * 180 / math.pi
    figures = {"mm_median": np.median(mm), "mm_p95": np.quantile(mm, 0.95)}
    figures |= {"deg_median": np.median(deg), "deg_p95": np.quantile(deg, 0.95)}
    return {"pairs": len(pairs)} | {name: float(value) for name, value in figures.items()}


if __name__ == "__main__":
    typer.run(main)
