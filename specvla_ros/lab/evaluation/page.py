# SPDX-License-Identifier: Apache-2.0
"""The style shared by all reports: one HTML file, readable offline and on a phone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specvla_ros.lab.evaluation.paired import Rate
from specvla_ros.lab.files import format_value, replace_file
from specvla_ros.lab.tally import DecodeTally

if TYPE_CHECKING:  # a robot has no Plotly, which only plots need
    import plotly.graph_objects as go

# Okabe and Ito's colours, which colour-blind people can tell apart.
INK, GREY, BLUE, GREEN, AMBER, RED = "#1b1f24", "#999999", "#0072b2", "#009e73", "#e69f00", "#d55e00"
COLOURS = (BLUE, RED, GREEN, AMBER, "#56b4e9", "#cc79a7", INK, GREY)  # of curves, in order
UNITS = {"x": "m", "y": "m", "z": "m", "roll": "rad", "pitch": "rad", "yaw": "rad"}  # of an action's dimensions
TAU = "τ: tokens committed per verification forward (accept length + 1)."
_NUMBER = re.compile(r"[-+]?[0-9.]+%?")
_LONG_CELL = 40  # characters; longer cells are text, which may wrap
# Shadows at the sides of .scroll show that there is more: they are covered where the content ends.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1200px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; margin: .5rem 0; background:
  linear-gradient(to right, #fff 40%, #fff0) left / 3rem 100% local,
  linear-gradient(to left, #fff 40%, #fff0) right / 3rem 100% local,
  linear-gradient(to right, #0003, #0000) left / 1rem 100%, linear-gradient(to left, #0003, #0000) right / 1rem 100%;
  background-repeat: no-repeat; }
table { border-collapse: collapse; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
td { border-bottom: 1px solid #eceef0; font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 1px solid #c8ccd1; } .number { text-align: right; }
.wide { min-width: 560px; } .provenance td { text-align: left; }
td.text { white-space: normal; min-width: 10rem; overflow-wrap: anywhere; }
.answer, .notice { padding: .6rem 1rem; border-left: 5px solid #999; margin: 1rem 0; overflow-wrap: anywhere; }
.answer p { margin: 0; } .figure b { font-size: 2.1rem; line-height: 1.2; margin-right: .3rem; }
.passed { border-color: #009e73; background: #ebf7f3; } .passed b::before { content: "✓ "; }
.failed { border-color: #d55e00; background: #fdf0e8; } .failed b::before { content: "✗ "; }
.notice { border-color: #e69f00; background: #fdf6e7; }
.note { color: #59636e; overflow-wrap: anywhere; }
.scrubber { display: grid; grid-template-columns: 340px minmax(0, 1fr); gap: 1rem; margin: .5rem 0; }
.scrubber > :first-child { align-self: start; margin: 0; }
.scrubber img, .scrubber input { display: block; width: 100%; }
.scrubber video { width: 100%; }
@media (max-width: 760px) { .scrubber { grid-template-columns: minmax(0, 1fr); } }
"""
# Arrow keys step through the images or the film under the pointer; a touch on a plot scrolls the page.
_SCRIPT = """
const cursor = (plot, time) => Plotly.relayout(plot, {
  shapes: Object.keys(plot.layout).filter((name) => name.startsWith("xaxis")).map((name) => {
    const axis = name.slice("xaxis".length);
    return { type: "line", xref: "x" + axis, yref: `y${axis} domain`, x0: time, x1: time, y0: 0, y1: 1,
      line: { color: "#1b1f24", width: 1, dash: "dot" } };
  }) });
let current;
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, (event) => {
  current = event.target.closest(".scrubber") ?? current;
});
document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  current ??= document.querySelector(".scrubber");
  if (!by || !current || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  current.dispatchEvent(new CustomEvent("step", { detail: event.shiftKey ? 10 * by : by }));
});
addEventListener("load", () => {
  if (matchMedia("(pointer: coarse)").matches)
    for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(plot, { dragmode: false });
  for (const film of document.querySelectorAll(".film")) {
    const [video, plot] = [film.querySelector("video"), film.querySelector(".js-plotly-plot")];
    film.addEventListener("step", (event) => {
      video.pause();
      video.currentTime += event.detail * film.dataset.frame;
    });
    if (!plot) continue;
    video.addEventListener("timeupdate", () => cursor(plot, video.currentTime));
    plot.on("plotly_click", (data) => { video.currentTime = data.points[0].x; });
  }
});
"""


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Writes a page: a title in plain text, which is also its heading, and parts in HTML."""
    replace_file(path, html(title, parts))


def html(title: str, parts: Sequence[str]) -> str:
    """The page as text; Plotly is only in pages with plots."""
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    scripts = f"<script>{_SCRIPT}</script>"
    if "class='plot" in body:
        from plotly.offline import get_plotlyjs

        scripts = f"<script>{get_plotlyjs()}</script>{scripts}"
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{scripts}"
    )
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text, scrollable in narrow windows. Columns of numbers are right-aligned."""
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    numbers = [any(cells) and all(map(_NUMBER.fullmatch, filter(None, cells))) for cells in columns]
    lines = [_row("th", head, numbers)] if any(head) else []
    lines += [_row("td", row, numbers) for row in rows]
    return "<div class=scroll><table>" + "".join(lines) + "</table></div>"


