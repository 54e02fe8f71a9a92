"""What a replay found: each frame's result, the figures over all of them, and which limits they break."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from specvla_ros.bags.frames import BagFrame
from specvla_ros.engine.outcome import Action, DropCounter, DropReason
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec


@dataclass(frozen=True)
class Thresholds:
    """Limits; None: not checked.

    Args:
        max_p95_latency_s: of the image in this process to its action.
        max_drop_fraction: frames without an action, of all frames, 0 to 1.
        max_bin_distance: mean over frames and dimensions of the distance to the recorded action, in bins: a dimension
            has 255 of them, so that metres, radians and gripper weigh the same.
        min_action_rate_hz: actions per second of decoding.

    Raises:
        UserError: a limit is negative, not finite, or a fraction above 1.
    """

    max_p95_latency_s: float | None = None
    max_drop_fraction: float | None = None
    max_bin_distance: float | None = None
    min_action_rate_hz: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            limit = getattr(self, each.name)
            if limit is not None and not (math.isfinite(limit) and limit >= 0):
                raise UserError(f"the limit {each.name} must be a number from 0 on, got {limit}")
        if self.max_drop_fraction is not None and self.max_drop_fraction > 1:
            raise UserError(f"the limit max_drop_fraction is a fraction from 0 to 1, got {self.max_drop_fraction}")


@dataclass(frozen=True)
class Comparison:
    """An action beside the recorded one.

    Args:
        recorded: float64 [action_dim].
        error: float64 [action_dim], decoded minus recorded, in the action's units.
        bins: int64 [action_dim], distance between the decoded token and the recorded value's, in bins.
    """

    recorded: np.ndarray
    error: np.ndarray
    bins: np.ndarray


@dataclass(frozen=True)
class FrameResult:
    """How one frame ended.

    Args:
        frame: which.
        stamp_ns: the image's stamp; None: it has none that is valid.
        total_s: seconds from the image's bytes in this process to the outcome.
        action: None: dropped.
        seq: the action's number.
        comparison: None: no recorded action that could be compared.
        reason: why it was dropped; None: it was not.
        detail: the same in words.
    """

    frame: BagFrame
    stamp_ns: int | None
    total_s: float
    action: Action | None = None
    seq: int | None = None
    comparison: Comparison | None = None
    reason: DropReason | None = None
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """One line of frames.jsonl; the units are those of VlaAction.msg and DecodeStats.msg."""
        line: dict[str, Any] = {
            "frame": self.frame.index,
            "time_ns": self.frame.image.time_ns,
            "stamp_ns": self.stamp_ns,
            "seq": self.seq,
            "epoch": self.frame.epoch,
            "instruction": self.frame.instruction,
            "total_s": self.total_s,
            "recorded": _numbers(self.frame.recorded),
            "drop": None if self.reason is None else {"reason": self.reason.value, "detail": self.detail},
        }
        if self.action is not None:
            record = self.action.record
            line["tokens"] = list(self.action.tokens)
            line["values"] = self.action.values.tolist()
            line["timings"] = asdict(self.action.timings)
            line["decode"] = {**asdict(record), "forwards": record.forwards, "tau": record.tau}
        if self.comparison is not None:
            line["error"] = self.comparison.error.tolist()
            line["bin_distance"] = self.comparison.bins.tolist()
        return line


def compare(codec: Codec, action: Action, recorded: tuple[float, ...] | None) -> Comparison | None:
    """An action beside the recorded one; None when that is missing, not finite, or of another length."""
    if recorded is None or len(recorded) != len(codec.names) or not all(map(math.isfinite, recorded)):
        return None
    wanted = np.asarray(recorded, dtype=np.float64)
    tokens = np.asarray(codec.encode(wanted[None]))
    return Comparison(wanted, action.values - wanted, np.abs(tokens - np.asarray(action.tokens)))


def _numbers(values: tuple[float, ...] | None) -> list[float | None] | None:
    # JSON has no NaN.
    return None if values is None else [value if math.isfinite(value) else None for value in values]


STAGES = ("wait", "vision", "prefill", "decode")
LATENCY_INTERVAL = (
    "from the image message's bytes in this process to its action: image decoding (in wait), vision, prefill, decode; "
    "no transport, no publication. The warm-up is not in it."
)
RATE_INTERVAL = "actions per second of decoding, frame after frame, without reading the bag or writing results"


@dataclass
class ReplayColumns:
    """The numbers of every frame, column by column, as summary and report need them.

    Attributes:
        names: of the action's dimensions.
        start_ns: bag time that counts as 0 s.
        total_s: seconds spent on each frame, dropped ones included.
        drops: frames dropped by reason.
        examples: the first detail of each reason.
        dropped: frame index and reason of each dropped frame.
        frame: index of each action's frame. The columns below have one row per action, too.
        time_s: bag time of the image.
        latency_s: total, then one per stage.
        values: the action.
        recorded: the recorded action; NaN where there is none to compare.
        bins: distance to it in bins; NaN where there is none.
    """

    names: tuple[str, ...]
    start_ns: int
    total_s: list[float] = field(default_factory=list)
    drops: DropCounter = field(default_factory=DropCounter)
    examples: dict[DropReason, str] = field(default_factory=dict)
    dropped: list[tuple[int, DropReason]] = field(default_factory=list)
    frame: list[int] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    latency_s: list[tuple[float, ...]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    recorded: list[np.ndarray] = field(default_factory=list)
    bins: list[np.ndarray] = field(default_factory=list)

    def add(self, result: FrameResult) -> None:
        """Takes one frame."""
        self.total_s.append(result.total_s)
        if result.reason is not None:
            self.drops.add(result.reason)
            self.examples.setdefault(result.reason, result.detail)
            self.dropped.append((result.frame.index, result.reason))
        if result.action is None:
            return
        timings, comparison = result.action.timings, result.comparison
        nothing = np.full(len(self.names), np.nan)
        self.frame.append(result.frame.index)
        self.time_s.append((result.frame.image.time_ns - self.start_ns) * 1e-9)
        self.latency_s.append((result.total_s, *(getattr(timings, f"{stage}_s") for stage in STAGES)))
        self.values.append(result.action.values)
        self.recorded.append(nothing if comparison is None else comparison.recorded)
        self.bins.append(nothing if comparison is None else comparison.bins.astype(np.float64))

    @property
    def frames(self) -> int:
        """Frames taken."""
        return len(self.total_s)

    @property
    def compared(self) -> np.ndarray:
        """Whether there was a recorded action to compare with: bool [actions]."""
        present: np.ndarray = ~np.isnan(np.array(self.recorded).reshape(-1, len(self.names))).any(axis=1)
        return present


@dataclass(frozen=True)
class ReplaySummary:
    """The content of summary.json.

    Args:
        frames: images replayed.
        actions: of them answered.
        frames_in_bag: images that the bag holds.
        drops: frames without an action, by reason.
        drop_examples: the details of the first of each reason.
        latency_s: per stage and in total: p50, p95, p99, mean and max, of the frames with an action.
        action_rate_hz: see `RATE_INTERVAL`; 0 without actions.
        compared: actions that had a recorded action beside them.
        mean_abs_error: per dimension, in the action's units; empty without recorded actions.
        mean_bin_distance: per dimension; empty without recorded actions.
        thresholds: the limits asked for.
        incomplete: why not the whole bag was replayed; empty: it was.
        failures: why the replay counts as failed, in sentences; empty: it does not.
        context: what was replayed, with what, on what.
    """

    frames: int
    actions: int
    frames_in_bag: int
    drops: dict[str, int]
    drop_examples: dict[str, str]
    latency_s: dict[str, dict[str, float]]
    action_rate_hz: float
    compared: int
    mean_abs_error: dict[str, float]
    mean_bin_distance: dict[str, float]
    thresholds: Thresholds
    incomplete: str
    failures: tuple[str, ...]
    context: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        own = {name: value for name, value in vars(self).items() if name not in ("thresholds", "context")}
        intervals = {"latency_interval": LATENCY_INTERVAL, "action_rate_interval": RATE_INTERVAL}
        return {**own, **intervals, "thresholds": asdict(self.thresholds), **self.context}


def summarise(
    columns: ReplayColumns,
    *,
    frames_in_bag: int,
    thresholds: Thresholds,
    incomplete: str,
    context: Mapping[str, Any],
) -> ReplaySummary:
    """Sums up the frames.

    Args:
        columns: their numbers.
        frames_in_bag: images that the bag holds.
        thresholds: limits to check.
        incomplete: why the replay ended early; empty: it did not.
        context: what was replayed, with what, on what.
    """
    compared = columns.compared
    errors = bins = np.empty((0, len(columns.names)))
    if compared.any():
        errors = np.abs(np.array(columns.values) - np.array(columns.recorded))[compared]
        bins = np.array(columns.bins)[compared]
    spent_s = sum(columns.total_s)
    without_failures = ReplaySummary(
        frames=columns.frames,
        actions=len(columns.frame),
        frames_in_bag=frames_in_bag,
        drops=columns.drops.by_name(),
        drop_examples={reason.value: detail for reason, detail in columns.examples.items()},
        latency_s=_latencies(columns.latency_s),
        action_rate_hz=len(columns.frame) / spent_s if spent_s > 0 else 0.0,
        compared=len(errors),
        mean_abs_error=_per_dimension(columns.names, errors),
        mean_bin_distance=_per_dimension(columns.names, bins),
        thresholds=thresholds,
        incomplete=incomplete,
        failures=(),
        context=context,
    )
    return ReplaySummary(**{**vars(without_failures), "failures": tuple(_failures(without_failures))})


def _latencies(rows: Sequence[tuple[float, ...]]) -> dict[str, dict[str, float]]:
    if not rows:
        return {}
    return {name: _percentiles(column) for name, column in zip(("total", *STAGES), np.array(rows).T, strict=True)}


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "mean": float(seconds.mean()), "max": float(seconds.max())}


def _per_dimension(names: tuple[str, ...], rows: np.ndarray) -> dict[str, float]:
    return dict(zip(names, rows.mean(axis=0).tolist(), strict=True)) if len(rows) else {}


def _failures(summary: ReplaySummary) -> list[str]:
    failures = [summary.incomplete] if summary.incomplete else []
    faults = summary.drops[DropReason.ENGINE_FAULT.value]
    if faults:
        example = summary.drop_examples[DropReason.ENGINE_FAULT.value]
        failures.append(f"{faults} of {summary.frames} frames ended in a fault of the engine, the first one: {example}")
    if summary.frames and not summary.actions:
        failures.append(f"not one of {summary.frames} frames gave an action: {_drops_in_words(summary)}")
    return failures + _exceeded(summary)


def _exceeded(summary: ReplaySummary) -> list[str]:
    """The limits that were not kept, in words."""
    limits = summary.thresholds
    failures = []
    p95_s = summary.latency_s.get("total", {}).get("p95")
    if limits.max_p95_latency_s is not None and p95_s is not None and p95_s > limits.max_p95_latency_s:
        failures.append(f"the p95 latency is {p95_s:.4f} s, the limit is {limits.max_p95_latency_s:g} s")
    fraction = 1 - summary.actions / summary.frames if summary.frames else 0.0
    if limits.max_drop_fraction is not None and fraction > limits.max_drop_fraction:
        failures.append(
            f"{fraction:.1%} of the frames gave no action, the limit is {limits.max_drop_fraction:.1%}: "
            + _drops_in_words(summary)
        )
    if limits.min_action_rate_hz is not None and summary.action_rate_hz < limits.min_action_rate_hz:
        failures.append(
            f"the action rate is {summary.action_rate_hz:.2f} Hz, the limit is {limits.min_action_rate_hz:g} Hz"
        )
    return failures + _too_far(summary, limits.max_bin_distance)


def _too_far(summary: ReplaySummary, limit: float | None) -> list[str]:
    if limit is None:
        return []
    if not summary.compared:
        return ["max_bin_distance was asked for, but the bag has no recorded action of the policy's length to compare"]
    mean = float(np.mean(list(summary.mean_bin_distance.values())))
    return (
        [f"the mean distance to the recorded action is {mean:.1f} bins, the limit is {limit:g}"] if mean > limit else []
    )


def _drops_in_words(summary: ReplaySummary) -> str:
    counts = [f"{count} {reason}" for reason, count in summary.drops.items() if count]
    details = [detail for detail in summary.drop_examples.values() if detail]
    return ", ".join(counts) + (f" (the first one: {details[0]})" if details else "")
