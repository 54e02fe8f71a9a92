# SPDX-License-Identifier: Apache-2.0
"""What a calibration measures of each setting, the limits that decide between them, and the page that shows it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import percentiles
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.page import (
    BLUE,
    GREEN,
    GREY,
    RED,
    context_rows,
    emulation,
    plot,
    provenance,
    table,
    write_page,
)
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.plans import Limits
from specvla_ros.speculation.settings import Tolerance

_ACTION_DIM = 7
_OPEN = 0.5  # a gripper value beyond is one command, below it the other


@dataclass(frozen=True)
class Deviation:
    """How far one setting's actions are from another's, over frames."""

    p95_mm: float = 0.0  # distance between the two displacements
    largest_mm: float = 0.0
    p95_deg: float = 0.0  # length of the difference of roll, pitch, yaw
    largest_deg: float = 0.0
    gripper_share: float = 0.0  # share of frames with another gripper command
    lost_share: float = 0.0  # share of frames for which one of the two had no action


def deviation(plain: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Deviation:
    """The deviation of actions, frame by frame: float64 [7] in metres, radians, gripper in [0, 1]; NaN: no action."""
    first, second = np.array(plain), np.array(other)
    if first.shape[1] != _ACTION_DIM:
        raise UserError(
            f"the policy's actions have {first.shape[1]} values: their deviation in mm and degrees is not known, only "
            "that of x y z roll pitch yaw gripper"
        )
    both = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    if not both.any():
        return Deviation(lost_share=1.0)
    difference = (second - first)[both]
    mm = 1e3 * np.linalg.norm(difference[:, :3], axis=1)
    degrees = np.degrees(np.linalg.norm(difference[:, 3:6], axis=1))
    flipped = (first[both, 6] > _OPEN) != (second[both, 6] > _OPEN)
    return Deviation(
        p95_mm=percentiles(mm)["p95"],
        largest_mm=float(mm.max()),
        p95_deg=percentiles(degrees)["p95"],
        largest_deg=float(degrees.max()),
        gripper_share=float(flipped.mean()),
        lost_share=float(1 - both.mean()),
    )


@dataclass(frozen=True)
class Trial:
    """One setting to try."""

    name: str
    tolerance: Tolerance | None  # of the acceptance; None: exact
    engine: EngineSettings


@dataclass(frozen=True)
class Candidate:
    """One setting with what was measured."""

    trial: Trial
    action_s: float  # mean seconds per action, see FrameRun
    speed_up: float  # of plain decoding on the same frames, over this
    tau: float  # tokens committed per verification forward
    forwards_per_action: float  # prefill included
    deviation: Deviation  # from plain decoding on the same frames
    pairs: PairedComparison | None = None  # success in simulation, paired with plain decoding; None: not simulated
    refusals: tuple[str, ...] = ()  # the limits that it breaks, in words

    def judged(self, limits: Limits, fastest_exact: "Candidate") -> "Candidate":
        """With the limits that it breaks on the frames; what is exact breaks none."""
        if self.trial.tolerance is None:
            return self
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
        """With its success, and the limit on it if it is broken."""
        _, low, _ = pairs.points
        reasons = self.refusals
        if low < -limits.loss_points:
            reasons += (f"it may lose {-low:.1f} points of success, the limit is {limits.loss_points:g}",)
        return replace(self, pairs=pairs, refusals=reasons)

    @property
    def success(self) -> str:
        """For a table: the difference to plain decoding in points, with its interval; empty without episodes."""
        return str(self.pairs or "")

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


def best_by_tolerance(
    candidates: Iterable[Candidate], chosen: Trial | None = None
) -> dict[Tolerance | None, Candidate]:
    """Of each tolerance the candidate that was chosen, or the fastest that keeps the limits, or else the fastest."""
    best: dict[Tolerance | None, Candidate] = {}
    for candidate in candidates:
        rivals = best.get(candidate.trial.tolerance, candidate), candidate
        best[candidate.trial.tolerance] = max(
            rivals, key=lambda rival: (rival.trial == chosen, not rival.refusals, rival.speed_up)
        )
    return best


@dataclass(frozen=True)
class Calibration:
    """The result."""

    candidates: tuple[Candidate, ...]  # everything that was tried; the first is plain decoding
    chosen: Candidate
    limits: Limits
    refused: Mapping[str, str]  # tolerances that do not fit the checkpoint, with the reason
    context: Mapping[str, Any]

    @property
    def shortlist(self) -> tuple[Candidate, ...]:
        """Plain decoding, the fastest strict setting, and of each tolerance the one that was chosen or is fastest."""
        return (self.candidates[0], *best_by_tolerance(self.candidates[1:], self.chosen.trial).values())

    def as_json(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen.as_json(),
            "limits": asdict(self.limits),
            "candidates": [each.as_json() for each in self.candidates],
            "refused": dict(self.refused),
            "context": dict(self.context),
        }


_TAU = "τ: tokens committed per verification forward (accept length + 1)."


CALIBRATION_HEAD = ("setting", "ms", "speed-up", "forwards", "τ", "mm p95", "deg p95", "gripper", "success", "verdict")


def write_calibration_report(path: Path, calibration: Calibration) -> None:
    """Writes the page of a calibration."""
    chosen = calibration.chosen
    success = f", success {chosen.success} points against it" if chosen.pairs else ""
    parts = [
        emulation(calibration.context.get("emulate")),
        f"<p class='verdict passed'>Chosen: {escape(chosen.trial.name)}, {chosen.speed_up:.2f} times as fast as plain "
        f"decoding{escape(success)}. It is in profile.yaml.</p>",
        "<h2>Settings tried</h2>",
        plot(_calibration_plot(calibration), 380),
        table(CALIBRATION_HEAD, [calibration_row(each, calibration) for each in calibration.candidates]),
        f"<p class=note>Success: the difference to plain decoding in points, with its 95 % interval. {_TAU}</p>",
        *(f"<p class=note>{escape(name)}: {escape(why)}</p>" for name, why in calibration.refused.items()),
        "<h2>Limits</h2>",
        table(("", ""), context_rows(calibration.as_json()["limits"])),
        provenance(calibration.context),
    ]
    write_page(path, f"Calibration of {Path(calibration.context['policy']['checkpoint']).name}", parts)


def calibration_row(candidate: Candidate, calibration: Calibration) -> tuple[str, ...]:
    """A candidate's cells under CALIBRATION_HEAD."""
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
        candidate.success,
        "chosen" if candidate.trial == calibration.chosen.trial else "; ".join(candidate.refusals),
    )


def _calibration_plot(calibration: Calibration) -> go.Figure:
    drawn = go.Figure()
    groups: dict[str, list[Candidate]] = {}
    for candidate in calibration.candidates:
        chosen = candidate.trial == calibration.chosen.trial
        tried = "tried" if candidate.trial.tolerance else "exact"
        groups.setdefault("chosen" if chosen else "refused" if candidate.refusals else tried, []).append(candidate)
    colours = {"chosen": GREEN, "refused": RED, "exact": GREY, "tried": BLUE}
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
