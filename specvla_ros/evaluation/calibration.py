"""What a calibration tried, measured and chose."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.evaluation.deviation import Deviation
from specvla_ros.evaluation.proportions import paired_difference
from specvla_ros.evaluation.simulate_summary import PairedComparison
from specvla_ros.evaluation.tolerance import Tolerance


@dataclass(frozen=True)
class Limits:
    """What the user allows, against plain decoding.

    Args:
        loss_points: success that may be lost [points]; the lower end of the paired 95 % interval must not go beyond.
        p95_mm: deviation of the displacement that 95 % of the actions keep.
        p95_deg: of the rotation.
        gripper_share: actions that may tell the gripper something else.

    Raises:
        UserError: one is negative.
    """

    loss_points: float = 2.0
    p95_mm: float = 5.0
    p95_deg: float = 3.0
    gripper_share: float = 0.01

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0:
                raise UserError(f"the limit {name} must be 0 or more, got {value}")


@dataclass(frozen=True)
class Trial:
    """One setting to try.

    Args:
        name: for tables and folders.
        tolerance: None: exact.
        engine: the setting.
    """

    name: str
    tolerance: Tolerance | None
    engine: EngineSettings


@dataclass(frozen=True)
class Candidate:
    """One setting with what was measured.

    Args:
        trial: the setting.
        action_s: mean seconds per action, see FrameRun.
        speed_up: of plain decoding on the same frames, over this.
        tau: tokens per verification forward.
        forwards_per_action: prefill included.
        deviation: from plain decoding on the same frames.
        pairs: success in simulation, paired with plain decoding; None: it did not act.
        refusals: limits that it does not keep.
    """

    trial: Trial
    action_s: float
    speed_up: float
    tau: float
    forwards_per_action: float
    deviation: Deviation
    pairs: PairedComparison | None = None
    refusals: tuple[str, ...] = ()

    def judged(self, limits: Limits, fastest_exact: "Candidate") -> "Candidate":
        """With what speaks against it on the frames."""
        found, reasons = self.deviation, []
        for text, value, limit in (
            ("{:.2g} mm off at p95, the limit is {:g}", found.p95_mm, limits.p95_mm),
            ("{:.2g} deg off at p95, the limit is {:g}", found.p95_deg, limits.p95_deg),
            ("the gripper differs in {:.2%}, the limit is {:.2%}", found.gripper_share, limits.gripper_share),
            ("no action for {:.2%} of the frames", found.lost_share, 0.0),
        ):
            if value > limit:
                reasons.append(text.format(value, limit))
        if self.speed_up <= fastest_exact.speed_up:
            reasons.append(f"no faster than {fastest_exact.trial.name}, which is exact")
        return replace(self, refusals=tuple(reasons))

    def with_success(self, pairs: PairedComparison, limits: Limits) -> "Candidate":
        """With its success, and what that speaks against it."""
        _, low, _ = paired_difference(pairs.only_first, pairs.only_second, pairs.first.n)
        reasons = self.refusals
        if 100 * low < -limits.loss_points:
            reasons += (f"it may lose {-100 * low:.1f} points of success, the limit is {limits.loss_points:g}",)
        return replace(self, pairs=pairs, refusals=reasons)

    @property
    def success(self) -> str:
        """For a table: the difference to plain decoding in points, with its interval; empty without episodes."""
        if self.pairs is None:
            return ""
        points = [
            100 * each for each in paired_difference(self.pairs.only_first, self.pairs.only_second, self.pairs.first.n)
        ]
        return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*points)

    def as_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "name": self.trial.name,
            "tolerance": str(self.trial.tolerance or "") or None,
            "draft": asdict(self.trial.engine.draft),
            "action_s": self.action_s,
            "speed_up": self.speed_up,
            "tau": self.tau,
            "forwards_per_action": self.forwards_per_action,
            "deviation": self.deviation.as_json(),
            "success_pairs": self.pairs.as_json() if self.pairs else None,
            "refusals": list(self.refusals),
        }


@dataclass(frozen=True)
class Calibration:
    """The result.

    Args:
        candidates: everything that was tried; the first is plain decoding.
        chosen: one of them.
        limits: that it keeps.
        refused: tolerances that do not fit the checkpoint, with the reason.
        context: what it was made with.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    limits: Limits
    refused: Mapping[str, str]
    context: Mapping[str, Any]

    @property
    def shortlist(self) -> tuple[Candidate, ...]:
        """Plain decoding, the fastest strict setting, and of each tolerance the one that was chosen or is fastest."""
        best: dict[Tolerance | None, Candidate] = {}
        for each in self.candidates[1:]:
            rival = best.get(each.trial.tolerance)
            if rival is None or self._rank(each) > self._rank(rival):
                best[each.trial.tolerance] = each
        return (self.candidates[0], *best.values())

    def _rank(self, candidate: Candidate) -> tuple[bool, bool, float]:
        return candidate.trial == self.chosen.trial, not candidate.refusals, candidate.speed_up

    def as_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "chosen": self.chosen.as_json(),
            "limits": asdict(self.limits),
            "candidates": [each.as_json() for each in self.candidates],
            "refused": dict(self.refused),
            "context": dict(self.context),
        }
