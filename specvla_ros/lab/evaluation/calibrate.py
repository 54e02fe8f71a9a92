# SPDX-License-Identifier: Apache-2.0
"""`specvla calibrate`: the tolerance and tree for a robot, from evidence."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import Sensors
from specvla_ros.lab.evaluation.calibration import (
    Calibration,
    Candidate,
    Trial,
    best_by_tolerance,
    deviation,
    write_calibration_report,
)
from specvla_ros.lab.evaluation.compare import FrameRun, time_settings
from specvla_ros.lab.evaluation.frame_sources import SIMULATION, bags_or_simulation, frame_source
from specvla_ros.lab.evaluation.provenance import head
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory
from specvla_ros.lab.evaluation.simulate import SimulateSettings, pace_of, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.plans import CalibratePlan
from specvla_ros.lab.simulation.rollout import EpisodeResult, read_stage_times
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.settings.parameter import values_of
from specvla_ros.settings.profiles import write_parameters
from specvla_ros.speculation.rules.registry import bins_of
from specvla_ros.speculation.settings import AcceptanceSettings, Tolerance

CALIBRATION_FILE, PROFILE_FILE = "calibration.json", "profile.yaml"
_PLAIN = "ar"
_TRIED = ("decode.mode", "draft.", "acceptance.")  # parameters that a trial sets


def write_profile(path: Path, calibration: Calibration) -> None:
    """Writes the file that `params_file:=` and --params-file take; the evidence is in its first lines."""
    chosen = calibration.chosen
    comments = [
        "Chosen by specvla calibrate; the evidence is in calibration.json beside this file.",
        f"{chosen.trial.name}: {chosen.speed_up:.2f} times as fast as plain decoding, "
        f"{chosen.forwards_per_action:.2f} forwards per action",
        f"deviation p95: {chosen.deviation.p95_mm:.2g} mm, {chosen.deviation.p95_deg:.2g} deg, gripper "
        f"{chosen.deviation.gripper_share:.2%}",
        f"success against plain decoding: {chosen.success or 'not tried'}",
    ]
    emulated = calibration.context.get("emulate")
    if emulated:
        comments.append(f"times are those of an emulated {emulated['name']}: none ran")
    # Tolerances found for rounded weights hold for these alone.
    quantization = calibration.context.get("policy", {}).get("quantization", "none")
    model = {"model.quantization": quantization} if quantization != "none" else {}
    values = {name: value for name, value in values_of(chosen.trial.engine).items() if name.startswith(_TRIED)}
    write_parameters(path, model | values, comments)


OnProgress = Callable[[str, int, int], None]  # the stage, how much of it is done, and how much there is


def collect_frames(
    policy: Target,
    base: SimulateSettings,
    data: Sequence[str] | None,
    plan: CalibratePlan,
    frames: int,
    sensors: Sensors,
) -> list[Observation]:
    """At most `frames` frames: of bags and directories of bags, or for `sim` and None of what the policy simulates."""
    bags = bags_or_simulation(data or [SIMULATION])
    tasks = plan.episodes.tasks if plan.episodes else ()
    source = frame_source(policy, bags, 0, sensors, world=base.world, tasks=tasks, engine=base.engine)
    return list(islice(source, frames))


def calibrate(
    policy: Target,
    base: SimulateSettings,
    frames: Sequence[Observation],
    plan: CalibratePlan,
    out: Path,
    on_progress: OnProgress = lambda stage, done, wanted: None,
) -> Calibration:
    """Chooses the largest tolerance that keeps the limits and is faster than exact decoding, and its fastest tree.

    First every tolerance is tried with every tree on the same frames: deviation from plain decoding, and seconds per
    action. For each tolerance the fastest tree that keeps the limits is a candidate. Then the candidates act in
    simulation, the largest tolerance first, until one keeps the limit on success, paired with plain decoding start by
    start. Where none does, the fastest exact setting is chosen: strict speculation, or plain decoding.

    Called again with the same `out` it simulates only the episodes that are missing.

    Args:
        base: the simulation, with the engine's settings that are not tried.
        frames: images with instructions, of one episode after the other.
        out: the directory for calibration.json, profile.yaml and report.html.
    """
    directory = RunDirectory(out, "calibrate")
    directory.check()
    spec = replace(base.engine, mode="spec")
    plain = Trial(_PLAIN, None, replace(base.engine, mode="ar", acceptance=AcceptanceSettings()))
    relaxed, refused = _relaxed_trials(policy, spec, plan)
    groups = [_trials(spec, plan.nodes, None), *relaxed]
    candidates = _try_on_frames(policy, plain, groups, frames, plan, on_progress)
    exact = [candidate for candidate in candidates if candidate.trial.tolerance is None]
    chosen = fastest_exact = max(exact, key=lambda candidate: candidate.speed_up)
    results = {candidate.trial.name: candidate.judged(plan.limits, fastest_exact) for candidate in candidates}
    best = best_by_tolerance(results.values())
    for tolerance in sorted(filter(None, best), reverse=True):
        candidate = best[tolerance]
        if not candidate.refusals and plan.episodes is not None:
            candidate = _try_in_simulation(candidate, plain, base, plan, directory.path, on_progress)
            results[candidate.trial.name] = candidate
        if not candidate.refusals:
            chosen = candidate
            break
    calibration = Calibration(
        candidates=tuple(results.values()),
        chosen=chosen,
        limits=plan.limits,
        refused=refused,
        context=_context(policy, base, plan, len(frames)),
    )
    directory.begin()
    with directory.reporting_errors():
        directory.write_json(CALIBRATION_FILE, calibration.as_json())
        write_profile(directory.path / PROFILE_FILE, calibration)
        write_calibration_report(directory.path / REPORT_FILE, calibration)
    return calibration


def _relaxed_trials(
    policy: Target, spec: EngineSettings, plan: CalibratePlan
) -> tuple[list[list[Trial]], dict[str, str]]:
    """The trials of each tolerance, and the tolerances that do not fit the checkpoint, with the reason."""
    trials: list[list[Trial]] = []
    refused: dict[str, str] = {}
    for tolerance in plan.tolerances:
        if tolerance == Tolerance():
            continue  # strict acceptance is tried in any case
        try:
            bins_of(tolerance.acceptance, policy)
        except UserError as error:
            refused[str(tolerance)] = str(error)
        else:
            trials.append(_trials(spec, plan.nodes, tolerance))
    if refused and not trials:
        raise UserError("no tolerance fits this checkpoint: " + "; ".join(refused.values()))
    return trials, refused


def _trials(spec: EngineSettings, nodes: Sequence[int], tolerance: Tolerance | None) -> list[Trial]:
    """One trial per tree size; with a tolerance one more, as children may be chosen by the mass within it."""
    acceptance = tolerance.acceptance if tolerance else AcceptanceSettings()
    return [
        Trial(
            f"{tolerance or 'strict'}, {size} nodes{suffix}",
            tolerance,
            replace(spec, draft=replace(spec.draft, nodes=size, children=children), acceptance=acceptance),
        )
        for size in nodes
        for children, suffix in (("top_k", ""), ("window_mass", ", window mass"))
        if tolerance or children == "top_k"
    ]


def _try_on_frames(
    policy: Target,
    plain: Trial,
    groups: Sequence[Sequence[Trial]],
    frames: Sequence[Observation],
    plan: CalibratePlan,
    on_progress: OnProgress,
) -> list[Candidate]:
    """Plain decoding, then each group beside it, one group after the other: every engine holds memory of its own."""
    progress = count(1)
    candidates: list[Candidate] = []
    pace = pace_of(plan.emulate)
    for group in groups:
        runs = time_settings(
            policy,
            {trial.name: trial.engine for trial in (plain, *group)},
            frames,
            rounds=1,
            pace=pace,
            on_frame=lambda: on_progress("frames", next(progress), len(groups) * len(frames)),
        )
        tried = group if candidates else (plain, *group)
        candidates += [_measured(trial, runs[trial.name], runs[_PLAIN]) for trial in tried]
    return candidates


def _measured(trial: Trial, run: FrameRun, plain: FrameRun) -> Candidate:
    return Candidate(
        trial=trial,
        action_s=run.action_s,
        speed_up=plain.action_s / run.action_s,
        tau=run.tally.tau,
        forwards_per_action=run.tally.forwards_per_action,
        deviation=deviation(plain.values, run.values),
    )


def _try_in_simulation(
    candidate: Candidate,
    plain: Trial,
    base: SimulateSettings,
    plan: CalibratePlan,
    out: Path,
    on_progress: OnProgress,
) -> Candidate:
    assert plan.episodes is not None
    episodes = []
    for trial in (plain, candidate.trial):

        def report(_: EpisodeResult, done: int, wanted: int, name: str = trial.name) -> None:
            on_progress(name, done, wanted)

        folder = out / trial.name.replace(", ", "_").replace(" ", "-")
        simulate(replace(base, engine=trial.engine), plan.episodes, folder, report)
        episodes.append(read_episodes(folder))
    return candidate.with_success(compare_episodes(*episodes), plan.limits)


def _context(policy: Target, base: SimulateSettings, plan: CalibratePlan, frames: int) -> dict[str, Any]:
    return {
        "policy": policy.describe(),
        "world": base.world,
        "frames": frames,
        "episodes": asdict(plan.episodes) if plan.episodes is not None else None,
        "emulate": read_stage_times(plan.emulate).as_json() if plan.emulate else None,
        **head(),
    }
