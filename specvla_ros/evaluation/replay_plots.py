"""The plots of a replay's report."""

from collections import Counter

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specvla_ros.evaluation.replay_summary import STAGES, ReplayColumns

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
