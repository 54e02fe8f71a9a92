"""An HTML report: one file, readable without a network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .2rem .9rem .2rem 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid #c8ccd1; } td.number, th.number { text-align: right; }
td { border-bottom: 1px solid #eceef0; vertical-align: top; overflow-wrap: anywhere; }
.verdict { padding: .6rem 1rem; border-left: 5px solid; margin: 1rem 0; }
.passed { border-color: #2a8a4a; background: #eef8f1; } .failed { border-color: #c0392b; background: #fdf0ee; }
.emulated { border-color: #c98a1b; background: #fdf6e7; }
.note { color: #59636e; } figure { display: inline-block; margin: 0 1rem 1rem 0; } video { max-width: 340px; }
"""


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Writes the page.

    Args:
        path: of the HTML file.
        title: plain text.
        parts: HTML, one after the other.
    """
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
    body = "\n".join(parts)
    path.write_text(f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n", "utf-8")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of plain text; cells that are numbers are set flush right."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"] if any(head) else []
    for row in rows:
        cells = "".join(f"<td{' class=number' if _is_number(cell) else ''}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "".join(lines) + "</table>"


def figure(drawn: go.Figure) -> str:
    """A plot that can be zoomed."""
    html: str = drawn.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return html


def context_rows(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a result was made of, as rows of a table; None is left out."""
    rows: list[tuple[str, str]] = []
    for name, value in context.items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{key}", text) for key, text in context_rows(value)]
        elif value is not None:
            rows.append((name, str(value)))
    return rows


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).lstrip("-").isdigit()
