# SPDX-License-Identifier: Apache-2.0
"""What pipelining and speculation buy together, at the stage times of devices that are emulated.

python benchmarks/pipelining.py --episodes 60 --workers 2

First the engine alone, a frame always waiting: latency and rate of each mode, with the nano policy's own acceptance.
Then in closed loop, where the world moves on while the policy thinks: success and time to success, paired with plain
decoding. An episode may take four times its task's time, since a slow policy is first of all late.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import typer
from harness import Episodes, Out, Seed, Work, Workers, finish, of_devices, of_weights, result_head, show_progress
from results_page import RESULTS
from saturated import Saturated, make_engine

from specvla_ros.engine.outcome import Action, Drop
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.tally import TickWork
from specvla_ros.evaluation.frame_sources import Frame, simulation_source
from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.evaluation.simulate_summary import compare_episodes
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Target
from specvla_ros.policies.bundled import nano_policy
from specvla_ros.simulation.robot import ACTION_DT_S
from specvla_ros.simulation.rollout import Clock, EpisodeResult, StageTimes, read_stage_times
from specvla_ros.simulation.tasks import FRAME_FIRST_SEED, choose_tasks
from specvla_ros.speculation.settings import DraftSettings, adjusted
from specvla_ros.speculation.tolerance import Tolerance

Results = Mapping[tuple[str, int], EpisodeResult]

DEVICES = ("orin", "rtx5090")
TOLERANCE = Tolerance(5.0, 3.0)
FRAMES = 600
TIME_LIMIT = 4.0
_WARM = 60  # frames until the pipeline is full and knows how many it should hold


def settings() -> dict[str, EngineSettings]:
    """The modes that are compared."""
    relaxed = TOLERANCE.acceptance
    tree = adjusted(DraftSettings(nodes=16, depth=5), temporal=True)
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


def main(
    context: typer.Context,
    episodes: Episodes = 60,
    seed: Seed = 0,
    workers: Workers = 2,
    work: Work = Path("pipelining-benchmark"),
    out: Out = RESULTS / "pipelining_nano.json",
) -> None:
    """Runs what is missing; no episodes: the engine alone."""
    policy = load_target(nano_policy(), device="cpu")
    frames = list(islice(simulation_source(policy, FRAME_FIRST_SEED), FRAMES))
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    devices = {}
    for name in DEVICES:
        device = read_stage_times(name)
        saturated = {mode: _saturated(policy, chosen, frames, device) for mode, chosen in settings().items()}
        print(json.dumps(saturated, indent=1), file=sys.stderr, flush=True)
        closed = _closed_loop(name, plan, work / name) if episodes else {}
        devices[name] = {"name": device.name, "frame_always_waiting": saturated, "closed_loop": closed}
    result = (
        result_head(context)
        | of_weights(nano_policy())
        | of_devices(DEVICES)
        | {
            "tolerance": {"mm": TOLERANCE.mm, "degrees": TOLERANCE.degrees},
            "frames": FRAMES,
            "time_limit": TIME_LIMIT,
            "first_seed": seed,
            "episodes_per_task": episodes,
            "devices": devices,
        }
    )
    finish(result, out)


def _saturated(policy: Target, chosen: EngineSettings, frames: Sequence[Frame], device: StageTimes) -> dict[str, Any]:
    """The engine alone, by the device's clock."""
    now_s = started_s = 0.0

    def advance(work: TickWork) -> None:
        nonlocal now_s
        now_s += device.tick_s(work)

    run = Saturated(make_engine(policy, chosen), _observations(frames), lambda: now_s, advance)
    latency_s: list[float] = []
    actions: list[Action] = []
    drops, warm = 0, False
    while True:
        outcomes = run.tick()
        if run.waiting is None:  # the end of the recording is no steady state
            break
        if not warm and len(run.admitted_s) == _WARM:
            warm, started_s = True, list(run.admitted_s.values())[-1]
            latency_s.clear()
        for outcome, seconds in outcomes:
            drops += isinstance(outcome, Drop)
            if isinstance(outcome, Action):
                latency_s.append(seconds)
                actions.append(outcome)
    return {
        "latency_s": statistics.fmean(latency_s),
        "actions_per_s": len(latency_s) / (now_s - started_s),
        "forwards_per_action": statistics.fmean(action.record.forwards for action in actions),
        "in_flight": statistics.fmean(action.record.in_flight for action in actions),
        "overtaken": drops / len(run.admitted_s),
    }


def _observations(frames: Sequence[Frame]) -> Iterator[Observation]:
    epoch, current = 0, ""
    for number, (image, instruction) in enumerate(frames, start=1):
        epoch += instruction != current
        current = instruction
        yield Observation(image, instruction, stamp_ns=number, epoch=epoch)


def _closed_loop(device: str, plan: SimulatePlan, work: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for mode, engine in settings().items():
        base = SimulateSettings(
            nano_policy(), clock=Clock.REALTIME, emulate=device, engine=engine, time_limit=TIME_LIMIT
        )
        out = work / mode.replace(", ", "_").replace(" ", "-")
        summary = simulate(base, plan, out, partial(show_progress, f"{device}, {mode}"))
        plain, own = (read_episodes(path) for path in (work / "ar", out))
        rows[mode] = {
            "success": summary.success.as_json(),
            "against_ar": compare_episodes(plain, own).as_json(),
            "in_time": sum(episode.succeeded and episode.time_s <= _allowed_s(episode) for episode in own.values()),
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


def _times(plain: Results, own: Results) -> dict[str, Any]:
    """Time to success, and against plain decoding on the starts where both succeeded: medians."""
    both = [key for key in own if plain[key].succeeded and own[key].succeeded]
    done = [episode.time_s for episode in own.values() if episode.succeeded]
    return {
        "time_to_success_s": statistics.median(done) if done else None,
        "plain_time_over_own": statistics.median(plain[key].time_s / own[key].time_s for key in both) if both else None,
    }


if __name__ == "__main__":
    typer.run(main)
