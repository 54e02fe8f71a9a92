"""`specvla calibrate`: the tolerance and tree for a robot, from evidence."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.calibration import Calibration, Candidate, Limits, Trial, deviation
from specvla_ros.evaluation.frame_sources import (
    SIMULATION,
    Frame,
    bag_source,
    find_bags,
    require_frames,
    simulation_source,
)
from specvla_ros.evaluation.provenance import head
from specvla_ros.evaluation.report.sweep import write_calibration_report
from specvla_ros.evaluation.run_directory import REPORT_FILE, RunDirectory
from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.evaluation.simulate_summary import compare_episodes
from specvla_ros.evaluation.sweep import FrameRun, run_side_by_side
from specvla_ros.models.checkpoint import Target
from specvla_ros.settings.parameter import values_of
from specvla_ros.settings.profiles import write_parameters
from specvla_ros.simulation.device_pace import read_stage_times, tick_time
from specvla_ros.simulation.rollout import EpisodeResult
from specvla_ros.simulation.tasks import FRAME_FIRST_SEED
from specvla_ros.speculation.rules.registry import bins_of
from specvla_ros.speculation.settings import AcceptanceSettings, DraftSettings
from specvla_ros.speculation.tolerance import Tolerance


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
    # Of the mode's own settings none was tried.
    values = {name: value for name, value in values_of(chosen.trial.engine).items() if name.startswith(_TRIED)}
    write_parameters(path, model | values, comments)


_TRIED = ("decode.mode", "draft.", "acceptance.")
CALIBRATION_FILE, PROFILE_FILE = "calibration.json", "profile.yaml"
PLAIN = "ar"
_FRAMES = "frames"


@dataclass(frozen=True)
class CalibratePlan:
    """What to try.

    Args:
        tolerances: to try beside strict.
        nodes: sizes of the draft tree to try.
        limits: that the chosen setting keeps.
        episodes: in simulation, to judge by success; None: judge by deviation alone.
        emulate: device whose stage times are taken in place of those measured; empty: none.
    """

    tolerances: tuple[Tolerance, ...]
    nodes: tuple[int, ...]
    limits: Limits = field(default_factory=Limits)
    episodes: SimulatePlan | None = None
    emulate: str = ""


@dataclass(frozen=True)
class Progress:
    """What to tell the user meanwhile: a stage, and how much of it is done."""

    stage: str
    done: int
    wanted: int


def collect_frames(
    policy: Target, base: SimulateSettings, data: Sequence[str] | None, plan: CalibratePlan, frames: int
) -> list[Frame]:
    """The frames to try the settings on.

    Args:
        policy: drives, where no bags are given.
        base: which world.
        data: bags, directories of bags, or `sim`; none: `sim`.
        plan: which tasks.
        frames: at most.

    Raises:
        UserError: bags that cannot be read, or `sim` beside bags.
    """
    if not data or list(data) == [SIMULATION]:
        tasks = plan.episodes.tasks if plan.episodes else ()
        source = simulation_source(policy, FRAME_FIRST_SEED, world=base.world, tasks=tasks, engine=base.engine)
    elif SIMULATION in data:
        raise UserError("--data sim cannot be mixed with bags: choose one")
    else:
        source = bag_source(find_bags([Path(each) for each in data]), seed=0)
    return list(islice(require_frames(source), frames))


def calibrate(
    policy: Target,
    base: SimulateSettings,
    frames: Sequence[Frame],
    plan: CalibratePlan,
    out: Path,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Calibration:
    """Chooses the most relaxed setting that keeps the limits and is faster than what is exact.

    First every tolerance is tried with every tree on the same frames: deviation from plain decoding, and seconds per
    action. For each tolerance the fastest tree that keeps the limits is a candidate. Then the candidates act in
    simulation, the most relaxed first, until one keeps the limit on success, paired with plain decoding start by start.
    Where none does, the fastest exact setting is chosen: strict speculation, or plain decoding.

    Called again with the same `out` it simulates only the episodes that are missing.

    Args:
        policy: loaded.
        base: the simulation, with the engine's settings that are not tried.
        frames: images with instructions, of one episode after the other.
        plan: what to try.
        out: directory for calibration.json, profile.yaml and report.html.
        on_progress: called now and then.

    Raises:
        UserError: something given is wrong, or no tolerance fits the checkpoint.
    """
    directory = RunDirectory(out, "calibrate")
    directory.check()
    spec = replace(base.engine, mode="spec")
    plain = Trial(PLAIN, None, replace(base.engine, mode=PLAIN, acceptance=AcceptanceSettings()))
    strict = [Trial(f"strict, {_tree(each)}", None, each) for each in _trees(spec, plan.nodes, AcceptanceSettings())]
    relaxed, refused = _relaxed(policy, spec, plan)
    measured = _try_on_frames(policy, plain, [strict, *relaxed], frames, plan, on_progress)
    fastest_exact = max((each for each in measured if each.trial.tolerance is None), key=lambda each: each.speed_up)
    candidates = [
        each.judged(plan.limits, fastest_exact) if each.trial.tolerance is not None else each for each in measured
    ]
    judged: list[Candidate] = []
    chosen = fastest_exact
    for candidate in _most_relaxed_first(candidates):
        if not candidate.refusals and plan.episodes is not None:
            candidate = _try_in_simulation(candidate, base, plan, out, on_progress)
        judged.append(candidate)
        if not candidate.refusals:
            chosen = candidate
            break
    found = {each.trial.name: each for each in judged}
    calibration = Calibration(
        candidates=tuple(found.get(each.trial.name, each) for each in candidates),
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


def _relaxed(policy: Target, spec: EngineSettings, plan: CalibratePlan) -> tuple[list[list[Trial]], dict[str, str]]:
    """The trials of each tolerance, and the tolerances that do not fit the checkpoint, with the reason."""
    trials: list[list[Trial]] = []
    refused: dict[str, str] = {}
    for tolerance in plan.tolerances:
        acceptance = tolerance.acceptance
        try:
            bins_of(acceptance, policy)
        except UserError as error:
            refused[str(tolerance)] = str(error)
            continue
        trees = _trees(spec, plan.nodes, acceptance)
        trials.append([Trial(f"{tolerance}, {_tree(each)}", tolerance, each) for each in trees])
    if not trials:
        raise UserError("no tolerance fits this checkpoint: " + "; ".join(refused.values()))
    return trials, refused


def _trees(spec: EngineSettings, nodes: Sequence[int], acceptance: AcceptanceSettings) -> list[EngineSettings]:
    """Every size, and under a tolerance each way to choose children."""
    ways = ("top_k",) if acceptance.rule == "strict" else ("top_k", "window_mass")
    return [
        replace(spec, draft=replace(spec.draft, nodes=size, children=way), acceptance=acceptance)
        for size in nodes
        for way in ways
    ]


def _tree(settings: EngineSettings) -> str:
    draft: DraftSettings = settings.draft
    return f"{draft.nodes} nodes" + (", window mass" if draft.children == "window_mass" else "")


def _try_on_frames(
    policy: Target,
    plain: Trial,
    groups: Sequence[Sequence[Trial]],
    frames: Sequence[Frame],
    plan: CalibratePlan,
    on_progress: Callable[[Progress], None],
) -> list[Candidate]:
    """Each group beside plain decoding, one group after the other: every engine holds memory of its own."""
    wanted, done = len(groups) * len(frames), 0

    def one_more() -> None:
        nonlocal done
        done += 1
        on_progress(Progress(_FRAMES, done, wanted))

    candidates: list[Candidate] = []
    pace = tick_time(read_stage_times(plan.emulate) if plan.emulate else None)
    for group in groups:
        engines = {each.name: each.engine for each in (plain, *group)}
        runs = run_side_by_side(policy, engines, frames, rounds=1, pace=pace, on_frame=one_more)
        candidates += [
            _measured(trial, runs[trial.name], runs[PLAIN]) for trial in ((plain, *group) if not candidates else group)
        ]
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


def _most_relaxed_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each tolerance the fastest tree that keeps the limits; or, where none does, the fastest of all."""
    chosen = []
    for tolerance in sorted({each.trial.tolerance for each in candidates if each.trial.tolerance}, reverse=True):
        mine = [each for each in candidates if each.trial.tolerance == tolerance]
        chosen.append(max(mine, key=lambda each: (not each.refusals, each.speed_up)))
    return chosen


