# SPDX-License-Identifier: Apache-2.0
"""Plays a recorded bag through the policy node on simulated time; ends with the bag."""

from launch.actions import DeclareLaunchArgument
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription
from specvla_ros.ros.bringup import argument, ending_launch, source_launch, switch, text
from specvla_ros.settings.profiles import as_number


def generate_launch_description() -> LaunchDescription:
    """Takes all arguments of bringup too, with profile:=cpu, use_sim_time:=true and the bag's topics by default."""
    arguments = [
        DeclareLaunchArgument("bag", description="The bag: a directory, or an .mcap or .db3 file."),
        text("rate", "1.0", "Speed against real time."),
        switch("loop", "false", "Start again at the end."),
        text("image_topic", "/camera/image_raw", "The bag's image topic."),
        text("instruction_topic", "/instruction", "Instruction topic, std_msgs/String."),
        text("wait_for", "", "Topic that the policy must subscribe to before the bag starts; empty: the image topic."),
    ]
    return source_launch(arguments, _play, forced={}, forwarded=("image_topic", "instruction_topic"))


def _play(context: LaunchContext) -> list:
    from specvla_ros.lab.bags.reader import open_bag

    bag = argument(context, "bag")
    with open_bag(bag) as opened:
        held = {topic.name for topic in opened.topics}
        image = argument(context, "image_topic")
        wait_for = argument(context, "wait_for") or next(
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
                "rate": as_number("rate", argument(context, "rate")),
                "loop": argument(context, "loop") == "true",
                "wait_for_subscriber": ParameterValue(wait_for, value_type=str),
            }
        ],
        output="screen",
    )
    return ending_launch(player, "the bag player", "the bag has been played")
