# SPDX-License-Identifier: Apache-2.0
"""The page of a replay of many bags: all of them together, and a row of each."""

from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from specvla_ros.lab.evaluation.replay_summary import LATENCY_INTERVAL, RATE_INTERVAL, BagRow, BagsSummary
from specvla_ros.lab.evaluation.report.page import BLUE, GREY, RED, plot, provenance, subplots, table, write_page
from specvla_ros.lab.evaluation.report.replay import comparison, frame_rows, latency_rows
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE

BAGS_HEAD = ("bag", "frames", "actions", "p50 ms", "p95 ms", "actions/s", "bins off", "replay")


def write_bags_report(path: Path, summary: BagsSummary) -> None:
    """Writes the page."""
    total = summary.total
    parts = [
        f"<p class=note>{escape(total.context['policy']['checkpoint'])}, {escape(total.context['date'])}</p>",
        _verdict(summary),
        "<h2>Bags</h2>",
        table(BAGS_HEAD, [bag_cells(row) for row in summary.rows]),
        _links(path.parent, summary),
        _bags_plot(summary) if total.actions else "",
        "<h2>Frames of all bags</h2>",
        table(("", "frames"), frame_rows(total)),
        "<h2>Latency over all bags</h2>",
        f"<p class=note>Measured {escape(LATENCY_INTERVAL)}</p>",
        table(("stage", "p50 ms", "p95 ms", "p99 ms", "mean ms", "max ms"), latency_rows(total)),
        f"<p>{total.action_rate_hz:.2f} {escape(RATE_INTERVAL)}.</p>",
        "<h2>Actions beside the recorded ones</h2>",
        comparison(total),
        provenance(total.context),
    ]
    write_page(path, f"Replay of {len(summary.rows)} bags", parts)


def _verdict(summary: BagsSummary) -> str:
    if summary.failures:
        reasons = "".join(f"<li>{escape(failure)}</li>" for failure in summary.failures)
        return f"<div class='verdict failed'>The replay failed:<ul>{reasons}</ul></div>"
    limits = [limit for limit in vars(summary.total.thresholds).values() if limit is not None]
    kept = "all limits kept" if limits else "no limits were set"
    return f"<p class='verdict passed'>All of {len(summary.rows)} bags were replayed as a whole; {kept}.</p>"


def bag_cells(row: BagRow) -> tuple[str, ...]:
    """A bag's cells under BAGS_HEAD."""
    found = row.summary
    if found is None:
        return (row.name, *[""] * (len(BAGS_HEAD) - 2), "failed")
    latency = found.latency_s.get("total", {})
    bins = [*found.mean_bin_distance.values()]
    return (
        row.name,
        str(found.frames),
        str(found.actions),
        *(f"{latency[each] * 1e3:.2f}" if latency else "" for each in ("p50", "p95")),
        f"{found.action_rate_hz:.2f}" if found.actions else "",
        f"{np.mean(bins):.1f}" if bins else "",
        "passed" if row.passed else "failed",
    )


def _links(directory: Path, summary: BagsSummary) -> str:
    """To the pages of the bags, and what else lay beside them."""
    there = [row.name for row in summary.rows if (directory / row.name / REPORT_FILE).exists()]
    pages = ", ".join(f"<a href='{quote(name)}/{REPORT_FILE}'>{escape(name)}</a>" for name in there)
    beside = ", ".join(map(escape, summary.left_out))
    return (f"<p>Reports of single bags: {pages}.</p>" if pages else "") + (
        f"<p class=note>Beside the bags, and no bags: {beside}.</p>" if beside else ""
    )


def _bags_plot(summary: BagsSummary) -> str:
    """Latency and distance to the recorded actions, bag by bag."""
    rows = [(row.name, row.summary) for row in summary.rows if row.summary is not None and row.summary.actions]
    names = [name for name, _ in rows]
    drawn = subplots(2, 1, subplot_titles=("latency: p50 and p95", "frames without an action"), shared_xaxes=True)
    for statistic, colour in (("p50", GREY), ("p95", BLUE)):
        latency_ms = [found.latency_s["total"][statistic] * 1e3 for _, found in rows]
        drawn.add_bar(x=names, y=latency_ms, name=statistic, marker_color=colour, row=1, col=1)
    dropped = [found.frames - found.actions for _, found in rows]
    drawn.add_bar(x=names, y=dropped, name="no action", marker_color=RED, row=2, col=1)
    drawn.update_yaxes(title_text="latency [ms]", rangemode="tozero", row=1)
    drawn.update_yaxes(title_text="frames", rangemode="tozero", row=2)
    return plot(drawn.update_xaxes(automargin=True), 520)
