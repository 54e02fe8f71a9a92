# SPDX-License-Identifier: Apache-2.0
"""Comparison of settings on the same frames and, for `specvla sweep`, on the same simulated episodes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.thread import Decoded
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation import page
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.paired import PairedComparison
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory
from specvla_ros.lab.evaluation.simulate import SimulateSettings, policy_of, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import SimulateSummary, compare_episodes
from specvla_ros.lab.plans import SimulatePlan
from specvla_ros.lab.simulation.rollout import EpisodeResult, TickTime, tick_time
from specvla_ros.lab.tally import DecodeTally
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target

SWEEP_FILE = "sweep.json"
SWEEP_HEAD = ("setting", "success", "difference", "forwards per action", "τ", "ms", "speed-up")
_TIMED_FRAMES = 64


class _Side:
    """One setting's engine and its pending answers, by their frames' stamps.

    An answer's seconds are those of the ticks since the previous answer: with one frame in flight, its decoding time.
    """

    def __init__(self, engine: Engine, pace: TickTime) -> None:
        self.engine = engine
        self.answers: dict[int, Decoded] = {}
        self._pace = pace
        self._seconds = 0.0

    def ask(self, frame: Observation) -> None:
        while not self.engine.has_room:
            self._tick()
        self._keep(self.engine.submit(frame))
        self._tick()

    def finish(self) -> None:
        while self.engine.busy:
            self._tick()

    def _tick(self) -> None:
        started = time.perf_counter()
        outcomes = self.engine.tick()
        self._seconds += self._pace(self.engine.last_work, time.perf_counter() - started)
        self._keep(outcomes)

    def _keep(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.answers[outcome.observation.stamp_ns] = Decoded(outcome, self._seconds)
            self._seconds = 0.0


def compare(
    engines: Mapping[str, Engine],
    frames: Iterable[Observation],
    *,
    first_epoch: int = 1,
    in_flight: bool = False,
    pace: TickTime | None = None,
) -> Iterator[tuple[Observation, dict[str, Decoded]]]:
    """Yields each frame with the answers of all settings.

    The settings take turns frame by frame, so that other load on the machine affects all of them alike. Frames are
    decoded in order, so that drafters with a memory see the same history as on the robot.

    Args:
        engines: by the names of their settings; without frames in flight.
        first_epoch: epoch of the first frame; each change of instruction starts another.
        in_flight: start a frame as soon as the engine has room; otherwise when the previous one is answered.
        pace: maps a tick's work and measured seconds to the seconds that count; default: the measured ones.
    """
    sides = {name: _Side(engine, pace or tick_time()) for name, engine in engines.items()}
    asked: dict[int, Observation] = {}

    def answered() -> Iterator[tuple[Observation, dict[str, Decoded]]]:
        for stamp in [each for each in asked if all(each in side.answers for side in sides.values())]:
            yield asked.pop(stamp), {name: side.answers.pop(stamp) for name, side in sides.items()}

    epoch, instruction = first_epoch - 1, None
    for number, frame in enumerate(frames, start=1):
        epoch += frame.instruction != instruction
        instruction = frame.instruction
        asked[number] = replace(frame, stamp_ns=number, epoch=epoch)
        for side in sides.values():
            side.ask(asked[number])
            if not in_flight:
                side.finish()
        yield from answered()
    for side in sides.values():
        side.finish()
    yield from answered()


@dataclass
class FrameRun:
    """The frames as decoded with one setting."""

    seconds: list[float] = field(default_factory=list)  # decoding time per frame and round
    # actions of the first round, float64 [frames, action_dim]; NaN for frames without one
    values: list[np.ndarray] = field(default_factory=list)
    tally: DecodeTally = field(default_factory=DecodeTally)  # of the first round
    dropped: str = ""  # why the first frame without an action has none

    def keep(self, outcome: Outcome, action_dim: int) -> None:
        if isinstance(outcome, Action):
            self.values.append(outcome.values)
            self.tally.add(outcome.record)
        else:
            self.values.append(np.full(action_dim, np.nan))
            self.dropped = self.dropped or f"{outcome.reason.value}: {outcome.detail}"

    @property
    def action_s(self) -> float:
        """Mean seconds per action, without the slowest 5 %, which waited for other load on the machine."""
        return float(np.mean(np.sort(self.seconds)[: max(1, len(self.seconds) * 19 // 20)]))


def time_settings(
    policy: Target,
    settings: Mapping[str, EngineSettings],
    frames: Sequence[Observation],
    *,
    rounds: int = 3,
    pace: TickTime | None = None,
    on_frame: Callable[[], None] = lambda: None,
) -> dict[str, FrameRun]:
    """Decodes the frames with each setting as `compare` does, in `rounds` timed rounds after a warm-up.

    `on_frame` is called each time all settings have answered a frame.
    """
    if not frames:
        raise UserError(
            "no frames to try the settings on: give --frames 1 or more, and bags that hold images with an instruction"
        )
    engines = {name: Engine(policy, each) for name, each in settings.items()}
    runs = {name: FrameRun() for name in settings}
    for engine in engines.values():
        engine.warm_up()
    for again in range(rounds):
        for engine in engines.values():
            engine.reset()
        for _, answers in compare(engines, frames, first_epoch=1 + again * len(frames), pace=pace):
            for name, answer in answers.items():
                runs[name].seconds.append(answer.seconds)
                if not again:
                    runs[name].keep(answer.outcome, len(policy.codec.names))
            on_frame()
    return runs


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
        """The row in sweep.json; accept lengths and their positions are those of Spec-VLA's tables 2 and 3."""
        tally = self.summary.decode
        return {
            "name": self.setting.name,
            "success": self.summary.success.as_json(),
            "against_first": self.against_first.as_json(),
            "tau": tally.tau,
            "forwards_per_action": tally.forwards_per_action,
            "share_by_accept_length": tally.by_length(),
            "accept_length_by_place": tally.by_position(),
            "largest_bins_off": max((bins for _, bins in tally.bins_off), default=0),
            "action_s": self.action_s,
            "speed_up": self.speed_up,
        }


