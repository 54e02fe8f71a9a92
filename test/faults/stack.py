# SPDX-License-Identifier: Apache-2.0
"""Faults of the running stack: every node a process over DDS, two arms, four outputs, a fault in each round.

    PYTHONPATH=test python -m faults.stack --rounds 200 --workers 2

Each fault by each output of each robot in turn, in real time, judged by what the simulated arm really did (judge.py).
A stack that runs takes several rounds, one after the other. A run goes on where it was; a round that never moved is
done again.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from faults.judge import describe
from faults.processes import SPEED, RealJob, real_rounds
from faults.real_kinds import REAL_FAULTS
from support.benchmark_runs import read_rows

from benchmarks.harness import Out, Seed, Work, chosen_names, finish, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.control.guard.settings import Output
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.plans import Spread
from specvla_ros.lab.simulation.arms import ARMS
from specvla_ros.lab.simulation.commanded_arm import COMMANDS

_ROUNDS = "rounds.jsonl"
_PER_STACK = 8  # rounds

Rows = list[dict[str, Any]]


def plan(rounds: int, seed: int, faults: list[str], outputs: list[str], robots: list[str]) -> list[RealJob]:
    """Each fault once in a random order, and again by the next output of the next robot, until there are enough."""
    order, ways = Random(seed).sample(faults, len(faults)), list(itertools.product(robots, outputs))
    jobs = []
    for number in range(rounds):
        lap, index = divmod(number, len(order))
        fault = order[index]
        fits = [way for way in ways if not REAL_FAULTS[fault].of_joints or Output(way[1]).of_joints]
        if fits:
            robot, output = fits[(lap + index) % len(fits)]
            jobs.append(RealJob(fault, output, robot, seed + number))
    return jobs


def stacks(jobs: Sequence[RealJob]) -> list[tuple[RealJob, ...]]:
    """The rounds that one start of all nodes takes: of one robot, output and clock, who kills last."""
    alike: dict[tuple[str, str, bool, bool], list[RealJob]] = {}
    for job in jobs:
        fault = REAL_FAULTS[job.fault]
        alike.setdefault((job.robot, job.output, fault.on_clock, fault.fills_disk), []).append(job)
    return [stack for each in alike.values() for stack in _split(each)]


def _split(jobs: list[RealJob]) -> Iterable[tuple[RealJob, ...]]:
    last = [job for job in jobs if REAL_FAULTS[job.fault].stays]
    others = [job for job in jobs if job not in last]
    count = max(len(last), -(-len(others) // _PER_STACK))
    return ((*others[index::count], *last[index : index + 1]) for index in range(count))


def main(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(help="How many.", min=0)] = 200,
    seed: Seed = 0,
    workers: Annotated[int, typer.Option(help="Stacks at a time.", min=1)] = 1,
    robot: Annotated[str, typer.Option(help="Comma-separated.")] = "panda,ur5e",
    output: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(COMMANDS),
    fault: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    work: Work = Path("stack-benchmark"),
    out: Out = RESULTS / "stack.json",
) -> None:
    """Does what is missing."""
    robots = chosen_names("--robot", robot, [arm.name for arm in ARMS])
    outputs, faults = chosen_names("--output", output, COMMANDS), chosen_names("--fault", fault, REAL_FAULTS)
    jobs = plan(rounds, seed, faults, outputs, robots)
    work.mkdir(parents=True, exist_ok=True)
    found = _do_missing(jobs, work / _ROUNDS, workers)
    head = result_head(context) | {"judge": describe(), "speed_m_s": SPEED, "workers": workers}
    finish(head | summary(found) | {"found": found}, out)


def _do_missing(jobs: list[RealJob], path: Path, workers: int) -> Rows:
    done = {_key(row): row for row in read_rows(path)}
    missing = [job for job in jobs if "problem" in done.get(job.key, {"problem": "not done"})]
    with path.open("a", encoding="utf-8") as lines:
        for stack, rows in run_jobs(real_rounds, stacks(missing), Spread(workers=workers), lost=_lost):
            for job, row in zip(stack, rows, strict=True):
                done[job.key] = row
                lines.write(json.dumps(row) + "\n")
                print(f"{len(done)} of {len(jobs)}: {_in_words(row)}", file=sys.stderr, flush=True)
            lines.flush()
    return [done[job.key] for job in jobs]


def _lost(stack: Sequence[RealJob], why: str) -> Rows:
    return [asdict(job) | {"problem": why} for job in stack]


def _key(row: dict[str, Any]) -> str:
    return RealJob(row["fault"], row["output"], row["robot"], row["seed"]).key


def _in_words(row: dict[str, Any]) -> str:
    what = f"{row['fault']}, {row['robot']}, {row['output']}, seed {row['seed']}: "
    if "problem" in row:
        return what + row["problem"]
    late = {True: "late", False: "in time"}[row["late"]] if row["promised"] else "no promise"
    goes_on = f"goes on after {row['recovered_s']:.1f} s" if row["recovered_s"] is not None else "does not go on"
    beyond, latched = row["beyond"] or "nothing", row["self_latched"] or "no"
    return f"{what}{beyond} beyond, {late}, {latched} self-latch, {goes_on}; load {row['load']:.1f}"


# What the page shows


def summary(found: Rows) -> dict[str, Any]:
    """The counts: of all rounds that ran, per fault, and per robot and output."""
    ran = [row for row in found if "problem" not in row]
    ways = sorted({(row["robot"], row["output"]) for row in ran})
    loads = [row["load"] for row in ran]
    return {
        "rounds": len(found),
        **_counts(ran),
        "load_median": statistics.median(loads) if loads else None,
        "load_max": max(loads, default=None),
        "faults": [
            {"fault": fault, **_counts(rows)}
            for fault in REAL_FAULTS
            if (rows := [row for row in ran if row["fault"] == fault])
        ],
        "ways": [{"robot": robot, "output": output, **_counts(_of(ran, robot, output))} for robot, output in ways],
        "not_run": [_in_words(row) for row in found if "problem" in row],
    }


def _of(rows: Rows, robot: str, output: str) -> Rows:
    return [row for row in rows if row["robot"] == robot and row["output"] == output]


def _counts(rows: Rows) -> dict[str, Any]:
    stops = [row["stop"] for row in rows if row["stop"] is not None]
    times_s, ways_m = [stop["time_s"] for stop in stops], [stop["distance_m"] for stop in stops]
    stays = [row for row in rows if row["stays"]]
    return {
        "ran": len(rows),
        "beyond": sum(bool(row["beyond"]) for row in rows),
        "in_contact": sum(row["in_contact"] for row in rows),
        "own_halts": sum(row["own_halt"] for row in rows),
        "arm_stops": sum(row["arm_stops"] for row in rows),
        "promised": sum(row["promised"] for row in rows),
        "late": sum(row["late"] for row in rows),
        "self_latched": sum(bool(row["self_latched"]) for row in rows),
        "latched_in_contact": sum(bool(row["latched_in_contact"]) for row in rows),
        "goes_on": sum(row["recovered_s"] is not None for row in rows if not row["stays"]),
        "could_go_on": len(rows) - len(stays),
        "cleared": sum(row["cleared"] for row in rows),
        "stop_median_s": statistics.median(times_s) if times_s else None,
        "stop_max_s": max(times_s, default=None),
        "way_max_m": max(ways_m, default=None),
        "speed_share": max((row["speed_share"] for row in rows), default=None),
        "acceleration_share": max((row["acceleration_share"] for row in rows), default=None),
    }


if __name__ == "__main__":
    typer.run(main)
