# SPDX-License-Identifier: Apache-2.0
"""`specvla qualify`: on which device, and with which setting, a policy still works as it does when the world waits.

Real-time episodes of a candidate are paired with lockstep episodes of plain decoding: the same task, the same start.
The task of each pair is drawn anew, so that pairs are alike whatever came before, and their evidence may be looked at
after each of them (see `e_process`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.evaluation.provenance import checkpoint_hashes, head
from specvla_ros.lab.evaluation.qualification import Judgement, Pair, Verdict, write_qualify_report
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory, write_line
from specvla_ros.lab.evaluation.simulate import (
    EPISODES_FILE,
    EpisodeJob,
    SimulateSettings,
    episode_of,
    job_name,
    run_job,
    tasks_of,
)
from specvla_ros.lab.jobs.run import run_jobs
from specvla_ros.lab.plans import Criterion, QualifyPlan
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult, read_stage_times

QUALIFY_FILE = "qualify.json"
REFERENCE = "lockstep"
_OF = "candidate"  # of a line in EPISODES_FILE


def device_candidates(base: SimulateSettings, devices: Sequence[str]) -> dict[str, SimulateSettings]:
    """The same policy and setting on one device after the other; without any, at this machine's own times."""
    realtime = replace(base, clock=Clock.REALTIME)
    return {device or "this machine": replace(realtime, emulate=device) for device in devices or [""]}


def tolerance_candidates(base: SimulateSettings, device: str, bins: Sequence[int]) -> dict[str, SimulateSettings]:
    """The same policy with one tolerance after the other (`acceptance.rule` bin_distance), on one device."""

    def relaxed(engine: EngineSettings, r: int) -> EngineSettings:
        return replace(engine, acceptance=replace(engine.acceptance, rule="bin_distance", bins=(r,)))

    realtime = replace(base, clock=Clock.REALTIME, emulate=device)
    return {f"r{r}": replace(realtime, engine=relaxed(base.engine, r)) for r in bins}


def qualify(
    candidates: dict[str, SimulateSettings],
    plan: QualifyPlan,
    criterion: Criterion,
    out: Path,
    on_pairs: Callable[[Judgement], None] = lambda judgement: None,
    on_episode: Callable[[str, int, int], None] = lambda name, done, wanted: None,
) -> list[Judgement]:
    """Judges candidates one after the other, until one does not qualify; writes a page, qualify.json and all episodes.

    They are tried from the safest to the boldest, each with the whole alpha: where one fails, those behind it are not
    tried, and so no wrong verdict of theirs can add to its own (fixed-sequence testing, Maurer, Hothorn and Lehmacher
    1995). Called again with the same settings, it goes on.

    Args:
        candidates: real-time simulations by name, the safest first; they share policy, world and robot.
        on_pairs: called at each look at the evidence.
        on_episode: called with the name, the number of episodes and of those wanted until the next look.
    """
    base = next(iter(candidates.values()))
    for settings in candidates.values():
        if settings.emulate:
            read_stage_times(settings.emulate)
    lockstep = replace(base, clock=Clock.LOCKSTEP, emulate="", engine=replace(base.engine, mode="ar"))
    simulated = {REFERENCE: lockstep, **candidates}
    deciding = {
        "candidates": {name: each.as_json() for name, each in simulated.items()},
        "criterion": asdict(criterion),
        "tasks": tasks_of(base.world, plan.tasks),
        "first_seed": plan.first_seed,
    }
    directory = RunDirectory(out, "qualify")
    directory.begin(deciding | checkpoint_hashes(base.policy, base.engine))
    done: dict[tuple[str, str, int], EpisodeResult] = {
        (name, each.task, each.seed): each for name, each in directory.resume_lines(EPISODES_FILE, _named_episode)
    }
    context = {**deciding, "plan": asdict(plan), **checkpoint_hashes(base.policy, base.engine), **head()}
    drawn = list(_drawn(plan, base.world))
    judgements = {name: Judgement(name, (), criterion) for name in candidates}

    def run(name: str, starts: Sequence[tuple[str, int]]) -> None:
        missing = [start for start in starts if (name, *start) not in done]
        jobs = [EpisodeJob(simulated[name], *start) for start in missing]
        with directory.append_to(EPISODES_FILE) as lines:
            gpu = base.model.device != "cpu"
            for _, result in run_jobs(run_job, jobs, workers=plan.workers, ray=plan.ray, gpu=gpu, name=job_name):
                write_line(lines, {_OF: name, **asdict(result)})
                done[name, result.task, result.seed] = result
                on_episode(name, sum((name, *start) in done for start in starts), len(starts))

    with directory.reporting_errors("; the episodes so far are kept, and the same command goes on"):
        try:
            for name in candidates:
                starts = iter(drawn)
                while batch := list(islice(starts, plan.batch)):
                    for each in (REFERENCE, name):
                        run(each, batch)
                    pairs = tuple(_pair(done, name, *start) for start in batch)
                    judgements[name] = replace(judgements[name], pairs=judgements[name].pairs + pairs)
                    on_pairs(judgements[name])
                    if judgements[name].verdict is not Verdict.UNDECIDED:
                        break
                if judgements[name].verdict is not Verdict.QUALIFIED:
                    break
        finally:
            found = list(judgements.values())
            directory.write_json(QUALIFY_FILE, {"results": [each.as_json() for each in found], **context})
            write_qualify_report(out / REPORT_FILE, found, context)
    return found


def _named_episode(raw: dict[str, Any]) -> tuple[str, EpisodeResult]:
    return raw[_OF], episode_of({key: value for key, value in raw.items() if key != _OF})


def _pair(done: dict[tuple[str, str, int], EpisodeResult], name: str, task: str, seed: int) -> Pair:
    return Pair(task, seed, done[REFERENCE, task, seed].succeeded, done[name, task, seed].succeeded)


def _drawn(plan: QualifyPlan, world: str) -> Iterator[tuple[str, int]]:
    """Task and seed of one pair after the other: the task at random."""
    tasks = tasks_of(world, plan.tasks)
    generator = np.random.default_rng(plan.first_seed)
    for number in range(plan.pairs):
        yield tasks[generator.integers(len(tasks))], plan.first_seed + number
