"""The commands that act in simulation: `specvla simulate`, `compare`, `collect` and `train-policy`."""

import json
from enum import Enum
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


class ClockOption(str, Enum):
    """How the world's time passes while the policy thinks."""

    LOCKSTEP = "lockstep"
    REALTIME = "realtime"


Ray = Annotated[bool, typer.Option("--ray", help="Spread the episodes over a Ray cluster (RAY_ADDRESS).")]


@app.command()
@takes_policy()
def simulate(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory of the results; one that was cut short goes on.")],
    world: World = "table",
    task: Tasks = None,
    episodes: Episodes = 20,
    seed: Seed = 0,
    clock: Annotated[
        ClockOption, typer.Option(help="lockstep: the world waits for the policy. realtime: it moves on meanwhile.")
    ] = ClockOption.LOCKSTEP,
    emulate: Emulate = "",
    time_limit: Annotated[
        float, typer.Option(help="An episode has failed after so many times its task's time.", min=0.1, max=100.0)
    ] = 1.0,
    films: Annotated[int, typer.Option(help="Episodes per task that are filmed.", min=0)] = 1,
    workers: Workers = 0,
    ray: Ray = False,
) -> None:
    """Let a policy act in simulation: success rates, latency, films; episodes.jsonl, summary.json, report.html."""
    from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings
    from specvla_ros.evaluation.simulate import simulate as run
    from specvla_ros.models.checkpoint import leave_a_core
    from specvla_ros.simulation.rollout import Clock, EpisodeResult

    settings = SimulateSettings(
        policy=chosen.checkpoint,
        world=world,
        clock=Clock(clock.value),
        emulate=emulate,
        engine=chosen.engine,
        time_limit=time_limit,
        model=chosen.model,
    )
    leave_a_core()
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films, workers, ray)
    with progress_bar() as bar:
        line = bar.add_task("episodes", total=None)
        successes: list[bool] = []

        def show(result: EpisodeResult, done: int, wanted: int) -> None:
            successes.append(result.succeeded)
            text = f"{result.task}: {sum(successes)} of {len(successes)} succeeded"
            bar.update(line, completed=done, total=wanted, description=text)

        summary = run(settings, plan, out, show)
    rows = []
    for name, each in summary.tasks.items():
        numbers = ("" if v is None else f"{v:.1f}" for v in (each.steps_to_success, each.time_to_success_s))
        rows.append((name, str(each.success), str(each.listened or ""), *numbers))
    print_table(("task", "success", "moved what it names", "steps", "time [s]"), rows)
    console = Console()
    latency = summary.latency_s
    times = f", latency p50 {latency['p50'] * 1e3:.1f} ms, p95 {latency['p95'] * 1e3:.1f} ms" if latency else ""
    emulated = f" (emulated: {emulate})" if emulate else ""
    console.print(f"success {summary.success}, {summary.action_rate_hz:.1f} actions/s{times}{emulated}")
    tally = summary.decode
    if tally.accepted:
        console.print(f"{tally.forwards_per_action:.2f} forwards per action, τ {tally.tau:.2f}")
    console.print(f"see {out / 'report.html'}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Results of `specvla simulate`.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Results with other settings, same tasks and seeds.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two simulations episode by episode (exact McNemar test)."""
    from specvla_ros.evaluation.simulate import read_episodes
    from specvla_ros.evaluation.simulate_summary import compare_episodes

    results = [read_episodes(directory) for directory in (first, second)]
    for directory, episodes in zip((first, second), results, strict=True):
        if not episodes:
            raise UserError(f"{directory} holds no episodes; `specvla simulate --out {directory}` makes some")
    comparison = compare_episodes(*results)
    if not comparison.first.n:
        raise UserError(f"{first} and {second} have no episode of the same task and seed")
    if as_json:
        typer.echo(json.dumps(comparison.as_json()))
        return
    typer.echo(f"{comparison.first.n} pairs of the same task and seed")
    typer.echo(f"{first}: {comparison.first}; it alone succeeded in {comparison.only_first}")
    typer.echo(f"{second}: {comparison.second}; it alone succeeded in {comparison.only_second}")
    typer.echo(f"both succeed alike: p = {comparison.p:.3g} (exact McNemar test, two-sided)")


@app.command()
def collect(
    out: Annotated[Path, typer.Option(help="Directory of the bags; those that are there are kept.")],
    episodes: Annotated[int, typer.Option(help="Per task.", min=1)] = 100,
    task: Tasks = None,
    noise: Annotated[float, typer.Option(help="Injected into what the expert does (DART); 0: none.", min=0.0)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the first start; default: far from those of `simulate`.")] = None,
    workers: Workers = 0,
    ray: Ray = False,
) -> None:
    """Record demonstrations by the scripted experts, as ROS 2 bags."""
    from specvla_ros.simulation.collect import collect as run
    from specvla_ros.simulation.tasks import DEMONSTRATION_FIRST_SEED

    with progress_bar() as bar:
        line = bar.add_task("demonstrations", total=None)
        result = run(
            out,
            tasks=list(task or ()),
            episodes=episodes,
            noise=noise,
            first_seed=DEMONSTRATION_FIRST_SEED if seed is None else seed,
            workers=workers,
            ray=ray,
            on_progress=lambda done, wanted: bar.update(line, completed=done, total=wanted),
        )
    typer.echo(f"{result.kept} of {result.wanted} demonstrations in {out}, {result.new} of them new")
    if result.failed:
        typer.echo(f"the expert failed in {result.failed}, which are not kept")


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
) -> None:
    """Train a nano OpenVLA by behaviour cloning; several GPUs: accelerate launch -m specvla_ros.cli train-policy."""
    check_accelerate()
    from specvla_ros.training import train_policy as training

    settings = training.PolicyTraining(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        validate_every=validate_every,
        unnorm_key=unnorm_key,
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
                bar.console.print(
                    f"step {found.step}, {found.seconds / 60:.0f} min: validation loss {found.loss:.3f}; per dimension "
                    f"token accuracy {accuracy}, bins off {distance}"
                )

        training.train_policy(
            data,
            out,
            settings,
            on_reading=lambda done, wanted: bar.update(reading, completed=done, total=wanted),
            on_progress=show,
        )
    typer.echo(f"the checkpoint is in {out}; try it: specvla simulate --policy {out} --out {out}-simulated")
