# SPDX-License-Identifier: Apache-2.0
"""The results of a replay: each frame, the statistics over all frames, and the broken limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from specvla_ros.engine.outcome import Action, DecodeRecord, DropCounter, DropReason
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import BagFrame
from specvla_ros.lab.evaluation.deviation import Deviation, deviation, distances
from specvla_ros.lab.plans import Thresholds
from specvla_ros.lab.tally import DecodeTally, percentiles
from specvla_ros.models.codecs.bins import BinsCodec
from specvla_ros.models.codecs.codec import Codec


@dataclass(frozen=True)
class FrameRecord:
    """The result of one frame: a line of frames.jsonl, in the units of VlaAction.msg and DecodeStats.msg."""

    frame: int  # index of the image in the bag
    time_ns: int  # bag time of the image
    stamp_ns: int | None  # the image's stamp; None: invalid
    seq: int | None  # the action's number; None: no action
    epoch: int
    instruction: str  # in force when the image was recorded
    total_s: float  # seconds from the image's bytes in this process to the outcome
    recorded: list[float | None] | None  # the recorded action; None: missing, or a value that is not finite
    drop: dict[str, str] | None  # reason and detail; None: not dropped
    publish_s: float | None = None  # seconds from the last token to this record
    tokens: list[int] | None = None
    values: list[float] | None = None
    timings: dict[str, float] | None = None
    decode: dict[str, Any] | None = None
    # decoded minus recorded action, in the action's units; None: no comparable recorded action
    error: list[float] | None = None
    # between the decoded tokens and those of the recorded action, in bins; None as for `error`
    bin_distance: list[int] | None = None

    @staticmethod
    def from_frame(frame: BagFrame, *, stamp_ns: int | None, total_s: float, **ending: Any) -> "FrameRecord":
        """Creates the record of a bag's frame; `ending` has the fields of an action or of a drop."""
        recorded: list[float | None] | None = None
        if frame.recorded is not None:  # JSON has no NaN
            recorded = [value if math.isfinite(value) else None for value in frame.recorded]
        return FrameRecord(
            frame=frame.index,
            time_ns=frame.image.time_ns,
            stamp_ns=stamp_ns,
            epoch=frame.epoch,
            instruction=frame.instruction,
            total_s=total_s,
            recorded=recorded,
            **{"seq": None, "drop": None} | ending,
        )

    def as_json(self) -> dict[str, Any]:
        """The line, without an action's fields if there is no action."""
        required = {each.name for each in fields(self) if each.default is MISSING}
        return {name: value for name, value in vars(self).items() if value is not None or name in required}

    @property
    def decoding(self) -> DecodeRecord | None:
        """The action's decoding record; None without an action."""
        if self.decode is None:
            return None
        decode: dict[str, Any] = {each.name: self.decode[each.name] for each in fields(DecodeRecord)}
        decode = {name: tuple(value) if isinstance(value, list) else value for name, value in decode.items()}
        return DecodeRecord(**decode)


def compare(codec: Codec, action: Action, recorded: tuple[float, ...] | None) -> dict[str, Any]:
    """Compares a chunk's first action with the recorded one: fields `error` and, for a bins codec, `bin_distance`.

    Empty if the recorded action is missing, not finite or of another length.
    """
    if recorded is None or len(recorded) != len(codec.names) or not all(map(math.isfinite, recorded)):
        return {}
    wanted = np.asarray(recorded, dtype=np.float64)
    error = {"error": (action.values - wanted).tolist()}
    if not isinstance(codec, BinsCodec):
        return error
    distance = np.abs(np.asarray(codec.encode(wanted[None])) - np.asarray(action.tokens))
    return error | {"bin_distance": distance.tolist()}


STAGES = ("wait", "vision", "prefill", "decode")
LATENCY_INTERVAL = (
    "from the image message's bytes in this process to its action: image decoding (in wait), vision, prefill, decode; "
    "without transport, publication and warm-up."
)
RATE_INTERVAL = "actions per second of decoding one frame at a time, without reading the bag or writing results"


