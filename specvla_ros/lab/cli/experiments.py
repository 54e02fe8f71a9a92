# SPDX-License-Identifier: Apache-2.0
"""The commands that run a policy in simulation: `demo` over ROS, `simulate` to `qualify` in process."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specvla_ros.control.convention import positions_joints
from specvla_ros.control.guard.settings import Output
from specvla_ros.errors import UserError
from specvla_ros.lab.cli import options
from specvla_ros.lab.cli.parameter_options import PolicyOptions, Taken, takes_policy
from specvla_ros.lab.planning.device import Software, known_devices
from specvla_ros.lab.plans import CalibratePlan, Criterion, Limits, QualifyPlan, SimulatePlan
from specvla_ros.lab.terminal import print_table, progress
from specvla_ros.settings.parameter import parameter, values_of

if TYPE_CHECKING:
    from specvla_ros.lab.evaluation.replay_summary import FrameRecord

app = typer.Typer()

_TOLERANCES = ("0.5mm,0.3deg", "1mm,0.6deg", "2mm,1.1deg", "3mm,1.7deg", "5mm,3deg")
_NODES = (8, 16, 32, 50)
_ACTING_ALONE = {"films": 0, "per_engine": 0}  # for compared episodes
_WATCHED = {"films": 0, "per_engine": 0, "workers": 0, "ray": ""}  # for the demo, in this process
_BINS = (1, 3, 5, 9, 15)
_SIGNIFICANT = 0.05  # p-values below it show a difference
UNDECIDED = 4  # exit code; 1 means refused, as for every result that breaks a limit


@dataclass(frozen=True)
class Moving:
    """The source of the demo arm's motion."""

    interface: str | None = parameter(
        None,
        "Commands that move the arm: the policy's actions directly (action), or the poses of driver and guard (pose). "
        "Default: action for the table's arm, pose for the others. A policy of joints always moves them through driver "
        "and guard.",
        choices=("action", "pose"),
    )


@app.command()
@takes_policy(publishes=True)
def demo(
    chosen: PolicyOptions,
    moving: Moving,
    plan: Annotated[SimulatePlan, Taken(fixed=_WATCHED, defaults={"episodes": 3})],
    out: Annotated[
        Path,
        typer.Option(help="Directory for films and report; overwritten each time.", callback=options.output_folder),
    ] = Path("demo"),
    robot: options.Robot = "table",
    rerun: options.Rerun = False,
    viewer: options.Viewer = "",
) -> None:
    """Watch a trained policy drive a simulated arm over ROS 2 topics; type another instruction while it runs.

    With --interface pose the arm is driven through driver and guard, like a commercial arm: Esc stops it, Ctrl-R clears
    the stop.
    """
    try:
        from specvla_ros.lab.ros.demo.run import CHUNKS, DemoRobot, run_demo
        from specvla_ros.lab.simulation.arm import TABLE_ARM
        from specvla_ros.lab.simulation.arms import check_actions, choose_arm
        from specvla_ros.lab.simulation.robot import TableRobot, check_policy
        from specvla_ros.models.codecs.statistics import checked_statistics
        from specvla_ros.models.families.openvla.config import read_config
    except ImportError as error:
        raise UserError(
            f"the demo needs ROS 2 and this package's messages ({error}). The pip wheel has neither: build from the "
            "repository with `make build` or colcon; `specvla doctor` lists what is installed"
        ) from None
    parameters = values_of(chosen.model) | values_of(chosen.engine) | values_of(chosen.action)
    del parameters["max_image_age_s"]  # the node's default differs from the default for recorded images
    if chosen.model.device == "auto":
        parameters["device"] = "cpu"  # sufficient for the nano policy, and a GPU may be busy
    arm = choose_arm(robot or TABLE_ARM.name)
    usual = "action" if arm is TABLE_ARM else "pose"
    statistics = checked_statistics(
        chosen.checkpoint, read_config(chosen.checkpoint).norm_stats, chosen.model.unnorm_key
    )
    of_joints = positions_joints(statistics.unnorm_key)
    if of_joints and moving.interface:
        raise UserError(f"--interface {moving.interface} is for actions of the tool, but the policy's position joints")
    check_actions(arm, joints=of_joints)
    check_policy(statistics, arm.action_names(of_joints=of_joints), TableRobot.largest_translation)
    interface = CHUNKS if of_joints else moving.interface or usual
    exit_code = run_demo(
        out,
        chosen.checkpoint,
        robot=DemoRobot(arm, interface),
        tasks=list(plan.tasks),
        episodes=plan.episodes,
        seed=plan.first_seed,
        parameters=parameters,
        shown=options.shown_in(out, rerun, viewer),
    )
    raise typer.Exit(exit_code)


