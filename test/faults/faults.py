# SPDX-License-Identifier: Apache-2.0
"""Faults at random moments of a task on simulated arms: what moved, for how long, how far, and what came back.

    PYTHONPATH=test python -m faults.faults --runs 720 --without-guard 200 --workers 2

Each fault in each mode by each output, in virtual time, judged by what the simulated arm really did (judge.py).
A run goes on where it was. The nodes as processes over DDS, in real time: stack.py.
"""

import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from faults.judge import describe
from faults.kinds import FAULTS, NONE
from faults.runs import Job, run_fault
from faults.timing import Timing, record_timings
from support.benchmark_runs import read_rows

from benchmarks.harness import Out, Seed, Work, Workers, chosen_names, finish, of_devices, result_head
from benchmarks.results_page import RESULTS
from specvla_ros.control.guard.settings import JOINT_OUTPUTS
from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.plans import Spread
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.ros.driver.parameters import DriverParameters

MODES = ("ar", "spec", "specpipe", "auto")
_TIMINGS, _RUNS = "timings.json", "runs.jsonl"
_SAY_EVERY = 20
_SERVO_HEARS_NOTHING = ("lose guard/command", "kill guard", "freeze guard")

Rows = list[dict[str, Any]]


def plan(
    runs: int, without_guard: int, seed: int, *, names: dict[str, list[str]], speeds: list[float], limited: bool = False
) -> Iterator[Job]:
    """The runs: each fault in each mode by each output, in a random order, again and again; robots and speeds in turn.

    Args:
        runs: how many, with the guard.
        without_guard: how many of them once more without it, the same in all else.
        seed: of the order; each run has its own.
        names: what is chosen of `faults`, `modes`, `outputs` and `robots`.
        speeds: limits of the tool, m/s.
        limited: whether the arms keep these limits by themselves.
    """
    kinds = [
        kind
        for kind in itertools.product(names["faults"], names["modes"], names["outputs"])
        if not FAULTS[kind[0]].of_joints or kind[2] in JOINT_OUTPUTS
    ]
    rounds = (random.Random(f"{seed} {number}").sample(kinds, len(kinds)) for number in itertools.count())
    chosen = itertools.islice(itertools.chain.from_iterable(rounds), runs)
    arms = itertools.cycle(itertools.product(names["robots"], speeds))
    left = without_guard
    for number, ((fault, mode, output), (robot, speed)) in enumerate(zip(chosen, arms, strict=False)):
        job = Job(fault, mode, output, robot, speed, seed + number, guarded=True, limited=limited)
        yield job
        if left and not FAULTS[fault].needs_guard:
            left -= 1
            yield replace(job, guarded=False)


def main(
    context: typer.Context,
    runs: Annotated[int, typer.Option(help="In virtual time, with the guard.", min=0)] = 1000,
    without_guard: Annotated[int, typer.Option(help="Of these, once more without the guard.", min=0)] = 200,
    seed: Seed = 0,
    workers: Workers = 2,
    robots: Annotated[str, typer.Option(help="Comma-separated.")] = "table,panda",
    outputs: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(COMMANDS),
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODES),
    faults: Annotated[str, typer.Option(help="Comma-separated; empty: all.")] = "",
    speeds: Annotated[str, typer.Option(help="Limits of the tool's speed, m/s, comma-separated.")] = "0.25,0.1",
    limiter: Annotated[bool, typer.Option(help="The arms keep the guard's limits by themselves.")] = True,
    device: Annotated[str, typer.Option(help="Whose stage times the modes have, emulated.")] = "orin",
    work: Work = Path("faults-benchmark"),
    out: Out = RESULTS / "faults_sim.json",
) -> None:
    """Runs what is missing."""
    chosen = {
        "faults": chosen_names("--faults", faults, FAULTS),
        "modes": chosen_names("--modes", modes, MODES),
        "outputs": chosen_names("--outputs", outputs, COMMANDS),
        "robots": robots.split(","),
    }
    work.mkdir(parents=True, exist_ok=True)
    timings = _timings(work / _TIMINGS, device, chosen["modes"])
    numbers = [float(speed) for speed in speeds.split(",")]
    jobs = list(plan(runs, without_guard, seed, names=chosen, speeds=numbers, limited=limiter))
    found = _run_missing(jobs, timings, work / _RUNS, workers)
    how = {mode: timing.as_json() for mode, timing in timings.items()}
    head = (
        result_head(context)
        | of_devices([device])
        | {"judge": describe(), "device": device, "modes": how, "limiter": limiter}
    )
    finish(head | summary(found) | {"found": found}, out)


def _timings(path: Path, device: str, modes: list[str]) -> dict[str, Timing]:
    """Recorded once: a run that goes on goes on with the same."""
    if not path.exists():
        recorded = record_timings(device, list(MODES))
        path.write_text(json.dumps({mode: vars(timing) for mode, timing in recorded.items()}), encoding="utf-8")
    raw = json.loads(path.read_text(encoding="utf-8"))
    found = {
        mode: Timing(mode, tuple(raw[mode]["pictured_s"]), tuple(raw[mode]["published_s"]), raw[mode]["lasts_s"])
        for mode in modes
    }
    _require_young_actions(device, found)
    return found


