"""The page of a replay: figures, limits, latencies and actions beside the recorded ones."""

from collections import Counter
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specvla_ros.evaluation.replay_summary import LATENCY_INTERVAL, RATE_INTERVAL, STAGES, ReplayColumns, ReplaySummary
from specvla_ros.evaluation.report.page import context_rows, figure, table, write_page

_UNITS = {"x": "m", "y": "m", "z": "m", "roll": "rad", "pitch": "rad", "yaw": "rad"}
_STAGE_COLOURS = dict(zip(STAGES, ("#9aa3ad", "#e1a03c", "#3c7fb1", "#58a371"), strict=True))
_DECODED, _RECORDED = "#3c7fb1", "#d1603d"
_LAYOUT = dict(template="plotly_white", margin=dict(l=60, r=20, t=50, b=50))
_COLUMNS = 2


def unit(name: str) -> str:
    """The unit of an action's dimension; empty: that of the training data."""
    return _UNITS.get(name, "")


def latency_plot(columns: ReplayColumns) -> go.Figure:
    """The stages stacked over the frames, and the histogram of their sum."""
    milliseconds = np.array(columns.latency_s) * 1e3
    figure = make_subplots(
        rows=1, cols=2, column_widths=[0.68, 0.32], subplot_titles=("each frame", "distribution of the total")
    )
    for place, stage in enumerate(STAGES, start=1):
        figure.add_scatter(
            x=columns.frame,
            y=milliseconds[:, place],
            name=stage,
            stackgroup="stages",
            line=dict(width=0.5, color=_STAGE_COLOURS[stage]),
            row=1,
            col=1,
        )
    figure.add_scatter(
        x=columns.frame, y=milliseconds[:, 0], name="total", line=dict(width=1, color="#1b1f24"), row=1, col=1
    )
    figure.add_histogram(x=milliseconds[:, 0], name="total", marker_color="#9aa3ad", showlegend=False, row=1, col=2)
    figure.update_xaxes(title_text="frame", row=1, col=1)
    figure.update_xaxes(title_text="latency [ms]", row=1, col=2)
    figure.update_yaxes(title_text="latency [ms]", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="frames", row=1, col=2)
    return figure.update_layout(height=380, **_LAYOUT)


def drop_plot(columns: ReplayColumns) -> go.Figure:
    """Dropped frames by reason, and where in the bag they were."""
    counts = Counter(reason.value for _, reason in columns.dropped)
    figure = make_subplots(rows=1, cols=2, column_widths=[0.32, 0.68], subplot_titles=("dropped frames", "which"))
    figure.add_bar(
        x=list(counts.values()), y=list(counts), orientation="h", marker_color=_RECORDED, showlegend=False, row=1, col=1
    )
    figure.add_scatter(
        x=[frame for frame, _ in columns.dropped],
        y=[reason.value for _, reason in columns.dropped],
        mode="markers",
        marker=dict(color=_RECORDED, symbol="x"),
        showlegend=False,
        row=1,
        col=2,
    )
    figure.update_xaxes(title_text="frames", row=1, col=1)
    figure.update_xaxes(title_text="frame", range=[-0.5, columns.frames - 0.5], row=1, col=2)
    return figure.update_layout(height=180 + 40 * len(counts), **_LAYOUT)


