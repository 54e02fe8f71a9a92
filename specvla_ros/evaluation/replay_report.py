"""The HTML report of a replay: one file, readable without a network."""

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from specvla_ros.evaluation.replay_plots import action_plot, drop_plot, latency_plot, unit
from specvla_ros.evaluation.replay_summary import LATENCY_INTERVAL, RATE_INTERVAL, ReplayColumns, ReplaySummary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .2rem .9rem .2rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #c8ccd1; } td.number, th.number { text-align: right; }
td { border-bottom: 1px solid #eceef0; vertical-align: top; overflow-wrap: anywhere; }
.verdict { padding: .6rem 1rem; border-left: 5px solid; margin: 1rem 0; }
.passed { border-color: #2a8a4a; background: #eef8f1; } .failed { border-color: #c0392b; background: #fdf0ee; }
.note { color: #59636e; }
"""


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
        _table(("", "frames"), _frame_rows(summary)),
        *([_figure(drop_plot(columns))] if columns.dropped else []),
        "<h2>Latency</h2>",
        f"<p class=note>Measured {escape(LATENCY_INTERVAL)}</p>",
        _table(("stage", "p50 ms", "p95 ms", "p99 ms", "mean ms", "max ms"), _latency_rows(summary)),
        f"<p>{summary.action_rate_hz:.2f} {escape(RATE_INTERVAL)}.</p>",
        *([_figure(latency_plot(columns))] if columns.frame else []),
        "<h2>Actions</h2>",
        _comparison(summary),
        *([_figure(action_plot(columns))] if columns.frame else []),
        "<h2>Where this comes from</h2>",
        _table(("", ""), _context_rows(summary.context)),
    ]
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    body = "\n".join(parts)
    path.write_text(f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n", "utf-8")


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
    return f"<p class=note>{note}</p>" + _table(("dimension", "unit", "mean |error|", "mean bin distance"), rows)


def _context_rows(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in context.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{key}", text) for key, text in _context_rows(value)]
        elif value is not None:
            rows.append((name, str(value)))
    return rows


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; cells that are numbers are set flush right."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"] if any(head) else []
    for row in rows:
        cells = "".join(f"<td{' class=number' if _is_number(cell) else ''}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "".join(lines) + "</table>"


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).lstrip("-").isdigit()


def _figure(figure: go.Figure) -> str:
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return html