def _require_young_actions(device: str, timings: Mapping[str, Timing]) -> None:
    """Raises UserError for a mode whose actions are mostly older than the driver takes: its arms would stand."""
    most_s = DriverParameters().max_action_age_s
    old = [mode for mode, timing in timings.items() if timing.as_json()["latency_p50_s"] > most_s]
    if old:
        raise UserError(f"on {device}, {', '.join(old)} answers after more than {most_s:g} s: the driver refuses that")


def _run(job: tuple[Job, Timing]) -> dict[str, Any]:
    return run_fault(*job, paired=True)


def _run_missing(jobs: list[Job], timings: dict[str, Timing], path: Path, workers: int) -> Rows:
    done = {_key(row): row for row in read_rows(path)}
    missing = [(job, timings[job.mode]) for job in jobs if job.key not in done]
    with path.open("a", encoding="utf-8") as lines:
        for (job, _), row in run_jobs(_run, missing, Spread(workers=workers)):
            done[job.key] = row
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if len(done) % _SAY_EVERY == 0:
                print(f"{len(done)} of {len(jobs)}", file=sys.stderr, flush=True)
    return [done[job.key] for job in jobs]


def _key(row: dict[str, Any]) -> str:
    return Job(**{name: row[name] for name in Job.__annotations__}).key


# What the page shows


def summary(found: Rows) -> dict[str, Any]:
    """The counts: per fault, per mode and output, and stops per robot, output and speed."""
    guarded = [row for row in found if row["guarded"]]
    bare = [row for row in found if not row["guarded"]]
    return {
        "runs": len(guarded),
        "runs_without_guard": len(bare),
        "beyond": sum(bool(row["beyond"]) for row in guarded),
        "caused": sum(map(_is_caused, guarded)),
        "in_contact": sum(row["in_contact"] for row in guarded),
        "own_halts": sum(map(_is_own_halt, guarded)),
        "late": sum(row["late"] for row in guarded),
        "promised": sum(row["promised"] for row in guarded),
        "recovered": sum(row["recovered_s"] is not None for row in guarded),
        "faults": [
            {"fault": fault, **_counts(_of(guarded, fault=fault)), "bare": _counts(_paired(guarded, bare, fault))}
            for fault in FAULTS
            if _of(guarded, fault=fault)
        ],
        "modes_and_outputs": [
            {"mode": mode, "output": output, **_counts(_of(guarded, mode=mode, output=output))}
            for mode, output in sorted({(row["mode"], row["output"]) for row in guarded})
        ],
        "stops": [
            {"robot": robot, "output": output, "speed": speed, **_stops(rows)}
            for robot, output, speed in sorted({(row["robot"], row["output"], row["speed"]) for row in guarded})
            if (rows := _of(guarded, robot=robot, output=output, speed=speed))
        ],
        "without_fault": _extremes(_of(guarded, fault=NONE.name)),
        "with_faults": _extremes([row for row in guarded if row["fault"] != NONE.name]),
        "without_guard_extremes": _extremes(bare),
    }


def _is_own_halt(row: dict[str, Any]) -> bool:
    """The arm halts by itself: MoveIt Servo hears nothing and brakes hard, or a joint cannot do what poses ask for."""
    silent = row["output"] == "twist" and row["fault"] in _SERVO_HEARS_NOTHING
    return (silent and row["beyond"] == ["acceleration"]) or (row["halted"] and bool(row["beyond"]))


def _is_caused(row: dict[str, Any]) -> bool:
    """An arm's own halt is named apart."""
    return bool(row["caused"]) and not _is_own_halt(row)


def _of(rows: Rows, **values: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _paired(guarded: Rows, bare: Rows, fault: str) -> Rows:
    """Runs without a guard of starts that also ran with it."""
    seeds = {row["seed"] for row in guarded}
    return [row for row in _of(bare, fault=fault) if row["seed"] in seeds]


def _counts(rows: Rows) -> dict[str, Any]:
    return {
        "runs": len(rows),
        "beyond": sum(bool(row["beyond"]) for row in rows),
        "caused": sum(map(_is_caused, rows)),
        "in_contact": sum(row["in_contact"] for row in rows),
        "promised": sum(row["promised"] for row in rows),
        "late": sum(row["late"] for row in rows),
        "recovered": sum(row["recovered_s"] is not None for row in rows),
        "cleared": sum(row["cleared"] for row in rows),
        **_extremes(rows),
        **_stops(rows),
    }


def _stops(rows: Rows) -> dict[str, Any]:
    stops = [row["stop"] for row in rows if row["stop"] is not None]
    found: dict[str, Any] = {"stopped": len(stops)}
    for name in ("time_s", "distance_m", "speed_m_s"):
        values = [stop[name] for stop in stops]
        found[f"{name}_median"] = statistics.median(values) if values else None
        found[f"{name}_max"] = max(values, default=None)
    return found


def _extremes(rows: Rows) -> dict[str, float]:
    names = ("speed_share", "acceleration_share", "outside_m", "tool_share")
    return {name: max((row[name] for row in rows), default=0.0) for name in names}


if __name__ == "__main__":
    typer.run(main)
