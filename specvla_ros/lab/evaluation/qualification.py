# SPDX-License-Identifier: Apache-2.0
"""Whether pairs of episodes show that a candidate works as well as the reference, and the page that says so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from specvla_ros.lab.evaluation.page import BLUE, GREEN, GREY, INK, RED, plot, provenance, table, write_page
from specvla_ros.lab.evaluation.paired import Rate, confidence_interval, log_e_values
from specvla_ros.lab.plans import Criterion


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
