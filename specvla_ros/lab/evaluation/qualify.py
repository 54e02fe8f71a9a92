# SPDX-License-Identifier: Apache-2.0
"""`specvla qualify`: finds the devices and settings on which a policy works in real time as well as in lockstep.

Real-time episodes of a candidate are paired with lockstep episodes of plain decoding with the same task and start. Each
pair's task is drawn at random, so that pairs have the same distribution and their evidence may be evaluated after any
pair (see `paired`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation import page, simulate
from specvla_ros.lab.evaluation.compare import within_bins
from specvla_ros.lab.evaluation.paired import Rate, confidence_interval, log_e_values
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory, checkpoint_hashes, head
from specvla_ros.lab.evaluation.simulate import SimulateSettings
from specvla_ros.lab.plans import Criterion, QualifyPlan
from specvla_ros.lab.simulation.rollout import Clock

QUALIFY_FILE = "qualify.json"
REFERENCE = "lockstep"
_OF = "candidate"  # field of a line in EPISODES_FILE


class Verdict(str, Enum):
    """The conclusion from a candidate's pairs."""

    QUALIFIED = "qualified"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Pair:
    """Two episodes from one start: the reference's and the candidate's."""

    task: str
    seed: int
    reference: bool  # whether the reference succeeded
    candidate: bool


@dataclass(frozen=True)
class Judgement:
    """A candidate and its pairs."""

    name: str
    pairs: tuple[Pair, ...]  # in the order of drawing
    criterion: Criterion
    no_more_starts: bool = False  # the world has no start for a further pair

    @cached_property
    def differences(self) -> np.ndarray:
        """Float64 [pairs]: 1 if only the candidate succeeded, -1 if only the reference did."""
        return np.array([pair.candidate - pair.reference for pair in self.pairs], dtype=np.float64)

    @cached_property
    def evidence(self) -> dict[str, np.ndarray]:
        """Logarithms of the e-values after each pair, by the claim that they support."""
        criterion = self.criterion
        succeeded = np.array([pair.candidate for pair in self.pairs], dtype=np.float64)
        return {
            "not worse": log_e_values(self.differences, -criterion.margin, -1.0),
            "works": log_e_values(succeeded, criterion.success, 0.0),
            "worse": log_e_values(-self.differences, criterion.margin, -1.0),
            "does not work": log_e_values(-succeeded, -criterion.success, -1.0),
        }

    @cached_property
    def verdict(self) -> Verdict:
        """Qualified if both criteria are shown, each at alpha; refused if one is refuted, each at alpha / 2."""
        if not self.pairs:
            return Verdict.NOT_TRIED
        most = {name: float(values.max()) for name, values in self.evidence.items()}
        alpha = self.criterion.alpha
        if max(most["worse"], most["does not work"]) >= -np.log(alpha / 2):
            return Verdict.REFUSED
        if min(most["not worse"], most["works"]) >= -np.log(alpha):
            return Verdict.QUALIFIED
        return Verdict.UNDECIDED

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Anytime-valid interval of the difference in success."""
        return self.interval_after(len(self.pairs))

    def interval_after(self, n: int) -> tuple[float, float]:
        return confidence_interval(self.differences[:n], -1.0, 1.0, self.criterion.alpha)

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """Success rates of the reference and of the candidate."""
        n = len(self.pairs)
        return Rate(sum(pair.reference for pair in self.pairs), n), Rate(sum(pair.candidate for pair in self.pairs), n)

    def as_json(self) -> dict[str, Any]:
        if not self.pairs:
            return {"name": self.name, "verdict": self.verdict.value}
        reference, candidate = self.rates
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "pairs": len(self.pairs),
            "reference": reference.as_json(),
            "candidate": candidate.as_json(),
            "only_reference": int((self.differences < 0).sum()),
            "only_candidate": int((self.differences > 0).sum()),
            "difference": {"mean": float(self.differences.mean()), "low": self.interval[0], "high": self.interval[1]},
            "log_e_values": {name: float(values.max()) for name, values in self.evidence.items()},
        }

    def __str__(self) -> str:
        if not self.pairs:
            return f"{self.name}: not tried, since the previous candidate did not qualify"
        reference, candidate = self.rates
        low, high = (100 * bound for bound in self.interval)
        ended = ", as the world has no more starts" if self.no_more_starts and self.verdict is Verdict.UNDECIDED else ""
        return (
            f"{self.name}: {self.verdict.value} after {len(self.pairs)} pairs{ended}: success {candidate}, "
            f"reference {reference}, difference {100 * self.differences.mean():+.1f} points, "
            f"anytime-valid interval {low:+.1f} to {high:+.1f}"
        )


def device_candidates(base: SimulateSettings, devices: Sequence[str]) -> dict[str, SimulateSettings]:
    """The policy and setting on each device; without devices, at this machine's own times."""
    realtime = replace(base, clock=Clock.REALTIME)
    return {device or "this machine": replace(realtime, emulate=device) for device in devices or [""]}