@dataclass(frozen=True)
class Acting:
    """Options for the execution of an episode."""

    clock: str = parameter(
        "lockstep",
        "lockstep: the world waits for the policy. realtime: the world keeps moving.",
        choices=("lockstep", "realtime"),
    )
    time_limit: float = parameter(
        1.0, "Time limit as a multiple of the task's nominal duration.", minimum=0.1, maximum=100.0
    )
    follow: str = parameter(
        "simulator",
        "What turns actions into motion. simulator: the simulator's controller. driver: this package's driver. "
        "guarded: driver and guard. plain: displacement / dt.",
        choices=("simulator", "driver", "guarded", "plain"),
    )
    interface: str | None = parameter(
        None,
        "Command interface for --follow driver, guarded or plain; default: pose, or joint_trajectory_chunk for joints.",
        choices=tuple(each.value for each in Output if each is not Output.NONE),
    )


@app.command()
@takes_policy()
def simulate(
    chosen: PolicyOptions,
    out: options.Results,
    plan: SimulatePlan,
    acting: Acting,
    world: options.World = "table",
    robot: options.Robot = "table",
    emulate: options.Emulate = "",
    software: Annotated[
        Software,
        typer.Option(help="What runs on the emulated device: eager kernels, or captured graphs, which are faster."),
    ] = Software.EAGER,
) -> None:
    """Let a policy act in simulation: success rates, latency, films; episodes.jsonl, summary.json, report.html."""
    from specvla_ros.lab.evaluation.simulate import simulate as run
    from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult

    options.tell_of_cpu(chosen, emulate)
    driven = acting.follow != "simulator"
    if acting.interface is not None and not driven:
        raise UserError(
            f"--interface {acting.interface} only applies with --follow driver, guarded or plain: give one of them"
        )
    if software is not Software.EAGER and not emulate:
        raise UserError(f"--software {software.value} only applies with --emulate DEVICE: add it")
    settings = options.simulation(
        chosen,
        world,
        robot=robot,
        follow=acting.follow if driven else "",
        interface=acting.interface or "",
        clock=Clock(acting.clock),
        emulate=emulate,
        software=software,
        time_limit=acting.time_limit,
    )
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
    print_table(("task", "success", "moved the right object", "steps", "time [s]"), rows)
    latency, tally, console = summary.latency_s, summary.decode, Console()
    times = f", latency p50 {latency['p50'] * 1e3:.1f} ms, p95 {latency['p95'] * 1e3:.1f} ms" if latency else ""
    emulated = f" (emulated: {emulate}, {software.value} software)" if emulate else ""
    console.print(f"success {summary.success}, {summary.action_rate_hz:.1f} actions/s{times}{emulated}")
    if tally.words:
        console.print(tally.words)
    if busy := summary.context["busy"]:
        console.print(busy)
    console.print(f"see {out / 'report.html'}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Results of `simulate` or of `replay`.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Results with other settings on the same tasks and seeds, or bags.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two simulations episode by episode (exact McNemar test), or two replays frame by frame."""
    from specvla_ros.lab.evaluation.replay_bags import read_frames
    from specvla_ros.lab.evaluation.simulate import read_episodes
    from specvla_ros.lab.evaluation.simulate_summary import compare_episodes

    for directory in (first, second):
        if not directory.is_dir():
            raise UserError(f"{directory} is not a folder: give the --out of two simulations or of two replays")
    frames = [read_frames(directory) for directory in (first, second)]
    if all(frames):
        _compare_replays((first, second), frames, as_json)
        return
    results = [read_episodes(directory) for directory in (first, second)]
    for directory, episodes in zip((first, second), results, strict=True):
        if any(frames):
            raise UserError(f"only one of {first} and {second} is a replay: compare two replays of the same bags")
        if not episodes:
            raise UserError(f"{directory} holds no episodes; run `specvla simulate --out {directory}` first")
    comparison = compare_episodes(*results)
    if not comparison.first.n:
        raise UserError(f"{first} and {second} share no episode of the same task and seed")
    if as_json:
        typer.echo(json.dumps(comparison.as_json()))
        return
    typer.echo(f"{comparison.first.n} pairs of the same task and seed")
    typer.echo(f"{first}: {comparison.first}; {comparison.only_first} pairs in which only this run succeeded")
    typer.echo(f"{second}: {comparison.second}; {comparison.only_second} pairs in which only this run succeeded")
    shown = "significant difference" if comparison.p < _SIGNIFICANT else "no significant difference"
    typer.echo(f"{shown} (p = {comparison.p:.3g}, {comparison.first.n} pairs; exact McNemar test, two-sided)")


def _compare_replays(names: Sequence[Path], frames: Sequence[Mapping[Any, "FrameRecord"]], as_json: bool) -> None:
    from specvla_ros.lab.evaluation.replay_bags import action_names
    from specvla_ros.lab.evaluation.replay_summary import compare_frames

    found = compare_frames(frames[0], frames[1], action_names(names[0]))
    if not found.frames:
        raise UserError(f"{names[0]} and {names[1]} share no frame of the same bag: replay the same bags with both")
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    typer.echo(f"{found.frames} pairs of the same frame; {found.differing} have different tokens")
    if found.differing and found.deviation is not None and found.median is not None:
        mm, degrees = found.median
        typer.echo(f"difference: {mm:.2f} mm and {degrees:.2f} degrees (median), {found.deviation.words}")
    if any(found.unpaired):
        left_out = " and ".join(f"{n} of {name}" for n, name in zip(found.unpaired, names, strict=True) if n)
        typer.echo(f"left out, since only one of the two holds the frame: {left_out}")
    alone = (found.only_first, found.only_second)
    for name, latency, forwards, only in zip(names, found.latency_ms, found.forwards_per_action, alone, strict=True):
        figures = f"p50 {latency:.1f} ms, {forwards:.2f} forwards per action"
        typer.echo(f"{name}: {figures}; {only} frames that only this run answered")
    typer.echo(f"{names[1]} is {found.speed_up:.2f} times as fast as {names[0]} (mean latency)")


@app.command("robot-model")
def robot_model(
    robot: options.Robot,
    out: Annotated[Path, typer.Option(help="The MJCF file to write.", callback=options.output_file)],
) -> None:
    """Write the kinematics of an arm at the table, for the driver's `joints.model`."""
    from specvla_ros.lab.simulation.arms import choose_arm

    arm = choose_arm(robot)
    out.write_text(arm.kinematics())
    speeds = " ".join(f"{each:g}" for each in arm.speed)
    typer.echo(f"{out}: joints {' '.join(arm.joints)}; tool pinch; speeds {speeds}")


@app.command()
@takes_policy(mode="spec")
def sweep(
    chosen: PolicyOptions,
    out: options.Results,
    plan: Annotated[SimulatePlan, Taken(fixed=_ACTING_ALONE)],
    world: options.World = "table",
    bins: Annotated[
        list[int] | None, typer.Option(help="Tolerance r in bins; repeatable. Default: 1, 3, 5, 9, 15.")
    ] = None,
) -> None:
    """Compare plain, strict and relaxed decoding on the same episodes: Spec-VLA's tables 1 to 3 and figure 4."""
    from specvla_ros.lab.evaluation.compare import SWEEP_HEAD, relaxation_settings, sweep_rows
    from specvla_ros.lab.evaluation.compare import sweep as run
    from specvla_ros.lab.evaluation.simulate import SimulateSettings
    from specvla_ros.models.checkpoint import leave_a_core

    options.tell_of_cpu(chosen)
    base = SimulateSettings(policy=chosen.checkpoint, world=world, model=chosen.model)
    leave_a_core()
    settings = relaxation_settings(chosen.engine, bins or _BINS)
    with progress("episodes") as advance:
        rows = run(base, settings, plan, out, lambda name, _, done, wanted: advance(done, wanted, name))
    print_table(SWEEP_HEAD, sweep_rows(rows))
    typer.echo(f"see {out / 'report.html'}, {out / 'sweep.json'} and a folder for each setting")


@app.command()
@takes_policy(mode="spec")
def calibrate(
    chosen: PolicyOptions,
    out: Annotated[
        Path,
        typer.Option(help="Directory for profile.yaml, the report and the episodes.", callback=options.output_folder),
    ],
    acting: Annotated[SimulatePlan, Taken(fixed=_ACTING_ALONE, defaults={"episodes": 60})],
    limits: Limits,
    of_bags: options.Images,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Images to test: bags, folders of bags, LeRobot datasets; or `sim`: the policy's episodes in --world."
        ),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="Tolerance to try, e.g. 2mm,1.1deg or 5bins; repeatable. Default: 0.5mm,0.3deg to 5mm,3deg."),
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(help="Tree size to try; repeatable. Default: 8, 16, 32, 50.")
    ] = None,
    max_gripper: Annotated[
        float,
        typer.Option(help="Maximum share of actions with another gripper command, in percent.", min=0.0, max=100.0),
    ] = 1.0,
    world: Annotated[
        str, typer.Option(help="World of the success test: table, a LIBERO suite, or none: deviation alone decides.")
    ] = "table",
    frames: Annotated[int, typer.Option(help="Number of images to test.", min=1)] = 100,
    emulate: options.Emulate = "",
) -> None:
    """Choose tolerance and draft tree by measurement, and write them as a ROS 2 parameter file."""
    from specvla_ros.lab.evaluation import calibrate as calibration
    from specvla_ros.lab.evaluation.frame_sources import SIMULATION, bags_or_simulation, frame_source
    from specvla_ros.lab.evaluation.run_directory import RunDirectory
    from specvla_ros.lab.evaluation.simulate import TABLE, policy_of
    from specvla_ros.speculation.settings import Tolerance

    RunDirectory(out, calibration.COMMAND).check()
    options.tell_of_cpu(chosen, emulate)
    simulated = world != "none"
    plan = CalibratePlan(
        tolerances=tuple(map(Tolerance.parse, tolerance or _TOLERANCES)),
        nodes=tuple(nodes or _NODES),
        limits=replace(limits, gripper_share=max_gripper / 100),
        episodes=_judged(acting, world) if simulated else None,
        emulate=emulate,
    )
    base = options.simulation(chosen, world if simulated else TABLE)
    bags, topics = bags_or_simulation(data or [SIMULATION]), options.topics_of(chosen, of_bags)
    tasks = acting.tasks if simulated else ()
    loaded = policy_of(base)
    with progress("looking for frames") as advance:
        source = frame_source(loaded, bags, 0, topics, world=base.world, tasks=tasks, engine=base.engine)
        images = list(islice(source, frames))
        found = calibration.calibrate(
            loaded, base, images, plan, out, lambda stage, done, wanted: advance(done, wanted, stage)
        )
    rows = [calibration.calibration_row(each, found)[:-1] for each in found.shortlist]
    print_table(calibration.CALIBRATION_HEAD[:-1], rows)
    console = Console()
    for each in found.shortlist:
        if each.refusals:
            console.print(f"{each.trial.name}: {'; '.join(each.refusals)}")
    for name, why in found.refused.items():
        console.print(f"skipped {name}: {why}")
    console.print(f"chosen: {found.chosen.trial.name}; its profile is {out / calibration.PROFILE_FILE}")


