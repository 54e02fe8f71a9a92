# SPDX-License-Identifier: Apache-2.0
"""Success of the SO-101's policy at the SO-101's tasks, by its joints, through the driver's control and the guard.

python -m benchmarks.robot.small_arm --episodes 20 --seed 7000

In lockstep, as in `specvla simulate --robot so101 --follow guarded`. The latency is that of an answer.
"""

from functools import partial
from pathlib import Path

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, finish, result_head, show_progress
from benchmarks.results_page import RESULTS, weights_digest
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, simulate
from specvla_ros.lab.simulation.driven_robot import Follow

_ROBOT = "so101"


def main(
    context: typer.Context,
    episodes: Episodes = 20,
    seed: Seed = 7000,
    work: Work = Path("small-arm-benchmark"),
    out: Out = RESULTS / "small_arm.json",
) -> None:
    """Runs the missing episodes."""
    policy, decoding = find_policy(None, _ROBOT)
    digest, engine = weights_digest(policy), engine_settings_from(params_file=decoding)
    settings = SimulateSettings(policy, robot=_ROBOT, follow=Follow.GUARDED.value, engine=engine)
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0)
    summary = simulate(settings, plan, work / digest[:8], partial(show_progress, _ROBOT))
    result = {
        "policy_weights": digest,
        "success": summary.success.as_json(),
        "latency_s": summary.latency_s,
        "tasks": {
            name: {"success": task.success.as_json(), "time_to_success_s": task.time_to_success_s}
            for name, task in summary.tasks.items()
        },
    }
    finish(result_head(context) | {"first_seed": seed, "episodes_per_task": episodes} | result, out)


if __name__ == "__main__":
    typer.run(main)
