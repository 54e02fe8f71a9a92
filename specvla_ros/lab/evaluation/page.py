# SPDX-License-Identifier: Apache-2.0
"""The style shared by all reports: one HTML file, readable offline and on a phone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specvla_ros.lab.evaluation.paired import Rate
from specvla_ros.lab.files import replace_file
from specvla_ros.lab.tally import DecodeTally

if TYPE_CHECKING:  # a robot has no Plotly, which only plots need
    import plotly.graph_objects as go

INK, GREY, BLUE, GREEN, AMBER, RED = "#1b1f24", "#9aa3ad", "#3c7fb1", "#58a371", "#e1a03c", "#c9512f"
TAU = "τ: tokens committed per verification forward (accept length + 1)."
_NUMBER = re.compile(r"[-+]?[0-9.]+%?")
_LONG_CELL = 40  # characters; longer cells are text, which may wrap
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; margin: .5rem 0; } table { border-collapse: collapse; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; white-space: nowrap; }
td { border-bottom: 1px solid #eceef0; font-variant-numeric: tabular-nums; }
th { font-weight: 600; border-bottom: 1px solid #c8ccd1; } .number { text-align: right; }
.plot { min-width: 560px; } .provenance td { text-align: left; }
td.text { white-space: normal; min-width: 10rem; overflow-wrap: anywhere; }
.verdict { padding: .6rem 1rem; border-left: 5px solid #9aa3ad; margin: 1rem 0; overflow-wrap: anywhere; }
.passed { border-color: #2a8a4a; background: #eef8f1; } .failed { border-color: #c0392b; background: #fdf0ee; }
.emulated { border-color: #c98a1b; background: #fdf6e7; }
.note { color: #59636e; overflow-wrap: anywhere; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } figure video { max-width: min(340px, 100%); }
"""


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Writes a page: a title in plain text, which is also its heading, and parts in HTML."""
    from plotly.offline import get_plotlyjs

    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    replace_file(path, f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text, scrollable in narrow windows. Columns of numbers are right-aligned."""
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    numbers = [any(cells) and all(map(_NUMBER.fullmatch, filter(None, cells))) for cells in columns]
    lines = [_row("th", head, numbers)] if any(head) else []
    lines += [_row("td", row, numbers) for row in rows]
    return "<div class=scroll><table>" + "".join(lines) + "</table></div>"


def _row(tag: str, cells: Sequence[str], numbers: Sequence[bool]) -> str:
    html = []
    for cell, number in zip(cells, numbers, strict=True):
        kind = " class=number" if number else " class=text" if len(cell) > _LONG_CELL else ""
        html.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(html)}</tr>"


def verdict(kind: str, text: str, reasons: Sequence[str] = ()) -> str:
    """The box at the top of a page; `kind`: passed, failed or empty. Reasons become a list under the text."""
    if not reasons:
        return f"<p class='verdict {kind}'>{escape(text)}</p>"
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"<div class='verdict {kind}'>{escape(text)}<ul>{items}</ul></div>"


def cell(value: float | None, form: str) -> str:
    """A number formatted with `format`; None is an empty cell."""
    return "" if value is None else format(value, form)


def plot(drawn: "go.Figure", height: int, *, name: str | None = None, **layout: Any) -> str:
    """A zoomable plot; `height` in pixels, `name` its element's id, for scripts."""
    margin = dict(l=60, r=20, t=60, b=50)
    drawn.update_layout(template="plotly_white", height=height, margin=margin, **layout)
    # Do not clip markers on an axis.
    drawn.update_traces(cliponaxis=False, selector=lambda trace: trace.type in ("scatter", "bar"))
    options = {"displaylogo": False, "responsive": True}
    html: str = drawn.to_html(full_html=False, include_plotlyjs=False, config=options, div_id=name)
    return f"<div class=scroll><div class=plot>{html}</div></div>"


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
    return (
        f"<p class='verdict emulated'><b>Emulation</b> of {escape(device['name'])}: nothing ran on the device. Each "
        f"engine stage counts for the time in the device's table ({escape(device['source'])}).</p>"
    )


def busy(machine: str | None) -> str:
    """The notice that other processes kept the machine busy, see `busy_machine`; empty if they did not."""
    return verdict("emulated", machine[0].upper() + machine[1:] + ".") if machine else ""


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
            rows.append((name, str(value)))
    return rows
