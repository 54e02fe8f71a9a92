# SPDX-License-Identifier: Apache-2.0
"""Task success with the driver, the simulator's own follower and a plain follower, on paired starts.

python -m benchmarks.robot.driving --episodes 16 --workers 2

The simulator's own follower moves the arm's goal immediately. The driver commands an arm that behaves like real
interfaces do; so does the plain follower, which sends values over dt from the tool's commanded pose. Runs in simulation
time at the stage times of emulated devices.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import (
    Episodes,
    Out,
    Seed,
    Work,
    Workers,
    finish,
    of_devices,
    of_weights,
    result_head,
    show_progress,
)
from benchmarks.results_page import RESULTS
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.rollout import Clock
from specvla_ros.speculation.settings import DraftSettings, adjusted

SIMULATOR = "simulator"


def modes() -> dict[str, EngineSettings]:
    """Returns the compared modes, strict."""
    tree = adjusted(DraftSettings(nodes=16, depth=5), temporal=True)
    return {
        "ar": EngineSettings("ar"),
        "spec": EngineSettings("spec", draft=tree),
        "pipeline": EngineSettings("pipeline", prefill_chunks=2),
        "specpipe": EngineSettings("specpipe", prefill_chunks=2, draft=tree),
    }


def followers(commands: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, follower and command of each row."""
    yield SIMULATOR, "", "pose"
    yield "plain, pose", "plain", "pose"
    for command in commands.split(","):
        yield f"driver, {command}", "driver", command


def main(
    context: typer.Context,
    episodes: Episodes = 16,
    seed: Seed = 0,
    workers: Workers = 2,
    devices: Annotated[str, typer.Option(help="Emulated devices, comma-separated.")] = "orin,rtx5090",
    commands: Annotated[str, typer.Option(help="The driver's commands, comma-separated.")] = ",".join(COMMANDS),
    robots: Annotated[str, typer.Option(help="Arms, comma-separated: table, panda, ur5e.")] = "table,panda",
    time_limit: Annotated[float, typer.Option(help="Time limit as a multiple of the task's nominal time.")] = 1.0,
    work: Work = Path("driving-benchmark"),
    out: Out = RESULTS / "driving_nano.json",
) -> None:
    """Runs the missing episodes."""
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    rows = []
    for robot, device, (mode, engine) in product(robots.split(","), devices.split(","), modes().items()):
        before = None
        for name, follow, command in followers(commands):
            settings = SimulateSettings(
                nano_policy(),
                robot=robot,
                follow=follow,
                interface=command,
                clock=Clock.REALTIME,
                emulate=device,
                engine=engine,
                time_limit=time_limit,
            )
            into = work / "-".join((robot, device, mode, name.replace(", ", "-")))
            summary = simulate(settings, plan, into, partial(show_progress, f"{robot}, {device}, {mode}, {name}"))
            done = read_episodes(into, plan)
            before = before or done
            rows.append(
                {
                    "robot": robot,
                    "device": device,
                    "name": read_device(device, "--devices").name,
                    "mode": mode,
                    "follower": name,
                    "success": summary.success.as_json(),
                    "latency_s": summary.latency_s,
                    "action_rate_hz": summary.action_rate_hz,
                    "drops": summary.drops,
                    "against": compare_episodes(before, done).as_json(),
                }
            )
    found = {"time_limit": time_limit, "first_seed": seed, "episodes_per_task": episodes, "rows": rows}
    finish(result_head(context) | of_weights(nano_policy()) | of_devices(devices.split(",")) | found, out)


if __name__ == "__main__":
    typer.run(main)
