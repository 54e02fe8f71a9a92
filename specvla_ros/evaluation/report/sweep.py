"""The HTML report of a sweep: Spec-VLA's tables 1 to 3 and its figure 4."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specvla_ros.evaluation.report.page import context_rows, figure, table, write_page
from specvla_ros.evaluation.statistics import paired_difference, wilson_interval

if TYPE_CHECKING:
    from specvla_ros.evaluation.sweep import SweepRow

_BLUE, _GREY = "#3c7fb1", "#9aa3ad"


def write_sweep_report(path: Path, rows: Sequence["SweepRow"]) -> None:
    """Writes the report; the first row is what the others are compared with."""
    title = f"{len(rows)} settings on the same {rows[0].summary.success.n} episodes"
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<h2>Success, tokens per forward and speed</h2>",
        table(
            ("", "success", "difference", "forwards per action", "tokens per verification", "ms", "speed-up"),
            [_main_row(row, first=row is rows[0]) for row in rows],
        ),
        "<p class=note>The difference to the first row is paired, in points, with a 95 % interval (Agresti and Min). "
        "Times were taken on the same frames, the settings taking turns.</p>",
        figure(_threshold_plot(rows)),
        "<h2>Drafts accepted in one forward</h2>",
        table(("", *map(str, _lengths(rows))), [_length_row(row, rows) for row in rows[1:]]),
        "<h2>Accepted, by the first drafted token</h2>",
        table(("", *(str(place + 1) for place in _places(rows))), [_place_row(row, rows) for row in rows[1:]]),
        "<h2>Where this comes from</h2>",
        table(("", ""), context_rows(rows[0].summary.context)),
    ]
    write_page(path, title, parts)


def _main_row(row: "SweepRow", *, first: bool) -> tuple[str, ...]:
    tally, pairs = row.summary.decode, row.against_first
    points = paired_difference(pairs.only_first, pairs.only_second, pairs.first.n)
    return (
        row.setting.name,
        str(row.summary.success),
        "" if first else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * each for each in points)),
        f"{tally.forwards_per_action:.2f}",
        f"{tally.tau:.2f}",
        f"{row.action_s * 1e3:.1f}",
        f"{row.speed_up:.2f}",
    )


def _threshold_plot(rows: Sequence["SweepRow"]) -> go.Figure:
    """Success and speed-up by setting."""
    names = [row.setting.name for row in rows]
    rates = [row.summary.success for row in rows]
    bounds = [wilson_interval(rate.successes, rate.n) for rate in rates]
    drawn = make_subplots(specs=[[{"secondary_y": True}]])
    drawn.add_scatter(
        x=names,
        y=[rate.value for rate in rates],
        error_y=dict(
            array=[high - rate.value for rate, (_, high) in zip(rates, bounds, strict=True)],
            arrayminus=[rate.value - low for rate, (low, _) in zip(rates, bounds, strict=True)],
        ),
        mode="lines+markers",
        marker=dict(color=_BLUE, size=9),
        name="success",
    )
    drawn.add_bar(
        x=names, y=[row.speed_up for row in rows], marker_color=_GREY, opacity=0.4, name="speed-up", secondary_y=True
    )
    drawn.update_yaxes(title_text="success", range=[0, 1.02], secondary_y=False)
    drawn.update_yaxes(title_text=f"times as fast as {names[0]}", rangemode="tozero", secondary_y=True)
    return drawn.update_layout(height=380, template="plotly_white", margin=dict(l=60, r=60, t=20, b=50))


def _lengths(rows: Sequence["SweepRow"]) -> range:
    return range(1 + max((length for row in rows[1:] for length in row.summary.decode.by_length()), default=0))


def _length_row(row: "SweepRow", rows: Sequence["SweepRow"]) -> tuple[str, ...]:
    shares = row.summary.decode.by_length()
    return row.setting.name, *(f"{shares.get(length, 0):.0%}" for length in _lengths(rows))


def _places(rows: Sequence["SweepRow"]) -> list[int]:
    return sorted({place for row in rows[1:] for place in row.summary.decode.by_place()})


def _place_row(row: "SweepRow", rows: Sequence["SweepRow"]) -> tuple[str, ...]:
    means = row.summary.decode.by_place()
    return row.setting.name, *(f"{means[place]:.2f}" if place in means else "" for place in _places(rows))
