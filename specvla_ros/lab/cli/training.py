# SPDX-License-Identifier: Apache-2.0
"""The data and training commands: `collect`, `train-policy`, `train-draft`, `fleet-draft` and `collect-answers`."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import (
    BagOptions,
    Bags,
    BagsOrSim,
    Images,
    MaxGb,
    check_accelerate,
    check_output_file,
    output_folder,
    topics_of,
)
from specvla_ros.lab.cli.parameter_options import PolicyOptions, Taken, takes_plans, takes_policy
from specvla_ros.lab.plans import (
    MIN_DRAFT_FRAMES,
    CalibratePlan,
    CollectPlan,
    DraftTraining,
    FleetPlan,
    PolicyTraining,
    Spread,
)
from specvla_ros.lab.terminal import print_table, progress, progress_bar

app = typer.Typer()

_SHOWN_POSITIONS = 16  # positions of an answer that are shown; the file has all


@app.command()
@takes_plans
def collect(
    out: Annotated[Path, typer.Option(help="Directory of the bags; existing ones are kept.", callback=output_folder)],
    plan: CollectPlan,
) -> None:
    """Record demonstrations of the scripted experts as ROS 2 bags."""
    from specvla_ros.lab.bundled.policies import find_policy
    from specvla_ros.lab.simulation.collect import collect as run

    if plan.policy is not None:
        from specvla_ros.models.checkpoint import leave_a_core

        leave_a_core()
        plan = replace(plan, policy=find_policy(plan.policy)[0])
    with progress("demonstrations") as advance:
        result = run(out, plan, lambda done, wanted: advance(done, wanted, "demonstrations"))
    typer.echo(f"{result.kept} of {result.wanted} demonstrations in {out}, {result.new} of them new")
    if result.failed:
        failure = "the simulation diverged" if plan.policy else "the expert failed"
        typer.echo(f"{failure} in {result.failed} episodes, which are discarded")


@app.command("train-policy")
@takes_plans
def train_policy(
    data: Bags,
    out: Annotated[
        Path,
        typer.Option(help="The checkpoint's directory; an interrupted training resumes.", callback=output_folder),
    ],
    settings: PolicyTraining,
    of_bags: BagOptions,
) -> None:
    """Train a nano OpenVLA by behaviour cloning; on several GPUs: accelerate launch -m specvla_ros.cli train-policy."""
    check_accelerate()
    from specvla_ros.lab.bags.finder import bags_in
    from specvla_ros.lab.bundled.policies import find_policy
    from specvla_ros.lab.training import train_policy as training
    from specvla_ros.models.checkpoint import leave_a_core

    leave_a_core()
    settings, bags = replace(settings, topics=of_bags.topics), bags_in(data)
    with progress_bar() as bar:
        reading = bar.add_task("reading bags", total=None)
        line = bar.add_task("training", total=settings.steps)

        def show(progress: training.Progress) -> None:
            text = f"loss {progress.loss:.3f}, {progress.samples_per_s:.0f} samples/s"
            bar.update(line, completed=progress.step, description=text)
            found = progress.validation
            if found is not None and found.step == progress.step:
                accuracy = " ".join(f"{each:.2f}" for each in found.accuracy)
                distance = " ".join(f"{each:.1f}" for each in found.bin_distance)
                per_dimension = f"; per dimension: token accuracy {accuracy}, distance in bins {distance}"
                bar.console.print(
                    f"step {found.step}, {found.seconds / 60:.0f} min: validation loss {found.loss:.3f}"
                    + (per_dimension if distance else f", token accuracy {accuracy}")
                )

        training.train_policy(
            bags,
            out,
            settings,
            init=find_policy(Path(settings.init))[0] if settings.init else None,
            on_reading=lambda done, wanted: bar.update(reading, completed=done, total=wanted),
            on_progress=show,
        )
    typer.echo(f"the checkpoint is in {out}; try it: specvla simulate --policy {out} --out {out}-simulated")


@app.command("train-draft")
@takes_policy(decodes=False)
def train_draft(
    chosen: PolicyOptions,
    data: BagsOrSim,
    out: Annotated[
        Path,
        typer.Option(help="The draft head's directory; an interrupted training resumes.", callback=output_folder),
    ],
    settings: DraftTraining,
    of_bags: Images,
    spread: Spread,
    frames: Annotated[
        int, typer.Option(help="Maximum number of images that the target answers.", min=MIN_DRAFT_FRAMES)
    ] = 20000,
    max_reasoning_tokens: Annotated[
        int, typer.Option(help="Maximum length of the target's text before an action, in tokens.", min=0)
    ] = 0,
    max_gb: MaxGb = 20.0,
) -> None:
    """Train an EAGLE draft head on the target's answers; on several GPUs: accelerate launch -m specvla_ros.cli …."""
    check_accelerate()
    from specvla_ros.lab.evaluation.frame_sources import bags_or_simulation
    from specvla_ros.lab.training import train_draft as training
    from specvla_ros.models.checkpoint import model_type_of
    from specvla_ros.models.config import check_directory
    from specvla_ros.models.families.openvla.config import OPENVLA_TYPES
    from specvla_ros.models.families.openvla.target import require_openvla

    training.check_output(out)
    check_directory(chosen.checkpoint)
    if model_type_of(chosen.checkpoint) not in OPENVLA_TYPES:
        raise UserError(f"{chosen.checkpoint} is not an OpenVLA checkpoint; draft heads are only trained for OpenVLA")
    bags = bags_or_simulation(data)
    training.check_frames(bags, frames, topics_of(chosen, of_bags))
    policy = require_openvla(chosen.load())
    with progress_bar() as bar:
        asking = bar.add_task("running the target", total=frames)
        shards = training.collect_features(
            policy,
            bags,
            out,
            seed=settings.seed,
            frames=frames,
            max_text=max_reasoning_tokens,
            max_bytes=max_gb * 1e9,
            topics=topics_of(chosen, of_bags),
            model=chosen.model,
            spread=spread,
            on_frame=lambda done: bar.update(asking, completed=done),
        )
        line = bar.add_task("training", total=None)
        shown = 0

        def show(progress: training.Progress[training.DraftValidation]) -> None:
            nonlocal shown
            bar.update(line, completed=progress.step, total=progress.steps, description=f"loss {progress.loss:.4f}")
            found = progress.validation
            if found is not None and found.epoch > shown:
                shown, positions = found.epoch, found.accept_length_by_place
                said = f"epoch {found.epoch}: τ {found.tau:.2f} on {found.samples} held-out answers"
                if len(positions) <= _SHOWN_POSITIONS:
                    said += "; accept length by position " + ", ".join(
                        f"{at}: {length:.2f}" for at, length in positions
                    )
                bar.console.print(said)

        training.train_draft(policy, shards, out, settings, show)
    parts = ("--policy", chosen.checkpoint, "--mode", "spec", "-p", f"draft.head:={out}", "--out", f"{out}-simulated")
    typer.echo(f"the draft head is in {out}; try it: specvla simulate {shlex.join(map(str, parts))}")


