# SPDX-License-Identifier: Apache-2.0
"""The commands for your own robot: checks of its parameter file, and statistics of its stops."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import typer
import yaml

from specvla_ros.errors import UserError, together
from specvla_ros.lab.cli import robot_mistakes
from specvla_ros.lab.cli.options import output_folder
from specvla_ros.lab.files import format_value
from specvla_ros.lab.terminal import print_table
from specvla_ros.settings.parameter import hint, walk, with_values
from specvla_ros.settings.profiles import PROFILES, Value, merge_parameters

if TYPE_CHECKING:
    from specvla_ros.control.guard.settings import GuardParameters
    from specvla_ros.control.limits import Limits
    from specvla_ros.control.robot_model import JointModel
    from specvla_ros.ros.driver.parameters import DriverParameters

app = typer.Typer()
robot = typer.Typer(help="Your own robot: its parameter file, and how it stops.", no_args_is_help=True)
app.add_typer(robot, name="robot")

_FIRST_SHARE = 0.1  # share of the speed limits for the first motions
_STARTS, _STEPS, _NEAR_M, _DAMPING = 40, 60, 0.005, 1e-3  # parameters of the search for joints that reach a corner

Settings = TypeVar("Settings")


@robot.command()
def check(
    file: Annotated[Path, typer.Argument(help="Parameter file of driver and guard, as for `robot:=`.")],
    urdf: Annotated[Path | None, typer.Option(help="MJCF or URDF of the robot; replaces joints.model.")] = None,
    profile: Annotated[
        str, typer.Option(help=f"Policy profile, {', '.join(PROFILES)} or a file, to also compare its image ages.")
    ] = "",
) -> None:
    """Check a robot's parameter file as driver and guard read it, without motion. Exit code 1: errors were found.

    A file with sections such as /left/driver is checked for each of its namespaces.
    """
    report, namespaces = Report(), [""]
    with suppress(UserError):  # reported below
        for text, surely in robot_mistakes.stray_sections(file):
            (report.wrong if surely else report.note)("file", text)
        namespaces = robot_mistakes.namespaces(file)
    for namespace in namespaces:
        if namespace:
            typer.echo(f"\nin the namespace {namespace}:")
        _check_robot(report, file, urdf, profile, namespace)
    raise typer.Exit(int(report.failed))


def _check_robot(report: "Report", file: Path, urdf: Path | None, profile: str, namespace: str) -> None:
    driver, guard = _read(report, file, urdf, namespace)
    if driver is None:
        report.note("model", "not checked, nor what follows, until the parameters above are right")
    else:
        _check_model(report, driver)
    if driver is not None and guard is not None:
        _check_together(report, driver, guard)
        _check_timeouts(report, driver, guard, profile, namespace)
    if driver is not None and not driver.limits.missing:
        _print_first_motions(driver.limits, file, 1.0 if guard is None else guard.guard.speed_scale)


@robot.command()
def stops(
    black_boxes: Annotated[
        list[str],
        typer.Argument(metavar="BLACKBOX", help="Files of the guard's black box, or their folders or globs."),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            "--robot", help="The robot's parameter file: speeds are shares of its limit, else of the highest seen."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for stops.json and report.html. Default: none.", callback=output_folder),
    ] = None,
) -> None:
    """Tabulate your robot's stopping times and distances by cause, speed and reach, from the guard's black box.

    Median and worst case, in the form of ISO 10218-1's annex on stopping. Exit code 1 when no file holds a stop of a
    moving robot.
    """
    from specvla_ros.lab.evaluation import stops_page
    from specvla_ros.lab.evaluation.stops import find_black_boxes, measure_stops

    limit_m_s = stops_page.linear_speed(file) if file is not None else None
    found = measure_stops(find_black_boxes(black_boxes))
    table = stops_page.tabulate(found, limit_m_s)
    if table.rows:
        print_table(stops_page.TABLE_HEAD, [row.cells for row in table.rows])
        typer.echo(table.caption)
    typer.echo(f"{len(found.measured)} stops measured, {len(found.left_out)} files skipped")
    for each in found.left_out:
        typer.echo(f"  {each.file}: {each.why}")
    if out is not None:
        stops_page.write_stops(out, found, table)
        typer.echo(f"see {out / 'report.html'}")
    if not found.measured:
        raise typer.Exit(1)


class Report:
    """Prints one line per check."""

    def __init__(self) -> None:
        self.failed = False

    def note(self, name: str, text: str) -> None:
        """Prints a remark that is not an error."""
        self._print("note", name, text)

    def wrong(self, name: str, text: str) -> None:
        """Prints an error."""
        self.failed = True
        self._print("wrong", name, text)

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[str], None]]:
        """Runs a check: yields the function that reports success; a UserError inside is reported as wrong."""
        try:
            yield lambda text: self._print("ok", name, text)
        except UserError as error:
            self.wrong(name, str(error))

    def _print(self, state: str, name: str, text: str) -> None:
        colour = {"wrong": typer.colors.RED, "ok": typer.colors.GREEN}.get(state, typer.colors.YELLOW)
        typer.echo(typer.style(f"{state:6}", fg=colour) + f"{name:11}{text}")


def _read(
    report: Report, file: Path, urdf: Path | None, namespace: str
) -> "tuple[DriverParameters | None, GuardParameters | None]":
    """The settings of driver and guard in a namespace; None if they are invalid or no guard runs."""
    from specvla_ros.control.guard.settings import GuardParameters
    from specvla_ros.ros.driver.parameters import DRY_RUN, DriverParameters
    from specvla_ros.ros.task import TaskParameters

    known = {each.name for kind in (DriverParameters, GuardParameters, TaskParameters) for each in walk(kind())}
    given: dict[str, dict[str, Value]] = {}
    with report.part("file") as well:
        given = {node: merge_parameters([file], {}, node=node, namespace=namespace) for node in ("driver", "guard")}
        well(f"{file} is a valid parameter file")
    if not given:
        return None, None
    for name in sorted({*given["driver"], *given["guard"]} - known - {"use_sim_time"}):
        report.wrong("file", f"no node has a parameter '{name}'; {_likely(name, known)}")
    driver, guard = None, None
    with report.part("driver") as well:
        driver = _settings(DriverParameters(), given["driver"], urdf)
        together(driver.check_complete, driver.gripper.require)
        joints, gripper = driver.joints, driver.gripper
        if gripper.joint in {*joints.names, *joints.model_names} - {""}:
            raise UserError(
                f"gripper.joint is {gripper.joint}, one of the arm's joints: the gripper's commands would move the "
                "arm; give the gripper's own joint, and leave it out of joints.names"
            )
        well(f"output {driver.output} in {driver.base_frame}, gripper {gripper.output}")
    for text in robot_mistakes.too_large(driver) if driver is not None else ():
        report.note("driver", text)
    if driver is not None and driver.output == DRY_RUN:
        report.note("guard", "output: none is a dry run: nothing is sent, and no guard is started")
        return driver, None
    with report.part("guard") as well:
        guard = _settings(GuardParameters(), given["guard"], urdf)
        guard = replace(guard, guard=guard.guard.completed())
        together(guard.guard.require, partial(guard.tool.require, guard.guard.joints))
        stops = f"a stop takes {guard.guard.ramp_s:.3f} s of the {guard.guard.stop_time_s:g} s promised"
        well(f"output {guard.guard.output}; {stops}")
    return driver, guard


def _likely(name: str, known: set[str]) -> str:
    text = hint(name, dict.fromkeys(known))
    return text if text.startswith("did you mean") else "see docs/reference/parameters.md for all parameters"


def _settings(defaults: Settings, given: Mapping[str, Value], urdf: Path | None) -> Settings:
    """The settings as a node reads them: ROS does not accept 1 for 1.0."""
    declared = {each.name: each for each in walk(defaults)}
    values = {name: _as_ros(value) for name, value in given.items() if name in declared}
    if problems := [problem for name, value in values.items() if (problem := declared[name].problem(value))]:
        raise UserError("; and ".join(problems))
    return with_values(defaults, values | ({"joints.model": str(urdf.absolute())} if urdf is not None else {}))


def _as_ros(value: Value) -> Any:
    """A list as launch passes it on: if whole numbers and floats are mixed, all become floats."""
    if not isinstance(value, list):
        return value
    return tuple(map(float, value)) if {int, float} == {type(each) for each in value} else tuple(value)


def _check_model(report: Report, driver: "DriverParameters") -> None:
    from specvla_ros.control.chunks import horizon_s, planned
    from specvla_ros.control.guard.settings import JOINT_OUTPUTS, Output
    from specvla_ros.control.robot_model import load_joint_model
    from specvla_ros.ros.driver.parameters import JOINTS

    joints = driver.joints
    if not joints.model and driver.output not in JOINT_OUTPUTS:
        report.note("model", "optional here; joints.model with joints.tool adds a comparison of tool pose and joints")
        return
    model = None
    with report.part("model") as well:
        if not joints.model:
            raise UserError(f"output: {driver.output} needs joints.model, joints.names, joints.tool, joints.max_speed")
        model = load_joint_model(joints)
        well(f"{joints.model} has {', '.join(model.in_model)} and the {model.tool_kind} {model.tool}")
    if model is None:
        return
    for text in robot_mistakes.wider_than_model(joints):
        report.wrong("model", text)
    for text in robot_mistakes.faster_than_model(joints, model.max_speed):
        report.note("model", text)
    if endless := [name for name in model.in_model if not model.model.joint(name).limited[0]]:
        report.note(
            "model",
            f"{', '.join(endless)} are continuous (no limits): if the arm's joint_states wrap from pi to -pi, the "
            "guard stops there; give joints.position_min and joints.position_max, such as -3.1 and 3.1",
        )
    if not Path(joints.model).is_absolute():
        report.note("model", "driver and guard look for it in the folder where each is started: give its absolute path")
    if idle := [name for name in model.in_model if name not in _on_the_way(model)]:
        report.wrong(
            "model",
            f"{', '.join(idle)} does not move {model.tool}: joints.names are the arm's joints, without the "
            "gripper's, and joints.tool comes after them",
        )
    if others := [name for name in _on_the_way(model) if name not in model.in_model]:
        report.wrong(
            "model",
            f"joints.names lacks {', '.join(others)}, which the model has before {model.tool}: the tool pose "
            "would be right only at position 0; add the name, or give a model in which that joint is fixed",
        )
    if driver.action_space != JOINTS:
        _note_weak_joint(report, driver.limits.angular_acceleration, model)
    if driver.output == Output.JOINT_TRAJECTORY_CHUNK:
        with report.part("chunks") as well:
            stop_s = planned(model).stop_s if driver.action_space == JOINTS else driver.limits.stop_s
            reach_s = horizon_s(joints.chunk_s, stop_s) + stop_s
            well(f"trajectories reach {reach_s:.2f} s ahead, of which {stop_s:.2f} s are the stop")
    with report.part("workspace") as well:
        corners = [*product(*zip(driver.limits.workspace_min, driver.limits.workspace_max, strict=True))]
        missed = [corner for corner in corners if not reaches(model, np.array(corner))]
        reached = f"{len(corners) - len(missed)} of {len(corners)} corners of the workspace"
        words = f"the arm reaches {reached} in some orientation of the tool"
        if missed:
            there = "; ".join(", ".join(f"{number:g}" for number in corner) for corner in missed)
            raise UserError(f"{words}, but not ({there}) m; shrink limits.workspace_min and workspace_max")
        well(words)


def _note_weak_joint(report: Report, asked: float, robot: "JointModel") -> None:
    """Compares the tool's angular acceleration with the weakest joint's, which may have to turn the tool alone."""
    import mujoco

    if robot.max_acceleration is None:
        return
    kinds = [robot.model.joint(name).type[0] for name in robot.in_model]
    turning = [
        (float(most), name)
        for kind, most, name in zip(kinds, robot.max_acceleration, robot.joints, strict=True)
        if kind == mujoco.mjtJoint.mjJNT_HINGE
    ]
    most, weakest = min(turning, default=(asked, ""))
    if asked > most:
        report.note(
            "model",
            f"limits.angular_acceleration is {asked:g} rad/s², but {weakest} has {most:g}: where that joint turns the "
            f"tool alone, the arm falls behind and swings; lower it to {most:g}",
        )


def _on_the_way(robot: "JointModel") -> list[str]:
    """Joints between base and tool."""
    model = robot.model
    body = model.site(robot.tool).bodyid[0] if robot.tool_kind == "site" else model.body(robot.tool).id
    found = []
    while body:
        begin = model.body_jntadr[body]
        found += [model.joint(begin + each).name for each in range(model.body_jntnum[body])]
        body = model.body_parentid[body]
    return found


def reaches(robot: "JointModel", place: np.ndarray) -> bool:
    """True if joint positions within their ranges bring the tool to a position, float64 [3], in any orientation."""
    from specvla_ros.control.robot_model import ToolKinematics

    arm, draw = ToolKinematics(robot), np.random.default_rng(0)
    low, high = np.where(np.isfinite(arm.ranges), arm.ranges, (-np.pi, np.pi)).T
    for _ in range(_STARTS):
        q = draw.uniform(low, high)
        for _ in range(_STEPS):
            missing = place - arm.pose_at(q).position
            if np.linalg.norm(missing) < _NEAR_M:
                return True
            moves = arm.tool_moves(q)[:3]
            q = np.clip(q + moves.T @ np.linalg.solve(moves @ moves.T + _DAMPING * np.eye(3), missing), low, high)
    return False


def _check_together(report: Report, driver: "DriverParameters", guard: "GuardParameters") -> None:
    """Checks that parameters of both nodes agree; under /** they are written once."""
    settings = guard.guard
    pairs = {
        "output": (driver.output, settings.output),
        "base_frame": (driver.base_frame, settings.base_frame),
        **{
            one.name: (one.value, other.value)
            for one, other in zip(walk(driver.limits), walk(settings.limits), strict=True)
        },
        "joints.names": (driver.joints.names, settings.joints.names),
        **{
            f"gripper.{name}": (getattr(driver.gripper, name), getattr(settings.gripper, name))
            for name in ("output", "joint", "open_value", "closed_value")
            if driver.gripper.output != "none"
        },
    }
    if driver.tool.pose_source == guard.tool.pose_source == "tf":
        pairs["tool_frame"] = driver.tool.frame, guard.tool.frame
    if driver.joints.model and driver.joints.model == settings.joints.model:
        pairs["joints.tool"] = driver.joints.tool, settings.joints.tool
    with report.part("both") as well:
        for name, (one, other) in pairs.items():
            if one != other:
                values = f"driver {format_value(one)}, guard {format_value(other)}"
                raise UserError(f"{name} differs: {values}; write it once, under /**")
        well("driver and guard have the same values")
    if driver.output == "position_array" and not driver.joints.controller:
        report.note(
            "order",
            "set joints.controller to the controller's node: the driver then checks the joints' order before it sends "
            "anything; otherwise a wrong order shows only when the first command moves the wrong joints",
        )
    if driver.joints.controller.endswith("/commands"):
        node = driver.joints.controller.removesuffix("/commands")
        report.note("order", f"joints.controller is the controller's node, not its topic: did you mean {node}?")
    if driver.tool.pose_source == "tf" and driver.joints.tool not in ("", driver.tool.frame):
        names = f"tool_frame {driver.tool.frame} and joints.tool {driver.joints.tool}"
        report.note("tool_pose", f"{names} have different names: both must be the same point with the same axes")
    needed = [("tool_pose", "tf", "tf2_ros")] if driver.tool.pose_source == "tf" else []
    if guard.guard.gripper.output == "action":
        needed.append(("gripper", "gripper.output: action", "control_msgs"))
    types: set[str] = set()
    with suppress(UserError):  # reported as the guard's
        types = {rule.message_type for rule in guard.guard.state_rules}
    needed += [("robot", f"robot_states: {name}", name.partition("/")[0]) for name in sorted(types)]
    for name, what, package in needed:
        if importlib.util.find_spec(package) is None:
            missing = f"needs the package {package}, which is not installed on this computer"
            apt = f"apt install ros-$ROS_DISTRO-{package.replace('_', '-')}"
            report.note(name, f"{what} {missing}: driver and guard do not start without it ({apt})")


def _check_timeouts(
    report: Report, driver: "DriverParameters", guard: "GuardParameters", profile: str, namespace: str
) -> None:
    from specvla_ros.ros.wiring import refused_images_warning

    settings = guard.guard
    with report.part("timeouts") as well:
        if driver.max_action_age_s > settings.max_action_age_s:
            raise UserError(
                f"the driver follows actions up to {driver.max_action_age_s:g} s old, but the guard accepts them as a "
                f"heartbeat only up to {settings.max_action_age_s:g} s; write max_action_age_s once, under /**"
            )
        if settings.command_timeout_s < 2 / driver.rate_hz:
            raise UserError(
                f"command_timeout_s {settings.command_timeout_s:g} is less than two periods of rate_hz "
                f"{driver.rate_hz:g}: the guard would stop between two commands; increase either"
            )
        enable = f"/{namespace}/guard/enable" if namespace else "/guard/enable"
        well(f"publish {enable} at {2 / settings.enable_timeout_s:.3g} Hz or more")
    if profile:
        with report.part("profile") as well:
            age_s = _max_image_age_s(profile)
            if words := refused_images_warning(age_s, min(driver.max_action_age_s, settings.max_action_age_s)):
                raise UserError(words)
            well(f"max_image_age_s {age_s:g} fits max_action_age_s")


def _max_image_age_s(profile: str) -> float:
    from ament_index_python.packages import get_package_share_directory

    file = Path(profile)
    files = [file]
    if not file.suffix:
        config = Path(get_package_share_directory("specvla_ros"), "config")
        if profile not in PROFILES:
            raise UserError(f"there is no profile '{profile}': give {', '.join(PROFILES)}, or a parameter file")
        files = [config / "common.yaml", config / f"{profile}.yaml"]
    from specvla_ros.policy_parameters import PolicyParameters

    merged = merge_parameters(files, {}, node="policy")
    declared = next(each for each in walk(PolicyParameters()) if each.name == "max_image_age_s")
    age_s = merged.get(declared.name, declared.value)
    if problem := declared.problem(age_s):
        raise UserError(problem)
    return float(age_s)


def _print_first_motions(limits: "Limits", file: Path, speed_scale: float) -> None:
    if speed_scale < 1:
        typer.echo(f"\nthe first motions run at {speed_scale:g} of the speed limits (the guard's speed_scale)")
        return
    slow = replace(
        limits,
        linear_speed=float(f"{_FIRST_SHARE * limits.linear_speed:.6g}"),
        angular_speed=float(f"{_FIRST_SHARE * limits.angular_speed:.6g}"),
    )
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(slow).items()}
    share = f"speed_scale: {_FIRST_SHARE:g} in {file} under /guard"
    typer.echo(f"\nfor the first motions: {share}, or these limits in a copy of it:")
    typer.echo(yaml.safe_dump({"limits": values}, sort_keys=False, default_flow_style=None), nl=False)
