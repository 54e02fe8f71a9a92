# SPDX-License-Identifier: Apache-2.0
"""The pages of a replay of one or many bags: limits, latencies, and actions next to the recorded ones."""

import base64
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.replay_summary import (
    LATENCY_INTERVAL,
    RATE_INTERVAL,
    STAGES,
    BagRow,
    BagsSummary,
    FrameRecord,
    ReplayColumns,
    ReplaySummary,
)
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE

_STAGE_COLOURS = dict(zip(STAGES, (page.GREY, page.AMBER, page.BLUE, page.GREEN), strict=True))
_PLOT_COLUMNS = 2
_MAX_PICTURES = 300
_PICTURE_SIZE = (240, 240)  # pixels, maximum

# The slider, the image, the numbers and the line in the plots show the same frame.
_SCRUBBER = """
<script>
{
  const frames = JSON.parse(document.getElementById("frames").textContent);
  const [slider, image, caption, numbers, plot] =
    ["slider", "image", "caption", "numbers", "actions"].map((id) => document.getElementById(id));
  const names = JSON.parse(numbers.dataset.names);
  const cell = (row, text) => { row.insertCell().textContent = text; row.lastChild.className = "number"; };
  const show = (index) => {
    const frame = frames[index];
    slider.value = index;
    if (frame.image) image.src = "data:image/jpeg;base64," + frame.image;
    else image.removeAttribute("src");
    caption.textContent =
      `frame ${frame.frame}, ${frame.time.toFixed(2)} s: ` + (frame.instruction || "no instruction") +
      (frame.drop ? ` (dropped: ${frame.drop})` : "");
    numbers.tBodies[0].replaceChildren();
    names.forEach((name, dimension) => {
      const row = numbers.tBodies[0].insertRow();
      row.insertCell().textContent = name;
      for (const values of [frame.values, frame.recorded]) {
        const value = values && values[dimension];
        cell(row, typeof value === "number" ? value.toFixed(4) : "");
      }
    });
    if (plot) cursor(plot, frame.time);
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  slider.closest(".scrubber").addEventListener("step", (event) => {
    show(Math.min(Math.max(Number(slider.value) + event.detail, 0), frames.length - 1));
  });
  if (plot) for (const event of ["plotly_hover", "plotly_click"]) plot.on(event, (data) => {
    const distance = (frame) => Math.abs(frame.time - data.points[0].x);
    const nearest = frames.reduce((best, frame, index) => distance(frame) < distance(frames[best]) ? index : best, 0);
    if (nearest !== Number(slider.value)) show(nearest);
  });
  show(0);
}
</script>
"""


