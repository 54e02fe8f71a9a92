"""The HTML report of a calibration."""

from html import escape
from pathlib import Path

import plotly.graph_objects as go

from specvla_ros.evaluation.calibration import Calibration, Candidate
from specvla_ros.evaluation.report.page import context_rows, figure, table, write_page

_BLUE, _GREY, _GREEN, _RED = "#3c7fb1", "#9aa3ad", "#2a8a4a", "#c0392b"
HEAD = ("setting", "ms", "speed-up", "forwards", "tau", "mm p95", "deg p95", "gripper", "success", "verdict")


def write_calibrate_report(path: Path, calibration: Calibration) -> None:
    """Writes the report."""
    chosen = calibration.chosen
    title = f"calibration of {Path(calibration.context['policy']['checkpoint']).name}"
    emulated = calibration.context.get("emulate")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='verdict emulated'><b>Emulation</b> of {escape(emulated['name'])}: no such device ran.</p>"
        if emulated
        else "",
        f"<p class='verdict passed'>Chosen: {escape(chosen.trial.name)}, {chosen.speed_up:.2f} times as fast as plain "
        f"decoding{escape(_success(chosen))}. It is in profile.yaml.</p>",
        "<h2>What was tried</h2>",
        figure(_plot(calibration)),
        table(HEAD, [row(each, calibration) for each in calibration.candidates]),
        "".join(f"<p class=note>{escape(name)}: {escape(why)}</p>" for name, why in calibration.refused.items()),
        "<h2>Limits</h2>",
        table(("", ""), context_rows(calibration.as_json()["limits"])),
        "<h2>Where this comes from</h2>",
        table(("", ""), context_rows(calibration.context)),
    ]
    write_page(path, title, parts)


def row(candidate: Candidate, calibration: Calibration) -> tuple[str, ...]:
    """One candidate's cells under HEAD."""
    found = candidate.deviation
    verdict = "chosen" if candidate.trial == calibration.chosen.trial else "; ".join(candidate.refusals)
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
        verdict,
    )


def _success(candidate: Candidate) -> str:
    return f", success {candidate.success} points against it" if candidate.pairs else ""


def _plot(calibration: Calibration) -> go.Figure:
    """Speed-up over deviation; what was refused is red."""
    drawn = go.Figure()
    groups: dict[str, list[Candidate]] = {}
    for each in calibration.candidates:
        chosen = each.trial == calibration.chosen.trial
        kind = "chosen" if chosen else "refused" if each.refusals else "exact" if not each.trial.tolerance else "tried"
        groups.setdefault(kind, []).append(each)
    colours = {"chosen": _GREEN, "refused": _RED, "exact": _GREY, "tried": _BLUE}
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
    drawn.update_yaxes(title_text="times as fast as plain decoding", rangemode="tozero")
    return drawn.update_layout(height=380, template="plotly_white", margin=dict(l=60, r=20, t=20, b=50))
