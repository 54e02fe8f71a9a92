# SPDX-License-Identifier: Apache-2.0
"""Several settings of the engine beside each other: on the same frames, and on the same simulated episodes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import DecodeTally
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.report.sweep import write_sweep_report
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE, RunDirectory
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, policy_of, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import Setting, SweepRow, compare_episodes
from specvla_ros.lab.simulation.rollout import EpisodeResult, TickTime, tick_time
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target

SWEEP_FILE = "sweep.json"
_TIMED_FRAMES = 64


@dataclass
class FrameRun:
    """The frames as one setting decoded them."""

    seconds: list[float] = field(default_factory=list)  # decoding time per frame and round
    # actions of the first round, float64 [frames, action_dim]; NaN where there was none
    values: list[np.ndarray] = field(default_factory=list)
    tally: DecodeTally = field(default_factory=DecodeTally)  # of the first round's decoding

    def keep(self, outcome: Outcome, action_dim: int) -> None:
        if isinstance(outcome, Action):
            self.values.append(outcome.values)
            self.tally.add(outcome.record)
        else:
            self.values.append(np.full(action_dim, np.nan))

    @property
    def action_s(self) -> float:
        """Mean seconds per action, without the slowest twentieth: those waited for something else on the machine."""
        return float(np.mean(np.sort(self.seconds)[: max(1, len(self.seconds) * 19 // 20)]))


def run_side_by_side(
    policy: Target,
    settings: Mapping[str, EngineSettings],
    frames: Sequence[Observation],
    *,
    rounds: int = 3,
    pace: TickTime | None = None,
    on_frame: Callable[[], None] = lambda: None,
) -> dict[str, FrameRun]:
    """Decodes the frames with each setting.

    The settings take turns, frame after frame, so that whatever else the machine does falls on all of them alike.
    Frames are decoded in order, so that a drafter that looks back sees what it would on the robot.

    Args:
        frames: images with instructions, of one episode after the other.
        rounds: timed passes over the frames, after a warm-up.
        pace: from a tick's work and its measured seconds to the seconds that count; by default those measured.
        on_frame: called when all settings have answered one more frame.
    """
    if not frames:
        raise UserError("there are no frames to try the settings on")
    pace = pace or tick_time(None)
    engines = {name: Engine(policy, each) for name, each in settings.items()}
    runs = {name: FrameRun() for name in settings}
    for engine in engines.values():
        engine.warm_up()
    for again in range(rounds):
        for engine in engines.values():
            engine.reset()
        epoch, previous = again * len(frames) + 1, ""
        for number, frame in enumerate(frames):
            epoch += frame.instruction != previous
            previous = frame.instruction
            observation = replace(frame, stamp_ns=number + 1, epoch=epoch)
            for name, engine in engines.items():
                outcome, seconds = _decode(engine, observation, pace)
                runs[name].seconds.append(seconds)
                if not again:
                    runs[name].keep(outcome, policy.codec.max_tokens)
            on_frame()
    return runs


def _decode(engine: Engine, observation: Observation, pace: TickTime) -> tuple[Outcome, float]:
    engine.submit(observation)
    outcomes: list[Outcome] = []
    counted_s = 0.0
    while engine.busy:
        started = time.perf_counter()
        outcomes += engine.tick()
        counted_s += pace(engine.last_work, time.perf_counter() - started)
    return outcomes[-1], counted_s


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
    runs = run_side_by_side(policy, engines, list(islice(source, _TIMED_FRAMES)))
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
