# SPDX-License-Identifier: Apache-2.0
"""One run of the fault suite in virtual time, and what is counted of it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from faults.judge import Judge
from faults.kinds import FAULTS, NONE, Fault
from faults.timing import Timing
from support.fault_scene import Scene, Setup

from specvla_ros.control.guard.guard import State
from specvla_ros.control.guard.settings import Output
from specvla_ros.control.guard.tool_gates import ANSWERS_S
from specvla_ros.lab.simulation.motion_record import read_motion_record

_SETTLED_S, _BEGINS_S, _MOVES_S, _AFTER_S = 4.0, (0.3, 3.0), 1.0, 3.0
_LOOK_S, _MOVES_M_S = 0.02, 0.03
_HAND_S = 0.8  # after a fault is over, until somebody clears a stop that latched


@dataclass(frozen=True)
class Job:
    """A run: which fault, of what, by which seed; whether with the guard, and by an arm with limits of its own."""

    fault: str
    mode: str
    output: str
    robot: str
    speed: float
    seed: int
    guarded: bool
    limited: bool = False

    @property
    def key(self) -> str:
        """Names it, for a run that goes on."""
        return " ".join(map(str, asdict(self).values()))


@dataclass(frozen=True)
class _Times:
    """Of a fault, steady seconds."""

    began_s: float
    ended_s: float
    cleared: bool


def run_fault(job: Job, timing: Timing, fault: Fault | None = None, *, paired: bool = False) -> dict[str, Any]:
    """Runs a job.

    Args:
        job: the run.
        timing: of its mode.
        fault: in place of the one that the job names.
        paired: whether the same start is run once more without a fault. `caused` is then what was beyond the limits
            after the fault began, and at no time after that moment without it: what an arm does anyway is no fault's.
    """
    found = _run(job, timing, fault or FAULTS[job.fault])
    if paired and found["beyond_then"]:
        alone = _run(job, timing, NONE)
        found["caused"] = sorted(set(found["beyond_then"]) - set(alone["beyond_then"]))
    return asdict(job) | found


def _run(job: Job, timing: Timing, fault: Fault) -> dict[str, Any]:
    setup = Setup(job.robot, job.output, job.speed, timing, job.seed, job.guarded, job.limited)
    with TemporaryDirectory() as folder:
        record = Path(folder, "record")
        scene = Scene(setup, record)
        try:
            times = _act(scene, fault)
        finally:
            scene.close()
        judge = Judge(read_motion_record(record), scene.settings)
    return _found(scene, judge, fault, times)


def _act(scene: Scene, fault: Fault) -> _Times:
    """Waits for motion at a random moment of the task, does the fault, undoes it, and looks what follows."""
    time, random = scene.time, scene.time.random
    while not scene.passing and time.clocks.steady_s < _SETTLED_S:
        time.run_until(time.clocks.steady_s + _LOOK_S)
    time.run_until(time.clocks.steady_s + random.uniform(*_BEGINS_S))
    latest_s = time.clocks.steady_s + _MOVES_S
    while time.clocks.steady_s < latest_s and not _moves(scene):
        pass
    began_s = time.clocks.steady_s
    fault.begin(scene)
    time.run_until(began_s + random.uniform(*fault.lasts_s))
    fault.end(scene)
    ended_s = time.clocks.steady_s
    time.run_until(ended_s + _HAND_S)
    cleared = False
    while scene.setup.guarded and scene.guard.state is State.STOPPED and time.clocks.steady_s < ended_s + _AFTER_S:
        cleared = True
        time.publish("clear_stop", None, "somebody")
        time.run_until(time.clocks.steady_s + 0.1)
    time.run_until(ended_s + _AFTER_S)
    return _Times(began_s, ended_s, cleared)


def _moves(scene: Scene) -> bool:
    """Lets a moment pass; whether the tool moved in it."""
    before = scene.world.tool().position
    scene.time.run_until(scene.time.clocks.steady_s + _LOOK_S)
    return bool(np.linalg.norm(scene.world.tool().position - before) > _MOVES_M_S * _LOOK_S)


def _found(scene: Scene, judge: Judge, fault: Fault, times: _Times) -> dict[str, Any]:
    extremes, stop_time_s = judge.extremes(), scene.settings.stop_time_s
    left_s, resumed_s = _left_and_resumed(scene, times)
    noticed_s = np.inf
    if fault.noticed is not None:
        noticed_s = fault.noticed(scene, times.began_s, times.ended_s)
    over_s = min(times.ended_s, resumed_s) if left_s < times.ended_s else times.ended_s
    told_s = left_s
    if fault.deaf:
        told_s = max(left_s, times.ended_s) + (_makes_up_s(scene) if left_s < np.inf else 0.0)
    windows = [(noticed_s + stop_time_s, over_s), (told_s + stop_time_s, resumed_s)]
    promised = [(begin_s, end_s) for begin_s, end_s in windows if begin_s < end_s]
    stop = judge.stop(noticed_s, over_s) if noticed_s < left_s else judge.stop(left_s, resumed_s)
    return {
        **asdict(extremes),
        "beyond": extremes.beyond,
        "beyond_then": judge.extremes(times.began_s).beyond,  # after the fault began
        "caused": [],
        "in_contact": extremes.in_contact,
        "halted": scene.halted_s < np.inf and not judge.extremes(until_s=scene.halted_s).beyond,
        "promised": bool(promised),
        "late": any(judge.moved_between(*window) for window in promised),
        "stop": stop.as_json() if stop is not None else None,
        "left": bool(np.isfinite(left_s)),
        "recovered_s": _recovered_s(scene, times.ended_s),
        "cleared": times.cleared,
        "succeeded": scene.succeeded_s is not None,
        "causes": {cause.value: count for cause, count in scene.guard.tally.counts.items()}
        if scene.setup.guarded
        else {},
    }


def _makes_up_s(scene: Scene) -> float:
    """How long an arm of positions makes up for what it was sent in vain, and is brought back: see safety.md.

    Each way takes no longer than the guard lets pass without an answer; the way back ends with a ramp.
    """
    return 0.0 if scene.settings.kind is Output.TWIST else 2 * ANSWERS_S + scene.settings.ramp_s


def _left_and_resumed(scene: Scene, times: _Times) -> tuple[float, float]:
    """When the guard let nothing more through, and when it did again; a fault that it lets pass ends with itself."""
    states = [(at_s, state is State.PASSING) for at_s, state in scene.states if at_s >= times.began_s]
    left_s = next((at_s for at_s, passing in states if not passing), np.inf)
    if np.isinf(left_s):
        return left_s, times.ended_s
    return left_s, next((at_s for at_s, passing in states if passing and at_s > left_s), scene.time.clocks.steady_s)


def _recovered_s(scene: Scene, ended_s: float) -> float | None:
    """From the fault's end until motion is let through and the driver follows an action again; None: it does not."""
    if not scene.passing:
        return None
    passing_s = scene.states[-1][0] if scene.states else 0.0
    followed = [at_s for at_s in scene.taken_s if at_s >= max(ended_s, passing_s)]
    return followed[0] - ended_s if followed else None
