# SPDX-License-Identifier: Apache-2.0
"""`specvla calibrate`: chooses the tolerance and tree for a robot from measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.compare import time_settings
from specvla_ros.lab.evaluation.deviation import Deviation, deviation
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory, head
from specvla_ros.lab.evaluation.simulate import SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.plans import CalibratePlan, Limits
from specvla_ros.lab.simulation.rollout import EpisodeResult, TickTime, tick_time
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.settings.parameter import values_of
from specvla_ros.speculation.rules.registry import bins_of
from specvla_ros.speculation.settings import AcceptanceSettings, Tolerance

COMMAND = "calibrate"
CALIBRATION_FILE, PROFILE_FILE = "calibration.json", "profile.yaml"
CALIBRATION_HEAD = ("setting", "ms", "speed-up", "forwards", "τ", "mm p95", "deg p95", "gripper", "success", "verdict")
_PLAIN = "ar"
_TRIED = ("decode.mode", "draft.", "acceptance.")  # parameters set by a trial

OnProgress = Callable[[str, int, int], None]  # stage, steps done, steps in total


@dataclass(frozen=True)
class Trial:
    """One setting to try."""

    name: str
    tolerance: Tolerance | None  # acceptance tolerance; None: exact
    engine: EngineSettings


@dataclass(frozen=True)
class Candidate:
    """One setting with its measurements."""

    trial: Trial
    action_s: float  # mean seconds per action, see FrameRun
    speed_up: float  # plain decoding's `action_s` on the same frames over this one's
    tau: float  # tokens committed per verification forward
    forwards_per_action: float  # prefill included
    deviation: Deviation  # from plain decoding on the same frames
    pairs: PairedComparison | None = None  # success in simulation, paired with plain decoding; None: not simulated
    refusals: tuple[str, ...] = ()  # the broken limits, in words

    def judged(self, limits: Limits, fastest_exact: "Candidate") -> "Candidate":
        """Returns a copy that lists the limits broken on the frames; exact settings break none."""
        if self.trial.tolerance is None:
            return self
        found = self.deviation
        checked = (
            ("p95 deviation {:.2g} mm, the limit is {:g}", found.p95_mm, limits.p95_mm),
            ("p95 deviation {:.2g} deg, the limit is {:g}", found.p95_deg, limits.p95_deg),
            ("gripper differs in {:.2%} of the frames, the limit is {:.2%}", found.gripper_share, limits.gripper_share),
            ("no action for {:.2%} of the frames", found.lost_share, 0.0),
        )
        reasons = [text.format(value, limit) for text, value, limit in checked if value > limit]
        if self.speed_up <= fastest_exact.speed_up:
            reasons.append(f"not faster than {fastest_exact.trial.name}, which is exact")
        return replace(self, refusals=tuple(reasons))

    def with_success(self, pairs: PairedComparison, limits: Limits) -> "Candidate":
        """Returns a copy with the success rate and, if it is broken, the limit on it."""
        _, low, _ = pairs.points
        reasons = self.refusals
        if low < -limits.loss_points:
            reasons += (f"may lose {-low:.1f} points of success, the limit is {limits.loss_points:g}",)
        return replace(self, pairs=pairs, refusals=reasons)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.trial.name,
            "tolerance": str(self.trial.tolerance or "") or None,
            "draft": asdict(self.trial.engine.draft),
            "action_s": self.action_s,
            "speed_up": self.speed_up,
            "tau": self.tau,
            "forwards_per_action": self.forwards_per_action,
            "deviation": asdict(self.deviation),
            "success_pairs": self.pairs.as_json() if self.pairs else None,
            "refusals": list(self.refusals),
        }


def _best_by_tolerance(
    candidates: Iterable[Candidate], chosen: Trial | None = None
) -> dict[Tolerance | None, Candidate]:
    """The best candidate of each tolerance: the chosen one, else the fastest within the limits, else the fastest."""
    best: dict[Tolerance | None, Candidate] = {}
    for candidate in candidates:
        rivals = best.get(candidate.trial.tolerance, candidate), candidate
        best[candidate.trial.tolerance] = max(
            rivals, key=lambda rival: (rival.trial == chosen, not rival.refusals, rival.speed_up)
        )
    return best


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`."""

    candidates: tuple[Candidate, ...]  # all candidates; the first is plain decoding
    chosen: Candidate
    limits: Limits
    refused: Mapping[str, str]  # tolerances that do not fit the checkpoint, with reasons
    context: Mapping[str, Any]

    @property
    def shortlist(self) -> tuple[Candidate, ...]:
        """Plain decoding, the fastest strict setting, and the best candidate of each tolerance."""
        return (self.candidates[0], *_best_by_tolerance(self.candidates[1:], self.chosen.trial).values())

    def as_json(self) -> dict[str, Any]:
        chosen, candidates = self.chosen.as_json(), [each.as_json() for each in self.candidates]
        return vars(self) | {"chosen": chosen, "limits": asdict(self.limits), "candidates": candidates}