@dataclass
class ReplayColumns:
    """The figures of all frames, as columns."""

    names: tuple[str, ...]
    start_ns: int  # bag time that counts as 0 s
    total_s: list[float] = field(default_factory=list)  # seconds spent on each frame, dropped ones included
    drops: DropCounter = field(default_factory=DropCounter)
    examples: dict[DropReason, str] = field(default_factory=dict)  # the first detail of each reason
    dropped: list[tuple[int, DropReason]] = field(default_factory=list)  # frame index and reason of each dropped frame
    # index of each action's frame; this and the columns below have one row per action
    frame: list[int] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)  # bag time of the image
    latency_s: list[tuple[float, ...]] = field(default_factory=list)  # total, then one per stage
    values: list[list[float]] = field(default_factory=list)  # the action
    # the recorded action; NaN if not comparable
    recorded: list[Sequence[float | None]] = field(default_factory=list)
    bins: list[Sequence[float]] = field(default_factory=list)  # distance to it in bins; NaN if there is none
    decode: DecodeTally = field(default_factory=DecodeTally)

    def add(self, record: FrameRecord) -> None:
        self.total_s.append(record.total_s)
        if record.drop is not None:
            reason = DropReason(record.drop["reason"])
            self.drops.add(reason)
            self.examples.setdefault(reason, record.drop["detail"])
            self.dropped.append((record.frame, reason))
        if record.values is None or record.timings is None:
            return
        if record.decoding is not None:
            self.decode.add(record.decoding)
        nothing = [math.nan] * len(self.names)
        self.frame.append(record.frame)
        self.time_s.append((record.time_ns - self.start_ns) * 1e-9)
        self.latency_s.append((record.total_s, *(record.timings[f"{stage}_s"] for stage in STAGES)))
        self.values.append(record.values)
        self.recorded.append(nothing if record.error is None or record.recorded is None else record.recorded)
        self.bins.append(nothing if record.bin_distance is None else record.bin_distance)

    @property
    def frames(self) -> int:
        return len(self.total_s)

    @property
    def compared(self) -> np.ndarray:
        """True for actions with a comparable recorded action: bool [actions]."""
        recorded = np.array(self.recorded, dtype=np.float64).reshape(len(self.recorded), len(self.names))
        present: np.ndarray = np.logical_not(np.isnan(recorded).any(axis=1))
        return present


