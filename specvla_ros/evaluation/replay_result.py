"""How one frame of a replay ended, and its line in frames.jsonl."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.evaluation.replay_frames import BagFrame
from specvla_ros.models.policy import Policy


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


def compare(policy: Policy, action: Action, recorded: tuple[float, ...] | None) -> Comparison | None:
    """An action beside the recorded one; None when that is missing, not finite, or of another length."""
    if recorded is None or len(recorded) != policy.action_dim or not all(map(math.isfinite, recorded)):
        return None
    wanted = np.asarray(recorded, dtype=np.float64)
    tokens = policy.action_tokenizer.encode(policy.statistics.normalise(wanted))
    return Comparison(wanted, action.values - wanted, np.abs(tokens - np.asarray(action.tokens)))


def _numbers(values: tuple[float, ...] | None) -> list[float | None] | None:
    # JSON has no NaN.
    return None if values is None else [value if math.isfinite(value) else None for value in values]
