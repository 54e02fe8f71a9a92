# SPDX-License-Identifier: Apache-2.0
"""The policy node on the simulated robot, on simulated time; ends after the last episode."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events import Shutdown
from launch.events.process import ProcessExited
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.settings.profiles import as_number

IMAGE_TOPIC = "/camera/image_raw"
INSTRUCTION_TOPIC = "/instruction"
# For a policy with two cameras, or one that reads the joints.
SENSOR_TOPICS = "wrist=/wrist/image_raw,state=/joint_states"


def generate_launch_description() -> LaunchDescription:
    """Takes all arguments of bringup too, with profile:=cpu; the topics and the clock are the simulated robot's."""
    bringup = Path(get_package_share_directory("specvla_ros"), "launch", "bringup.launch.py")
    forced = {
        "use_sim_time": "true",
        "image_topic": IMAGE_TOPIC,
        "instruction_topic": INSTRUCTION_TOPIC,
        "sensor_topics": SENSOR_TOPICS,
    }
    arguments = [
        DeclareLaunchArgument(
            "checkpoint",
            default_value=str(nano_policy()),
            description="Directory of the checkpoint; default: the package's nano policy.",
        ),
        DeclareLaunchArgument(
            "clock",
            default_value="realtime",
            choices=["lockstep", "realtime"],
            description="Time in the simulated world while the policy computes: stopped (lockstep) or running.",
        ),
        DeclareLaunchArgument(
            "tasks", default_value="all", description="Names of tasks, comma-separated; all: every task."
        ),
        DeclareLaunchArgument("episodes", default_value="3", description="Episodes of each task; 0: endless."),
        DeclareLaunchArgument("seed", default_value="0", description="Seed of the first round."),
        DeclareLaunchArgument(
            "profile", default_value="cpu", choices=["cpu", "desktop", "orin"], description="Parameters to use."
        ),
        DeclareLaunchArgument(
            "exit_on_failure",
            default_value="true",
            choices=["true", "false"],
            description="End the launch if the policy cannot start: the other nodes are of no use without it.",
        ),
    ]
    forwarded = {name: LaunchConfiguration(name) for name in ("checkpoint", "profile", "exit_on_failure")}
    source = PythonLaunchDescriptionSource(str(bringup))
    policy = IncludeLaunchDescription(source, launch_arguments={**forwarded, **forced}.items())
    # The robot first: a wrong task must end the launch before a policy process starts.
    return LaunchDescription([*arguments, OpaqueFunction(function=_act), policy])


def _act(context: LaunchContext) -> list:
    from specvla_ros.lab.simulation import require_gl
    from specvla_ros.lab.simulation.tasks import choose_tasks

    def argument(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    require_gl()
    tasks = [name.strip() for name in argument("tasks").split(",") if name.strip()] or ["all"]
    if tasks != ["all"]:
        choose_tasks(tasks)  # for an unknown task it raises an error that lists the others
    robot = Node(
        package="specvla_ros",
        executable="sim_robot",
        name="sim_robot",
        parameters=[
            {
                "tasks": tasks,
                "episodes": int(as_number("episodes", argument("episodes"))),
                "seed": int(as_number("seed", argument("seed"))),
                "clock": ParameterValue(argument("clock"), value_type=str),
            }
        ],
        output="screen",
    )
    return [robot, RegisterEventHandler(OnProcessExit(target_action=robot, on_exit=_end))]


def _end(event: ProcessExited, context: LaunchContext) -> list:
    if event.returncode:
        raise RuntimeError(f"the simulated robot ended with code {event.returncode}: its own message above says why")
    return [EmitEvent(event=Shutdown(reason="the last episode has ended"))]
