# SPDX-License-Identifier: Apache-2.0
"""The commands that simulate and tune: `simulate`, `compare`, `robot-model`, `sweep` and `calibrate`."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.cli.terminal import print_table, progress
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import (
    Cameras,
    Emulate,
    Episodes,
    PerEngine,
    Ray,
    Robot,
    Seed,
    StateNames,
    StateTopic,
    Tasks,
    Workers,
    World,
    sensors_of,
)

app = typer.Typer()

_TOLERANCES = ("0.5mm,0.3deg", "1mm,0.6deg", "2mm,1.1deg", "3mm,1.7deg", "5mm,3deg")
_NODES = (8, 16, 32, 50)


class FollowOption(str, Enum):
    """Who follows the policy's actions."""

    SIMULATOR = "simulator"
    DRIVER = "driver"
    PLAIN = "plain"


class InterfaceOption(str, Enum):
    """How an arm is commanded."""

    POSE = "pose"
    TWIST = "twist"
    JOINT_TRAJECTORY = "joint_trajectory"
    POSITION_ARRAY = "position_array"


class ClockOption(str, Enum):
    """How the world's time passes while the policy thinks."""

    LOCKSTEP = "lockstep"
    REALTIME = "realtime"


@app.command()
@takes_policy()
def simulate(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory of the results; one that was cut short goes on.")],
    world: World = "table",
    robot: Robot = "table",
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
    follow: Annotated[
        FollowOption,
        typer.Option(help="simulator: the arm's own follower. driver: the driver's control. plain: values over dt."),
    ] = FollowOption.SIMULATOR,
    interface: Annotated[
        InterfaceOption | None, typer.Option(help="By which --follow driver and plain command the arm; else pose.")
    ] = None,
    films: Annotated[int, typer.Option(help="Episodes per task that are filmed.", min=0)] = 1,
    workers: Workers = 0,
    per_engine: PerEngine = 0,
    ray: Ray = "",
) -> None:
    """Let a policy act in simulation: success rates, latency, films; episodes.jsonl, summary.json, report.html."""
    from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings
    from specvla_ros.lab.evaluation.simulate import simulate as run
    from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult
    from specvla_ros.models.checkpoint import leave_a_core

    if interface is not None and follow is FollowOption.SIMULATOR:
        raise UserError(f"--interface {interface.value} is of the arms of --follow driver and --follow plain: give one")
    settings = SimulateSettings(
        policy=chosen.checkpoint,
        world=world,
        robot=robot,
        follow="" if follow is FollowOption.SIMULATOR else follow.value,
        interface=(interface or InterfaceOption.POSE).value,
        clock=Clock(clock.value),
        emulate=emulate,
        engine=chosen.engine,
        time_limit=time_limit,
        model=chosen.model,
    )
    leave_a_core()
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films, workers, ray, per_engine)
    with progress("episodes") as advance:
        successes: list[bool] = []

        def show(result: EpisodeResult, done: int, wanted: int) -> None:
            successes.append(result.succeeded)
            advance(done, wanted, f"{result.task}: {sum(successes)} of {len(successes)} succeeded")

        summary = run(settings, plan, out, show)
    rows = []
    for name, each in summary.tasks.items():
        numbers = ("" if v is None else f"{v:.1f}" for v in (each.steps_to_success, each.time_to_success_s))
        rows.append((name, str(each.success), str(each.listened or ""), *numbers))
    print_table(("task", "success", "moved what it names", "steps", "time [s]"), rows)
    latency = summary.latency_s
    times = f", latency p50 {latency['p50'] * 1e3:.1f} ms, p95 {latency['p95'] * 1e3:.1f} ms" if latency else ""
    emulated = f" (emulated: {emulate})" if emulate else ""
    console = Console()
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
    from specvla_ros.lab.evaluation.simulate import read_episodes
    from specvla_ros.lab.evaluation.simulate_summary import compare_episodes

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


@app.command("robot-model")
def robot_model(
    robot: Robot,
    out: Annotated[Path, typer.Option(help="The MJCF file to write.")],
) -> None:
    """Write the kinematics of an arm that can stand at the table, for the driver's `joints.model`."""
    from specvla_ros.lab.simulation.arms import choose_arm

    arm = choose_arm(robot)
    try:
        out.write_text(arm.kinematics())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    typer.echo(
        f"{out}: joints {' '.join(arm.joints)}; tool pinch; speeds {' '.join(f'{each:g}' for each in arm.speed)}"
    )


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
    ray: Ray = "",
) -> None:
    """Compare plain, strict and relaxed decoding on the same episodes: Spec-VLA's tables 1 to 3 and figure 4."""
    from specvla_ros.lab.evaluation.simulate import SimulatePlan, SimulateSettings
    from specvla_ros.lab.evaluation.sweep import relaxation_settings
    from specvla_ros.lab.evaluation.sweep import sweep as run
    from specvla_ros.models.checkpoint import leave_a_core

    base = SimulateSettings(policy=chosen.checkpoint, world=world, model=chosen.model)
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers, ray=ray)
    leave_a_core()
    settings = relaxation_settings(chosen.engine, bins or [1, 3, 5, 9, 15])
    with progress("episodes") as advance:
        rows = run(base, settings, plan, out, lambda name, _, done, wanted: advance(done, wanted, name))
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
    ray: Ray = "",
    emulate: Emulate = "",
    camera: Cameras = None,
    state_topic: StateTopic = "",
    state_names: StateNames = "",
) -> None:
    """Choose tolerance and draft tree from evidence, and write them as a ROS 2 parameter file."""
    from specvla_ros.lab.evaluation import calibrate as calibration
    from specvla_ros.lab.evaluation.calibration import Limits
    from specvla_ros.lab.evaluation.report.sweep import CALIBRATION_HEAD, calibration_row
    from specvla_ros.lab.evaluation.simulate import TABLE, SimulatePlan, SimulateSettings, policy_of
    from specvla_ros.models.checkpoint import leave_a_core
    from specvla_ros.speculation.settings import Tolerance

    simulated = world != "none"
    base = SimulateSettings(
        policy=chosen.checkpoint, world=world if simulated else TABLE, engine=chosen.engine, model=chosen.model
    )
    acting = SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers, ray=ray)
    plan = calibration.CalibratePlan(
        tolerances=tuple(map(Tolerance.parse, tolerance or _TOLERANCES)),
        nodes=tuple(nodes or _NODES),
        limits=Limits(max_loss, max_mm, max_deg, max_gripper / 100),
        episodes=acting if simulated else None,
        emulate=emulate,
    )
    leave_a_core()
    loaded = policy_of(base)
    with progress("looking for frames") as advance:
        images = calibration.collect_frames(
            loaded, base, data, plan, frames, sensors_of(camera, state_topic, state_names)
        )
        found = calibration.calibrate(
            loaded, base, images, plan, out, lambda stage, done, wanted: advance(done, wanted, stage)
        )
    print_table(CALIBRATION_HEAD[:-1], [calibration_row(each, found)[:-1] for each in found.shortlist])
    console = Console()
    for each in found.shortlist:
        if each.refusals:
            console.print(f"{each.trial.name}: {'; '.join(each.refusals)}")
    for name, why in found.refused.items():
        console.print(f"left out {name}: {why}")
    console.print(f"chosen: {found.chosen.trial.name}; {out / calibration.PROFILE_FILE} is its profile")