def _row(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    tags = []
    for cell, number in zip(cells, numbers, strict=True):
        kind = " class=number" if number else " class=text" if len(cell) > _LONG_CELL else ""
        tags.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(tags)}</tr>"


def answer(kind: str, number: str, of: str, text: str, reasons: Sequence[str] = ()) -> str:
    """The answer to the command's question, at the top of a page: one number and what it counts, then a sentence.

    `kind`: passed, failed or empty. Reasons become a list under the sentence.
    """
    items = f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>" if reasons else ""
    return (
        f"<div class='answer {kind}'><p class=figure><b>{escape(number)}</b> {escape(of)}</p>"
        f"<p class=sentence>{escape(text)}</p>{items}</div>"
    )


def notice(text: str) -> str:
    """A box with what to know about all figures of a page, as HTML; empty without text."""
    return f"<p class=notice>{text}</p>" if text else ""


def cell(value: float | None, form: str) -> str:
    """A number formatted with `format`; None is an empty cell."""
    return "" if value is None else format(value, form)


def plot(drawn: "go.Figure", height: int, *, name: str | None = None, **layout: Any) -> str:
    """A zoomable plot; `height` in pixels, `name` its element's id, for scripts."""
    margin = dict(l=60, r=20, t=60, b=50)
    clear = dict(
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", modebar_bgcolor="rgba(0,0,0,0)"
    )  # shows the shadows of .scroll
    drawn.update_layout(template="plotly_white", colorway=COLOURS, height=height, margin=margin, **clear, **layout)
    # Do not clip markers on an axis.
    drawn.update_traces(cliponaxis=False, selector=lambda trace: trace.type in ("scatter", "bar"))
    options = {"displaylogo": False, "responsive": True}
    div: str = drawn.to_html(full_html=False, include_plotlyjs=False, config=options, div_id=name)
    wide = " wide" if len({axis.domain for axis in drawn.select_xaxes()}) > 1 else ""  # several beside each other
    return f"<div class=scroll><div class='plot{wide}'>{div}</div></div>"


def subplots(*shape: int, **layout: Any) -> "go.Figure":
    """A figure of several plots; takes the arguments of Plotly's make_subplots."""
    from plotly.subplots import make_subplots

    return make_subplots(*shape, **layout)


def heatmap(x: Sequence[str], y: Sequence[str], shares: Sequence[Sequence[float]], text: Any) -> "go.Figure":
    """Shares from 0 to 1 as shades of one colour, with a label in each cell."""
    import plotly.graph_objects as go

    shades = dict(colorscale=[[0, "#ffffff"], [1, BLUE]], zmin=0, zmax=1, showscale=False)
    return go.Figure(go.Heatmap(x=x, y=y, z=shares, text=text, texttemplate="%{text}", **shades))


