# SPDX-License-Identifier: Apache-2.0
"""Speculation alone, pipelining alone and both, at the stage times of emulated devices.

python -m benchmarks.speculation.text_policy --out text-policy
python -m benchmarks.speculation.pipelining --text-policy text-policy --episodes 16 --workers 2

specvla train-policy --data DEMONSTRATIONS --init digits --codec digits --horizon 2 --steps 700 --learning-rate 0.0008
                     --out two-actions
python -m benchmarks.speculation.pipelining --answers chunks --two-actions two-actions --episodes 3
                                --out benchmarks/results/pipelining_of_chunks.json

Answers of 7 tokens (the nano policy) and of about 45 (the text policy), each with its own acceptance, and chunks of
actions as 26 FAST tokens (the fast policy), as 56 digits (two actions) and as 220 (the digits policy). First the engine
alone with a frame always waiting: latency and rate of each mode. Then closed loop, where the world keeps moving while
the policy computes: success and time to success, paired with plain decoding. An episode may take four times its task's
nominal time, since a slow policy mostly fails by being late.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import (
    FRAMES_FIRST_SEED,
    Episodes,
    Out,
    Seed,
    Work,
    Workers,
    finish,
    of_devices,
    of_weights,
    result_head,
    show_progress,
)
from benchmarks.results_page import RESULTS, weights_digest
from benchmarks.saturated import Saturated, make_engine
from benchmarks.speculation.text_policy import LONGEST_TEXT
from specvla_ros import Action, Drop, EngineSettings, Observation
from specvla_ros.engine.batch import TickWork
from specvla_ros.lab.bundled.policies import bundled_policy, nano_policy
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import compare_episodes
from specvla_ros.lab.planning.stage_times import StageTimes, read_stage_times
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult
from specvla_ros.lab.simulation.tasks import choose_tasks
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target
from specvla_ros.speculation.settings import NO_HEAD, AcceptanceSettings, DraftSettings, Tolerance, adjusted

Results = Mapping[tuple[str, int], EpisodeResult]

DEVICES = ("orin", "rtx5090", "h100")
DEVICES_OF_CHUNKS = DEVICES[:2]
PLAIN, SPEC = "ar", "spec, strict"  # rows that other benchmarks use
TOLERANCE = Tolerance(5.0, 3.0)
TIME_LIMIT = 4.0
_WARM = 60  # frames until the pipeline is full and has found its number of requests
_STAGES = 48  # maximum frames in flight of plain pipelining with long answers


class Answers(str, Enum):
    """Kinds of answers."""

    ACTIONS = "actions"
    CHUNKS = "chunks"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Subject:
    """A policy and its decoding modes.

    Args:
        directory: its checkpoint.
        modes: settings by row name.
        frames: number of frames for the engine alone.
        writes: description of its answers.
    """

    directory: Path
    modes: Mapping[str, EngineSettings]
    frames: int
    writes: str

    @property
    def in_closed_loop(self) -> dict[str, EngineSettings]:
        """Modes for closed loop: those that spread a prompt over at most two forwards."""
        return {name: mode for name, mode in self.modes.items() if mode.prefill_chunks <= 2}


def subjects(text_policy: Path) -> dict[str, Subject]:
    """Returns the policies by name, each with its best drafters."""
    tree = adjusted(DraftSettings(nodes=16, depth=5), temporal=True)
    window = replace(tree, children="window_mass")
    words = adjusted(DraftSettings(nodes=48), prompt_lookup_tokens=8, temporal=True)
    relaxed = TOLERANCE.acceptance
    composite = replace(relaxed, rule="composite")
    writing = EngineSettings("ar", max_reasoning_tokens=LONGEST_TEXT)
    return {
        "nano": Subject(nano_policy(), _modes(EngineSettings("ar"), tree, window, relaxed), 600, "an action in bins"),
        "text": Subject(
            text_policy, _modes(writing, words, words, composite, stages=_STAGES), 150, "text, then an action in bins"
        ),
    }


def subjects_of_chunks(two_actions: Path) -> dict[str, Subject]:
    """Returns the policies that write chunks, with lossless rows only."""
    fast = adjusted(DraftSettings(), chunk_shift=True)
    digits = adjusted(DraftSettings(nodes=64, head=NO_HEAD), chunk_shift=True)
    eight = bundled_policy("digits")
    return {
        "fast": Subject(bundled_policy("fast"), _lossless_modes(fast), 150, "eight actions in FAST tokens"),
        "digits-2": Subject(two_actions, _lossless_modes(digits), 120, "two actions in digits"),
        "digits": Subject(eight, _lossless_modes(digits), 90, "eight actions in digits"),
    }


def _lossless_modes(drafts: DraftSettings) -> dict[str, EngineSettings]:
    modes = _modes(EngineSettings("ar"), drafts, drafts, AcceptanceSettings(), stages=_STAGES)
    chosen = {name: mode for name, mode in modes.items() if "relaxed" not in name and mode.prefill_chunks <= 2}
    both = "specpipe, strict, 2 chunks"
    return chosen | {f"{both}, in order": replace(chosen[both], in_order=True)}


def _modes(
    plain: EngineSettings, strict: DraftSettings, loose: DraftSettings, rule: AcceptanceSettings, *, stages: int = 0
) -> dict[str, EngineSettings]:
    spec, pipeline = replace(plain, mode="spec"), replace(plain, mode="pipeline", max_in_flight=stages)
    specpipe = replace(plain, mode="specpipe")
    return {
        PLAIN: plain,
        SPEC: replace(spec, draft=strict),
        "spec, relaxed": replace(spec, draft=loose, acceptance=rule),
        "pipeline": pipeline,
        "pipeline, 3 chunks": replace(pipeline, prefill_chunks=3),
        "specpipe, strict, 2 chunks": replace(specpipe, prefill_chunks=2, draft=strict),
        "specpipe, relaxed, 2 chunks": replace(specpipe, prefill_chunks=2, draft=loose, acceptance=rule),
        "specpipe, relaxed, 3 chunks": replace(specpipe, prefill_chunks=3, draft=loose, acceptance=rule),
    }


def main(
    context: typer.Context,
    episodes: Episodes = 16,
    seed: Seed = 0,
    workers: Workers = 2,
    text_policy: Annotated[Path, typer.Option(help="Directory of the text policy.")] = Path("text-policy"),
    answers: Annotated[Answers, typer.Option(help="Policies with single actions, or with chunks (lossless rows).")] = (
        Answers.ACTIONS
    ),
    two_actions: Annotated[Path, typer.Option(help="Directory of the two-action policy.")] = Path("two-actions"),
    work: Work = Path("pipelining-benchmark"),
    out: Out = RESULTS / "pipelining_nano.json",
) -> None:
    """Runs the missing parts; with 0 episodes, the engine alone."""
    plan = SimulatePlan(episodes=episodes, first_seed=seed, films=0, workers=workers)
    chunks = answers is Answers.CHUNKS
    chosen = subjects_of_chunks(two_actions) if chunks else subjects(text_policy)
    devices = DEVICES_OF_CHUNKS if chunks else DEVICES
    policies = {name: _policy(name, subject, devices, plan, work) for name, subject in chosen.items()}
    found = {
        "tolerance": {"mm": TOLERANCE.mm, "degrees": TOLERANCE.degrees},
        "time_limit": TIME_LIMIT,
        "first_seed": seed,
        "episodes_per_task": episodes,
        "policies": policies,
    }
    finish(result_head(context) | of_weights(nano_policy()) | of_devices(devices) | found, out)


def _policy(name: str, subject: Subject, names: Sequence[str], plan: SimulatePlan, work: Path) -> dict[str, Any]:
    policy = load_target(subject.directory, device="cpu")
    plain = subject.modes["ar"]
    frames = list(islice(simulation_source(policy, FRAMES_FIRST_SEED, engine=plain), subject.frames))
    devices: dict[str, Any] = {}
    for device in names:
        stages = read_stage_times(device)
        alone = {mode: _saturated(policy, chosen, frames, stages) for mode, chosen in subject.modes.items()}
        print(json.dumps(alone, indent=1), file=sys.stderr, flush=True)
        closed = _closed_loop(device, subject, plan, work / name / device) if plan.episodes else {}
        devices[device] = {"name": stages.name, "frame_always_waiting": alone, "closed_loop": closed}
    return {
        "weights": weights_digest(subject.directory),
        "writes": subject.writes,
        "frames": subject.frames,
        "tokens": devices[names[0]]["frame_always_waiting"]["ar"]["forwards_per_action"],
        "devices": devices,
    }


def _saturated(
    policy: Target, chosen: EngineSettings, frames: Sequence[Observation], device: StageTimes
) -> dict[str, Any]:
    """Runs the engine alone on the device's clock."""
    now_s = started_s = 0.0

    def advance(work: TickWork) -> None:
        nonlocal now_s
        now_s += device.tick_s(work)

    run = Saturated(make_engine(policy, chosen), numbered(frames), lambda: now_s, advance)
    latency_s: list[float] = []
    actions: list[Action] = []
    drops, warm = 0, False
    while True:
        outcomes = run.tick()
        if run.waiting is None:  # the end of the recording is not a steady state
            break
        if not warm and len(run.admitted_s) == _WARM:
            warm, started_s = True, list(run.admitted_s.values())[-1]
            latency_s.clear()
            actions.clear()
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