@app.command("fleet-draft")
@takes_policy(mode="spec")
def fleet_draft(
    chosen: PolicyOptions,
    data: Bags,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory of head, verdict and report; an interrupted training resumes.", callback=output_folder
        ),
    ],
    plan: FleetPlan,
    training: Annotated[DraftTraining, Taken(fixed={"parallel_depth": 1})],
    of_bags: Images,
    spread: Spread,
    promote: Annotated[
        Path | None,
        typer.Option(
            help="Directory that an accepted head is copied to, such as the checkpoint's folder draft; the previous "
            "head is kept next to it. Default: it stays in --out.",
            callback=output_folder,
        ),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="Tolerance to calibrate with the new head, e.g. 2mm,1.1deg; repeatable. Default: none."),
    ] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Tree size for the calibration; repeatable.")] = None,
    max_gb: MaxGb = 20.0,
) -> None:
    """Train a draft head on bags, compare it with the head in use on held-out bags, and accept or refuse it.

    It is accepted if it saves forwards and strict answers equal plain decoding's. Exit code 1 when it is refused.
    """
    check_accelerate()
    from specvla_ros.lab.bags.finder import bags_in
    from specvla_ros.lab.training import fleet_draft as fleet
    from specvla_ros.lab.training.train_draft import DraftValidation
    from specvla_ros.lab.training.trainer import Progress
    from specvla_ros.models.families.openvla.target import require_openvla
    from specvla_ros.speculation.settings import Tolerance

    fleet.open_output(out)
    tolerances = tuple(map(Tolerance.parse, tolerance or ()))
    plan = replace(
        plan,
        training=training,
        max_bytes=max_gb * 1e9,
        calibrate=CalibratePlan(tolerances, tuple(nodes or (chosen.engine.draft.nodes,))) if tolerances else None,
    )
    policy = require_openvla(chosen.load_with_text())
    with progress_bar() as bar:
        asking = bar.add_task("running the target", total=plan.frames)
        line = bar.add_task("training", total=None)

        def show(progress: Progress[DraftValidation]) -> None:
            bar.update(line, completed=progress.step, total=progress.steps, description=f"loss {progress.loss:.4f}")

        found = fleet.fleet_draft(
            policy,
            chosen.model,
            chosen.engine,
            bags_in(data),
            out,
            plan,
            promote=promote,
            topics=topics_of(chosen, of_bags),
            spread=spread,
            on_frame=lambda done: bar.update(asking, completed=done),
            on_training=show,
        )
    print_table(fleet.RUNS_HEAD, found.rows())
    typer.echo(f"calibration: {found.calibration}")
    for refusal in found.refusals:
        typer.secho(f"specvla: the new head is refused: {refusal}", fg=typer.colors.RED, err=True)
    if found.refusals:
        raise typer.Exit(1)
    kept = f"; the previous head is in {found.kept}" if found.kept else ""
    typer.echo(f"the new head is accepted and in {found.promoted or out / fleet.HEAD}{kept}; see {out / 'report.html'}")


