# SPDX-License-Identifier: Apache-2.0
"""The command that renews a draft head from the day's bags: `fleet-draft`."""

from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import print_table, progress_bar
from specvla_ros.lab.cli.options import Cameras, Ray, StateNames, StateTopic, Workers, check_accelerate, sensors_of

app = typer.Typer()


@app.command("fleet-draft")
@takes_policy(mode="spec")
def fleet_draft(
    chosen: PolicyOptions,
    data: Annotated[list[Path], typer.Option(help="Bags, or directories of bags; again for more.")],
    out: Annotated[Path, typer.Option(help="Directory for head, verdict and report; a training cut short goes on.")],
    promote: Annotated[
        Path | None,
        typer.Option(
            help="Where a head is put that is taken, such as the folder draft of the checkpoint; what lies there is "
            "kept beside it. Default: it stays in --out."
        ),
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the bags that heads are judged by.")] = 0.2,
    min_gain: Annotated[
        float, typer.Option(help="Share of the forwards per action that it must save against the one in use.")
    ] = 0.01,
    judged_frames: Annotated[int, typer.Option(help="Held-out images at most for that.", min=1)] = 300,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="To calibrate with the new head, as 2mm,1.1deg; again for more. Default: none."),
    ] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Tree sizes for that; again for more.")] = None,
    frames: Annotated[int, typer.Option(help="Images at most that the target is asked about.", min=1)] = 20000,
    max_gb: Annotated[float, typer.Option(help="Maximum of disk for features, in GB.")] = 20.0,
    epochs: Annotated[int, typer.Option(help="Passes over the features.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Answers of a step.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="At its peak; 5e-5 suits 7 B targets.")] = 5e-5,
    own_steps: Annotated[int, typer.Option(help="Tokens deep that the head learns from its own features.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, order and which bags are held out.", min=0)] = 0,
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
    workers: Workers = 0,
    ray: Ray = "",
) -> None:
    """Train a draft head on bags, hold it against the one in use on others, and take or refuse it.

    It is taken where it saves forwards and strict answers stay plain decoding's. Exit code 1 when it is refused.
    """
    check_accelerate()
    from specvla_ros.lab.evaluation.calibrate import CalibratePlan
    from specvla_ros.lab.training import fleet_draft as fleet
    from specvla_ros.lab.training.draft_model import DraftValidation
    from specvla_ros.lab.training.train_draft import DraftTraining
    from specvla_ros.lab.training.trainer import Progress
    from specvla_ros.models.families.openvla.target import require_openvla
    from specvla_ros.speculation.settings import Tolerance

    tolerances = tuple(map(Tolerance.parse, tolerance or ()))
    plan = fleet.FleetPlan(
        training=DraftTraining(epochs, batch_size, learning_rate, own_steps, seed=seed),
        frames=frames,
        max_bytes=max_gb * 1e9,
        held_out=held_out,
        judged_frames=judged_frames,
        min_gain=min_gain,
        calibrate=CalibratePlan(tolerances, tuple(nodes or (chosen.engine.draft.nodes,))) if tolerances else None,
    )
    policy = require_openvla(chosen.load())
    with progress_bar() as bar:
        asking = bar.add_task("asking the target", total=frames)
        line = bar.add_task("training", total=None)

        def show(progress: Progress[DraftValidation]) -> None:
            bar.update(line, completed=progress.step, total=progress.steps, description=f"loss {progress.loss:.4f}")

        found = fleet.fleet_draft(
            policy,
            chosen.model,
            chosen.engine,
            data,
            out,
            plan,
            promote=promote,
            sensors=sensors_of(camera, state_topic, state_names),
            workers=workers,
            ray=ray,
            on_frame=lambda done: bar.update(asking, completed=done),
            on_training=show,
        )
    print_table(fleet.RUNS_HEAD, found.rows())
    typer.echo(f"calibration: {found.calibration}")
    for refusal in found.refusals:
        typer.secho(f"specvla: the new head is refused: {refusal}", fg=typer.colors.RED, err=True)
    if found.refusals:
        raise typer.Exit(1)
    kept = f"; the one before is in {found.kept}" if found.kept else ""
    typer.echo(f"the new head is taken: it is in {found.promoted or out / fleet.HEAD}{kept}; see {out / 'report.html'}")
