"""What latency costs: the same policy, starts and seeds, with the world waiting and with it moving on.

python benchmarks/simulation.py --episodes 100 --workers 2

The devices are emulated: each stage of the engine counts for the time in its table (specvla_ros/planning/devices).
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from episode_benchmark import parser, result_head, write_result

from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.evaluation.simulate_summary import compare_episodes
from specvla_ros.policies.bundled import nano_policy
from specvla_ros.simulation.device_pace import read_stage_times
from specvla_ros.simulation.rollout import Clock

DEVICES = ("h200", "rtx5090", "orin")
LOCKSTEP = "lockstep"


def main() -> None:
    """Runs what is missing, and writes the JSON file."""
    options = _options()
    policy = options.policy or nano_policy()
    plan = SimulatePlan(episodes=options.episodes, first_seed=options.seed, films=0, workers=options.workers)
    lockstep = SimulateSettings(policy)
    settings = {LOCKSTEP: lockstep} | {
        device: replace(lockstep, clock=Clock.REALTIME, emulate=device) for device in DEVICES
    }
    results: dict[str, Any] = {}
    for name, chosen in settings.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        summary = simulate(chosen, plan, options.work / name)
        print(f"{name}: {summary.success}", file=sys.stderr, flush=True)
        results[name] = summary.as_json() | {"emulation": summary.context["emulation"]}
        del results[name]["context"]
        comparison = compare_episodes(read_episodes(options.work / LOCKSTEP), read_episodes(options.work / name))
        results[name]["against_lockstep"] = comparison.as_json()
    result = result_head("simulation", options) | {
        "policy": policy.name,
        "first_seed": options.seed,
        "episodes_per_task": options.episodes,
        "devices": {device: vars(read_stage_times(device)) for device in DEVICES},
        "results": results,
    }
    write_result(result, options)


def _options() -> argparse.Namespace:
    options = parser(__doc__, work="simulation-benchmark", out="simulation_nano.json", episodes=100)
    options.add_argument("--policy", type=Path, help="checkpoint directory; default: the nano policy of the package")
    return options.parse_args()


if __name__ == "__main__":
    main()