def calibrate(
    policy: Target,
    base: SimulateSettings,
    frames: Sequence[Observation],
    plan: CalibratePlan,
    out: Path,
    on_progress: OnProgress = lambda stage, done, wanted: None,
) -> Calibration:
    """Chooses the largest tolerance that keeps the limits and is faster than exact decoding, and its fastest tree.

    First, every tolerance is tried with every tree on the same frames for deviation from plain decoding and seconds per
    action. The fastest tree within the limits is each tolerance's candidate. Then the candidates act in simulation, the
    largest tolerance first, paired with plain decoding on the same starts, until one keeps the limit on success. If
    none does, the fastest exact setting is chosen: strict speculation or plain decoding.

    A repeated call with the same `out` simulates only missing episodes. `base` holds the remaining engine settings.
    """
    directory = RunDirectory(out, COMMAND)
    directory.check()
    if not base.engine.gives_no_prefix:
        raise UserError(
            "calibrate looks for fast exact settings, and decode.think_every_s and decode.commit are not exact: leave "
            "them at 0 and none, and measure them with specvla simulate and compare"
        )
    spec = replace(base.engine, mode="spec")
    plain = Trial(_PLAIN, None, replace(base.engine, mode="ar", acceptance=AcceptanceSettings()))
    relaxed, refused = _relaxed_trials(policy, spec, plan)
    groups = [_trials(spec, plan.nodes, None), *relaxed]
    emulated = replace(base, emulate=plan.emulate).stage_times()
    candidates = _try_on_frames(policy, plain, groups, frames, tick_time(emulated), on_progress)
    exact = [candidate for candidate in candidates if candidate.trial.tolerance is None]
    chosen = fastest_exact = max(exact, key=lambda candidate: candidate.speed_up)
    results = {candidate.trial.name: candidate.judged(plan.limits, fastest_exact) for candidate in candidates}
    best = _best_by_tolerance(results.values())
    for tolerance in sorted(filter(None, best), reverse=True):
        candidate = best[tolerance]
        if not candidate.refusals and plan.episodes is not None:
            candidate = _try_in_simulation(candidate, plain, base, plan, directory.path, on_progress)
            results[candidate.trial.name] = candidate
        if not candidate.refusals:
            chosen = candidate
            break
    context = {
        "policy": policy.describe(),
        "world": base.world,
        "frames": len(frames),
        "episodes": asdict(plan.episodes) if plan.episodes is not None else None,
        "emulate": emulated and emulated.as_json(),
        **head(),
    }
    calibration = Calibration(tuple(results.values()), chosen, plan.limits, refused, context)
    directory.begin()
    with directory.reporting_errors():
        directory.write_json(CALIBRATION_FILE, calibration.as_json())
        write_profile(directory.path / PROFILE_FILE, calibration)
        _write_report(directory.path / REPORT_FILE, calibration)
    return calibration


def _relaxed_trials(
    policy: Target, spec: EngineSettings, plan: CalibratePlan
) -> tuple[list[list[Trial]], dict[str, str]]:
    """The trials of each tolerance, and the tolerances that do not fit the checkpoint, with reasons."""
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
        raise UserError("no --tolerance fits this checkpoint: " + "; ".join(refused.values()))
    return trials, refused


def _trials(spec: EngineSettings, nodes: Sequence[int], tolerance: Tolerance | None) -> list[Trial]:
    """One trial per tree size; with a tolerance a second one, whose children are chosen by the mass within it."""
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
    pace: TickTime,
    on_progress: OnProgress,
) -> list[Candidate]:
    """Times plain decoding with each group. Groups run one after the other, since every engine needs its own memory."""
    progress = count(1)
    candidates: list[Candidate] = []
    for group in groups:
        runs = time_settings(
            policy,
            {trial.name: trial.engine for trial in (plain, *group)},
            frames,
            rounds=1,
            pace=pace,
            on_frame=lambda: on_progress("frames", next(progress), len(groups) * len(frames)),
        )
        exact = runs[_PLAIN]
        if not exact.tally.actions:
            raise UserError(
                f"the policy answered none of the {len(frames)} images with an action, so that no setting can be "
                f"compared ({exact.dropped}): give images of its own robot and tasks, and its own decoding parameters"
            )
        for trial in group if candidates else (plain, *group):
            run = runs[trial.name]
            speed_up, off = exact.action_s / run.action_s, deviation(exact.values, run.values, policy.codec.names)
            tau, forwards = run.tally.tau, run.tally.forwards_per_action
            candidates.append(Candidate(trial, run.action_s, speed_up, tau, forwards, off))
    return candidates


