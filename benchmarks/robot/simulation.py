# SPDX-License-Identifier: Apache-2.0
"""The cost of latency: the same policy and starts, with the world waiting and with it moving on.

python -m benchmarks.robot.simulation --episodes 100 --workers 2

The devices are emulated: each stage of the engine takes the time in its table (specvla_ros/lab/planning/devices).
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, Workers, finish, of_devices, of_weights, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.simulation.rollout import Clock

DEVICES = ("h200", "rtx5090", "orin")
LOCKSTEP = "lockstep"


def main(
    context: typer.Context,
    episodes: Episodes = 100,
    seed: Seed = 0,
    workers: Workers = 2,
    policy: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the nano policy.")] = None,
    work: Work = Path("simulation-benchmark"),
    out: Out = RESULTS / "simulation_nano.json",
) -> None:
    """Runs the missing episodes on every device."""
    policy = policy or nano_policy()
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    lockstep = SimulateSettings(policy, engine=EngineSettings("ar"))
    settings = {LOCKSTEP: lockstep} | {
        device: replace(lockstep, clock=Clock.REALTIME, emulate=device) for device in DEVICES
    }
    results: dict[str, Any] = {}
    for name, chosen in settings.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        summary = simulate(chosen, plan, work / name)
        print(f"{name}: {summary.success}", file=sys.stderr, flush=True)
        results[name] = summary.as_json() | {"emulation": summary.context["emulation"]}
        del results[name]["context"]
        comparison = compare_episodes(read_episodes(work / LOCKSTEP), read_episodes(work / name))
        results[name]["against_lockstep"] = comparison.as_json()
    result = (
        result_head(context)
        | of_weights(policy)
        | of_devices(DEVICES)
        | {"policy": policy.name, "first_seed": seed, "episodes_per_task": episodes, "results": results}
    )
    finish(result, out)


if __name__ == "__main__":
    typer.run(main)