def _judged(acting: SimulatePlan, world: str) -> SimulatePlan:
    """The episodes that measure success: no more than the world has besides those that give images."""
    from specvla_ros.lab.evaluation.frame_sources import first_frame_seed

    end = first_frame_seed(world)
    left = end - acting.first_seed
    if left < 1:
        raise UserError(f"--seed {acting.first_seed}: episodes from seed {end} on give images; give a lower one")
    if left < acting.episodes:
        typer.echo(f"reduced to --episodes {left}: episodes from seed {end} on give images", err=True)
    return replace(acting, episodes=min(left, acting.episodes))


@app.command()
@takes_policy()
def qualify(
    chosen: PolicyOptions,
    out: options.Results,
    plan: QualifyPlan,
    criterion: Criterion,
    emulate: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Device: {', '.join(known_devices())} or a JSON file; repeat, fastest first. Default: this machine."
        ),
    ] = None,
    bins: Annotated[
        list[int] | None, typer.Option(help="Tolerance in bins; repeat in increasing order, on one device.", min=0)
    ] = None,
    world: options.World = "table",
    robot: options.Robot = "table",
) -> None:
    """Find the slowest device, or the largest tolerance, with which a policy still works in real time.

    Pairs real-time episodes with lockstep episodes of plain decoding and stops as soon as the evidence suffices.
    Exit code 1 when the first candidate is refused, 4 when the pairs did not suffice to decide on it.
    """
    from specvla_ros.lab.evaluation import qualify as run
    from specvla_ros.lab.evaluation.qualify import Judgement, Verdict

    devices = emulate or []
    if bins and len(devices) > 1:
        raise UserError("give several --emulate or several --bins, not both: candidates need an order of safety")
    if len(set(devices)) < len(devices) or (bins and sorted(set(bins)) != bins):
        raise UserError("give each --emulate device once, and --bins in increasing order")
    base = options.simulation(chosen, world, robot=robot)
    if bins:
        candidates = run.tolerance_candidates(base, devices[0] if devices else "", bins)
    else:
        candidates = run.device_candidates(base, devices)
    with progress("episodes") as advance:
        latest = ""

        def look(judgement: Judgement) -> None:
            nonlocal latest
            reference, candidate = (rate.successes for rate in judgement.rates)
            latest = f", {reference} and {candidate} of {len(judgement.pairs)} succeeded"

        found = run.qualify(
            candidates, plan, criterion, out, look, lambda name, done, wanted: advance(done, wanted, f"{name}{latest}")
        )
    for judgement in found:
        typer.echo(str(judgement))
    typer.echo(f"see {out / 'report.html'}")
    raise typer.Exit({Verdict.REFUSED: 1, Verdict.UNDECIDED: UNDECIDED}.get(found[0].verdict, 0))