def tolerance_candidates(base: SimulateSettings, device: str, bins: Sequence[int]) -> dict[str, SimulateSettings]:
    """The policy with each tolerance (`acceptance.rule` bin_distance) on one device."""
    realtime = replace(base, clock=Clock.REALTIME, emulate=device)
    return {f"r{r}": replace(realtime, engine=within_bins(base.engine, r)) for r in bins}


def qualify(
    candidates: dict[str, SimulateSettings],
    plan: QualifyPlan,
    criterion: Criterion,
    out: Path,
    on_pairs: Callable[[Judgement], None] = lambda judgement: None,
    on_episode: Callable[[str, int, int], None] = lambda name, done, wanted: None,
) -> list[Judgement]:
    """Judges candidates in order until one does not qualify; writes a page, qualify.json and all episodes.

    Candidates are tried from the safest to the boldest, each at the full alpha. After one fails, the later ones are not
    tried, so that their wrong verdicts cannot add to its own (fixed-sequence testing, Maurer, Hothorn and Lehmacher
    1995). A repeated call with the same settings resumes.

    Args:
        candidates: real-time simulations by name, the safest first; they share policy, world and robot.
        on_episode: gets the name, the number of episodes done and the number wanted until the next evaluation.
    """
    base = next(iter(candidates.values()))
    for settings in candidates.values():
        settings.stage_times()  # an unknown device fails here
    lockstep = replace(base, clock=Clock.LOCKSTEP, emulate="", engine=replace(base.engine, mode="ar"))
    simulated = {REFERENCE: lockstep, **candidates}
    tasks = simulate.tasks_of(base.world, plan.tasks, base.robot)
    drawn = _draw(tasks, plan, simulate.starts_of(base.world))
    deciding = {
        "candidates": {name: each.as_json() for name, each in simulated.items()},
        "criterion": asdict(criterion),
        "tasks": tasks,
        "first_seed": plan.first_seed,
    }
    hashes = checkpoint_hashes(base.policy, base.engine)
    directory = RunDirectory(out, "qualify")
    directory.begin(deciding | hashes)
    before = directory.resume_lines(simulate.EPISODES_FILE, lambda raw: (raw.pop(_OF), simulate.episode_of(raw)))
    done = {(name, each.task, each.seed): each for name, each in before}
    context = {**deciding, "plan": asdict(plan), **hashes, **head()}
    judgements = {name: Judgement(name, (), criterion, len(drawn) < plan.pairs) for name in candidates}

    def run(name: str, starts: Sequence[tuple[str, int]]) -> None:
        jobs = [simulate.EpisodeJob(simulated[name], *start) for start in starts if (name, *start) not in done]
        for result in simulate.run_episodes(directory, jobs, plan, more={_OF: name}):
            done[name, result.task, result.seed] = result
            on_episode(name, sum((name, *start) in done for start in starts), len(starts))

    with directory.reporting_errors("; finished episodes are kept, and the same command resumes"):
        try:
            for name in candidates:
                starts = iter(drawn)
                while batch := list(islice(starts, plan.batch)):
                    for each in (REFERENCE, name):
                        run(each, batch)
                    pairs = tuple(
                        Pair(task, seed, done[REFERENCE, task, seed].succeeded, done[name, task, seed].succeeded)
                        for task, seed in batch
                    )
                    judgements[name] = replace(judgements[name], pairs=judgements[name].pairs + pairs)
                    on_pairs(judgements[name])
                    if judgements[name].verdict is not Verdict.UNDECIDED:
                        break
                if judgements[name].verdict is not Verdict.QUALIFIED:
                    break
        finally:
            found = list(judgements.values())
            directory.write_json(QUALIFY_FILE, {"results": [each.as_json() for each in found], **context})
            _write_report(out / REPORT_FILE, found, context)
    return found


def _draw(tasks: Sequence[str], plan: QualifyPlan, starts: int | None) -> list[tuple[str, int]]:
    """Draws the task and seed of each pair.

    With few starts per task, a pair takes the next one of its task. The draw ends when a task has no more: pairs of
    the other tasks alone would have another distribution.
    """
    random = np.random.default_rng(plan.first_seed)
    names = [tasks[int(random.integers(len(tasks)))] for _ in range(plan.pairs)]
    if starts is None:
        return [(task, plan.first_seed + number) for number, task in enumerate(names)]
    if plan.first_seed >= starts:
        raise UserError(f"each task has the seeds 0 to {starts - 1}, not {plan.first_seed}; choose a lower --seed")
    seeds = dict.fromkeys(tasks, plan.first_seed)
    drawn: list[tuple[str, int]] = []
    for task in names:
        if seeds[task] == starts:
            break
        drawn.append((task, seeds[task]))
        seeds[task] += 1
    return drawn


def boldest(judgements: Sequence[Judgement]) -> str:
    """Name of the last candidate that qualified; empty if none did."""
    return next((each.name for each in reversed(judgements) if each.verdict is Verdict.QUALIFIED), "")


