# SPDX-License-Identifier: Apache-2.0
"""Plays a recorded bag through the policy node on simulated time; ends with the bag."""

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
from specvla_ros.settings.profiles import as_number


def generate_launch_description() -> LaunchDescription:
    """Takes all arguments of bringup too, with profile:=cpu, use_sim_time:=true and the bag's topics by default."""
    bringup = Path(get_package_share_directory("specvla_ros"), "launch", "bringup.launch.py")
    forced = {"use_sim_time": "true"}
    arguments = [
        DeclareLaunchArgument("bag", description="The bag: a directory, or an .mcap or .db3 file."),
        DeclareLaunchArgument("rate", default_value="1.0", description="Speed against real time."),
        DeclareLaunchArgument(
            "loop", default_value="false", choices=["true", "false"], description="Start again at the end."
        ),
        DeclareLaunchArgument(
            "profile", default_value="cpu", choices=["cpu", "desktop", "orin"], description="Parameters to use."
        ),
        DeclareLaunchArgument(
            "exit_on_failure",
            default_value="true",
            choices=["true", "false"],
            description="End the launch if the policy cannot start: the other nodes are of no use without it.",
        ),
        DeclareLaunchArgument("image_topic", default_value="/camera/image_raw", description="The bag's image topic."),
        DeclareLaunchArgument(
            "instruction_topic", default_value="/instruction", description="Instruction topic, std_msgs/String."
        ),
        DeclareLaunchArgument(
            "wait_for",
            default_value="",
            description="Topic that the policy must subscribe to before the bag starts; empty: the image topic.",
        ),
    ]
    forwarded = {
        name: LaunchConfiguration(name) for name in ("profile", "exit_on_failure", "image_topic", "instruction_topic")
    }
    source = PythonLaunchDescriptionSource(str(bringup))
    policy = IncludeLaunchDescription(source, launch_arguments={**forwarded, **forced}.items())
    # The player first: a bag that cannot be opened must end the launch before a policy process starts.
    return LaunchDescription([*arguments, OpaqueFunction(function=_play), policy])


def _play(context: LaunchContext) -> list:
    from specvla_ros.lab.bags.reader import open_bag

    def argument(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    bag = argument("bag")
    with open_bag(bag) as opened:
        held = {topic.name for topic in opened.topics}
        image = argument("image_topic")
        wait_for = argument("wait_for") or next(
            (name for name in (image, f"{image}/compressed") if name in held), image
        )
        opened.topic(wait_for)  # for a missing topic it raises an error that lists the others
    player = Node(
        package="specvla_ros",
        executable="bag_player",
        name="bag_player",
        parameters=[
            {
                "bag": ParameterValue(bag, value_type=str),
                "rate": as_number("rate", argument("rate")),
                "loop": argument("loop") == "true",
                "wait_for_subscriber": ParameterValue(wait_for, value_type=str),
            }
        ],
        output="screen",
    )
    return [player, RegisterEventHandler(OnProcessExit(target_action=player, on_exit=_end))]


def _end(event: ProcessExited, context: LaunchContext) -> list:
    if event.returncode:
        raise RuntimeError(f"the bag player ended with code {event.returncode}: its own message above says why")
    return [EmitEvent(event=Shutdown(reason="the bag has been played"))]
