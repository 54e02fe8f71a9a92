"""What pipelining and speculation buy together, at the stage times of devices that are emulated.

python benchmarks/pipelining.py --episodes 60 --workers 2

First the engine alone, a frame always waiting: latency and rate of each mode, with the nano policy's own acceptance.
Then in closed loop, where the world moves on while the policy thinks: success and time to success, paired with plain
decoding. An episode may take four times its task's time, since a slow policy is first of all late.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from episode_benchmark import parser, result_head, write_result

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Action, Drop
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.evaluation.frame_sources import Frame, simulation_source
from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.evaluation.simulate_summary import compare_episodes
from specvla_ros.models.checkpoint import Target, load_target
from specvla_ros.policies.bundled import nano_policy
from specvla_ros.simulation.device_pace import read_stage_times
from specvla_ros.simulation.robot import ACTION_DT_S
from specvla_ros.simulation.rollout import Clock, EpisodeResult
from specvla_ros.simulation.tasks import FRAME_FIRST_SEED, choose_tasks
from specvla_ros.speculation.settings import DraftSettings
from specvla_ros.speculation.tolerance import Tolerance

Episodes = Mapping[tuple[str, int], EpisodeResult]

DEVICES = ("orin", "rtx5090")
TOLERANCE = Tolerance(5.0, 3.0)
FRAMES = 600
TIME_LIMIT = 4.0
_WARM = 60  # frames until the pipeline is full and knows how many it should hold


def settings() -> dict[str, EngineSettings]:
    """The modes that are compared."""
    relaxed = TOLERANCE.acceptance
    tree = DraftSettings(nodes=16, depth=5, temporal=True)
    window = replace(tree, children="window_mass")
    return {
        "ar": EngineSettings("ar"),
        "spec, strict": EngineSettings("spec", draft=tree),
        "spec, relaxed": EngineSettings("spec", draft=window, acceptance=relaxed),
        "pipeline": EngineSettings("pipeline"),
        "pipeline, 2 chunks": EngineSettings("pipeline", prefill_chunks=2),
        "pipeline, 3 chunks": EngineSettings("pipeline", prefill_chunks=3),
        "specpipe, strict": EngineSettings("specpipe", draft=tree),
        "specpipe, strict, 2 chunks": EngineSettings("specpipe", prefill_chunks=2, draft=tree),
        "specpipe, relaxed": EngineSettings("specpipe", draft=window, acceptance=relaxed),
        "specpipe, relaxed, 2 chunks": EngineSettings("specpipe", prefill_chunks=2, draft=window, acceptance=relaxed),
        "specpipe, relaxed, 3 chunks": EngineSettings("specpipe", prefill_chunks=3, draft=window, acceptance=relaxed),
    }


def main() -> None:
    """Runs what is missing, and writes the JSON file."""
    of = "per task; 0: the engine alone"
    options = parser(__doc__, work="pipelining-benchmark", out="pipelining_nano.json", episodes=60, of=of).parse_args()
    policy = load_target(nano_policy(), device="cpu")
    frames = list(islice(simulation_source(policy, FRAME_FIRST_SEED), FRAMES))
    devices = {}
    for name in DEVICES:
        device = read_stage_times(name)
        saturated = {mode: _saturated(policy, each, frames, name) for mode, each in settings().items()}
        print(json.dumps(saturated, indent=1), file=sys.stderr, flush=True)
        closed = _closed_loop(name, options) if options.episodes else {}
        devices[name] = {"name": device.name, "frame_always_waiting": saturated, "closed_loop": closed}
    result = result_head("pipelining", options) | {
        "tolerance": {"mm": TOLERANCE.mm, "degrees": TOLERANCE.degrees},
        "frames": FRAMES,
        "time_limit": TIME_LIMIT,
        "first_seed": options.seed,
        "episodes_per_task": options.episodes,
        "devices": devices,
    }
    write_result(result, options)


def _saturated(policy: Target, chosen: EngineSettings, frames: Sequence[Frame], device: str) -> dict[str, Any]:
    """The engine alone: whenever it has room the next frame is there, taken at that moment."""
    engine, pace = Engine(policy, chosen), read_stage_times(device)
    engine.warm_up()
    begun_s: dict[int, float] = {}
    latency_s: list[float] = []
    forwards, in_flight, dropped = [], [], 0
    now_s = started_s = 0.0
    left = _observations(frames)
    waiting = next(left, None)
    while waiting is not None or engine.busy:
        if waiting is not None and engine.has_room:
            begun_s[waiting.stamp_ns] = now_s
            engine.submit(waiting)
            waiting = next(left, None)
            if len(begun_s) == _WARM:
                started_s = now_s
                latency_s.clear()
        outcomes = engine.tick()
        now_s += pace.tick_s(engine.last_work)
        if waiting is None:  # the end of the recording is no steady state
            break
        for outcome in outcomes:
            dropped += isinstance(outcome, Drop)
            if isinstance(outcome, Action):
                latency_s.append(now_s - begun_s[outcome.observation.stamp_ns])
                forwards.append(outcome.record.forwards)
                in_flight.append(outcome.record.in_flight)
    return {
        "latency_s": statistics.fmean(latency_s),
        "actions_per_s": len(latency_s) / (now_s - started_s),
        "forwards_per_action": statistics.fmean(forwards),
        "in_flight": statistics.fmean(in_flight),
        "overtaken": dropped / len(begun_s),
    }


def _observations(frames: Sequence[Frame]) -> Iterator[Observation]:
    epoch, asked = 0, ""
    for number, (image, instruction) in enumerate(frames, start=1):
        epoch += instruction != asked
        asked = instruction
        yield Observation(image, instruction, stamp_ns=number, epoch=epoch)


def _closed_loop(device: str, options: argparse.Namespace) -> dict[str, Any]:
    plan = SimulatePlan(episodes=options.episodes, first_seed=options.seed, films=0, workers=options.workers)
    rows: dict[str, Any] = {}
    for mode, engine in settings().items():
        base = SimulateSettings(
            nano_policy(), clock=Clock.REALTIME, emulate=device, engine=engine, time_limit=TIME_LIMIT
        )
        out = options.work / device / mode.replace(", ", "_").replace(" ", "-")

        def show(_: EpisodeResult, done: int, wanted: int, what: str = f"{device}, {mode}") -> None:
            if done % 100 == 0:
                print(f"{what}: {done} of {wanted}", file=sys.stderr, flush=True)

        summary = simulate(base, plan, out, show)
        plain, own = (read_episodes(path) for path in (options.work / device / "ar", out))
        rows[mode] = {
            "success": summary.success.as_json(),
            "against_ar": compare_episodes(plain, own).as_json(),
            "in_time": sum(each.succeeded and each.time_s <= _allowed_s(each) for each in own.values()),
            **_times(plain, own),
            "latency_s": summary.latency_s,
            "action_rate_hz": summary.action_rate_hz,
            "drops": summary.drops,
        }
    return rows


def _allowed_s(episode: EpisodeResult) -> float:
    """The task's own time, of which `TIME_LIMIT` were allowed."""
    (task,) = choose_tasks([episode.task])
    return task.max_steps * ACTION_DT_S + 1e-6


def _times(plain: Episodes, own: Episodes) -> dict[str, Any]:
    """Time to success, and against plain decoding on the starts where both succeeded: medians."""
    both = [key for key in own if plain[key].succeeded and own[key].succeeded]
    done = [each.time_s for each in own.values() if each.succeeded]
    return {
        "time_to_success_s": statistics.median(done) if done else None,
        "plain_time_over_own": statistics.median(plain[key].time_s / own[key].time_s for key in both) if both else None,
    }


if __name__ == "__main__":
    main()
