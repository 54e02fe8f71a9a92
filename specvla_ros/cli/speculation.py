"""The commands about speculation: `specvla train-draft`, `sweep` and `calibrate`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specvla_ros.cli.options import (
    Emulate,
    Episodes,
    PolicyOptions,
    Seed,
    Tasks,
    Workers,
    World,
    check_accelerate,
    takes_policy,
)
from specvla_ros.errors import UserError
from specvla_ros.evaluation.terminal import print_table, progress_bar

app = typer.Typer()

_TOLERANCES = ("0.5mm,0.3deg", "1mm,0.6deg", "2mm,1.1deg", "3mm,1.7deg", "5mm,3deg")
_NODES = (8, 16, 32, 50)


@app.command("train-draft")
@takes_policy(decodes=False)
def train_draft(
    chosen: PolicyOptions,
    data: Annotated[
        list[str], typer.Option(help="Bags or directories of bags; or `sim`: what the target does at the table.")
    ],
    out: Annotated[Path, typer.Option(help="The draft head's directory; a training cut short goes on.")],
    frames: Annotated[int, typer.Option(help="Images at most that the target is asked about.", min=1)] = 20000,
    max_gb: Annotated[
        float, typer.Option(help="Maximum of disk for features, in GB; they are removed at the end.")
    ] = 20.0,
    epochs: Annotated[int, typer.Option(help="Passes over the features.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Answers, over all processes.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="At its peak; 5e-5 suits 7 B targets.")] = 5e-5,
    own_steps: Annotated[
        int, typer.Option(help="Tokens deep that the head learns from its own features; 1: from the target's.", min=1)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, order and noise.")] = 0,
) -> None:
    """Train an EAGLE draft head on the target's own answers; several GPUs: accelerate launch -m specvla_ros.cli …."""
    check_accelerate()
    from specvla_ros.evaluation.frame_sources import SIMULATION
    from specvla_ros.models.checkpoint import load_target
    from specvla_ros.models.openvla.target import require_openvla
    from specvla_ros.training import train_draft as training

    if SIMULATION in data and len(data) > 1:
        raise UserError("--data sim cannot be mixed with bags: train twice, or choose one")
    settings = training.DraftTraining(epochs, batch_size, learning_rate, own_steps, seed)
    bags = None if data == [SIMULATION] else [Path(each) for each in data]
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
            max_bytes=max_gb * 1e9,
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
                places = ", ".join(f"{place}: {length:.2f}" for place, length in found.accept_length_by_place)
                bar.console.print(
                    f"epoch {found.epoch}: τ {found.tau:.2f} on {found.samples} held-out answers; "
                    f"accept length by place {places}"
                )

        training.train_draft(policy, shards, out, settings, show)
    parts = ("--policy", chosen.checkpoint, "--mode", "spec", "-p", f"draft.head:={out}", "--out", f"{out}-simulated")
    typer.echo(f"the draft head is in {out}; try it: specvla simulate {shlex.join(map(str, parts))}")


@app.command()
@takes_policy(mode="spec")
def sweep(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory of the results; one that was cut short goes on.")],
    world: World = "table",
    task: Tasks = None,
    bins: Annotated[
        list[int] | None, typer.Option(help="Tolerance r in bins; again for more. Default: 1, 3, 5, 9, 15.")
    ] = None,
    episodes: Episodes = 20,
    seed: Seed = 0,
    workers: Workers = 0,
) -> None:
    """Compare plain, strict and relaxed decoding on the same episodes: Spec-VLA's tables 1 to 3 and figure 4."""
    from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings
    from specvla_ros.evaluation.sweep import relaxation_settings
    from specvla_ros.evaluation.sweep import sweep as run
    from specvla_ros.models.checkpoint import leave_a_core
    from specvla_ros.simulation.rollout import EpisodeResult

    base = SimulateSettings(policy=chosen.checkpoint, world=world, model=chosen.model)
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers)
    leave_a_core()
    with progress_bar() as bar:
        line = bar.add_task("episodes", total=None)

        def show(name: str, result: EpisodeResult, done: int, wanted: int) -> None:
            bar.update(line, completed=done, total=wanted, description=name)

        rows = run(base, relaxation_settings(chosen.engine, bins or [1, 3, 5, 9, 15]), plan, out, show)
    print_table(
        ("setting", "success", "only plain / only this", "τ", "forwards", "ms", "speed-up"),
        [
            (
                row.setting.name,
                str(row.summary.success),
                f"{row.against_first.only_first} / {row.against_first.only_second}",
                f"{row.summary.decode.tau:.2f}",
                f"{row.summary.decode.forwards_per_action:.2f}",
                f"{row.action_s * 1e3:.1f}",
                f"{row.speed_up:.2f}",
            )
            for row in rows
        ],
    )
    typer.echo(f"see {out / 'report.html'}, {out / 'sweep.json'} and a folder for each setting")


