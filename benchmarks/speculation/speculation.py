# SPDX-License-Identifier: Apache-2.0
"""The gain of speculation for the nano policy: plain, strict and relaxed decoding on the same starts.

python -m benchmarks.speculation.speculation --episodes 60 --workers 2

Success is paired by episode; the time per action is measured on the same frames, with the settings taking turns.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, Workers, finish, of_weights, result_head, show_progress
from benchmarks.results_page import RESULTS
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.compare import Setting, SweepRow, sweep
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings
from specvla_ros.models.checkpoint import load_target
from specvla_ros.speculation.rules.registry import bins_of
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings, Tolerance, adjusted

# The first is about the nano policy's own deviation from the expert; `specvla calibrate` chooses the second with its
# default limits.
TOLERANCES = (Tolerance(2.0, 1.1), Tolerance(5.0, 3.0))


def settings() -> list[Setting]:
    """Returns the compared settings; the first is the reference."""
    tree, near, far = DraftSettings(), *(tolerance.acceptance for tolerance in TOLERANCES)
    small = replace(tree, nodes=16)
    alone = adjusted(small, head=NO_HEAD, temporal=True)
    both = adjusted(tree, temporal=True)
    window, small_window = (replace(draft, children="window_mass") for draft in (tree, small))
    chosen = [
        ("strict, temporal alone", alone, AcceptanceSettings()),
        ("strict, 50 nodes", tree, AcceptanceSettings()),
        ("strict, 50 nodes, temporal", both, AcceptanceSettings()),
        ("strict, 16 nodes, temporal", adjusted(small, temporal=True), AcceptanceSettings()),
        ("2 mm, 50 nodes", tree, near),
        ("2 mm, 8 nodes, window mass", replace(small_window, nodes=8), near),
        ("2 mm, 16 nodes, window mass", small_window, near),
        ("2 mm, 50 nodes, window mass", window, near),
        ("2 mm, 16 nodes, window mass, temporal", adjusted(small_window, temporal=True), near),
        ("2 mm, 50 nodes, window mass, temporal", adjusted(window, temporal=True), near),
        ("5 mm, 32 nodes, window mass, temporal", adjusted(window, nodes=32, temporal=True), far),
    ]
    settings = [Setting(name, EngineSettings("spec", draft=draft, acceptance=rule)) for name, draft, rule in chosen]
    return [Setting("ar", EngineSettings("ar")), *settings]


def main(
    context: typer.Context,
    episodes: Episodes = 60,
    seed: Seed = 0,
    workers: Workers = 2,
    work: Work = Path("speculation-benchmark"),
    out: Out = RESULTS / "speculation_nano.json",
) -> None:
    """Runs the missing episodes with every setting."""
    policy = nano_policy()
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    rows = sweep(SimulateSettings(policy), settings(), plan, work, show_progress)
    loaded = load_target(policy, device="cpu")
    found = {
        "policy": policy.name,
        "first_seed": seed,
        "episodes_per_task": episodes,
        "tolerances": [
            {"mm": bound.mm, "degrees": bound.degrees, "bins": bins_of(bound.acceptance, loaded)}
            for bound in TOLERANCES
        ],
        "rows": [_row(row) for row in rows],
    }
    finish(result_head(context) | of_weights(policy) | found, out)


def _row(row: SweepRow) -> dict[str, Any]:
    tasks = {name: task.success.as_json() for name, task in row.summary.tasks.items()}
    return row.as_json() | {"tasks": tasks, "action_rate_hz": row.summary.action_rate_hz}


if __name__ == "__main__":
    typer.run(main)
