# SPDX-License-Identifier: Apache-2.0
"""The command that shows a policy at work: `demo`."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from specvla_ros.cli.options import PolicyOptions, takes_policy
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.options import Rerun, Robot, Tasks, Viewer, shown_in
from specvla_ros.settings.parameter import values_of

app = typer.Typer()


class DemoInterface(str, Enum):
    """What moves the demo's arm."""

    ACTION = "action"
    POSE = "pose"


@app.command()
@takes_policy(publishes=True)
def demo(
    chosen: PolicyOptions,
    out: Annotated[Path, typer.Option(help="Directory for films and report; remade each time.")] = Path("demo"),
    robot: Robot = "table",
    interface: Annotated[
        DemoInterface | None,
        typer.Option(
            help="What moves the arm: the policy's actions as they come (action), or what driver and guard make of "
            "them (pose). Default: action for the table's arm, pose for the others."
        ),
    ] = None,
    task: Tasks = None,
    episodes: Annotated[int, typer.Option(help="Per task.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the first episode's start.", min=0)] = 0,
    rerun: Rerun = False,
    viewer: Viewer = "",
) -> None:
    """Watch a trained policy drive a simulated arm over ROS 2 topics; type another instruction while it runs.

    An arm that is commanded, as arms are that are sold, has a driver and a guard before it: Esc stops it, Ctrl-R clears
    the stop.
    """
    try:
        from specvla_ros.lab.ros.demo.run import DemoRobot, run_demo
        from specvla_ros.lab.simulation.arms import TABLE_ARM, choose_arm
    except ImportError as error:
        raise UserError(
            f"the demo needs ROS 2 and this package's messages ({error}). A pip wheel brings neither: build from the "
            "repository with `make build` or colcon; `specvla doctor` says what is there"
        ) from None
    parameters = values_of(chosen.model) | values_of(chosen.engine) | values_of(chosen.action)
    del parameters["max_image_age_s"]  # the node's own default differs from that of recorded images
    if chosen.model.device == "auto":
        parameters["device"] = "cpu"  # enough for the nano policy, and a GPU may be busy
    arm = choose_arm(robot or TABLE_ARM.name)
    interface = interface or (DemoInterface.ACTION if arm is TABLE_ARM else DemoInterface.POSE)
    exit_code = run_demo(
        out,
        chosen.checkpoint,
        robot=DemoRobot(arm, interface.value),
        tasks=list(task or ()),
        episodes=episodes,
        seed=seed,
        parameters=parameters,
        shown=shown_in(out, rerun, viewer),
    )
    raise typer.Exit(exit_code)