def action_plot(columns: ReplayColumns) -> go.Figure:
    """Each dimension over the bag's time, beside the recorded action where there is one."""
    values, recorded = np.array(columns.values), np.array(columns.recorded)
    rows = -(-len(columns.names) // _COLUMNS)
    titles = [f"{name} [{unit(name)}]" if unit(name) else name for name in columns.names]
    figure = make_subplots(rows=rows, cols=_COLUMNS, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.07)
    for place in range(len(columns.names)):
        where = dict(row=place // _COLUMNS + 1, col=place % _COLUMNS + 1)
        first = place == 0
        _add_line(figure, columns.time_s, values[:, place], "decoded", _DECODED, first, where)
        if columns.compared.any():
            _add_line(figure, columns.time_s, recorded[:, place], "recorded", _RECORDED, first, where)
    figure.update_xaxes(title_text="bag time [s]", row=rows)
    return figure.update_layout(height=80 + 190 * rows, legend=dict(orientation="h", y=1.06, x=0), **_LAYOUT)


def _add_line(
    figure: go.Figure, x: list[float], y: np.ndarray, name: str, colour: str, in_legend: bool, where: dict[str, int]
) -> None:
    # Single points are invisible as lines.
    mode = "lines+markers" if len(x) < 200 else "lines"
    figure.add_scatter(
        x=x,
        y=[None if np.isnan(value) else value for value in y.tolist()],
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        mode=mode,
        line=dict(width=1.3, color=colour),
        marker=dict(size=4),
        **where,
    )


def write_report(path: Path, summary: ReplaySummary, columns: ReplayColumns) -> None:
    """Writes the report.

    Args:
        path: of the HTML file.
        summary: of the replay.
        columns: the numbers of its frames.
    """
    title = f"Replay of {Path(summary.context['bag']['path']).name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=note>{escape(summary.context['policy']['checkpoint'])}, {escape(summary.context['started'])}</p>",
        _verdict(summary),
        "<h2>Frames</h2>",
        table(("", "frames"), _frame_rows(summary)),
        *([figure(drop_plot(columns))] if columns.dropped else []),
        "<h2>Latency</h2>",
        f"<p class=note>Measured {escape(LATENCY_INTERVAL)}</p>",
        table(("stage", "p50 ms", "p95 ms", "p99 ms", "mean ms", "max ms"), _latency_rows(summary)),
        f"<p>{summary.action_rate_hz:.2f} {escape(RATE_INTERVAL)}.</p>",
        *([figure(latency_plot(columns))] if columns.frame else []),
        "<h2>Actions</h2>",
        _comparison(summary),
        *([figure(action_plot(columns))] if columns.frame else []),
        "<h2>Where this comes from</h2>",
        table(("", ""), context_rows(summary.context)),
    ]
    write_page(path, title, parts)


def _verdict(summary: ReplaySummary) -> str:
    if not summary.failures:
        limits = [limit for limit in vars(summary.thresholds).values() if limit is not None]
        kept = "all limits kept" if limits else "no limits were set"
        return f"<p class='verdict passed'>The whole bag was replayed; {kept}.</p>"
    reasons = "".join(f"<li>{escape(failure)}</li>" for failure in summary.failures)
    return f"<div class='verdict failed'>The replay failed:<ul>{reasons}</ul></div>"


def _frame_rows(summary: ReplaySummary) -> list[tuple[str, str]]:
    rows = [
        ("in the bag", str(summary.frames_in_bag)),
        ("replayed", str(summary.frames)),
        ("with an action", str(summary.actions)),
    ]
    for reason, count in summary.drops.items():
        if count:
            example = summary.drop_examples.get(reason, "")
            rows.append((f"dropped: {reason}" + (f" (the first: {example})" if example else ""), str(count)))
    return rows


def _latency_rows(summary: ReplaySummary) -> list[tuple[str, ...]]:
    statistics = ("p50", "p95", "p99", "mean", "max")
    return [
        (stage, *(f"{seconds[name] * 1e3:.2f}" for name in statistics)) for stage, seconds in summary.latency_s.items()
    ]


def _comparison(summary: ReplaySummary) -> str:
    if not summary.compared:
        return "<p>The bag has no recorded action of the policy's length to compare with.</p>"
    rows = [
        (name, unit(name), f"{error:.5f}", f"{summary.mean_bin_distance[name]:.1f}")
        for name, error in summary.mean_abs_error.items()
    ]
    note = f"Means over {summary.compared} actions. A dimension has 256 bins over its range."
    return f"<p class=note>{note}</p>" + table(("dimension", "unit", "mean |error|", "mean bin distance"), rows)