def decoding(tally: DecodeTally) -> str:
    """Forwards, accept lengths, and the distance of relaxed tokens to the target's; empty for plain decoding."""
    if not tally.accepted:
        return ""
    accepted = sum(length * count for (_, length), count in tally.accepted.items()) / tally.accepted.total()
    row = (f"{tally.forwards_per_action:.2f}", f"{tally.tau:.2f}", f"{accepted:.2f}")
    parts = [
        "<h2>Decoding</h2>",
        table(("forwards per action", "tokens per verification forward (τ)", "accept length, mean"), [row]),
        _accept_lengths(tally) if any(length for _, length in tally.accepted) else "",
    ]
    if any(bins for _, bins in tally.bins_off):
        parts.append("<p class=note>Tokens that differ from the target's own choice, by their distance to it.</p>")
        parts.append(plot(_distance(tally), 300))
    return "".join(parts)


def _accept_lengths(tally: DecodeTally) -> str:
    positions = sorted({position for position, _ in tally.accepted})
    lengths = range(1 + max(length for _, length in tally.accepted))
    counts = np.array([[tally.accepted[position, length] for position in positions] for length in lengths])
    drawn = heatmap(
        [f"from token {position + 1}" for position in positions],
        [f"{length} accepted" for length in lengths],
        (counts / counts.sum(axis=0)).tolist(),
        [[count or "" for count in row] for row in counts.tolist()],
    )
    drawn.update_yaxes(automargin=True)
    return plot(drawn, 120 + 30 * len(lengths))


def _distance(tally: DecodeTally) -> "go.Figure":
    drawn = subplots()
    for position in sorted({position for position, _ in tally.bins_off}):
        counts = {bins: count for (at, bins), count in sorted(tally.bins_off.items()) if at == position}
        total = sum(counts.values())
        shares = [count / total for count in counts.values()]
        drawn.add_bar(x=list(counts), y=shares, name=f"token {position + 1}")
    drawn.update_xaxes(title_text="bins from the target's own choice")
    return drawn.update_yaxes(title_text="share of tokens")


def rate_trace(rates: Sequence[Rate]) -> dict[str, Any]:
    """The arguments of a Plotly trace for success rates with error bars."""
    above = [rate.interval[1] - rate.value for rate in rates]
    below = [rate.value - rate.interval[0] for rate in rates]
    return {"y": [rate.value for rate in rates], "error_y": dict(array=above, arrayminus=below)}


def emulation(device: Mapping[str, Any] | None) -> str:
    """The notice that times are a device's emulated ones; empty without a device."""
    if not device:
        return ""
    return notice(
        f"<b>Emulation</b> of {escape(device['name'])}: nothing ran on the device. Each engine stage counts for the "
        f"time in the device's table ({escape(device['source'])})."
    )


def noticed(found: str | None) -> str:
    """The notice of what was found, such as by `busy_machine`; empty if nothing was."""
    return notice(escape(found[0].upper() + found[1:] + ".")) if found else ""


def recording(name: str | None) -> str:
    """The section that names the recording next to the page; empty without one."""
    if not name:
        return ""
    what = "Camera, instruction, actions, latency by stage, drafted and accepted tokens over time"
    return f"<h2>Recording</h2><p>{what}: <code>rerun {escape(name)}</code>, next to this page.</p>"


def provenance(context: Mapping[str, Any]) -> str:
    """The section at the end of a page: the result's settings, inputs and software."""
    return f"<h2>Provenance</h2><div class=provenance>{table(('', ''), context_rows(context))}</div>"


def context_rows(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested values as table rows, without None."""
    rows: list[tuple[str, str]] = []
    for name, value in context.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{key}", text) for key, text in context_rows(value)]
        elif value is not None:
            rows.append((name, format_value(value)))
    return rows
