# SPDX-License-Identifier: Apache-2.0
"""Tasks over topics: policy, driver, guard and simulated arm as processes, in real time on this machine, by mode.

python -m benchmarks.robot.live_driving --episodes 3

Runs `specvla demo` in each mode on the same starts: as `make demo` does, with the simulator's own follower, and with
`--robot` and `--interface pose`. Not emulated: the policy answers as fast as this machine allows while the simulation
runs too, so the machine should be otherwise idle.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import Episodes, Out, Seed, Work, finish, of_weights, result_head
from benchmarks.results_page import RESULTS
from benchmarks.robot.driving import SIMULATOR
from specvla_ros.lab.bundled.policies import nano_policy

_LONGEST_S = 1800.0
_MODES = ("ar", "spec", "auto")


def main(
    context: typer.Context,
    episodes: Episodes = 3,
    seed: Seed = 0,
    robots: Annotated[
        str, typer.Option(help="Comma-separated: simulator (without driver and guard), table, panda, ur5e.")
    ] = "simulator,table,panda",
    work: Work = Path("live-driving-benchmark"),
    out: Out = RESULTS / "live_driving.json",
) -> None:
    """Runs the missing episodes."""
    rows = []
    for robot, mode in product(robots.split(","), _MODES):
        into = work / f"{robot}-{mode}"
        if not (into / "summary.json").exists():
            print(f"{robot}, {mode}", file=sys.stderr, flush=True)
            _demo(robot, mode, into, episodes, seed)
        rows.append({"robot": robot, "mode": mode} | _figures(into))
    head = result_head(context) | of_weights(nano_policy())
    finish(head | {"first_seed": seed, "episodes_per_task": episodes, "rows": rows}, out)


def _demo(robot: str, mode: str, into: Path, episodes: int, seed: int) -> None:
    options = [] if robot == SIMULATOR else ["--robot", robot, "--interface", "pose"]
    options += ["--episodes", str(episodes), "--seed", str(seed), "--out", str(into), "-p", f"decode.mode:={mode}"]
    subprocess.run([sys.executable, "-m", "specvla_ros.cli", "demo", *options], check=False, timeout=_LONGEST_S)


def _figures(into: Path) -> dict[str, Any]:
    summary = json.loads((into / "summary.json").read_text(encoding="utf-8"))
    kept = ("success", "latency_s", "action_rate_hz")
    return {name: summary[name] for name in kept} | {"refused": summary["context"].get("refused", {})}


if __name__ == "__main__":
    typer.run(main)