def within_bins(engine: EngineSettings, r: int) -> EngineSettings:
    """The settings with one tolerance in bins for every dimension."""
    return replace(engine, acceptance=replace(engine.acceptance, rule="bin_distance", bins=(r,)))


def relaxation_settings(spec: EngineSettings, bins: Sequence[int]) -> list[Setting]:
    """Plain decoding, then speculation as given: strict, and with each tolerance in bins (Spec-VLA, figure 4)."""
    strict = replace(spec, acceptance=replace(spec.acceptance, rule="strict"))
    relaxed = [Setting(f"r{r}", within_bins(spec, r)) for r in bins]
    return [Setting("ar", replace(spec, mode="ar")), Setting("strict", strict), *relaxed]


def sweep(
    base: SimulateSettings,
    settings: Sequence[Setting],
    plan: SimulatePlan,
    out: Path,
    on_episode: Callable[[str, EpisodeResult, int, int], None] = lambda name, result, done, wanted: None,
) -> list[SweepRow]:
    """Simulates every setting on the same seeds and times all of them on the same frames.

    Each setting is compared with the first, and its results are in a folder of its name. A repeated call runs what is
    missing. `on_episode` gets that name, an episode, the number of finished episodes and the total.
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
    episodes = {name: read_episodes(out / name, plan) for name in engines}
    rows = [
        SweepRow(
            setting=setting,
            summary=summaries[setting.name],
            against_first=compare_episodes(episodes[first], episodes[setting.name]),
            action_s=runs[setting.name].action_s,
            speed_up=runs[first].action_s / runs[setting.name].action_s,
        )
        for setting in settings
    ]
    directory.begin()
    with directory.reporting_errors():
        directory.write_json(SWEEP_FILE, {"rows": [row.as_json() for row in rows], "context": summaries[first].context})
        _write_sweep_report(directory.path / REPORT_FILE, rows)
    return rows


def _write_sweep_report(path: Path, rows: Sequence[SweepRow]) -> None:
    tallies = {row.setting.name: row.summary.decode for row in rows[1:]}
    lengths = range(1 + max((length for tally in tallies.values() for length in tally.by_length()), default=0))
    positions = sorted({position for tally in tallies.values() for position in tally.by_position()})
    shares, means = [], []
    for name, tally in tallies.items():
        by_length, by_position = tally.by_length(), tally.by_position()
        shares.append((name, *(f"{by_length.get(length, 0):.0%}" for length in lengths)))
        means.append((name, *(f"{by_position[each]:.2f}" if each in by_position else "" for each in positions)))
    fastest = max(rows, key=lambda row: row.speed_up)
    parts = [
        _sweep_answer(rows, fastest),
        "<h2>Success, forwards and speed</h2>",
        page.table(SWEEP_HEAD, sweep_rows(rows)),
        "<p class=note>The difference to the first row is paired, in points, with a 95 % interval (Agresti and Min). "
        f"Times are from the same frames, with the settings taking turns. {page.TAU}</p>",
        page.plot(_sweep_plot(rows), 380, showlegend=False),
        "<h2>Verification forwards by accept length</h2>",
        page.table(("", *map(str, lengths)), shares),
        "<h2>Mean accept length by the first drafted token</h2>",
        page.table(("", *(str(position + 1) for position in positions)), means),
        page.provenance(rows[0].summary.context),
    ]
    page.write_page(path, f"{len(rows)} settings on the same {rows[0].summary.success.n} episodes", parts)


def _sweep_answer(rows: Sequence[SweepRow], fastest: SweepRow) -> str:
    first, name = rows[0], fastest.setting.name
    text = (
        f"{name} is the fastest of {len(rows)} settings. Its success is {fastest.summary.success}, that of "
        f"{first.setting.name} {first.summary.success}: a paired difference of {fastest.against_first} points."
    )
    if fastest is first:
        text = f"None of {len(rows)} settings is faster than {name}, whose success is {first.summary.success}."
    return page.answer("", f"{fastest.speed_up:.2f} ×", f"as fast as {first.setting.name}", text)


def sweep_rows(rows: Sequence[SweepRow]) -> list[tuple[str, ...]]:
    """The settings' table cells, in the order of SWEEP_HEAD."""
    return [
        (
            row.setting.name,
            str(row.summary.success),
            "" if row is rows[0] else str(row.against_first),
            f"{row.summary.decode.forwards_per_action:.2f}",
            f"{row.summary.decode.tau:.2f}",
            f"{row.action_s * 1e3:.1f}",
            f"{row.speed_up:.2f}",
        )
        for row in rows
    ]


def _sweep_plot(rows: Sequence[SweepRow]) -> go.Figure:
    names = [row.setting.name for row in rows]
    rates = page.rate_trace([row.summary.success for row in rows])
    marker = dict(color=page.BLUE, size=9)
    drawn = page.subplots(cols=2, subplot_titles=("success", f"times as fast as {names[0]}"))
    drawn.add_scatter(x=names, **rates, mode="lines+markers", marker=marker, row=1, col=1)
    drawn.add_bar(x=names, y=[row.speed_up for row in rows], marker_color=page.GREY, row=1, col=2)
    drawn.update_yaxes(range=[0, 1.02], tickformat=".0%", col=1)
    return drawn.update_yaxes(rangemode="tozero", col=2)
