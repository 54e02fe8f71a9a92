# SPDX-License-Identifier: Apache-2.0
"""Size of the draft tree for long answers: forwards by number of nodes, and latency on emulated devices.

python -m benchmarks.speculation.draft_nodes --two-actions two-actions

A larger tree saves forwards, but each of them verifies more rows, at a cost that depends on the device. The policies
write chunks and use their best drafters, strict (`pipelining.py` says how `two-actions` is trained).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import FRAMES_FIRST_SEED, Out, finish, of_devices, result_head
from benchmarks.results_page import RESULTS, weights_digest
from benchmarks.saturated import make_engine
from benchmarks.speculation.pipelining import DEVICES_OF_CHUNKS, PLAIN, SPEC, Subject, numbered, subjects_of_chunks
from specvla_ros import Action, EngineSettings, Observation
from specvla_ros.engine.outcome import Outcome
from specvla_ros.lab.evaluation.frame_sources import simulation_source
from specvla_ros.lab.planning.stage_times import StageTimes, read_stage_times
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target


def main(
    context: typer.Context,
    policies: Annotated[str, typer.Option(help="Policies of pipelining.py, comma-separated.")] = "fast,digits-2,digits",
    nodes: Annotated[str, typer.Option(help="Nodes of a draft tree including the root, comma-separated.")] = (
        "8,12,16,24,32,48,64"
    ),
    frames: Annotated[int, typer.Option(help="Frames of one run, decoded for each row.", min=1)] = 120,
    two_actions: Annotated[Path, typer.Option(help="Directory of the two-action policy.")] = Path("two-actions"),
    out: Out = RESULTS / "draft_nodes.json",
) -> None:
    """Decodes the same images with trees of every size."""
    sizes = [int(size) for size in nodes.split(",")]
    devices = {name: read_stage_times(name) for name in DEVICES_OF_CHUNKS}
    subjects = subjects_of_chunks(two_actions)
    chosen = policies.split(",")
    if unknown := set(chosen) - set(subjects):
        raise typer.BadParameter(f"unknown policy {', '.join(sorted(unknown))}; known: {', '.join(subjects)}")
    rows = {name: _policy(subjects[name], frames, sizes, devices) for name in chosen}
    finish(result_head(context) | of_devices(devices) | {"policies": rows}, out)


def _policy(subject: Subject, frames: int, sizes: Sequence[int], devices: Mapping[str, StageTimes]) -> dict[str, Any]:
    target, plain, spec = load_target(subject.directory, device="cpu"), subject.modes[PLAIN], subject.modes[SPEC]
    pictures = list(islice(simulation_source(target, FRAMES_FIRST_SEED, engine=plain), frames))
    of_size = {size: replace(spec, draft=replace(spec.draft, nodes=size)) for size in sizes}
    return {
        "weights": weights_digest(subject.directory),
        "writes": subject.writes,
        "frames": len(pictures),
        "plain": _row(target, plain, pictures, devices),
        "nodes": {size: _row(target, settings, pictures, devices) for size, settings in of_size.items()},
    }


def _row(
    target: Target, settings: EngineSettings, pictures: Sequence[Observation], devices: Mapping[str, StageTimes]
) -> dict[str, Any]:
    """Forwards and latency of an answer, one image at a time; a device only changes the times."""
    engine = make_engine(target, settings)
    seconds, forwards = dict.fromkeys(devices, 0.0), []
    for picture in numbered(pictures):
        engine.submit(picture)
        outcomes: list[Outcome] = []
        while not outcomes:
            outcomes = engine.tick()
            for name, device in devices.items():
                seconds[name] += device.tick_s(engine.last_work)
        forwards += [outcome.record.forwards for outcome in outcomes if isinstance(outcome, Action)]
    return {
        "forwards_per_action": statistics.fmean(forwards),
        "latency_s": {name: total / len(forwards) for name, total in seconds.items()},
    }


if __name__ == "__main__":
    typer.run(main)
