# SPDX-License-Identifier: Apache-2.0
"""Options shared by several commands."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.control.joint_parts import TOLERANCE_S
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.parameter_options import Taken
from specvla_ros.lab.planning.device import known_devices
from specvla_ros.lab.plans import ROBOTS
from specvla_ros.settings.json_file import shown
from specvla_ros.settings.parameter import parameter

if TYPE_CHECKING:
    from specvla_ros.lab.bags.frames import TopicChoice
    from specvla_ros.lab.cli.parameter_options import PolicyOptions
    from specvla_ros.lab.evaluation.rerun_recording import RerunSettings
    from specvla_ros.lab.evaluation.simulate import SimulateSettings


def output_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Checks a directory of results when its option is read, before hours of work; expands `~`."""
    if path is None:
        return None
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        raise UserError(f"{option.opts[0]} {path} is a file; give a directory")
    _check_writable(option.opts[0], path)
    return path


def output_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Checks a file of results like `output_folder`."""
    if path is None:
        return None
    path = path.expanduser()
    check_output_file(option.opts[0], path)
    if not path.parent.is_dir():
        raise UserError(f"{option.opts[0]} {path}: the directory {path.parent} does not exist; create it first")
    return path


def check_output_file(option: str, path: Path) -> None:
    """Raises UserError if no file can be written at `path`; its directory need not exist."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give the name of a file")
    _check_writable(option, path.parent)


def _check_writable(option: str, folder: Path) -> None:
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is a file"
        raise UserError(f"{option} {folder}: {there} {why}; give another path, or change its permissions")


ON_A_CPU = (
    "on a CPU a drafted token costs about as much as a decoded one: with short answers such as OpenVLA's 7 tokens, "
    "expect spec, pipeline and specpipe to be slower than ar here (`specvla compare` compares two runs). `specvla "
    "simulate --emulate DEVICE` and `specvla plan --device DEVICE` show where they pay off"
)
World = Annotated[str, typer.Option(help="table, or a LIBERO suite such as libero_spatial.")]
Robot = Annotated[str, typer.Option(help=f"The arm at the table: {ROBOTS}.")]
Emulate = Annotated[
    str, typer.Option(help=f"Emulate the timing of this device: {', '.join(known_devices())} or a JSON file.")
]
Rerun = Annotated[
    bool, typer.Option("--rerun", help="Write run.rrd for Rerun next to the report (requirements/rerun.txt).")
]
Viewer = Annotated[
    str, typer.Option(help="Show the run live in Rerun: spawn opens a viewer; or the address of a running viewer.")
]
BagsOrSim = Annotated[
    list[str],
    typer.Option(
        "--data", help="Bags, directories of bags, or LeRobot datasets; or `sim`: the policy's episodes at the table."
    ),
]
MaxGb = Annotated[float, typer.Option(help="Disk space for features, in GB; they are removed at the end.")]
Bags = Annotated[list[Path], typer.Option("--data", help="Bags, directories of bags, or LeRobot datasets; repeatable.")]
Results = Annotated[
    Path,
    typer.Option("--out", help="Directory of the results; an interrupted run resumes.", callback=output_folder),
]


@dataclass(frozen=True)
class BagOptions:
    """The topics to read from bags."""

    image_topic: str = parameter("", "The first camera's images; empty: /camera/image_raw, or the only colour camera.")
    camera: tuple[str, ...] = parameter((), "NAME=TOPIC of a further camera, for policies with several; repeatable.")
    state_topic: str = parameter("", "JointState topic, for a policy that reads the robot's state.")
    state_names: str = parameter(
        "", "Comma-separated names of the state's values in the policy's order; empty: the message's order."
    )
    sync_tolerance_s: float | None = parameter(
        None,
        "Maximum difference between the first camera's stamp and the other inputs'. Default: the parameter file's, or "
        f"{TOLERANCE_S:g}.",
        minimum=0.0,
    )
    instruction_topic: str = parameter("", "Instruction topic; empty: /instruction.")
    instruction: str = parameter("", "Instruction that replaces the bags' instruction topic.")
    action_topic: str = parameter("", "Recorded actions; empty: /ground_truth/action if it exists.")

    @property
    def topics(self) -> "TopicChoice":
        """The options as a `TopicChoice`."""
        from specvla_ros.lab.bags.frames import TopicChoice

        parts = {text: text.partition("=") for text in self.camera}
        for text, (name, _, topic) in parts.items():
            if not (name and topic):
                raise UserError(f"--camera must be NAME=TOPIC, such as wrist=/wrist/image_raw; got {shown(text)}")
        return TopicChoice(
            image_topic=self.image_topic or None,
            instruction_topic=self.instruction_topic or None,
            instruction=self.instruction or None,
            action_topic=self.action_topic or None,
            cameras={name: topic for name, _, topic in parts.values()},
            state_topic=self.state_topic or None,
            state_names=tuple(filter(None, self.state_names.split(","))),
            sync_tolerance_s=TOLERANCE_S if self.sync_tolerance_s is None else self.sync_tolerance_s,
        )


# Options for bags whose recorded actions are not used.
Images = Annotated[BagOptions, Taken(fixed={"action_topic": ""})]


def topics_of(chosen: "PolicyOptions", of_bags: BagOptions) -> "TopicChoice":
    """The topics to read from bags; instruction and state, where not given, come from the policy's parameter file."""
    topics, in_file = of_bags.topics, chosen.in_file
    if chosen.action != ConventionSettings():
        topics = replace(topics, action=chosen.action)
    if not (of_bags.instruction or of_bags.instruction_topic):
        topics = replace(topics, instruction=in_file.get("instruction") or None)
    names = in_file.get("state_names", ["all"])
    if not topics.state_names and names != ["all"]:
        topics = replace(topics, state_names=tuple(names))
    if of_bags.sync_tolerance_s is None:
        topics = replace(topics, sync_tolerance_s=in_file.get("sync_tolerance_s", TOLERANCE_S))
    return topics


def tell_of_cpu(chosen: "PolicyOptions", emulate: str = "") -> None:
    """Warns that a fixed mode may not pay off on a CPU, if one computes and its times count; auto measures it."""
    import torch

    on_cpu = chosen.model.device == "cpu" or (chosen.model.device == "auto" and not torch.cuda.is_available())
    if on_cpu and not emulate and chosen.engine.mode not in ("ar", "auto"):
        typer.echo(ON_A_CPU, err=True)


def simulation(chosen: "PolicyOptions", world: str, **settings: Any) -> "SimulateSettings":
    """Settings of the policy's simulation; leaves a core to other processes."""
    from specvla_ros.lab.evaluation.simulate import SimulateSettings
    from specvla_ros.models.checkpoint import leave_a_core

    leave_a_core()
    return SimulateSettings(chosen.checkpoint, world, engine=chosen.engine, model=chosen.model, **settings)


def shown_in(out: Path, rerun: bool, viewer: str) -> "RerunSettings | None":
    """Rerun's settings: a viewer, a file in `out`, or both; None without either."""
    if not rerun and not viewer:
        return None
    from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE, RerunSettings, require_rerun

    require_rerun()
    return RerunSettings(str(out / RECORDING_FILE) if rerun else "", viewer)


def check_accelerate() -> None:
    """Fails if accelerate is missing, which is otherwise imported after the policy has answered all images."""
    import accelerate  # noqa: F401
