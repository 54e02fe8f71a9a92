# SPDX-License-Identifier: Apache-2.0
"""The commands that record and teach: `collect`, `train-policy`, `train-draft` and `collect-answers`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import progress, progress_bar
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import (
    Cameras,
    Ray,
    Robots,
    StateNames,
    StateTopic,
    Tasks,
    Workers,
    check_accelerate,
    sensors_of,
)

app = typer.Typer()

_SHOWN_PLACES = 16  # of an answer; the file has all


@app.command()
def collect(
    out: Annotated[Path, typer.Option(help="Directory of the bags; those that are there are kept.")],
    episodes: Annotated[int, typer.Option(help="Per task and robot.", min=1)] = 100,
    robot: Robots = None,
    task: Tasks = None,
    noise: Annotated[float, typer.Option(help="Injected into what the expert does (DART); 0: none.", min=0.0)] = 1.0,
    policy: Annotated[
        Path | None,
        typer.Option(help="Checkpoint that acts while the expert says what it should have done (DAgger)."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first start; default: far from those of `simulate`.")] = None,
    all_sensors: Annotated[
        bool, typer.Option("--all-sensors", help="Record the wrist camera and the joints' state too.")
    ] = False,
    workers: Workers = 0,
    ray: Ray = "",
) -> None:
    """Record demonstrations by the scripted experts, as ROS 2 bags."""
    from specvla_ros.lab.bundled.policies import find_policy
    from specvla_ros.lab.simulation.collect import collect as run
    from specvla_ros.lab.simulation.tasks import DEMONSTRATION_FIRST_SEED

    with progress("demonstrations") as advance:
        result = run(
            out,
            tasks=list(task or ()),
            episodes=episodes,
            robots=robot or ["table"],
            noise=noise,
            policy=find_policy(policy)[0] if policy else None,
            first_seed=DEMONSTRATION_FIRST_SEED if seed is None else seed,
            all_sensors=all_sensors,
            workers=workers,
            ray=ray,
            on_progress=lambda done, wanted: advance(done, wanted, "demonstrations"),
        )
    typer.echo(f"{result.kept} of {result.wanted} demonstrations in {out}, {result.new} of them new")
    if result.failed:
        typer.echo(
            f"{'the simulation diverged' if policy else 'the expert failed'} in {result.failed}, which are not kept"
        )


@app.command("train-policy")
def train_policy(
    data: Annotated[list[Path], typer.Option(help="Bags, or directories of bags; again for more.")],
    out: Annotated[Path, typer.Option(help="The checkpoint's directory; a training cut short goes on.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 10000,
    batch_size: Annotated[int, typer.Option(help="Images, over all processes.", min=1)] = 32,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 1.5e-3,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    validate_every: Annotated[int, typer.Option(help="Steps between validations.", min=1)] = 500,
    unnorm_key: Annotated[str, typer.Option(help="Name of the action statistics.")] = "specvla_table",
    init: Annotated[str, typer.Option(help="Checkpoint to go on from, with its words and statistics.")] = "",
    codec: Annotated[
        str, typer.Option(help="How it writes its actions: bins (a single action), digits or fast (chunks).")
    ] = "bins",
    horizon: Annotated[int, typer.Option(help="Actions of a chunk.", min=1)] = 8,
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
) -> None:
    """Train a nano OpenVLA by behaviour cloning; several GPUs: accelerate launch -m specvla_ros.cli train-policy."""
    check_accelerate()
    from specvla_ros.lab.bundled.policies import find_policy
    from specvla_ros.lab.training import train_policy as training

    settings = training.PolicyTraining(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        validate_every=validate_every,
        unnorm_key=unnorm_key,
        init=init,
        codec=codec,
        horizon=horizon,
        sensors=sensors_of(camera, state_topic, state_names),
    )
    with progress_bar() as bar:
        reading = bar.add_task("reading bags", total=None)
        line = bar.add_task("training", total=steps)

        def show(progress: training.Progress) -> None:
            text = f"loss {progress.loss:.3f}, {progress.samples_per_s:.0f} samples/s"
            bar.update(line, completed=progress.step, description=text)
            found = progress.validation
            if found is not None and found.step == progress.step:
                accuracy = " ".join(f"{each:.2f}" for each in found.accuracy)
                distance = " ".join(f"{each:.1f}" for each in found.bin_distance)
                per_dimension = f"; per dimension token accuracy {accuracy}, bins off {distance}"
                bar.console.print(
                    f"step {found.step}, {found.seconds / 60:.0f} min: validation loss {found.loss:.3f}"
                    + (per_dimension if distance else f", token accuracy {accuracy}")
                )

        training.train_policy(
            data,
            out,
            settings,
            init=find_policy(Path(init))[0] if init else None,
            on_reading=lambda done, wanted: bar.update(reading, completed=done, total=wanted),
            on_progress=show,
        )
    typer.echo(f"the checkpoint is in {out}; try it: specvla simulate --policy {out} --out {out}-simulated")


@app.command("train-draft")
@takes_policy(decodes=False)
def train_draft(
    chosen: PolicyOptions,
    data: Annotated[
        list[str], typer.Option(help="Bags or directories of bags; or `sim`: what the target does at the table.")
    ],
    out: Annotated[Path, typer.Option(help="The draft head's directory; a training cut short goes on.")],
    frames: Annotated[int, typer.Option(help="Images at most that the target is asked about.", min=1)] = 20000,
    max_reasoning_tokens: Annotated[
        int, typer.Option(help="Text at most that the target writes before it acts, in tokens.", min=0)
    ] = 0,
    max_gb: Annotated[
        float, typer.Option(help="Maximum of disk for features, in GB; they are removed at the end.")
    ] = 20.0,
    epochs: Annotated[int, typer.Option(help="Passes over the features.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Answers, over all processes.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="At its peak; 5e-5 suits 7 B targets.")] = 5e-5,
    own_steps: Annotated[
        int, typer.Option(help="Tokens deep that the head learns from its own features; 1: from the target's.", min=1)
    ] = 1,
    parallel_depth: Annotated[
        int, typer.Option(help="Tokens drafted in one forward (P-EAGLE); 1: a tree grows level by level.", min=1)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, order and noise.")] = 0,
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
    workers: Workers = 0,
    ray: Ray = "",
) -> None:
    """Train an EAGLE draft head on the target's own answers; several GPUs: accelerate launch -m specvla_ros.cli …."""
    check_accelerate()
    from specvla_ros.lab.training import train_draft as training
    from specvla_ros.models.checkpoint import load_target
    from specvla_ros.models.families.openvla.target import require_openvla

    settings = training.DraftTraining(epochs, batch_size, learning_rate, own_steps, parallel_depth, seed)
    bags = _bags(data)
    training.check_frames(bags, frames)
    policy = require_openvla(load_target(chosen.checkpoint, **vars(chosen.model)))
    with progress_bar() as bar:
        asking = bar.add_task("asking the target", total=frames)
        shards = training.collect_features(
            policy,
            bags,
            out,
            seed=seed,
            frames=frames,
            max_text=max_reasoning_tokens,
            max_bytes=max_gb * 1e9,
            sensors=sensors_of(camera, state_topic, state_names),
            model=chosen.model,
            workers=workers,
            ray=ray,
            on_frame=lambda done: bar.update(asking, completed=done),
        )
        line = bar.add_task("training", total=None)
        shown = 0

        def show(progress: training.Progress[training.DraftValidation]) -> None:
            nonlocal shown
            bar.update(line, completed=progress.step, total=progress.steps, description=f"loss {progress.loss:.4f}")
            found = progress.validation
            if found is not None and found.epoch > shown:
                shown = found.epoch
                of_places = found.accept_length_by_place
                places = ", ".join(f"{place}: {length:.2f}" for place, length in of_places)
                bar.console.print(
                    f"epoch {found.epoch}: τ {found.tau:.2f} on {found.samples} held-out answers"
                    + (f"; accept length by place {places}" if len(of_places) <= _SHOWN_PLACES else "")
                )

        training.train_draft(policy, shards, out, settings, show)
    parts = ("--policy", chosen.checkpoint, "--mode", "spec", "-p", f"draft.head:={out}", "--out", f"{out}-simulated")
    typer.echo(f"the draft head is in {out}; try it: specvla simulate {shlex.join(map(str, parts))}")


