# SPDX-License-Identifier: Apache-2.0
"""Success of policies whose actions move the joints, against one whose actions move the tool, on paired starts.

python -m benchmarks.robot.joint_actions --episodes 60 --seed 7000

All act through the driver's control and the guard, in lockstep, as in `specvla simulate --follow guarded`, with their
own drafters, lossless. The tool's motion is sent as poses, that of the joints as chunks of a trajectory.
"""

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, Workers, finish, result_head, show_progress
from benchmarks.results_page import RESULTS, weights_digest
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.paired import Z_95, PairedComparison
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.simulation.driven_robot import Follow


def main(
    context: typer.Context,
    episodes: Episodes = 20,
    seed: Seed = 7000,
    workers: Workers = 1,
    policies: Annotated[str, typer.Option(help="Bundled policies, the reference first.")] = "nano,joints,joint_digits",
    work: Work = Path("joint-actions-benchmark"),
    out: Out = RESULTS / "joint_actions.json",
) -> None:
    """Runs the missing episodes."""
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    rows, before = {}, None
    for name in policies.split(","):
        policy, decoding = find_policy(Path(name))
        engine = engine_settings_from(params_file=decoding)
        settings = SimulateSettings(policy, follow=Follow.GUARDED.value, engine=engine)
        into = work / f"{name}-{weights_digest(policy)[:8]}"
        summary = simulate(settings, plan, into, partial(show_progress, name))
        done = read_episodes(into, plan)
        before = before or done
        against = compare_episodes(before, done)
        rows[name] = {
            "policy_weights": weights_digest(policy),
            "success": summary.success.as_json(),
            "tasks": {task: found.success.as_json() for task, found in summary.tasks.items()},
            "against": against.as_json(),
            "share": success_share(against),
        }
    finish(result_head(context) | {"first_seed": seed, "episodes_per_task": episodes, "policies": rows}, out)


def success_share(pairs: PairedComparison) -> dict[str, float]:
    """The second's success rate as a share of the first's, with a 95 % interval.

    The interval is that of the ratio's logarithm for matched pairs (Nam and Blackwelder 2002, Statistics in Medicine
    21:689), with half a pair added to the pairs in which only one succeeded. No success counts as half a one.
    """
    first, second = (max(rate.successes, 0.5) for rate in (pairs.first, pairs.second))
    ratio = second / first
    spread = math.exp(Z_95 * math.sqrt((pairs.only_first + pairs.only_second + 1) / (first * second)))
    return {"ratio": ratio, "low": ratio / spread, "high": ratio * spread}


if __name__ == "__main__":
    typer.run(main)
