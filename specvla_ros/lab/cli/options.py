# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specvla_ros.errors import UserError
from specvla_ros.lab.planning.device import known_devices
from specvla_ros.lab.plans import ROBOTS
from specvla_ros.settings.json_file import shown
from specvla_ros.settings.parameter import parameter

if TYPE_CHECKING:
    from specvla_ros.cli.options import PolicyOptions
    from specvla_ros.lab.bags.frames import Sensors
    from specvla_ros.lab.evaluation.rerun_recording import RerunSettings
    from specvla_ros.lab.evaluation.simulate import SimulateSettings

World = Annotated[str, typer.Option(help="table, or a LIBERO suite such as libero_spatial.")]
Robot = Annotated[str, typer.Option(help=f"The arm at the table: {ROBOTS}.")]
Emulate = Annotated[
    str, typer.Option(help=f"Count the times of a device: {', '.join(known_devices())} or a JSON file. An emulation.")
]
Rerun = Annotated[
    bool, typer.Option("--rerun", help="Write run.rrd beside the report, for Rerun (requirements/rerun.txt).")
]
Viewer = Annotated[
    str, typer.Option(help="Show it in Rerun's viewer meanwhile: spawn opens one; or the address of one that listens.")
]
BagsOrSim = Annotated[
    list[str], typer.Option("--data", help="Bags or directories of bags; or `sim`: what the policy does at the table.")
]
MaxGb = Annotated[float, typer.Option(help="Maximum of disk for features, in GB; they are removed at the end.")]
Bags = Annotated[list[Path], typer.Option("--data", help="Bags, or directories of bags; again for more.")]
Results = Annotated[Path, typer.Option("--out", help="Directory of the results; one that was cut short goes on.")]


@dataclass(frozen=True)
class SensorOptions:
    """What is read of bags beside the first camera's images."""

    camera: tuple[str, ...] = parameter(
        (), "NAME=TOPIC of a further camera, again for each, for a policy that looks at several."
    )
    state_topic: str = parameter("", "JointState, for a policy that reads the robot's state.")
    state_names: str = parameter(
        "", "Comma-separated: the state's numbers in the policy's order; empty: the message's."
    )

    @property
    def cameras(self) -> dict[str, str]:
        """Topics of further cameras, by their names."""
        parts = {text: text.partition("=") for text in self.camera}
        for text, (name, _, topic) in parts.items():
            if not (name and topic):
                raise UserError(f"--camera must be NAME=TOPIC, such as wrist=/wrist/image_raw; got {shown(text)}")
        return {name: topic for name, _, topic in parts.values()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, self.state_names.split(",")))

    def sensors(self, instruction: str = "") -> "Sensors":
        """The same for `frame_sources`; an instruction replaces the bags' own."""
        from specvla_ros.lab.bags.frames import Sensors

        return Sensors(self.cameras, self.state_topic, self.names, instruction)


def simulation(chosen: "PolicyOptions", world: str, **settings: Any) -> "SimulateSettings":
    """The policy's simulation; leaves a core to other processes."""
    from specvla_ros.lab.evaluation.simulate import SimulateSettings
    from specvla_ros.models.checkpoint import leave_a_core

    leave_a_core()
    return SimulateSettings(chosen.checkpoint, world, engine=chosen.engine, model=chosen.model, **settings)


def shown_in(out: Path, rerun: bool, viewer: str) -> "RerunSettings | None":
    """Where Rerun shows a run, and whether it writes a file into `out`; None: nowhere."""
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