_HEAD = (
    "",
    "verdict",
    "pairs",
    "lockstep",
    "realtime",
    "difference",
    "succeeded only in lockstep",
    "succeeded only in real time",
)
_POINTS = 60  # points on an interval's curve
_SHOWN_EVIDENCE = (-2.5, 4.5)  # powers of ten; values beyond do not change a verdict
_COLOURS = {"not worse": page.GREEN, "works": page.BLUE, "worse": page.RED, "does not work": page.INK}


def _write_report(path: Path, judgements: Sequence[Judgement], context: Mapping[str, Any]) -> None:
    tried = [each for each in judgements if each.pairs]
    qualified = boldest(judgements)
    ended = next((each for each in judgements if each.verdict in (Verdict.REFUSED, Verdict.UNDECIDED)), None)
    number, of = "0", f"of {len(judgements)} candidates qualify"
    if qualified:
        best = next(each for each in judgements if each.name == qualified)
        number, of = f"{100 * best.differences.mean():+.1f} points", f"of success, {qualified} against {REFERENCE}"
    reasons = (f"{ended}.",) if ended is not None else ()
    parts = [
        page.answer("passed" if qualified else "failed", number, of, f"{qualified or 'None'} qualifies.", reasons),
    ]
    parts += ["<h2>Candidates, the safest first</h2>", page.table(_HEAD, map(_row, judgements))]
    if tried:
        wanted = tried[0].criterion
        parts.append(
            "<p class=note>Success with its 95 % Wilson interval. Difference in points, with an anytime-valid interval "
            f"whose error probability is at most {wanted.alpha:g}. To qualify: less than "
            f"{100 * wanted.margin:g} points below lockstep, and above {100 * wanted.success:g} % success.</p>"
        )
    for each in tried:
        parts += [
            f"<h2>{escape(each.name)}</h2>",
            page.plot(_evidence(each), 340),
            page.plot(_interval(each), 300),
            page.table(("task", "pairs", *_HEAD[-2:]), _by_task(each)),
        ]
    parts.append(page.provenance(context))
    policy = next(iter(context["candidates"].values()))["policy"]
    page.write_page(path, f"Qualification of {Path(policy).name}", parts)


def _row(each: Judgement) -> tuple[str, ...]:
    if not each.pairs:
        return (each.name, each.verdict.value, *[""] * (len(_HEAD) - 2))
    low, high = (100 * bound for bound in each.interval)
    return (
        each.name,
        each.verdict.value,
        str(len(each.pairs)),
        *map(str, each.rates),
        f"{100 * each.differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]",
        str(int((each.differences < 0).sum())),
        str(int((each.differences > 0).sum())),
    )


def _evidence(each: Judgement) -> go.Figure:
    numbers = list(range(1, len(each.pairs) + 1))
    drawn = go.Figure()
    for name, values in each.evidence.items():
        drawn.add_scatter(x=numbers, y=values / np.log(10), name=name, line_color=_COLOURS[name])
    odds = 1 / each.criterion.alpha
    for level, what, where in ((odds, "to qualify: both", "bottom right"), (2 * odds, "to refuse: one", "top left")):
        words = dict(annotation_text=f"{level:g}, {what}", annotation_position=where)
        drawn.add_hline(y=np.log10(level), line_dash="dot", line_color=page.GREY, **words)
    drawn.update_xaxes(title_text="pairs")
    return drawn.update_yaxes(title_text="evidence, power of ten", range=_SHOWN_EVIDENCE)


def _interval(each: Judgement) -> go.Figure:
    at = sorted({round(n) for n in np.linspace(1, len(each.pairs), min(_POINTS, len(each.pairs)))})
    low, high = 100 * np.array([each.interval_after(n) for n in at]).T
    means = 100 * each.differences.cumsum() / np.arange(1, len(each.pairs) + 1)
    drawn = go.Figure()
    drawn.add_scatter(x=at, y=high, line_color=page.GREY, name="at most")
    drawn.add_scatter(x=at, y=low, line_color=page.GREY, name="at least", fill="tonexty")
    drawn.add_scatter(x=at, y=means[np.array(at) - 1], line_color=page.BLUE, name="mean")
    drawn.update_traces(showlegend=False)
    margin = -100 * each.criterion.margin
    words = dict(annotation_text=f"margin, {margin:g}", annotation_position="bottom left")
    drawn.add_hline(y=margin, line_dash="dot", line_color=page.RED, **words)
    drawn.update_xaxes(title_text="pairs")
    return drawn.update_yaxes(title_text="realtime minus lockstep [points]")


def _by_task(each: Judgement) -> list[tuple[str, ...]]:
    by_task: dict[str, list[int]] = {}
    for pair in each.pairs:
        by_task.setdefault(pair.task, []).append(pair.candidate - pair.reference)
    return [(task, *map(str, (len(of), of.count(-1), of.count(1)))) for task, of in sorted(by_task.items())]
