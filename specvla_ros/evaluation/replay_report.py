"""The HTML report of a replay."""

from html import escape
from pathlib import Path

from specvla_ros.evaluation.replay_plots import action_plot, drop_plot, latency_plot, unit
from specvla_ros.evaluation.replay_summary import LATENCY_INTERVAL, RATE_INTERVAL, ReplayColumns, ReplaySummary
from specvla_ros.evaluation.report_page import context_rows, figure, table, write_page


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
