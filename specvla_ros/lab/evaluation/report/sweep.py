# SPDX-License-Identifier: Apache-2.0
"""The pages that compare settings: of a sweep (Spec-VLA's tables 1 to 3 and its figure 4), and of a calibration."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specvla_ros.lab.evaluation.calibration import Calibration, Candidate
from specvla_ros.lab.evaluation.report.page import (
    BLUE,
    GREEN,
    GREY,
    RED,
    context_rows,
    emulation,
    plot,
    provenance,
    rate_trace,
    table,
    write_page,
)
from specvla_ros.lab.evaluation.simulate_summary import SweepRow

_TAU = "τ: tokens committed per verification forward (accept length + 1)."


def write_sweep_report(path: Path, rows: Sequence[SweepRow]) -> None:
    """Writes the page of a sweep; the first row is what the others are compared with."""
    lengths = range(1 + max((length for row in rows[1:] for length in row.summary.decode.by_length()), default=0))
    positions = sorted({position for row in rows[1:] for position in row.summary.decode.by_place()})
    parts = [
        "<h2>Success, forwards and speed</h2>",
        table(
            ("", "success", "difference", "forwards per action", "τ", "ms", "speed-up"),
            [_sweep_row(row, first=row is rows[0]) for row in rows],
        ),
        "<p class=note>The difference to the first row is paired, in points, with a 95 % interval (Agresti and Min). "
        f"Times were taken on the same frames, the settings taking turns. {_TAU}</p>",
        plot(_sweep_plot(rows), 380, showlegend=False),
        "<h2>Verification forwards by accept length</h2>",
        table(("", *map(str, lengths)), [_shares(row, lengths) for row in rows[1:]]),
        "<h2>Mean accept length by the first drafted token</h2>",
        table(("", *(str(position + 1) for position in positions)), [_means(row, positions) for row in rows[1:]]),
        provenance(rows[0].summary.context),
    ]
    write_page(path, f"{len(rows)} settings on the same {rows[0].summary.success.n} episodes", parts)


def _sweep_row(row: SweepRow, *, first: bool) -> tuple[str, ...]:
    tally = row.summary.decode
    return (
        row.setting.name,
        str(row.summary.success),
        "" if first else str(row.against_first),
        f"{tally.forwards_per_action:.2f}",
        f"{tally.tau:.2f}",
        f"{row.action_s * 1e3:.1f}",
        f"{row.speed_up:.2f}",
    )


def _sweep_plot(rows: Sequence[SweepRow]) -> go.Figure:
    names = [row.setting.name for row in rows]
    drawn = make_subplots(cols=2, subplot_titles=("success", f"times as fast as {names[0]}"))
    drawn.add_scatter(
        x=names,
        **rate_trace([row.summary.success for row in rows]),
        mode="lines+markers",
        marker=dict(color=BLUE, size=9),
        row=1,
        col=1,
    )
    drawn.add_bar(x=names, y=[row.speed_up for row in rows], marker_color=GREY, row=1, col=2)
    drawn.update_yaxes(range=[0, 1.02], tickformat=".0%", col=1)
    return drawn.update_yaxes(rangemode="tozero", col=2)


def _shares(row: SweepRow, lengths: range) -> tuple[str, ...]:
    shares = row.summary.decode.by_length()
    return row.setting.name, *(f"{shares.get(length, 0):.0%}" for length in lengths)


def _means(row: SweepRow, positions: Sequence[int]) -> tuple[str, ...]:
    means = row.summary.decode.by_place()
    return row.setting.name, *(f"{means[position]:.2f}" if position in means else "" for position in positions)


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
    """Speed-up over deviation."""
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
