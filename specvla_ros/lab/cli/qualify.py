# SPDX-License-Identifier: Apache-2.0
"""The command that decides whether a policy still works on a device, or with a tolerance: `qualify`."""

from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import progress
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import Ray, Robot, Seed, Tasks, Workers, World
from specvla_ros.lab.planning.device import known_devices

app = typer.Typer()

UNDECIDED = 4  # the exit code; 1 is refused, as of every result that breaks a limit


@app.command()
@takes_policy()
def qualify(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory of the results; one that was cut short goes on.")],
    emulate: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A device: {', '.join(known_devices())} or a JSON file; again for slower ones. Default: this machine."
        ),
    ] = None,
    bins: Annotated[
        list[int] | None, typer.Option(help="Tolerance in bins; again for larger ones, all on one device.", min=0)
    ] = None,
    world: World = "table",
    robot: Robot = "table",
    task: Tasks = None,
    pairs: Annotated[int, typer.Option(help="Pairs of episodes at most, per candidate.", min=1)] = 400,
    margin: Annotated[
        float, typer.Option(help="Success may be less than this below lockstep's, as a share.", min=0.01, max=0.99)
    ] = 0.1,
    success: Annotated[
        float, typer.Option(help="And must be above this share of all starts.", min=0.01, max=0.99)
    ] = 0.5,
    alpha: Annotated[float, typer.Option(help="Probability of a wrong verdict.", min=1e-6, max=0.5)] = 0.05,
    seed: Seed = 0,
    workers: Workers = 0,
    ray: Ray = "",
) -> None:
    """Find the slowest device, or the largest tolerance, with which a policy still works in real time.

    Real-time episodes are paired with lockstep ones of plain decoding; it stops as soon as the evidence suffices.
    Exit code 1 when the first candidate is refused, 4 when the pairs did not suffice to decide on it.
    """
    from specvla_ros.lab.evaluation import qualify as run
    from specvla_ros.lab.evaluation.qualification import Criterion, Judgement, Verdict
    from specvla_ros.lab.evaluation.simulate import SimulateSettings
    from specvla_ros.models.checkpoint import leave_a_core

    devices = emulate or []
    if bins and len(devices) > 1:
        raise UserError("give several devices or several tolerances: both at once have no order from safe to bold")
    if len(set(devices)) < len(devices) or (bins and sorted(set(bins)) != bins):
        raise UserError("give each device once, and tolerances from the smallest to the largest")
    base = SimulateSettings(
        policy=chosen.checkpoint, world=world, robot=robot, engine=chosen.engine, model=chosen.model
    )
    candidates = (
        run.tolerance_candidates(base, devices[0] if devices else "", bins)
        if bins
        else run.device_candidates(base, devices)
    )
    criterion = Criterion(margin, success, alpha)
    leave_a_core()
    plan = run.QualifyPlan(tuple(task or ()), pairs, seed, workers=workers, ray=ray)
    with progress("episodes") as advance:
        latest = ""

        def look(judgement: Judgement) -> None:
            nonlocal latest
            rates = [f"{rate.successes}" for rate in judgement.rates]
            latest = f", {' and '.join(rates)} of {len(judgement.pairs)} succeeded"

        def show(name: str, done: int, wanted: int) -> None:
            advance(done, wanted, f"{name}{latest}")

        found = run.qualify(candidates, plan, criterion, out, look, show)
    for judgement in found:
        typer.echo(str(judgement))
    typer.echo(f"see {out / 'report.html'}")
    if found[0].verdict is Verdict.REFUSED:
        raise typer.Exit(1)
    if found[0].verdict is Verdict.UNDECIDED:
        raise typer.Exit(UNDECIDED)
