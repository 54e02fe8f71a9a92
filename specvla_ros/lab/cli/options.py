# SPDX-License-Identifier: Apache-2.0
"""Options that several commands of the laboratory share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.device import known_devices
from specvla_ros.settings.json_file import shown

if TYPE_CHECKING:
    from specvla_ros.lab.bags.frames import Sensors
    from specvla_ros.lab.evaluation.rerun_recording import RerunSettings

World = Annotated[str, typer.Option(help="table, or a LIBERO suite such as libero_spatial.")]
_ROBOTS = "table, our own; panda or ur5e: pip install --no-deps -r requirements/robots.txt"
Robot = Annotated[str, typer.Option(help=f"The arm at the table: {_ROBOTS}.")]
Robots = Annotated[
    list[str] | None, typer.Option("--robot", help=f"An arm; again for more. {_ROBOTS}. Default: table.")
]
Episodes = Annotated[int, typer.Option(help="Per task.", min=1)]
Seed = Annotated[int, typer.Option(help="Of the first episode's start; the others follow.", min=0)]
Emulate = Annotated[
    str,
    typer.Option(help=f"Count the times of a device: {', '.join(known_devices())} or a JSON file. An emulation."),
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="A task's name; again for more. Default: all.")]
Rerun = Annotated[
    bool,
    typer.Option("--rerun", help="Write run.rrd beside the report, for Rerun (requirements/rerun.txt)."),
]
Viewer = Annotated[
    str, typer.Option(help="Show it in Rerun's viewer meanwhile: spawn opens one; or the address of one that listens.")
]
Cameras = Annotated[
    list[str] | None,
    typer.Option(help="NAME=TOPIC of a further camera, again for each, for a policy that looks at several."),
]
StateTopic = Annotated[str, typer.Option(help="JointState, for a policy that reads the robot's state.")]
StateNames = Annotated[
    str, typer.Option(help="Comma-separated: the state's numbers in the policy's order; empty: the message's.")
]
Workers = Annotated[int, typer.Option(help="Worker processes; 0: this one alone.", min=0)]
PerEngine = Annotated[
    int,
    typer.Option(
        help="Workers whose frames one engine packs into its forwards, with the model once in memory; 0: each worker "
        "has its own.",
        min=0,
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        help="Work on a Ray cluster: its HOST:PORT; auto: that of this machine; local: one is started here. --workers "
        "is then the number of actors, 0: as many as there is room for."
    ),
]


def camera_topics(given: Sequence[str] | None) -> dict[str, str]:
    """Topics of further cameras, by their names.

    Raises:
        UserError: one is not NAME=TOPIC.
    """
    parts = {text: text.partition("=") for text in given or ()}
    for text, (name, _, topic) in parts.items():
        if not (name and topic):
            raise UserError(f"--camera must be NAME=TOPIC, such as wrist=/wrist/image_raw; got {shown(text)}")
    return {name: topic for name, _, topic in parts.values()}


def sensors_of(cameras: Sequence[str] | None, state_topic: str, state_names: str) -> "Sensors":
    """What is read of bags beside the first camera's images, as the options say.

    Raises:
        UserError: as of `camera_topics`.
    """
    from specvla_ros.lab.bags.frames import Sensors

    return Sensors(camera_topics(cameras), state_topic, names_of(state_names))


def names_of(given: str) -> tuple[str, ...]:
    """Names that stand between commas."""
    return tuple(filter(None, given.split(",")))


def shown_in(out: Path, rerun: bool, viewer: str) -> "RerunSettings | None":
    """Where Rerun shows what a command does; None: nowhere.

    Args:
        out: directory of the command's results.
        rerun: whether a file is written there.
        viewer: as the option says; empty: none.

    Raises:
        UserError: the library is missing.
    """
    if not rerun and not viewer:
        return None
    from specvla_ros.lab.evaluation.rerun_recording import RECORDING_FILE, RerunSettings, require_rerun

    require_rerun()
    return RerunSettings(str(out / RECORDING_FILE) if rerun else "", viewer)


def check_accelerate() -> None:
    """Refuses to train where accelerate is missing."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise UserError("training needs accelerate: pip install -r requirements/train.txt") from None
