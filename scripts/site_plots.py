# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: on the site, the plot of each results page is interactive.

The pages show an SVG, which is also what GitHub shows. Here it is replaced by a Plotly figure of the same `Plot`, from
the same JSON files. Without JavaScript the SVG remains.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # MkDocs runs hooks without the repository's root

from benchmarks.pages.plot import COLOURS, Panel, Plot  # noqa: E402
from benchmarks.results_page import figures, results  # noqa: E402

_IMAGE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*images/results/([\w-]+)\.svg"\s*/?></p>')
_SCRIPT = "assets/plotly.min.js"
_MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
_GRID = "rgba(128, 128, 128, 0.3)"
_PANEL, _LINE = 90, 20  # pixels
# Black and the text follow the page's colours, also when the reader switches between light and dark.
_DRAW = """
<script>
document.currentScript.insertAdjacentHTML("beforebegin", "<div class='results-plot'></div>");
(() => {
  const place = document.currentScript.previousElementSibling, figure = FIGURE;
  const draw = () => {
    const ink = getComputedStyle(document.body).color;
    const drawn = JSON.parse(JSON.stringify(figure).replaceAll("#000000", ink));
    Plotly.react(place, drawn.data, { ...drawn.layout, font: { ...drawn.layout.font, color: ink } },
      { responsive: true, displaylogo: false, displayModeBar: false });
  };
  addEventListener("load", draw);
  new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
})();
</script>
"""
_plots: dict[str, Plot] = {}


def on_pre_build(**_: Any) -> None:
    """Reads the plots' data."""
    _plots.update(figures(results()))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Replaces the SVG of a results page by an interactive figure."""

    def interactive(match: re.Match[str]) -> str:
        figure = json.dumps(json.loads(drawn(_plots[match[2]]).to_json() or ""))
        up = "../" * page.file.dest_uri.count("/")
        return f"<noscript>{match[0]}</noscript><script src='{up}{_SCRIPT}'></script>{_DRAW.replace('FIGURE', figure)}"

    return _IMAGE.sub(interactive, html)


def on_post_build(config: Any, **_: Any) -> None:
    """Writes Plotly once, for all pages."""
    place = Path(config.site_dir) / _SCRIPT
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(get_plotlyjs(), encoding="utf-8")


def drawn(plot: Plot) -> go.Figure:
    """The plot as a Plotly figure: panels one above the other, one trace per series and panel."""
    heights = [len(panel.rows) * (_LINE + 6 * len(panel.series)) for panel in plot.panels]
    total = sum(heights) + _PANEL * len(heights)
    gap = _PANEL / total if len(heights) > 1 else 0
    titles = [f"<b>{panel.title}</b>" for panel in plot.panels]
    shares = [height / sum(heights) for height in heights]
    figure = make_subplots(len(heights), 1, subplot_titles=titles, row_heights=shares, vertical_spacing=gap)
    for number, panel in enumerate(plot.panels, 1):
        _draw(figure, panel, number)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    figure.update_layout(
        height=total + 70,
        margin=dict(l=10, r=10, t=90, b=50),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        dragmode=False,  # a touch scrolls the page
        legend=dict(orientation="h", y=1.0, yanchor="top", yref="container", x=0),
        showlegend=len(plot.panels[0].series) > 1,
    )
    return figure


def _draw(figure: go.Figure, panel: Panel, number: int) -> None:
    count = len(panel.series)
    for index, name in enumerate(panel.series):
        shift = (index - (count - 1) / 2) * 0.62 / count
        found = [(y + shift, row.label, row.points[index]) for y, row in enumerate(panel.rows) if row.points]
        shown = [(y, label, point) for y, label, point in found if point is not None]
        figure.add_scatter(
            x=[point.value for *_, point in shown],
            y=[y for y, *_ in shown],
            error_x=dict(
                array=[point.high - point.value for *_, point in shown],
                arrayminus=[point.value - point.low for *_, point in shown],
            ),
            customdata=[(label, point.low, point.high) for _, label, point in shown],
            hovertemplate="%{customdata[0]}: %{x:.4g} [%{customdata[1]:.4g}, %{customdata[2]:.4g}]",
            mode="markers",
            marker=dict(color=COLOURS[index], symbol=_MARKERS[index], size=8),
            name=name,
            legendgroup=name,
            showlegend=number == 1,
            row=number,
            col=1,
        )
    labels = [row.label if row.points else f"<i>{row.label}</i>" for row in panel.rows]
    rows = dict(tickvals=[*range(len(labels))], ticktext=labels, range=[len(labels) - 0.5, -0.5], automargin=True)
    figure.update_yaxes(**rows, showgrid=False, zeroline=False, fixedrange=True, row=number, col=1)
    kind = dict(type="log") if panel.log else dict(rangemode="tozero")
    figure.update_xaxes(**kind, title_text=panel.axis, gridcolor=_GRID, zerolinecolor=_GRID, row=number, col=1)
    if panel.line is not None:
        figure.add_vline(panel.line, line=dict(color="#777777", dash="dash"), row=number, col=1)
