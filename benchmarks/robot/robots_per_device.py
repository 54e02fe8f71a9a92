# SPDX-License-Identifier: Apache-2.0
"""Number of robots that one device can serve: frames packed into one forward, in turns, or with an engine each.

python -m benchmarks.robot.robots_per_device

Cameras send an image every 0.1 s, each robot at a different phase; a robot follows its last action until the next one
arrives. The figure of merit is the age of the image acted on: the 95th percentile over time for the worst robot. Uses
the stage times of emulated devices (7 B), and the clock of this CPU with the policy's own size. The images are those
that the policy saw while acting alone; the answers here move nothing.

packed: one engine with a request of each robot in flight. in turns: the same engine takes the next robot's image when
the previous one is answered, like a server that schedules whole requests. an engine each: their ticks alternate on the
device. Mode auto on an emulated device has its ticks' times, and the rows that are free on it for trees.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_devices, of_weights, result_head
from benchmarks.results_page import RESULTS
from specvla_ros import Action, Engine, EngineSettings, Observation
from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.settings import engine_settings_from
from specvla_ros.lab.bundled.policies import find_policy, nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.planning.stage_times import read_stage_times
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import DraftSettings, adjusted

DEVICES = ("orin", "rtx5090")
CPU = "this CPU"
SECONDS = {"orin": 60.0, "rtx5090": 20.0, CPU: 5.0}  # by the device's clock
LONG, LONGER = "digits", 4  # a policy with long answers and large trees, and how much longer it is served
PACKED, TURNS, EACH = "packed", "in turns", "an engine each"
SHARING = (PACKED, TURNS, EACH)
PERIOD_S = 0.1
NANO_DRAFTS = adjusted(DraftSettings(nodes=16), temporal=True)
_FRAMES = 400
_APART = 37  # images between the starts of two robots
_NS = 1e-9


class Fleet:
    """Robots with clocked images, and their answers; `frames` are a recording of one policy acting alone."""

    def __init__(self, robots: int, frames: Sequence[Observation]) -> None:
        self.robots = [f"robot_{i}" for i in range(robots)]
        self._frames = frames
        self._sent: dict[str, int] = dict.fromkeys(self.robots, -1)
        self._answers: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (image's time, action's time)

    def due(self, now_s: float) -> list[Observation]:
        """Returns the newest image of each robot that has sent one since the last call."""
        return [
            self._picture(i, robot, now_s)
            for i, robot in enumerate(self.robots)
            if self._newest(i, now_s) > self._sent[robot]
        ]

    def next_s(self) -> float:
        """Returns the time of the next image."""
        return min((self._sent[robot] + 1) * PERIOD_S + self._phase(i) for i, robot in enumerate(self.robots))

    def answered(self, action: Action, now_s: float) -> None:
        """Records an action."""
        self._answers[action.observation.stream].append((action.observation.stamp_ns * _NS, now_s))

    def figures(self, from_s: float, to_s: float) -> dict[str, float]:
        """Returns the figures over all robots between two times."""
        inside = sum(from_s <= at <= to_s for answers in self._answers.values() for _, at in answers)
        return {
            "age_p95_s": max(_age_at(self._answers[robot], from_s, to_s) for robot in self.robots),
            "actions_per_s": inside / (to_s - from_s) / len(self.robots),
        }

    def _newest(self, i: int, now_s: float) -> int:
        return int((now_s - self._phase(i)) / PERIOD_S + 1e-9) if now_s >= self._phase(i) else -1

    def _phase(self, i: int) -> float:
        return PERIOD_S * i / len(self.robots)

    def _picture(self, i: int, robot: str, now_s: float) -> Observation:
        number = self._sent[robot] = self._newest(i, now_s)
        taken_s = number * PERIOD_S + self._phase(i)
        seen = self._frames[(i * _APART + int(taken_s / ACTION_DT_S)) % len(self._frames)]
        return replace(seen, stamp_ns=int(taken_s / _NS) + 1, stream=robot)


def _age_at(answers: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    """Age of the image that a robot acts on: the 95th percentile over time."""
    ages, at, n = [], from_s, 0
    seen = None
    while at < to_s:
        while n < len(answers) and answers[n][1] <= at:
            seen, n = answers[n][0], n + 1
        ages.append(at - seen if seen is not None else at)
        at += 0.005
    ages.sort()
    return ages[int(0.95 * len(ages))]


def serve(
    fleet: Fleet, engines: Sequence[Engine], sharing: str, seconds: float, spent: Callable[[TickWork, float], float]
) -> dict[str, float]:
    """Serves a fleet for a time and returns its figures; the first fifth is not counted.

    Args:
        engines: one engine, or one per robot.
        sharing: one of SHARING.
        seconds: duration on the device's clock.
        spent: maps a tick's work and its seconds on this machine to its seconds on the device.
    """
    of = dict(zip(fleet.robots, engines, strict=False)) if sharing == EACH else dict.fromkeys(fleet.robots, engines[0])
    waiting: dict[str, Observation] = {}  # in turns: by robot, longest waiting first
    now_s = 0.0
    while now_s < seconds:
        for observation in fleet.due(now_s):
            if sharing == TURNS:
                waiting[observation.stream] = observation
            else:
                of[observation.stream].submit(observation)
        if sharing == TURNS and waiting and not engines[0].busy:
            engines[0].submit(waiting.pop(next(iter(waiting))))
        busy = [engine for engine in engines if engine.busy]
        if not busy:
            now_s = max(now_s, fleet.next_s())
            continue
        for engine in busy:
            started = time.perf_counter()
            outcomes = engine.tick()
            now_s += spent(engine.last_work, time.perf_counter() - started)
            for outcome in outcomes:
                if isinstance(outcome, Action):
                    fleet.answered(outcome, now_s)
    return fleet.figures(seconds / 5, seconds)


@dataclass(frozen=True)
class Served:
    """A policy whose robots are served, how it drafts, and what it saw while acting alone."""

    policy: Target
    settings: EngineSettings
    frames: Sequence[Observation]
    longer: int = 1  # factor of the device's time

    def row(self, mode: str, sharing: str, robots: int, device: str, share: float) -> dict[str, float]:
        """Serves a fleet for a share of the device's time, and returns its figures."""
        stages = None if device == CPU else read_stage_times(device)
        count, streams = (robots, 1) if sharing == EACH else (1, robots)
        engines = [Engine(self.policy, replace(self.settings, mode=mode, streams=streams)) for _ in range(count)]
        for engine in engines:
            if stages is not None:
                engine.tick_time = lambda work, _: stages.tick_s(work)
            engine.warm_up()
            if stages is not None and engine.settings.chooses:
                engine.drafter.free_rows = stages.free_rows
        seconds = share * self.longer * SECONDS[device]
        figures = serve(Fleet(robots, self.frames), engines, sharing, seconds, engines[0].tick_time)
        return {"robots": robots, **figures}