@app.command()
@takes_policy(mode="spec")
def calibrate(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory for profile.yaml, the report and the episodes.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Images to try: bags or directories of bags; or `sim`: the policy's own at --world."),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="To try, as 2mm,1.1deg or 5bins; again for more. Default: 0.5mm,0.3deg to 5mm,3deg."),
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(help="Tree sizes to try; again for more. Default: 8, 16, 32, 50.")
    ] = None,
    max_loss: Annotated[float, typer.Option(help="Success that may be lost, in points, at 95 % confidence.")] = 2.0,
    max_mm: Annotated[float, typer.Option(help="Deviation from plain decoding, 95th percentile, in mm.")] = 5.0,
    max_deg: Annotated[float, typer.Option(help="The same of the rotation, in degrees.")] = 3.0,
    max_gripper: Annotated[
        float, typer.Option(help="Actions that may tell the gripper something else, in percent.")
    ] = 1.0,
    world: Annotated[
        str, typer.Option(help="Where success is tried: table, a LIBERO suite, or none: deviation alone decides.")
    ] = "table",
    task: Tasks = None,
    episodes: Episodes = 60,
    frames: Annotated[int, typer.Option(help="Images to try.", min=1)] = 100,
    seed: Seed = 0,
    workers: Workers = 0,
    emulate: Emulate = "",
) -> None:
    """Choose tolerance and draft tree from evidence, and write them as a ROS 2 parameter file."""
    from specvla_ros.evaluation import calibrate as calibration
    from specvla_ros.evaluation.calibration import Limits
    from specvla_ros.evaluation.report.sweep import CALIBRATION_HEAD, calibration_row
    from specvla_ros.evaluation.simulate import TABLE, SimulatePlan, SimulateSettings, policy_of
    from specvla_ros.models.checkpoint import leave_a_core
    from specvla_ros.speculation.tolerance import Tolerance

    simulated = world != "none"
    base = SimulateSettings(
        policy=chosen.checkpoint, world=world if simulated else TABLE, engine=chosen.engine, model=chosen.model
    )
    tried = tuple(map(Tolerance.parse, tolerance or _TOLERANCES))
    plan = calibration.CalibratePlan(
        tolerances=tried,
        nodes=tuple(nodes or _NODES),
        limits=Limits(max_loss, max_mm, max_deg, max_gripper / 100),
        episodes=SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers) if simulated else None,
        emulate=emulate,
    )
    leave_a_core()
    loaded = policy_of(base)
    with progress_bar() as bar:
        line = bar.add_task("looking for frames", total=None)
        images = calibration.collect_frames(loaded, base, data, plan, frames)

        def show(stage: str, done: int, wanted: int) -> None:
            bar.update(line, completed=done, total=wanted, description=stage)

        found = calibration.calibrate(loaded, base, images, plan, out, show)
    print_table(CALIBRATION_HEAD[:-1], [calibration_row(each, found)[:-1] for each in found.shortlist])
    console = Console()
    for each in found.shortlist:
        if each.refusals:
            console.print(f"{each.trial.name}: {'; '.join(each.refusals)}")
    for name, why in found.refused.items():
        console.print(f"left out {name}: {why}")
    console.print(f"chosen: {found.chosen.trial.name}; {out / calibration.PROFILE_FILE} is its profile")
