# SPDX-License-Identifier: Apache-2.0
"""Smoothness and success of an arm that gets the driver's motion point by point, or ahead as a chunk, on paired starts.

python -m benchmarks.robot.chunk_output --episodes 20

The tasks' expert acts in place of a policy, at the rate and with the image age of one. The driver commands a simulated
arm by each interface, in simulation time. Accelerations are those of the arm's joints as measured every 10 ms; a jump
is the change of acceleration within 20 ms of an action's arrival.
"""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import Episodes, Out, Seed, chosen_names, finish, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.lab.evaluation.paired import Rate, mcnemar_p, paired_difference
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.controllers import CONTROL_DT_S
from specvla_ros.lab.simulation.driven_robot import DrivenRobot
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.lab.simulation.world import CONTROL_HZ

_AROUND = 2  # samples before and after an action's arrival


class Recorded(DrivenRobot):
    """A driven arm whose joints are recorded every 10 ms."""

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        self.joints: list[np.ndarray] = []

    def moved(self) -> None:
        super().moved()
        self.joints.append(self.world.joint_state()[0][: len(self.state_names)])


def main(
    context: typer.Context,
    episodes: Episodes = 20,
    seed: Seed = 0,
    interfaces: Annotated[str, typer.Option(help="Comma-separated.")] = "joint_trajectory,joint_trajectory_chunk",
    rates: Annotated[str, typer.Option(help="Actions per second, comma-separated.")] = "20,5",
    age_ms: Annotated[float, typer.Option(help="Age of an action's image on arrival.", min=0)] = 100.0,
    out: Out = RESULTS / "chunk_output.json",
) -> None:
    """Runs all episodes."""
    names = chosen_names("--interfaces", interfaces, COMMANDS)
    rows: list[dict[str, Any]] = []
    for rate in map(float, rates.split(",")):
        robots = {name: Recorded(command=name) for name in names}
        found = {name: list(_episodes(robots[name], rate, age_ms * 1e-3, episodes, seed)) for name in names}
        rows += [_row(name, rate, found[name], found[names[0]]) for name in names]
    finish(result_head(context) | {"episodes_per_task": episodes, "first_seed": seed, "rows": rows}, out)


def _episodes(robot: Recorded, rate_hz: float, age_s: float, episodes: int, seed: int) -> Iterator[dict[str, Any]]:
    every = round(CONTROL_HZ / rate_hz)
    for task, number in product(TASKS, range(seed, seed + episodes)):
        robot.reset(task.name, number)
        yield _episode(robot, every, round(age_s * CONTROL_HZ))


def _episode(robot: Recorded, every: int, late: int) -> dict[str, Any]:
    """Actions of states `late` control steps old, one in `every`, until success or the time limit."""
    states, arrivals = [robot.state()], []
    steps = robot.max_steps * round(robot.action_dt / robot.control_dt)
    for step in range(steps):
        if step >= late and step % every == 0:
            arrivals.append(len(robot.joints))
            robot.take(demonstrate(robot.task, states[step - late]), late * robot.control_dt)
        robot.advance()
        states.append(robot.state())
        if robot.task.succeeded(states[-1]):
            break
    succeeded = robot.task.succeeded(states[-1])
    return {"succeeded": succeeded, "seconds": len(states) * robot.control_dt, **_smoothness(robot.joints, arrivals)}


def _smoothness(joints: list[np.ndarray], arrivals: list[int]) -> dict[str, float]:
    accelerations = np.diff(np.array(joints), n=2, axis=0) / CONTROL_DT_S**2
    jerks = np.diff(accelerations, axis=0) / CONTROL_DT_S
    jumps = [
        np.abs(accelerations[at + _AROUND] - accelerations[at - _AROUND]).max()
        for at in arrivals
        if _AROUND <= at < len(accelerations) - _AROUND
    ]
    return {
        "jerk_rms": float(np.sqrt((jerks**2).mean())),
        "acceleration_p99": float(np.quantile(np.abs(accelerations).max(axis=1), 0.99)),
        "jump_p95": float(np.quantile(jumps, 0.95)) if jumps else 0.0,
    }


def _row(name: str, rate_hz: float, found: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(before["succeeded"], after["succeeded"]) for before, after in zip(first, found, strict=True)]
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    difference, low, high = paired_difference(lost, won, len(pairs))
    ratios = {
        figure: float(np.median([after[figure] / before[figure] for before, after in zip(first, found, strict=True)]))
        for figure in ("jerk_rms", "acceleration_p99", "jump_p95")
    }
    return {
        "interface": name,
        "rate_hz": rate_hz,
        "success": Rate(sum(each["succeeded"] for each in found), len(found)).as_json(),
        "against": {"difference": difference, "low": low, "high": high, "p": mcnemar_p(lost, won)},
        "median": {figure: float(np.median([each[figure] for each in found])) for figure in (*ratios, "seconds")},
        "ratio": ratios,
    }


if __name__ == "__main__":
    typer.run(main)
