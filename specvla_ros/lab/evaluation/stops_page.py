# SPDX-License-Identifier: Apache-2.0
"""The table of stopping times and distances, in the form of ISO 10218-1's annex on stopping, as JSON and as a page."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import median

from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory, head
from specvla_ros.lab.evaluation.stops import Stop, Stops
from specvla_ros.settings.profiles import merge_parameters

STOPS_FILE = "stops.json"
THIRDS = (33, 66, 100)
TABLE_HEAD = (
    *("output", "cause", "speed %", "reach %", "n"),
    *("median time [s]", "longest time [s]", "median distance [mm]", "longest distance [mm]"),
)


@dataclass(frozen=True)
class Row:
    """Stops with the same output and cause, and similar speed and reach."""

    output: str
    cause: str
    speed_percent: int  # share of full speed, the nearest of THIRDS
    reach_percent: int  # share of the largest reach, the upper edge of its third
    n: int
    time_median_s: float
    time_worst_s: float
    way_median_mm: float
    way_worst_mm: float

    @property
    def cells(self) -> tuple[str, ...]:
        figures = (f"{self.time_median_s:.3f}", f"{self.time_worst_s:.3f}")
        ways = (f"{self.way_median_mm:.1f}", f"{self.way_worst_mm:.1f}")
        return self.output, self.cause, str(self.speed_percent), str(self.reach_percent), str(self.n), *figures, *ways


@dataclass(frozen=True)
class StopTable:
    """The rows, and the speed and reach that count as 100 %."""

    rows: tuple[Row, ...]
    full_speed_m_s: float
    full_speed_is: str  # its origin, in words
    reach_m: float

    @property
    def caption(self) -> str:
        return (
            f"100 % speed: {self.full_speed_m_s:.3g} m/s, {self.full_speed_is}. 100 % reach: {self.reach_m:.3g} "
            "m from the base, the largest measured."
        )


def linear_speed(robot: Path) -> float:
    """`limits.linear_speed` of a robot's parameter file, m/s."""
    speed = merge_parameters([robot], {}, node="guard").get("limits.linear_speed")
    if not isinstance(speed, (int, float)) or isinstance(speed, bool) or speed <= 0:
        raise UserError(f"{robot}: limits.linear_speed is missing or not a speed; give the guard's own parameter file")
    return float(speed)


def tabulate(stops: Stops, limit_m_s: float | None) -> StopTable:
    """Groups the stops; without a limit, shares of speed refer to the fastest stop."""
    seen_m_s = max((stop.speed_m_s for stop in stops.measured), default=0.0)
    full_m_s = limit_m_s or seen_m_s
    groups: defaultdict[tuple[str, str, int, int], list[Stop]] = defaultdict(list)
    for stop in stops.measured:
        speed = min(THIRDS, key=lambda share: abs(100 * stop.speed_m_s / max(full_m_s, 1e-9) - share))
        reach = next((third for third in THIRDS if stop.reach_m <= stops.reach_m * third / 100), 100)
        groups[stop.output, stop.cause, speed, reach].append(stop)
    rows = tuple(_row(*key, group) for key, group in sorted(groups.items()))
    whose = "limits.linear_speed" if limit_m_s else "the fastest of these stops, since no --robot gives the limit"
    return StopTable(rows, full_m_s, whose, stops.reach_m)


def _row(output: str, cause: str, speed: int, reach: int, group: Sequence[Stop]) -> Row:
    times_s, ways_mm = [stop.time_s for stop in group], [stop.way_m * 1e3 for stop in group]
    figures = (median(times_s), max(times_s), median(ways_mm), max(ways_mm))
    return Row(output, cause, speed, reach, len(group), *figures)


def write_stops(out: Path, stops: Stops, table: StopTable) -> None:
    """Writes stops.json and report.html to a directory, replacing those of an earlier `specvla robot stops`."""
    directory = RunDirectory(out, "robot stops")
    directory.begin()
    with directory.reporting_errors():
        directory.write_json(STOPS_FILE, {**asdict(table), **asdict(stops), **head()})
        _write_page(directory.path / REPORT_FILE, stops, table)


def _write_page(path: Path, stops: Stops, table: StopTable) -> None:
    left_out = f"; files without one: {len(stops.left_out)}" if stops.left_out else ""
    number, of, slowest = "0", "stops of a moving robot", ""
    if stops.measured:
        number, of = f"{max(stop.way_m for stop in stops.measured) * 1e3:.1f} mm", "is the longest stopping distance"
        slowest = f"The longest stopping time is {max(stop.time_s for stop in stops.measured):.3f} s. "
    counted = f"{slowest}{len(stops.measured)} stops of a moving robot{left_out}."
    parts = [
        page.answer("", number, of, counted),
        f"<p class=note>{escape(table.caption)}</p>",
        f"<p class=note>{escape(_HOW)}</p>",
        page.table(TABLE_HEAD, [row.cells for row in table.rows]),
    ]
    if stops.measured:
        parts += ["<h2>Distance over speed</h2>", _ways(stops.measured)]
        found = [(stop.file, stop.cause, stop.time_zero, *_figures(stop)) for stop in stops.measured]
        columns = (
            "file",
            "cause",
            "time zero",
            "speed [mm/s]",
            "reach [m]",
            "time [s]",
            "braking [s]",
            "distance [mm]",
        )
        parts += ["<h2>Each stop</h2>", page.table(columns, found)]
    if stops.left_out:
        rows = [(each.file, each.why) for each in stops.left_out]
        parts += ["<h2>Files without a stop</h2>", page.table(("file", "reason"), rows)]
    parts.append(page.provenance(head()))
    page.write_page(path, "Stopping time and distance, from the guard's black box", parts)


_HOW = (
    "In the form of ISO 10218-1's annex on stopping, with median and worst case. The figures describe this robot in "
    "these stops under the guard, which is not a certified safety function. They do not replace the manufacturer's "
    "declaration."
)


def _figures(stop: Stop) -> tuple[str, ...]:
    times = (f"{stop.time_s:.3f}", f"{stop.braking_s:.3f}")
    return f"{stop.speed_m_s * 1e3:.0f}", f"{stop.reach_m:.2f}", *times, f"{stop.way_m * 1e3:.1f}"


def _ways(measured: Sequence[Stop]) -> str:
    drawn = page.subplots(1, 1, x_title="speed, mm/s", y_title="distance, mm")
    for number, cause in enumerate(sorted({stop.cause for stop in measured})):
        of_cause = [stop for stop in measured if stop.cause == cause]
        speeds, ways = [stop.speed_m_s * 1e3 for stop in of_cause], [stop.way_m * 1e3 for stop in of_cause]
        marker = {"color": page.COLOURS[number % len(page.COLOURS)], "size": 8}
        files = [Path(stop.file).name for stop in of_cause]
        drawn.add_scatter(x=speeds, y=ways, mode="markers", name=cause, marker=marker, text=files)
    return page.plot(drawn, 420)