def numbered(frames: Sequence[Observation]) -> Iterator[Observation]:
    """Yields a recording's frames with consecutive stamps and an epoch per instruction."""
    epoch, current = 0, ""
    for number, frame in enumerate(frames, start=1):
        epoch += frame.instruction != current
        current = frame.instruction
        yield replace(frame, stamp_ns=number, epoch=epoch)


def _closed_loop(device: str, subject: Subject, plan: SimulatePlan, work: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for mode, engine in subject.in_closed_loop.items():
        base = SimulateSettings(
            subject.directory, clock=Clock.REALTIME, emulate=device, engine=engine, time_limit=TIME_LIMIT
        )
        out = work / mode.replace(", ", "_").replace(" ", "-")
        summary = simulate(base, plan, out, partial(show_progress, f"{device}, {mode}"))
        plain, own = (read_episodes(path, plan) for path in (work / "ar", out))
        rows[mode] = {
            "success": summary.success.as_json(),
            "against_ar": compare_episodes(plain, own).as_json(),
            "in_time": sum(episode.succeeded and episode.time_s <= _allowed_s(episode) for episode in own.values()),
            **_times(plain, own),
            "latency_s": summary.latency_s,
            "picture_age_s": summary.picture_age_s,
            "action_rate_hz": summary.action_rate_hz,
            "drops": summary.drops,
        }
    return rows


def _allowed_s(episode: EpisodeResult) -> float:
    """The task's nominal time; `TIME_LIMIT` times as much was allowed."""
    (task,) = choose_tasks([episode.task])
    return task.max_steps * ACTION_DT_S + 1e-6


def _times(plain: Results, own: Results) -> dict[str, Any]:
    """Median time to success, alone and relative to plain decoding on the starts where both succeeded."""
    both = [key for key in own if plain[key].succeeded and own[key].succeeded]
    done = [episode.time_s for episode in own.values() if episode.succeeded]
    return {
        "time_to_success_s": statistics.median(done) if done else None,
        "plain_time_over_own": statistics.median(plain[key].time_s / own[key].time_s for key in both) if both else None,
    }


if __name__ == "__main__":
    typer.run(main)
