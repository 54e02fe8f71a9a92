# SPDX-License-Identifier: Apache-2.0
"""`specvla sweep`: several settings of the engine on the same simulated episodes, and timed on the same frames."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.evaluation.compare import time_settings
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.page import BLUE, GREY, plot, provenance, rate_trace, table, write_page
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory
from specvla_ros.lab.evaluation.simulate import SimulateSettings, policy_of, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import SimulateSummary, compare_episodes
from specvla_ros.lab.plans import SimulatePlan
from specvla_ros.lab.simulation.rollout import EpisodeResult

SWEEP_FILE = "sweep.json"
_TIMED_FRAMES = 64


@dataclass(frozen=True)
class Setting:
    """One setting of a sweep."""

    name: str
    engine: EngineSettings


@dataclass(frozen=True)
class SweepRow:
    """The results of one setting of a sweep."""

    setting: Setting
    summary: SimulateSummary
    against_first: PairedComparison  # its episodes paired with those of the sweep's first setting
    action_s: float  # mean seconds per action on the frames that all settings share
    speed_up: float  # the first setting's `action_s` over this one's

    def as_json(self) -> dict[str, Any]:
        """For sweep.json; accept lengths and their positions are those of Spec-VLA's tables 2 and 3."""
        tally = self.summary.decode
        return {
            "name": self.setting.name,
            "success": self.summary.success.as_json(),
            "against_first": self.against_first.as_json(),
            "tau": tally.tau,
            "forwards_per_action": tally.forwards_per_action,
            "share_by_accept_length": tally.by_length(),
            "accept_length_by_place": tally.by_place(),
            "largest_bins_off": max((bins for _, bins in tally.bins_off), default=0),
            "action_s": self.action_s,
            "speed_up": self.speed_up,
        }


def relaxation_settings(spec: EngineSettings, bins: Sequence[int]) -> list[Setting]:
    """Plain decoding, then speculation as given: strict, and with each tolerance in bins (Spec-VLA, figure 4)."""
    relaxed = [
        Setting(f"r{r}", replace(spec, acceptance=replace(spec.acceptance, rule="bin_distance", bins=(r,))))
        for r in bins
    ]
    strict = Setting("strict", replace(spec, acceptance=replace(spec.acceptance, rule="strict")))
    return [Setting("ar", replace(spec, mode="ar")), strict, *relaxed]


def sweep(
    base: SimulateSettings,
    settings: Sequence[Setting],
    plan: SimulatePlan,
    out: Path,
    on_episode: Callable[[str, EpisodeResult, int, int], None] = lambda name, result, done, wanted: None,
) -> list[SweepRow]:
    """Simulates every setting on the same seeds, and times them side by side on the same frames.

    Called again it runs what is missing; each setting's results lie in a folder of its name.

    Args:
        base: the simulation, whose engine's settings are replaced.
        settings: the settings; the others are compared with the first.
        on_episode: called with the setting's name, an episode, the number of finished episodes and that of all.
    """
    directory = RunDirectory(out, "sweep")
    directory.check()
    engines = {setting.name: setting.engine for setting in settings}
    summaries = {
        name: simulate(replace(base, engine=engine), plan, out / name, partial(on_episode, name))
        for name, engine in engines.items()
    }
    policy = policy_of(base)
    source = simulation_source(policy, plan.first_seed, world=base.world, tasks=plan.tasks, engine=base.engine)
    runs = time_settings(policy, engines, list(islice(source, _TIMED_FRAMES)))
    first = settings[0].name
    rows = [
        SweepRow(
            setting=setting,
            summary=summaries[setting.name],
            against_first=compare_episodes(read_episodes(out / first), read_episodes(out / setting.name)),
            action_s=runs[setting.name].action_s,
            speed_up=runs[first].action_s / runs[setting.name].action_s,
        )
        for setting in settings
    ]
    directory.begin()
    with directory.reporting_errors():
        directory.write_json(SWEEP_FILE, {"rows": [row.as_json() for row in rows], "context": summaries[first].context})
        write_sweep_report(directory.path / REPORT_FILE, rows)
    return rows


_TAU = "τ: tokens committed per verification forward (accept length + 1)."


def write_sweep_report(path: Path, rows: Sequence[SweepRow]) -> None:
    """Writes the page of a sweep; the first row is what the others are compared with."""
    lengths = range(1 + max((length for row in rows[1:] for length in row.summary.decode.by_length()), default=0))
    positions = sorted({position for row in rows[1:] for position in row.summary.decode.by_place()})
    parts = [
        "<h2>Success, forwards and speed</h2>",
        table(
            ("", "success", "difference", "forwards per action", "τ", "ms", "speed-up"),
            [_sweep_row(row, first=row is rows[0]) for row in rows],
        ),
        "<p class=note>The difference to the first row is paired, in points, with a 95 % interval (Agresti and Min). "
        f"Times were taken on the same frames, the settings taking turns. {_TAU}</p>",
        plot(_sweep_plot(rows), 380, showlegend=False),
        "<h2>Verification forwards by accept length</h2>",
        table(("", *map(str, lengths)), [_shares(row, lengths) for row in rows[1:]]),
        "<h2>Mean accept length by the first drafted token</h2>",
        table(("", *(str(position + 1) for position in positions)), [_means(row, positions) for row in rows[1:]]),
        provenance(rows[0].summary.context),
    ]
    write_page(path, f"{len(rows)} settings on the same {rows[0].summary.success.n} episodes", parts)


def _sweep_row(row: SweepRow, *, first: bool) -> tuple[str, ...]:
    tally = row.summary.decode
    return (
        row.setting.name,
        str(row.summary.success),
        "" if first else str(row.against_first),
        f"{tally.forwards_per_action:.2f}",
        f"{tally.tau:.2f}",
        f"{row.action_s * 1e3:.1f}",
        f"{row.speed_up:.2f}",
    )


def _sweep_plot(rows: Sequence[SweepRow]) -> go.Figure:
    names = [row.setting.name for row in rows]
    drawn = make_subplots(cols=2, subplot_titles=("success", f"times as fast as {names[0]}"))
    drawn.add_scatter(
        x=names,
        **rate_trace([row.summary.success for row in rows]),
        mode="lines+markers",
        marker=dict(color=BLUE, size=9),
        row=1,
        col=1,
    )
    drawn.add_bar(x=names, y=[row.speed_up for row in rows], marker_color=GREY, row=1, col=2)
    drawn.update_yaxes(range=[0, 1.02], tickformat=".0%", col=1)
    return drawn.update_yaxes(rangemode="tozero", col=2)


def _shares(row: SweepRow, lengths: range) -> tuple[str, ...]:
    shares = row.summary.decode.by_length()
    return row.setting.name, *(f"{shares.get(length, 0):.0%}" for length in lengths)


def _means(row: SweepRow, positions: Sequence[int]) -> tuple[str, ...]:
    means = row.summary.decode.by_place()
    return row.setting.name, *(f"{means[position]:.2f}" if position in means else "" for position in positions)