def _served(directory: Path, settings: EngineSettings, most: int, longer: int = 1) -> Served:
    policy = load_target(directory, device="cpu")
    return Served(policy, settings, list(islice(simulation_source(policy, FRAMES_FIRST_SEED), most)), longer)


def main(
    context: typer.Context,
    robots: Annotated[str, typer.Option(help="Fleet sizes, ascending.")] = "1,2,3,4,6,8,12,16",
    share: Annotated[float, typer.Option(help="Share of the time for which each device is observed.")] = 1.0,
    out: Out = RESULTS / "robots_per_device.json",
) -> None:
    """Serves fleets of several sizes in all ways."""
    counts = [int(each) for each in robots.split(",")]
    watched = min(_FRAMES, ceil(share * max(SECONDS.values()) / ACTION_DT_S) + _APART * (max(counts) - 1))
    nano = _served(nano_policy(), EngineSettings(draft=NANO_DRAFTS), watched)
    directory, decoding = find_policy(Path(LONG))
    long = _served(directory, engine_settings_from(params_file=decoding), watched, LONGER)
    ways = [("", nano, mode, sharing) for mode in ("ar", "spec") for sharing in SHARING] + [("", nano, "auto", PACKED)]
    ways += [(f"{LONG}: ", long, mode, PACKED) for mode in ("spec", "auto")]
    devices: dict[str, Any] = {}
    for device in (*DEVICES, CPU):
        rows: dict[str, list[dict[str, float]]] = {}
        for name, served, mode, sharing in ways:
            found = rows[f"{name}{mode}, {sharing}"] = [served.row(mode, sharing, n, device, share) for n in counts]
            print(device, name, mode, sharing, [round(each["age_p95_s"], 3) for each in found], flush=True)
        title = device if device == CPU else read_stage_times(device).name
        devices[device] = {"name": title, "measured": device == CPU, "rows": rows}
    result = result_head(context) | of_weights(nano_policy()) | of_devices(DEVICES)
    finish(result | {"period_s": PERIOD_S, "seconds": SECONDS, "devices": devices}, out)


if __name__ == "__main__":
    typer.run(main)