@app.command("collect-answers")
@takes_policy(decodes=False)
def collect_answers(
    chosen: PolicyOptions,
    data: BagsOrSim,
    of_bags: Images,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: in the checkpoint, where draft.chunk_shift finds it.")
    ] = None,
    frames: Annotated[int, typer.Option(help="Maximum number of images that the policy answers.", min=1)] = 2500,
    seed: Annotated[int, typer.Option(help="Seed of the bags' order, or of the first episode.", min=0)] = 0,
) -> None:
    """Record a policy's answers, in which draft.chunk_shift looks up continuations of new ones."""
    from itertools import islice

    from specvla_ros.lab.evaluation.frame_sources import bags_or_simulation, frame_source
    from specvla_ros.lab.evaluation.frame_sources import collect_answers as collect
    from specvla_ros.lab.training.artifacts import save_answers
    from specvla_ros.speculation.drafters.chunk_shift import ANSWERS_FILE

    path = (out or chosen.checkpoint / ANSWERS_FILE).expanduser()
    check_output_file("--out", path)
    bags = bags_or_simulation(data)
    policy = chosen.load()
    source = frame_source(policy, bags, seed, topics_of(chosen, of_bags))
    with progress("running the policy") as advance:
        found = collect(policy, islice(source, frames), lambda done: advance(done, frames, ""))
    save_answers(path, [*found.answers])
    left_out = "".join(f"; {count} without an action: {reason}" for reason, count in found.dropped.items())
    typer.echo(f"wrote {len(found.answers)} different answers to {found.frames} images to {path}{left_out}")