def _try_in_simulation(
    candidate: Candidate, plain: Trial, base: SimulateSettings, plan: CalibratePlan, out: Path, on_progress: OnProgress
) -> Candidate:
    assert plan.episodes is not None
    episodes = []
    for trial in (plain, candidate.trial):

        def report(_: EpisodeResult, done: int, wanted: int, name: str = trial.name) -> None:
            on_progress(name, done, wanted)

        folder = out / trial.name.replace(", ", "_").replace(" ", "-")
        simulate(replace(base, engine=trial.engine), plan.episodes, folder, report)
        episodes.append(read_episodes(folder, plan.episodes))
    return candidate.with_success(compare_episodes(*episodes), plan.limits)


def write_profile(path: Path, calibration: Calibration) -> None:
    """Writes a file for `params_file:=` and --params-file, with the evidence in its first lines."""
    chosen = calibration.chosen
    off = chosen.deviation
    comments = [
        "Chosen by specvla calibrate; the evidence is in calibration.json next to this file.",
        f"{chosen.trial.name}: {chosen.speed_up:.2f} times as fast as plain decoding, "
        f"{chosen.forwards_per_action:.2f} forwards per action",
        f"deviation p95: {off.p95_mm:.2g} mm, {off.p95_deg:.2g} deg, gripper {off.gripper_share:.2%}",
        f"success against plain decoding: {chosen.pairs or 'not tried'}",
    ]
    emulated = calibration.context.get("emulate")
    if emulated:
        comments.append(f"times are those of an emulated {emulated['name']}, not measured on one")
    # Tolerances found with quantised weights hold for these only.
    quantization = calibration.context.get("policy", {}).get("quantization", "none")
    model = {"model.quantization": quantization} if quantization != "none" else {}
    values = {name: value for name, value in values_of(chosen.trial.engine).items() if name.startswith(_TRIED)}
    write_parameters(path, model | values, comments)


def _write_report(path: Path, calibration: Calibration) -> None:
    chosen = calibration.chosen
    success = f", success difference {chosen.pairs} points" if chosen.pairs else ""
    off = f"{chosen.deviation.p95_mm:.2g} mm from plain decoding's actions at the 95th percentile"
    answer = f"Chosen: {chosen.trial.name}, {off}{success}. It is saved in profile.yaml."
    parts = [
        page.answer("passed", f"{chosen.speed_up:.2f} ×", "as fast as plain decoding", answer),
        page.emulation(calibration.context.get("emulate")),
        "<h2>Settings tried</h2>",
        page.plot(_plot(calibration), 380),
        page.table(CALIBRATION_HEAD, [calibration_row(each, calibration) for each in calibration.candidates]),
        f"<p class=note>Success: difference to plain decoding in points, with its 95 % interval. {page.TAU}</p>",
        *(f"<p class=note>{escape(name)}: {escape(why)}</p>" for name, why in calibration.refused.items()),
        "<h2>Limits</h2>",
        page.table(("", ""), page.context_rows(asdict(calibration.limits))),
        page.provenance(calibration.context),
    ]
    page.write_page(path, f"Calibration of {Path(calibration.context['policy']['checkpoint']).name}", parts)


def calibration_row(candidate: Candidate, calibration: Calibration) -> tuple[str, ...]:
    """A candidate's table cells, in the order of CALIBRATION_HEAD."""
    found = candidate.deviation
    return (
        candidate.trial.name,
        f"{candidate.action_s * 1e3:.1f}",
        f"{candidate.speed_up:.2f}",
        f"{candidate.forwards_per_action:.2f}",
        f"{candidate.tau:.2f}" if candidate.tau else "",
        f"{found.p95_mm:.2g}",
        f"{found.p95_deg:.2g}",
        f"{found.gripper_share:.1%}",
        str(candidate.pairs or ""),
        "chosen" if candidate.trial == calibration.chosen.trial else "; ".join(candidate.refusals),
    )


def _plot(calibration: Calibration) -> go.Figure:
    groups: dict[str, list[Candidate]] = {}
    for candidate in calibration.candidates:
        chosen = candidate.trial == calibration.chosen.trial
        tried = "tried" if candidate.trial.tolerance else "exact"
        groups.setdefault("chosen" if chosen else "refused" if candidate.refusals else tried, []).append(candidate)
    colours = {"chosen": page.GREEN, "refused": page.RED, "exact": page.GREY, "tried": page.BLUE}
    drawn = go.Figure()
    for kind, members in groups.items():
        drawn.add_scatter(
            x=[each.deviation.p95_mm for each in members],
            y=[each.speed_up for each in members],
            text=[each.trial.name for each in members],
            mode="markers",
            marker=dict(color=colours[kind], size=14 if kind == "chosen" else 9),
            name=kind,
        )
    drawn.update_xaxes(title_text="deviation from plain decoding, p95 [mm]", rangemode="tozero")
    return drawn.update_yaxes(title_text="times as fast as plain decoding", rangemode="tozero", ticklabelstandoff=8)