@dataclass(frozen=True)
class ReplaySummary:
    """The content of summary.json."""

    names: tuple[str, ...]  # the action's dimensions
    frames: int  # images replayed
    actions: int  # images answered with an action
    frames_in_bag: int
    drops: dict[str, int]  # frames without an action, by reason
    drop_examples: dict[str, str]  # details of the first drop for each reason
    # p50, p95, p99, mean and max of the frames with an action, per stage and in total
    latency_s: dict[str, dict[str, float]]
    action_rate_hz: float  # see `RATE_INTERVAL`; 0 without actions
    compared: int  # actions with a comparable recorded action
    mean_abs_error: dict[str, float]  # per dimension, in the action's units; empty without recorded actions
    mean_bin_distance: dict[str, float]  # per dimension; empty without recorded actions
    decode: DecodeTally
    thresholds: Thresholds
    incomplete: str  # why the bag was not replayed completely; empty: it was
    context: Mapping[str, Any]

    @property
    def silent(self) -> bool:
        """True if there were frames but no action."""
        return self.frames > 0 and not self.actions

    @property
    def drops_in_words(self) -> str:
        """Number of frames without an action by reason, with an example; empty if there are none."""
        counts = [f"{count} {reason}" for reason, count in self.drops.items() if count]
        details = [detail for detail in self.drop_examples.values() if detail]
        return ", ".join(counts) + (f" (the first: {details[0]})" if details else "")

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons why the replay failed, in sentences; empty if it did not."""
        failures = [self.incomplete] if self.incomplete else []
        fault = DropReason.ENGINE_FAULT.value
        if self.drops[fault]:
            of_frames = f"{self.drops[fault]} of {self.frames} frames ended in an engine fault"
            failures.append(f"{of_frames}, the first: {self.drop_examples[fault]}")
        if self.silent:
            failures.append(f"none of {self.frames} frames produced an action: {self.drops_in_words}")
        return (*failures, *_exceeded(self))

    def as_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("thresholds", "context")}
        own["decode"] = self.decode.summary()
        intervals = {"latency_interval": LATENCY_INTERVAL, "action_rate_interval": RATE_INTERVAL}
        return own | {"failures": self.failures, **intervals, "thresholds": asdict(self.thresholds), **self.context}


@dataclass(frozen=True)
class BagRow:
    """The result of one bag."""

    name: str
    path: str
    why: str = ""  # why it was not replayed completely; empty: it was
    # of this bag, without limits; None: no frame was read
    summary: ReplaySummary | None = None

    @property
    def passed(self) -> bool:
        """True if the bag was replayed completely and without failures; limits apply to all bags together."""
        return not self.why and self.summary is not None and not self.summary.failures

    def as_json(self) -> dict[str, Any]:
        """The row, without the fields that the summary of all bags holds once."""
        found = {} if self.summary is None else self.summary.as_json()
        same = ("thresholds", "incomplete", "names", "latency_interval", "action_rate_interval")
        row: dict[str, Any] = {"path": self.path, "why": self.why}
        return row | {name: value for name, value in found.items() if name not in same}


@dataclass(frozen=True)
class BagsSummary:
    """The content of summary.json: all bags together, and each bag."""

    rows: tuple[BagRow, ...]
    total: ReplaySummary
    left_out: tuple[str, ...]  # other files found, which were not read

    @property
    def failures(self) -> tuple[str, ...]:
        by_reason: dict[str, list[str]] = {}
        for row in self.rows:
            if row.why:
                by_reason.setdefault(row.why, []).append(row.name)
        if self.total.actions:  # otherwise `total` has this failure itself
            silent = [row.name for row in self.rows if not row.why and row.summary and row.summary.silent]
            by_reason |= {"none of its frames produced an action": silent} if silent else {}
        return (*(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()), *self.total.failures)

    def as_json(self) -> dict[str, Any]:
        rows = {row.name: row.as_json() for row in self.rows}
        return {**self.total.as_json(), "failures": self.failures, "bags": rows, "left_out": self.left_out}


def summarise(
    columns: ReplayColumns, frames_in_bag: int, thresholds: Thresholds, incomplete: str, context: Mapping[str, Any]
) -> ReplaySummary:
    """Summarises the frames."""
    compared = columns.compared
    errors = bins = np.empty((0, len(columns.names)))
    if compared.any():
        errors = np.abs(np.array(columns.values) - np.array(columns.recorded))[compared]
        bins = np.array(columns.bins)[compared]
    stages = np.array(columns.latency_s).T  # without an action: no rows
    spent_s = sum(columns.total_s)
    return ReplaySummary(
        names=columns.names,
        frames=columns.frames,
        actions=len(columns.frame),
        frames_in_bag=frames_in_bag,
        drops=columns.drops.by_name(),
        drop_examples={reason.value: detail for reason, detail in columns.examples.items()},
        latency_s={name: percentiles(column) for name, column in zip(("total", *STAGES), stages, strict=False)},
        action_rate_hz=len(columns.frame) / spent_s if spent_s > 0 else 0.0,
        compared=len(errors),
        mean_abs_error=_per_dimension(columns.names, errors),
        mean_bin_distance=_per_dimension(columns.names, bins),
        decode=columns.decode,
        thresholds=thresholds,
        incomplete=incomplete,
        context=context,
    )


def _per_dimension(names: tuple[str, ...], rows: np.ndarray) -> dict[str, float]:
    return dict(zip(names, rows.mean(axis=0).tolist(), strict=True)) if np.isfinite(rows).any() else {}


def _exceeded(summary: ReplaySummary) -> list[str]:
    limits = summary.thresholds
    failures = []
    limit, p95_s = limits.max_p95_latency_s, summary.latency_s.get("total", {}).get("p95")
    if limit is not None and p95_s is not None and p95_s > limit:
        failures.append(f"the p95 latency is {p95_s:.4f} s, the limit is {limit:g} s")
    fraction = 1 - summary.actions / summary.frames if summary.frames else 0.0
    limit = limits.max_drop_fraction
    if limit is not None and fraction > limit:
        drops = summary.drops_in_words
        failures.append(f"{fraction:.1%} of the frames produced no action, the limit is {limit:.1%}: {drops}")
    limit, rate = limits.min_action_rate_hz, summary.action_rate_hz
    if limit is not None and rate < limit:
        failures.append(f"the action rate is {rate:.2f} Hz, the limit is {limit:g} Hz")
    limit = limits.max_bin_distance
    if limit is not None and not summary.mean_bin_distance:
        why = "this policy's actions are not bins"
        if not summary.compared:
            why = "the bag has no recorded action of the policy's length"
        failures.append(f"max_bin_distance cannot be checked: {why}")
    elif limit is not None:
        mean = float(np.mean(list(summary.mean_bin_distance.values())))
        if mean > limit:
            failures.append(f"the mean distance to the recorded action is {mean:.1f} bins, the limit is {limit:g}")
    return failures


@dataclass(frozen=True)
class ReplayComparison:
    """Two settings on the same frames; times cover the frames that both answered."""

    frames: int
    only_first: int  # frames answered by the first only
    only_second: int
    differing: int  # frames answered by both with different tokens
    latency_ms: tuple[float, float]  # medians, from the image's bytes to the action
    forwards_per_action: tuple[float, float]
    speed_up: float  # the first's mean latency over the second's; 0 if both answered no frame
    unpaired: tuple[int, int]  # frames of each that the other does not hold
    # of the second's actions from the first's, and its medians in mm and degrees; None: not of a tool, or no action
    deviation: Deviation | None = None
    median: tuple[float, float] | None = None


def compare_frames(
    first: Mapping[Any, FrameRecord], second: Mapping[Any, FrameRecord], names: Sequence[str]
) -> ReplayComparison:
    """Compares the frames present in both, matched by key. `names`: of an action's values."""
    pairs = [(first[key], second[key]) for key in first if key in second]
    both = [pair for pair in pairs if all(each.tokens is not None for each in pair)]
    seconds = np.array([[each.total_s for each in pair] for pair in both]).reshape(-1, 2)
    tallies = [DecodeTally(), DecodeTally()]
    for pair in both:
        for tally, record in zip(tallies, pair, strict=True):
            tally.add(record.decoding or DecodeRecord(mode=""))
    means = seconds.mean(axis=0) if both else np.zeros(2)
    medians = np.median(seconds, axis=0) * 1e3 if both else np.zeros(2)
    return ReplayComparison(
        frames=len(pairs),
        only_first=sum(one.tokens is not None and other.tokens is None for one, other in pairs),
        only_second=sum(one.tokens is None and other.tokens is not None for one, other in pairs),
        differing=sum(one.tokens != other.tokens for one, other in both),
        latency_ms=(float(medians[0]), float(medians[1])),
        forwards_per_action=(tallies[0].forwards_per_action, tallies[1].forwards_per_action),
        speed_up=float(means[0] / means[1]) if means[1] else 0.0,
        unpaired=(len(first) - len(pairs), len(second) - len(pairs)),
        **_deviation([each for each in both if all(record.values for record in each)], names),
    )


def _deviation(pairs: Sequence[tuple[FrameRecord, FrameRecord]], names: Sequence[str]) -> dict[str, Any]:
    """The deviation of actions with a tool's units; empty for others."""
    first, second = ([np.array(pair[side].values, np.float64) for pair in pairs] for side in (0, 1))
    try:
        found = distances(first, second, names) if pairs else None
    except UserError:
        return {}
    if found is None:
        return {}
    return {
        "deviation": deviation(first, second),
        "median": (float(np.median(found.mm)), float(np.median(found.degrees))),
    }
