# SPDX-License-Identifier: Apache-2.0
"""A plot of the results pages: rows of values with their intervals, in panels one above the other, as SVG."""

import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, which people with any colour vision can tell apart, and a marker for each.
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_INCH, _LINE = 72.0, 15.0  # points
_WIDTH, _ABOVE, _BELOW = 360.0, 22.0, 38.0  # points; on a phone the text is about 11 pixels high
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specvla_ros",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Point:
    """A value with its interval, to four digits, so that machines agree on them; no interval if both ends are equal."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, low: float | None = None, high: float | None = None) -> "Point":
        """A point; without an interval if `low` is None."""
        ends = (value, value if low is None else low, value if high is None else high)
        return cls(*(float(f"{each:.4g}") for each in ends))


@dataclass(frozen=True)
class Row:
    """A label and its points, one per series; None where a series has none. Without points: a heading."""

    label: str
    points: tuple[Point | None, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Rows above one axis.

    Args:
        axis: the axis' quantity with its unit.
        series: the names in the legend, in the order of the rows' points.
        line: a value to compare with, drawn as a vertical line.
    """

    title: str
    axis: str
    series: tuple[str, ...]
    rows: tuple[Row, ...]
    log: bool = False
    line: float | None = None


@dataclass(frozen=True)
class Plot:
    """Panels one above the other; the series have the same colours in all of them."""

    panels: tuple[Panel, ...]

    @property
    def _heights(self) -> list[float]:
        """The height of each panel's rows in points; more series make a row higher, lest intervals overlap."""
        return [len(panel.rows) * max(_LINE, 8.0 + 6.0 * len(panel.series)) for panel in self.panels]

    @property
    def digest(self) -> str:
        """The digest of everything that is drawn; the SVG carries it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def svg(self) -> str:
        """Returns the plot as SVG, the same for the same data. Needs matplotlib (requirements/docs.txt)."""
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        heights, legend = self._heights, _legend_lines(self.panels[0].series) * _LINE
        height = legend + sum(heights) + (_ABOVE + _BELOW) * len(heights)
        with pyplot.rc_context(_STYLE):
            figure = pyplot.figure(figsize=(_WIDTH / _INCH, height / _INCH))
            top, left = height - legend, _left(self.panels)
            for panel, rows in zip(self.panels, heights, strict=True):
                top -= _ABOVE + rows
                axes = figure.add_axes((left, top / height, 0.97 - left, rows / height))
                _draw(panel, axes)
                top -= _BELOW
            if legend:
                figure.legend(
                    *axes.get_legend_handles_labels(),
                    loc="upper center",
                    ncols=_columns(self.panels[0].series),
                    frameon=False,
                    handletextpad=0.2,
                    columnspacing=1.0,
                    borderaxespad=0.1,
                )
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Description": self.digest})
            pyplot.close(figure)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _left(panels: Sequence[Panel]) -> float:
    """The share of the width that the longest label takes."""
    longest = max(len(row.label) for panel in panels for row in panel.rows if row.points)
    return min(0.48, 0.05 + longest * 6.0 / _WIDTH)


def _columns(series: Sequence[str]) -> int:
    return max(1, min(len(series), int(_WIDTH / (34 + 6.2 * max(map(len, series))))))


def _legend_lines(series: Sequence[str]) -> int:
    return math.ceil(len(series) / _columns(series)) if len(series) > 1 else 0


def _draw(panel: Panel, axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    count = len(panel.series)
    for number, name in enumerate(panel.series):
        shift = (number - (count - 1) / 2) * 0.62 / max(count, 1)
        found = [(y + shift, row.points[number]) for y, row in enumerate(panel.rows) if row.points]
        drawn = [(y, point) for y, point in found if point is not None]
        values = [point.value for _, point in drawn]
        # Rounding may put an interval's end on the wrong side of a share of 0 or 1.
        errors = [[max(0.0, p.value - p.low) for _, p in drawn], [max(0.0, p.high - p.value) for _, p in drawn]]
        axes.errorbar(
            values,
            [y for y, _ in drawn],
            xerr=errors,
            fmt=_MARKERS[number],
            color=COLOURS[number],
            markersize=4.5,
            elinewidth=1.3,
            label=name,
            clip_on=False,
        )
    axes.set_title(panel.title, fontsize=10.5, fontweight="bold", loc="left", x=0.0, pad=5)
    axes.set_xlabel(panel.axis, labelpad=2)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks([y for y, row in enumerate(panel.rows) if row.points])
    axes.set_yticklabels([row.label for row in panel.rows if row.points])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    for y, row in enumerate(panel.rows):
        if not row.points:
            axes.text(0.0, y, row.label, transform=axes.get_yaxis_transform(), va="center", style="italic")
        elif y % 2:
            axes.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    if panel.line is not None:
        axes.axvline(panel.line, color="#555555", linewidth=1.0, linestyle="--")
