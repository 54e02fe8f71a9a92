# SPDX-License-Identifier: Apache-2.0
"""The policy node with a profile's parameters, configured and activated."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch.actions import DeclareLaunchArgument, EmitEvent, OpaqueFunction, RegisterEventHandler
from launch.event_handlers import OnProcessStart
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterValue
from lifecycle_msgs.msg import Transition

from launch import LaunchContext, LaunchDescription
from specvla_ros.ros.policy.parameters import PolicyParameters
from specvla_ros.settings.parameter import walk
from specvla_ros.settings.profiles import as_bool, merge_parameters

CONFIG = Path(get_package_share_directory("specvla_ros"), "config")
# Arguments that are parameters; an empty one leaves the value of the parameter files.
PARAMETERS = {
    declared.name: declared.description
    for declared in walk(PolicyParameters())
    if declared.name in ("checkpoint", "unnorm_key", "instruction", "device")
}


def generate_launch_description() -> LaunchDescription:
    """See `ros2 launch specvla_ros bringup.launch.py --show-args`."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "profile", default_value="desktop", choices=["cpu", "desktop", "orin"], description="Parameters to use."
            ),
            DeclareLaunchArgument(
                "params_file", default_value="", description="Parameter file, stronger than the profile."
            ),
            *(DeclareLaunchArgument(name, default_value="", description=text) for name, text in PARAMETERS.items()),
            DeclareLaunchArgument(
                "image_topic", default_value="image", description="Raw images; compressed ones below it."
            ),
            DeclareLaunchArgument("instruction_topic", default_value="instruction", description="std_msgs/String."),
            DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node and its topics."),
            DeclareLaunchArgument(
                "use_sim_time", default_value="false", choices=["true", "false"], description="Follow /clock."
            ),
            DeclareLaunchArgument(
                "autostart", default_value="true", choices=["true", "false"], description="Configure and activate."
            ),
            DeclareLaunchArgument(
                "log_level",
                default_value="info",
                choices=["debug", "info", "warn", "error"],
                description="Of the node.",
            ),
            OpaqueFunction(function=_start),
        ]
    )


def _start(context: LaunchContext) -> list:
    def argument(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    files = [CONFIG / "common.yaml", CONFIG / f"{argument('profile')}.yaml"]
    if argument("params_file"):
        files.append(Path(argument("params_file")).expanduser())
    merged = merge_parameters(
        files, {name: argument(name) for name in PARAMETERS}, node="policy", namespace=argument("namespace")
    )
    # Without a type, launch would read the instruction "5" as a number.
    parameters = {
        name: ParameterValue(value, value_type=str) if isinstance(value, str) else value
        for name, value in merged.items()
    }
    parameters["use_sim_time"] = as_bool("use_sim_time", argument("use_sim_time"))
    image_topic = argument("image_topic")
    node = LifecycleNode(
        package="specvla_ros",
        executable="policy",
        name="policy",
        namespace=argument("namespace"),
        parameters=[parameters],
        remappings=[
            ("image", image_topic),
            ("image/compressed", f"{image_topic}/compressed"),
            ("instruction", argument("instruction_topic")),
        ],
        ros_arguments=["--log-level", f"policy:={argument('log_level')}"],
        output="screen",
    )
    if not as_bool("autostart", argument("autostart")):
        return [node]
    return [*_autostart(node), node]


def _autostart(node: LifecycleNode) -> list:
    def change(transition: int) -> EmitEvent:
        return EmitEvent(event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition))

    return [
        RegisterEventHandler(OnProcessStart(target_action=node, on_start=[change(Transition.TRANSITION_CONFIGURE)])),
        RegisterEventHandler(
            OnStateTransition(
                target_lifecycle_node=node,
                start_state="configuring",
                goal_state="inactive",
                entities=[change(Transition.TRANSITION_ACTIVATE)],
            )
        ),
        RegisterEventHandler(
            OnStateTransition(
                target_lifecycle_node=node,
                start_state="configuring",
                goal_state="unconfigured",
                entities=[OpaqueFunction(function=_give_up)],
            )
        ),
    ]


def _give_up(context: LaunchContext) -> list:
    # An exception is how a launch file ends `ros2 launch` with a code other than 0.
    raise RuntimeError("the policy could not be configured: its own message above says why")
