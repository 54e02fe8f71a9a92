# SPDX-License-Identifier: Apache-2.0
"""The commands that simulate, train and tune: `simulate`, `compare`, `collect`, `train-*`, `sweep` and `calibrate`."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specvla_ros.cli.options import (
    Cameras,
    Emulate,
    Episodes,
    PolicyOptions,
    Robot,
    Robots,
    Seed,
    StateNames,
    StateTopic,
    Tasks,
    Workers,
    World,
    camera_topics,
    check_accelerate,
    names_of,
    takes_policy,
)
from specvla_ros.errors import UserError
from specvla_ros.evaluation.terminal import print_table, progress_bar

app = typer.Typer()

_TOLERANCES = ("0.5mm,0.3deg", "1mm,0.6deg", "2mm,1.1deg", "3mm,1.7deg", "5mm,3deg")
_NODES = (8, 16, 32, 50)
_SHOWN_PLACES = 16  # of an answer; the file has all


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, and what advances it: how much is done, how much there is, and what it is."""
    with progress_bar() as bar:
        line = bar.add_task(description, total=None)
        yield lambda done, wanted, what: bar.update(line, completed=done, total=wanted, description=what)


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


Ray = Annotated[bool, typer.Option("--ray", help="Spread the episodes over a Ray cluster (RAY_ADDRESS).")]


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
    ray: Ray = False,
) -> None:
    """Let a policy act in simulation: success rates, latency, films; episodes.jsonl, summary.json, report.html."""
    from specvla_ros.evaluation.simulate import SimulatePlan, SimulateSettings
    from specvla_ros.evaluation.simulate import simulate as run
    from specvla_ros.models.checkpoint import leave_a_core
    from specvla_ros.simulation.rollout import Clock, EpisodeResult

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
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films, workers, ray)
    with _progress("episodes") as advance:
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
    ray: Ray = False,
) -> None:
    """Record demonstrations by the scripted experts, as ROS 2 bags."""
    from specvla_ros.policies.bundled import find_policy
    from specvla_ros.simulation.collect import collect as run
    from specvla_ros.simulation.tasks import DEMONSTRATION_FIRST_SEED

    with _progress("demonstrations") as advance:
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


@app.command("robot-model")
def robot_model(
    robot: Robot,
    out: Annotated[Path, typer.Option(help="The MJCF file to write.")],
) -> None:
    """Write the kinematics of an arm that can stand at the table, for the driver's `joints.model`."""
    from specvla_ros.simulation.arms import choose_arm

    arm = choose_arm(robot)
    try:
        out.write_text(arm.kinematics())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from None
    typer.echo(
        f"{out}: joints {' '.join(arm.joints)}; tool pinch; speeds {' '.join(f'{each:g}' for each in arm.speed)}"
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
    from specvla_ros.policies.bundled import find_policy
    from specvla_ros.training import train_policy as training
    from specvla_ros.training.dataset import Sensors

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
        sensors=Sensors(camera_topics(camera), state_topic, names_of(state_names)),
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
) -> None:
    """Train an EAGLE draft head on the target's own answers; several GPUs: accelerate launch -m specvla_ros.cli …."""
    check_accelerate()
    from specvla_ros.evaluation.frame_sources import SIMULATION
    from specvla_ros.models.checkpoint import load_target
    from specvla_ros.models.openvla.target import require_openvla
    from specvla_ros.training import train_draft as training

    if SIMULATION in data and len(data) > 1:
        raise UserError("--data sim cannot be mixed with bags: train twice, or choose one")
    settings = training.DraftTraining(epochs, batch_size, learning_rate, own_steps, parallel_depth, seed)
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
            max_text=max_reasoning_tokens,
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
                of_places = found.accept_length_by_place
                places = ", ".join(f"{place}: {length:.2f}" for place, length in of_places)
                bar.console.print(
                    f"epoch {found.epoch}: τ {found.tau:.2f} on {found.samples} held-out answers"
                    + (f"; accept length by place {places}" if len(of_places) <= _SHOWN_PLACES else "")
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

    base = SimulateSettings(policy=chosen.checkpoint, world=world, model=chosen.model)
    plan = SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers)
    leave_a_core()
    settings = relaxation_settings(chosen.engine, bins or [1, 3, 5, 9, 15])
    with _progress("episodes") as advance:
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
    plan = calibration.CalibratePlan(
        tolerances=tuple(map(Tolerance.parse, tolerance or _TOLERANCES)),
        nodes=tuple(nodes or _NODES),
        limits=Limits(max_loss, max_mm, max_deg, max_gripper / 100),
        episodes=SimulatePlan(tuple(task or ()), episodes, seed, films=0, workers=workers) if simulated else None,
        emulate=emulate,
    )
    leave_a_core()
    loaded = policy_of(base)
    with _progress("looking for frames") as advance:
        images = calibration.collect_frames(loaded, base, data, plan, frames)
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