def _try_in_simulation(
    candidate: Candidate,
    base: SimulateSettings,
    plan: CalibratePlan,
    out: Path,
    on_progress: Callable[[Progress], None],
) -> Candidate:
    assert plan.episodes is not None
    folders = {}
    plain = replace(base.engine, mode=PLAIN, acceptance=AcceptanceSettings())
    for name, engine in ((PLAIN, plain), (candidate.trial.name, candidate.trial.engine)):

        def report(_: EpisodeResult, done: int, wanted: int, name: str = name) -> None:
            on_progress(Progress(name, done, wanted))

        folders[name] = out / name.replace(", ", "_").replace(" ", "-")
        simulate(replace(base, engine=engine), plan.episodes, folders[name], report)
    pairs = compare_episodes(read_episodes(folders[PLAIN]), read_episodes(folders[candidate.trial.name]))
    return candidate.with_success(pairs, plan.limits)


def _context(policy: Target, base: SimulateSettings, plan: CalibratePlan, frames: int) -> dict[str, Any]:
    return {
        "policy": policy.describe(),
        "world": base.world,
        "frames": frames,
        "episodes": asdict(plan.episodes) if plan.episodes is not None else None,
        "emulate": asdict(read_stage_times(plan.emulate)) if plan.emulate else None,
        **head(),
    }
