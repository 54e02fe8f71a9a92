# SPDX-License-Identifier: Apache-2.0
"""`specvla qualify`: on which device, and with which setting, a policy still works as it does when the world waits.

Real-time episodes of a candidate are paired with lockstep episodes of plain decoding: the same task, the same start.
The task of each pair is drawn anew, so that pairs are alike whatever came before, and their evidence may be looked at
after each of them (see `paired`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.evaluation.page import BLUE, GREEN, GREY, INK, RED, plot, provenance, table, write_page
from specvla_ros.lab.evaluation.paired import Rate, confidence_interval, log_e_values
from specvla_ros.lab.evaluation.provenance import checkpoint_hashes, head
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


class Verdict(str, Enum):
    """What the pairs say of a candidate."""

    QUALIFIED = "qualified"
    REFUSED = "refused"
    UNDECIDED = "undecided"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Pair:
    """One start, twice."""

    task: str
    seed: int
    reference: bool  # whether the reference succeeded
    candidate: bool


@dataclass(frozen=True)
class Judgement:
    """A candidate and its pairs.

    Args:
        pairs: in the order in which they were drawn.
    """

    name: str
    pairs: tuple[Pair, ...]
    criterion: Criterion

    @cached_property
    def differences(self) -> np.ndarray:
        """Float64 [pairs]: 1 where the candidate alone succeeded, -1 where the reference alone did."""
        return np.array([pair.candidate - pair.reference for pair in self.pairs], dtype=np.float64)

    @cached_property
    def evidence(self) -> dict[str, np.ndarray]:
        """Logarithms of the e-values after each pair, by what they are evidence for."""
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
        """Qualified where both criteria are shown, refused where one is shown not to be met.

        To qualify, both must be wrong for the verdict to be: each has alpha. To refuse one suffices: each has half.
        """
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
        """That of the difference in success, which holds whenever one looks."""
        return self.interval_after(len(self.pairs))

    def interval_after(self, n: int) -> tuple[float, float]:
        """`interval` as it was after n pairs."""
        return confidence_interval(self.differences[:n], -1.0, 1.0, self.criterion.alpha)

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """Of the reference and of the candidate."""
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
            return f"{self.name}: not tried, since the one before it did not qualify"
        reference, candidate = self.rates
        low, high = (100 * bound for bound in self.interval)
        return (
            f"{self.name}: {self.verdict.value} after {len(self.pairs)} pairs: success {candidate} beside {reference}, "
            f"{100 * self.differences.mean():+.1f} points, {low:+.1f} to {high:+.1f} whenever one looks"
        )


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


def boldest(judgements: Sequence[Judgement]) -> str:
    """The name of the last candidate that qualified; empty: none did."""
    return next((each.name for each in reversed(judgements) if each.verdict is Verdict.QUALIFIED), "")


_HEAD = ("", "verdict", "pairs", "lockstep", "realtime", "difference", "only lockstep", "only realtime")
_POINTS = 60  # of an interval's curve
_SHOWN_EVIDENCE = (-2.5, 4.5)  # powers of ten; more changes no verdict
_COLOURS = {"not worse": GREEN, "works": BLUE, "worse": RED, "does not work": INK}


def write_qualify_report(path: Path, judgements: Sequence[Judgement], context: Mapping[str, Any]) -> None:
    """Writes the page."""
    tried = [each for each in judgements if each.pairs]
    parts = [_verdict(judgements), "<h2>Candidates, the safest first</h2>", table(_HEAD, map(_row, judgements))]
    if tried:
        wanted = tried[0].criterion
        parts.append(
            "<p class=note>Success with its 95 % Wilson interval. The difference in points, with an interval that "
            f"holds whenever one looks, wrongly with a probability of at most {wanted.alpha:g}. To qualify: less than "
            f"{100 * wanted.margin:g} points below lockstep, and above {100 * wanted.success:g} % success.</p>"
        )
    for each in tried:
        parts += [
            f"<h2>{escape(each.name)}</h2>",
            plot(_evidence(each), 340),
            plot(_interval(each), 300),
            table(("task", "pairs", "only lockstep", "only realtime"), _by_task(each)),
        ]
    parts.append(provenance(context))
    write_page(path, f"Qualification of {_policy(context)}", parts)


def _policy(context: Mapping[str, Any]) -> str:
    first = next(iter(context["candidates"].values()))
    return Path(first["policy"]).name


def _verdict(judgements: Sequence[Judgement]) -> str:
    qualified = boldest(judgements)
    ended = next((each for each in judgements if each.verdict in (Verdict.REFUSED, Verdict.UNDECIDED)), None)
    kind = "passed" if qualified else "failed"
    words = [f"{escape(qualified)} qualifies." if qualified else "None qualifies."]
    if ended is not None:
        words.append(f"{escape(str(ended))}.")
    return f"<p class='verdict {kind}'>{' '.join(words)}</p>"


def _row(each: Judgement) -> tuple[str, ...]:
    if not each.pairs:
        return (each.name, each.verdict.value, *[""] * (len(_HEAD) - 2))
    reference, candidate = each.rates
    low, high = (100 * bound for bound in each.interval)
    return (
        each.name,
        each.verdict.value,
        str(len(each.pairs)),
        str(reference),
        str(candidate),
        f"{100 * each.differences.mean():+.1f} [{low:+.1f}, {high:+.1f}]",
        str(int((each.differences < 0).sum())),
        str(int((each.differences > 0).sum())),
    )


def _evidence(each: Judgement) -> go.Figure:
    numbers = list(range(1, len(each.pairs) + 1))
    drawn = go.Figure()
    for name, values in each.evidence.items():
        drawn.add_scatter(x=numbers, y=values / np.log(10), name=name, line_color=_COLOURS[name])
    alpha = each.criterion.alpha
    for level, what, where in (
        (1 / alpha, "to qualify: both", "bottom right"),
        (2 / alpha, "to refuse: one", "top left"),
    ):
        words = dict(annotation_text=f"{level:g}, {what}", annotation_position=where)
        drawn.add_hline(y=np.log10(level), line_dash="dot", line_color=GREY, **words)
    drawn.update_xaxes(title_text="pairs")
    return drawn.update_yaxes(title_text="evidence, power of ten", range=_SHOWN_EVIDENCE)


def _interval(each: Judgement) -> go.Figure:
    at = sorted({round(n) for n in np.linspace(1, len(each.pairs), min(_POINTS, len(each.pairs)))})
    bounds = [each.interval_after(n) for n in at]
    drawn = go.Figure()
    drawn.add_scatter(x=at, y=[100 * high for _, high in bounds], line_color=GREY, showlegend=False, name="at most")
    low = dict(line_color=GREY, fill="tonexty", showlegend=False, name="at least")
    drawn.add_scatter(x=at, y=[100 * low for low, _ in bounds], **low)
    means = 100 * each.differences.cumsum() / np.arange(1, len(each.pairs) + 1)
    drawn.add_scatter(x=at, y=means[np.array(at) - 1], line_color=BLUE, showlegend=False, name="mean")
    margin = -100 * each.criterion.margin
    words = dict(annotation_text=f"margin, {margin:g}", annotation_position="bottom left")
    drawn.add_hline(y=margin, line_dash="dot", line_color=RED, **words)
    drawn.update_xaxes(title_text="pairs")
    return drawn.update_yaxes(title_text="realtime less lockstep [points]")


def _by_task(each: Judgement) -> list[tuple[str, ...]]:
    pairs = Counter(pair.task for pair in each.pairs)
    lost = Counter(pair.task for pair in each.pairs if pair.reference and not pair.candidate)
    won = Counter(pair.task for pair in each.pairs if pair.candidate and not pair.reference)
    return [(task, str(pairs[task]), str(lost[task]), str(won[task])) for task in sorted(pairs)]
