# SPDX-License-Identifier: Apache-2.0
"""Effect of acting on an answer's first action while the rest is decoded, and of decoding no more than needed.

The same starts with whole answers, with first actions, and with first actions whose answers end early (decode.tail).

python -m benchmarks.robot.first_actions --episodes 10 --workers 2

The digits policy, eight actions in digits, in closed loop at the stage times of emulated devices. The robot follows the
first action of each answer from its publication on. An episode has its task's nominal time.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from benchmarks.harness import (
    Episodes,
    Out,
    Seed,
    Work,
    Workers,
    finish,
    mean_ratio,
    of_devices,
    of_weights,
    result_head,
    show_progress,
)
from benchmarks.results_page import RESULTS
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.simulation.rollout import Clock

DEVICES = ("rtx5090", "orin")
POLICY = "digits"


def main(
    context: typer.Context,
    episodes: Episodes = 10,
    seed: Seed = 0,
    workers: Workers = 2,
    work: Work = Path("first-actions-benchmark"),
    out: Out = RESULTS / "first_actions.json",
) -> None:
    """Runs the missing episodes on every device."""
    directory, decoding = find_policy(Path(POLICY))
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    early = engine_settings_from(params_file=decoding)
    rows = []
    for device in DEVICES:
        base = SimulateSettings(directory, clock=Clock.REALTIME, emulate=device, engine=early)
        runs = {}
        for name, engine in (
            ("whole", replace(early, partial_actions=False)),
            ("first", replace(early, tail="whole")),
            ("needed", replace(early, tail="needed")),
        ):
            progress = partial(show_progress, f"{device}, {name}")
            runs[name] = simulate(replace(base, engine=engine), plan, work / device / name, progress)
        whole = read_episodes(work / device / "whole")
        for name, run in runs.items():
            found = read_episodes(work / device / name)
            pairs = [(whole[key].picture_age_s, found[key].picture_age_s) for key in whole]
            ages = [(one, other) for one, other in pairs if one and other]
            rows.append(
                {
                    "device": device,
                    "answers": name,
                    "picture_age_s": run.picture_age_s,
                    "latency_s": run.latency_s,
                    "action_rate_hz": run.action_rate_hz,
                    "drops": run.drops,
                    "starts": len(ages),
                    "age_ratio": mean_ratio([other / one for one, other in ages]),
                    "success": compare_episodes(whole, found).as_json(),
                }
            )
    head = result_head(context) | of_weights(directory) | of_devices(DEVICES) | {"policy": POLICY}
    finish(head | {"mode": early.mode, "first_seed": seed, "episodes_per_task": episodes, "rows": rows}, out)


if __name__ == "__main__":
    typer.run(main)