@dataclass
class Pictures:
    """Small camera images of a replay with instruction and action, evenly spaced over the bag."""

    frames: int
    start_ns: int  # bag time that counts as 0 s
    shown: list[dict[str, Any]] = field(default_factory=list)

    def add(self, record: FrameRecord, image: np.ndarray | None) -> None:
        """Keeps the frame if it is among those shown; image: RGB uint8 [height, width, 3], None if unreadable."""
        if record.frame % max(1, -(-self.frames // _MAX_PICTURES)):
            return
        shown = {name: getattr(record, name) for name in ("frame", "instruction", "values", "recorded")}
        shown |= {"time": (record.time_ns - self.start_ns) * 1e-9, "drop": record.drop and record.drop["reason"]}
        self.shown.append(shown | {"image": None if image is None else _jpeg(image)})


def _jpeg(image: np.ndarray) -> str:
    small, stream = Image.fromarray(image), io.BytesIO()
    small.thumbnail(_PICTURE_SIZE)
    small.save(stream, "JPEG", quality=70)
    return base64.b64encode(stream.getvalue()).decode()


def write_replay_report(path: Path, summary: ReplaySummary, columns: ReplayColumns, pictures: Pictures) -> None:
    """Writes the page of one bag."""
    parts = [
        _answer(summary, summary.failures, "The whole bag was replayed"),
        _checkpoint(summary),
        page.noticed(summary.context.get("refused_states")),
        page.noticed(summary.context.get("busy")),
        "<h2>Frames</h2>",
        page.table(("", "frames"), _frame_rows(summary)),
        _drop_plot(columns) if columns.dropped else "",
        "<h2>Latency</h2>",
        _latency(summary),
        _latency_plot(columns) if columns.frame else "",
        page.decoding(summary.decode),
        "<h2>Actions</h2>",
        _comparison(summary),
        _actions(columns, pictures),
        page.recording(summary.context.get("recording")),
        page.provenance(summary.context),
    ]
    page.write_page(path, f"Replay of {Path(summary.context['bag']['path']).name}", parts)


def _checkpoint(summary: ReplaySummary) -> str:
    return f"<p class=note>{escape(summary.context['policy']['checkpoint'])}, {escape(summary.context['date'])}</p>"


def _answer(summary: ReplaySummary, failures: Sequence[str], whole: str) -> str:
    answered = f"{summary.actions} of {summary.frames} frames got an action"
    number, of = str(summary.actions), f"actions from {summary.frames} frames"
    if summary.latency_s:
        number, of = f"{summary.latency_s['total']['p95'] * 1e3:.0f} ms", "from image to action, 95th percentile"
    if failures:
        return page.answer("failed", number, of, f"{answered}. The replay failed:", failures)
    limited = any(limit is not None for limit in vars(summary.thresholds).values())
    kept = "all limits kept" if limited else "no limits were set"
    return page.answer("passed", number, of, f"{whole}; {kept}. {answered}.")


def _frame_rows(summary: ReplaySummary) -> list[tuple[str, str]]:
    frames = {"in the bag": summary.frames_in_bag, "replayed": summary.frames, "with an action": summary.actions}
    rows = [(name, str(count)) for name, count in frames.items()]
    for reason, count in summary.drops.items():
        if count:
            example = summary.drop_examples.get(reason, "")
            rows.append((f"dropped: {reason}" + (f" (the first: {example})" if example else ""), str(count)))
    return rows


def _latency(summary: ReplaySummary) -> str:
    statistics = ("p50", "p95", "p99", "mean", "max")
    rows = [
        (stage, *(f"{seconds[name] * 1e3:.2f}" for name in statistics)) for stage, seconds in summary.latency_s.items()
    ]
    return (
        f"<p class=note>Measured {escape(LATENCY_INTERVAL)}</p>"
        + page.table(("stage", *(f"{name} ms" for name in statistics)), rows)
        + f"<p>{summary.action_rate_hz:.2f} {escape(RATE_INTERVAL)}.</p>"
    )


def _comparison(summary: ReplaySummary) -> str:
    """The table comparing the actions with the recorded ones, or the reason for its absence."""
    if not summary.compared:
        return "<p>The bag has no recorded action of the policy's length to compare with.</p>"
    rows = [
        (name, page.UNITS.get(name, ""), f"{error:.5f}", page.cell(summary.mean_bin_distance.get(name), ".1f"))
        for name, error in summary.mean_abs_error.items()
    ]
    note = f"Means over {summary.compared} actions. A dimension has 256 bins over its range."
    return f"<p class=note>{note}</p>" + page.table(("dimension", "unit", "mean |error|", "mean bin distance"), rows)


def _actions(columns: ReplayColumns, pictures: Pictures) -> str:
    drawn = _action_plot(columns) if columns.frame else ""
    if not pictures.shown:
        return drawn
    # Text from a bag must not end the script element.
    frames, names = (json.dumps(each).replace("<", "\\u003c") for each in (pictures.shown, columns.names))
    shown = len(pictures.shown)
    note = (
        f"Images of {shown} of {columns.frames} frames. Press ← or → (with Shift: ten frames), move the slider, or the "
        "pointer over the plots."
    )
    return (
        f"<p class=note>{note}</p><div class=scrubber><div><img id=image alt='camera image'>"
        f"<input id=slider type=range min=0 max={shown - 1} value=0 aria-label=frame><p id=caption></p>"
        f"<table id=numbers data-names='{escape(names)}'><thead><tr><th><th>decoded<th>recorded</thead><tbody></tbody>"
        f"</table></div><div>{drawn}</div></div><script id=frames type='application/json'>{frames}</script>{_SCRUBBER}"
    )


def _drop_plot(columns: ReplayColumns) -> str:
    counts = Counter(reason.value for _, reason in columns.dropped)
    drawn = page.subplots(cols=2, column_widths=[0.32, 0.68], subplot_titles=("dropped frames", "by frame"))
    drawn.add_bar(x=list(counts.values()), y=list(counts), orientation="h", marker_color=page.RED, row=1, col=1)
    frames, reasons = zip(*((frame, reason.value) for frame, reason in columns.dropped), strict=True)
    drawn.add_scatter(x=frames, y=reasons, mode="markers", marker=dict(color=page.RED, symbol="x"), row=1, col=2)
    drawn.update_xaxes(title_text="frames", col=1)
    drawn.update_xaxes(title_text="frame", range=[-0.5, columns.frames - 0.5], col=2)
    drawn.update_yaxes(automargin=True)
    return page.plot(drawn, 180 + 40 * len(counts), showlegend=False)


def _latency_plot(columns: ReplayColumns) -> str:
    total_ms, *stages_ms = np.array(columns.latency_s).T * 1e3
    drawn = page.subplots(cols=2, column_widths=[0.68, 0.32], subplot_titles=("by frame", "distribution of the total"))
    for stage, milliseconds in zip(STAGES, stages_ms, strict=True):
        line = dict(width=0.5, color=_STAGE_COLOURS[stage])
        drawn.add_scatter(x=columns.frame, y=milliseconds, name=stage, stackgroup="stages", line=line, row=1, col=1)
    drawn.add_scatter(x=columns.frame, y=total_ms, name="total", line=dict(width=1, color=page.INK), row=1, col=1)
    drawn.add_histogram(x=total_ms, name="total", marker_color=page.GREY, showlegend=False, row=1, col=2)
    drawn.update_xaxes(title_text="frame", col=1)
    drawn.update_xaxes(title_text="latency [ms]", col=2)
    drawn.update_yaxes(title_text="latency [ms]", rangemode="tozero", col=1)
    drawn.update_yaxes(title_text="frames", col=2)
    return page.plot(drawn, 380)


def _action_plot(columns: ReplayColumns) -> str:
    """Plots each dimension over bag time, decoded and recorded."""
    series = [("decoded", page.BLUE, np.array(columns.values))]
    if columns.compared.any():
        series.append(("recorded", page.RED, np.array(columns.recorded)))
    rows = -(-len(columns.names) // _PLOT_COLUMNS)
    titles = [f"{name} [{page.UNITS[name]}]" if name in page.UNITS else name for name in columns.names]
    drawn = page.subplots(rows, _PLOT_COLUMNS, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.07)
    mode = "lines+markers" if len(columns.frame) < 200 else "lines"  # a single point is invisible as a line
    for dimension in range(len(columns.names)):
        row, col = divmod(dimension, _PLOT_COLUMNS)
        for name, colour, values in series:
            drawn.add_scatter(
                x=columns.time_s,
                y=[None if np.isnan(value) else value for value in values[:, dimension].tolist()],
                name=name,
                legendgroup=name,
                showlegend=dimension == 0,
                mode=mode,
                line=dict(width=1.3, color=colour),
                marker=dict(size=4),
                row=row + 1,
                col=col + 1,
            )
    drawn.update_xaxes(title_text="bag time [s]", row=rows)
    drawn.update_yaxes(exponentformat="power")
    return page.plot(drawn, 80 + 190 * rows, name="actions", legend=dict(orientation="h", y=1.06, x=0))


BAGS_HEAD = ("bag", "frames", "actions", "p50 ms", "p95 ms", "actions/s", "bin distance", "replay")


def write_bags_report(path: Path, summary: BagsSummary) -> None:
    """Writes the page of many bags."""
    total = summary.total
    parts = [
        _answer(total, summary.failures, f"All {len(summary.rows)} bags were replayed completely"),
        _checkpoint(total),
        "<h2>Bags</h2>",
        page.noticed(total.context.get("refused_states")),
        page.table(BAGS_HEAD, [bag_cells(row) for row in summary.rows]),
        _links(path.parent, summary),
        _bags_plot(summary) if total.actions else "",
        "<h2>Frames of all bags</h2>",
        page.table(("", "frames"), _frame_rows(total)),
        "<h2>Latency over all bags</h2>",
        _latency(total),
        page.decoding(total.decode),
        "<h2>Actions compared with the recorded ones</h2>",
        _comparison(total),
        page.provenance(total.context),
    ]
    page.write_page(path, f"Replay of {len(summary.rows)} bags", parts)


def bag_cells(row: BagRow) -> tuple[str, ...]:
    """A bag's table cells, in the order of BAGS_HEAD."""
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
        "complete" if row.passed else "failed",
    )


def _links(directory: Path, summary: BagsSummary) -> str:
    there = [row.name for row in summary.rows if (directory / row.name / REPORT_FILE).exists()]
    pages = ", ".join(f"<a href='{quote(name)}/{REPORT_FILE}'>{escape(name)}</a>" for name in there)
    text = f"<p>Reports of single bags: {pages}.</p>" if pages else ""
    beside = ", ".join(map(escape, summary.left_out))
    return text + (f"<p class=note>Left out: {beside}.</p>" if beside else "")


def _bags_plot(summary: BagsSummary) -> str:
    rows = [(row.name, row.summary) for row in summary.rows if row.summary is not None and row.summary.actions]
    names = [name for name, _ in rows]
    drawn = page.subplots(2, 1, subplot_titles=("latency: p50 and p95", "frames without an action"), shared_xaxes=True)
    for statistic, colour in (("p50", page.GREY), ("p95", page.BLUE)):
        latency_ms = [found.latency_s["total"][statistic] * 1e3 for _, found in rows]
        drawn.add_bar(x=names, y=latency_ms, name=statistic, marker_color=colour, row=1, col=1)
    dropped = [found.frames - found.actions for _, found in rows]
    drawn.add_bar(x=names, y=dropped, name="no action", marker_color=page.RED, row=2, col=1)
    drawn.update_yaxes(title_text="latency [ms]", rangemode="tozero", row=1)
    drawn.update_yaxes(title_text="frames", rangemode="tozero", row=2)
    return page.plot(drawn.update_xaxes(automargin=True), 520)