@app.command("collect-answers")
@takes_policy(decodes=False)
def collect_answers(
    chosen: PolicyOptions,
    data: Annotated[
        list[str], typer.Option(help="Bags or directories of bags; or `sim`: what the policy does at the table.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file; by default where draft.chunk_shift finds it, in the checkpoint.")
    ] = None,
    frames: Annotated[int, typer.Option(help="Images at most that the policy is asked about.", min=1)] = 2500,
    seed: Annotated[int, typer.Option(help="Of the bags' order, or of the first episode's start.", min=0)] = 0,
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
) -> None:
    """Record a policy's answers, in which draft.chunk_shift looks up how the next ones go on."""
    from itertools import islice

    from specvla_ros.lab.evaluation.collect_answers import collect_answers as collect
    from specvla_ros.lab.evaluation.frame_sources import frame_source
    from specvla_ros.models.checkpoint import load_target
    from specvla_ros.speculation.drafters.earlier_answers import ANSWERS_FILE, save_answers

    bags = _bags(data)
    policy = load_target(chosen.checkpoint, **vars(chosen.model))
    source = frame_source(policy, bags, seed, sensors_of(camera, state_topic, state_names))
    with progress("asking the policy") as advance:
        found = collect(policy, islice(source, frames), lambda done: advance(done, frames, ""))
    path = out or policy.directory / ANSWERS_FILE
    save_answers(path, [*found.answers])
    left_out = "".join(f"; {count} without an action: {reason}" for reason, count in found.dropped.items())
    typer.echo(f"{len(found.answers)} different answers to {found.frames} images are in {path}{left_out}")


def _bags(data: list[str]) -> list[Path] | None:
    """Bags to read frames from; None: simulation."""
    from specvla_ros.lab.evaluation.frame_sources import SIMULATION

    if SIMULATION in data and len(data) > 1:
        raise UserError("--data sim cannot be mixed with bags: run this twice, or choose one")
    return None if data == [SIMULATION] else [Path(each) for each in data]
