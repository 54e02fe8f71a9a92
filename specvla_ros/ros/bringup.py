# SPDX-License-Identifier: Apache-2.0
"""Arguments, parameters and start of the policy node, shared by the launch files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ament_index_python.packages import get_package_share_directory
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    IncludeLaunchDescription,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
    TimerAction,
)
from launch.event_handlers import OnProcessExit, OnProcessStart
from launch.events import Shutdown, matches_action
from launch.events.process import ProcessExited
from launch.launch_context import LaunchContext
from launch.launch_description import LaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode, Node
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterValue
from lifecycle_msgs.msg import Transition

from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.ros.wiring import Autostart, Step, image_remappings, sensor_remappings
from specvla_ros.settings.parameter import walk
from specvla_ros.settings.profiles import PROFILES, Value, as_bool, as_number, merge_parameters

_AGAIN_S = 5.0  # longer than a process takes to start on most machines
# Launch arguments that set parameters. An empty argument keeps the value of the parameter files.
PARAMETERS = {
    declared.name: declared.description
    for declared in walk(PolicyParameters())
    if declared.name in ("checkpoint", "unnorm_key", "instruction", "device", "base_frame")
}


def policy_launch(profile: str = "") -> LaunchDescription:
    """Starts, configures and activates the policy node with a profile; if it is empty, an argument chooses it."""
    return LaunchDescription(
        [
            *([choice("profile", "desktop", [*PROFILES], "Parameters to use.")] if not profile else []),
            text("params_file", "", "Parameter file; overrides the profile."),
            *(text(name, "", description) for name, description in PARAMETERS.items()),
            text("image_topic", "image", "Topic of the raw images; the compressed ones are below it."),
            text("sensor_topics", "", "Topics of further cameras and the state: NAME=TOPIC, comma-separated."),
            text("instruction_topic", "instruction", "Topic of the instruction, std_msgs/String."),
            text("namespace", "", "Namespace of the node and its topics."),
            text("robots", "", "Robots that share the policy, comma-separated. A robot's topics are below its name."),
            switch("policy", "true", "Start the policy node; false if another launch or machine starts it."),
            choice("use_sim_time", "", ["", "true", "false"], "Follow /clock; empty: as in the files, else false."),
            switch("autostart", "true", "Configure and activate the node once for each start of its process."),
            switch(
                "exit_on_failure",
                "false",
                "End the launch if the policy or the driver cannot start; otherwise the other nodes keep running.",
            ),
            switch("respawn", "false", "Restart a process that ended; the guard is never restarted."),
            text("respawn_delay", "2.0", "Seconds before a restart."),
            choice("log_level", "info", ["debug", "info", "warn", "error"], "Log level of the node."),
            OpaqueFunction(function=_start, args=[profile]),
        ]
    )


def text(name: str, default: str, description: str) -> DeclareLaunchArgument:
    """Declares an argument of any text."""
    return DeclareLaunchArgument(name, default_value=default, description=description)


def switch(name: str, default: str, description: str) -> DeclareLaunchArgument:
    """Declares an argument that is true or false."""
    return choice(name, default, ["true", "false"], description)


def choice(name: str, default: str, choices: list[str], description: str) -> DeclareLaunchArgument:
    """Declares an argument of some values."""
    return DeclareLaunchArgument(name, default_value=default, choices=choices, description=description)


def argument(context: LaunchContext, name: str) -> str:
    """The value of a launch argument."""
    return str(LaunchConfiguration(name).perform(context))


def source_launch(
    arguments: list[DeclareLaunchArgument],
    start: Callable[[LaunchContext], list[Any]],
    forced: dict[str, str],
    forwarded: tuple[str, ...],
) -> LaunchDescription:
    """The policy on the images of another node, on simulated time, and on the CPU by default.

    Args:
        start: returns the other node's actions. It runs first: an error in it must end the launch before a policy
            process starts.
        forced: arguments of bringup that the launch file sets.
        forwarded: names of `arguments` that are bringup's too.
    """
    shared = [
        choice("profile", "cpu", [*PROFILES], "Parameters to use."),
        switch(
            "exit_on_failure",
            "true",
            "End the launch if the policy cannot start: the other nodes are of no use without it.",
        ),
    ]
    names = (*forwarded, *(each.name for each in shared))
    passed = {name: LaunchConfiguration(name) for name in names} | {"use_sim_time": "true"} | forced
    return LaunchDescription([*arguments, *shared, OpaqueFunction(function=start), bringup(passed)])


def bringup(arguments: dict[str, Any]) -> IncludeLaunchDescription:
    """Includes bringup.launch.py."""
    path = Path(get_package_share_directory("specvla_ros"), "launch", "bringup.launch.py")
    return IncludeLaunchDescription(PythonLaunchDescriptionSource(str(path)), launch_arguments=arguments.items())


def ending_launch(node: Node, name: str, reason: str) -> list[Any]:
    """A node whose end ends the launch, with an error if it failed. `reason`: why the launch ends otherwise."""

    def end(event: ProcessExited, context: LaunchContext) -> list[Any]:
        if event.returncode:
            raise RuntimeError(f"{name} ended with code {event.returncode}: its own message above says why")
        return [EmitEvent(event=Shutdown(reason=reason))]

    return [node, RegisterEventHandler(OnProcessExit(target_action=node, on_exit=end))]


def policy_parameters(context: LaunchContext, profile: str = "") -> dict[str, Value]:
    """The policy's parameters from the launch's arguments and files; see `merge_parameters`."""
    config = Path(get_package_share_directory("specvla_ros"), "config")
    files = [config / "common.yaml", config / f"{profile or argument(context, 'profile')}.yaml"]
    if argument(context, "params_file"):
        files.append(Path(argument(context, "params_file")).expanduser())
    given = {name: argument(context, name) for name in PARAMETERS}
    return merge_parameters(files, given, node="policy", namespace=argument(context, "namespace"))


def clock_parameter(context: LaunchContext) -> dict[str, Any]:
    """The launch's `use_sim_time` for a node, which overrides its file's; nothing if it is not given."""
    given = argument(context, "use_sim_time")
    return {"use_sim_time": as_bool("use_sim_time", given)} if given else {}


def _start(context: LaunchContext, profile: str) -> list[Any]:
    if not as_bool("policy", argument(context, "policy")):
        return []
    merged = policy_parameters(context, profile)
    # Without a type, launch would read the instruction "5" as a number.
    parameters = {
        name: ParameterValue(value, value_type=str) if isinstance(value, str) else value
        for name, value in merged.items()
    }
    parameters |= clock_parameter(context)
    robots = [name.strip() for name in argument(context, "robots").split(",") if name.strip()]
    if robots:
        parameters["robots"] = robots
    # Passed as a file, which also reaches the robots' own nodes. `parameters` already has the policy node's share.
    file = argument(context, "params_file")
    whole = [str(Path(file).expanduser())] if robots and file else []
    image_topic = argument(context, "image_topic")
    node = LifecycleNode(
        package="specvla_ros",
        executable="policy",
        name="policy",
        namespace=argument(context, "namespace"),
        parameters=[*whole, parameters],
        remappings=[
            *image_remappings("image", image_topic),
            *sensor_remappings(argument(context, "sensor_topics")),
            ("instruction", argument(context, "instruction_topic")),
        ],
        ros_arguments=["--log-level", f"policy:={argument(context, 'log_level')}"],
        output="screen",
        **respawning(context),
    )
    return [*autostart(node, "policy", context), node]


def respawning(context: LaunchContext) -> dict[str, Any]:
    """Respawn options of a node, from the launch arguments."""
    again = as_bool("respawn", argument(context, "respawn"))
    delay_s = as_number("respawn_delay", argument(context, "respawn_delay"))
    return {"respawn": again, "respawn_delay": delay_s}


def autostart(node: LifecycleNode, name: str, context: LaunchContext) -> list[RegisterEventHandler]:
    """Handlers that configure and activate a node once for each start of its process, if the arguments ask for it."""
    if not as_bool("autostart", argument(context, "autostart")):
        return []
    ends = as_bool("exit_on_failure", argument(context, "exit_on_failure"))
    return _Lifecycle(node, name, ends).handlers()


class _Lifecycle:
    """Configures and activates a node on the events of its process."""

    def __init__(self, node: LifecycleNode, name: str, exit_on_failure: bool) -> None:
        self._node, self._name = node, name
        self._exit_on_failure = exit_on_failure
        self._autostart = Autostart()
        self._killed = False

    def handlers(self) -> list[RegisterEventHandler]:
        started, changed = OpaqueFunction(function=self._started), OpaqueFunction(function=self._changed)
        return [
            RegisterEventHandler(OnProcessStart(target_action=self._node, on_start=[started])),
            RegisterEventHandler(OnStateTransition(target_lifecycle_node=self._node, entities=[changed])),
            RegisterEventHandler(OnProcessExit(target_action=self._node, on_exit=self._ended)),
        ]

    def _started(self, context: LaunchContext) -> list[Any]:
        if self._autostart.process_started() is Step.NOTHING:
            return [LogInfo(msg=f"the {self._name} was shut down by hand: it restarts, but stays unconfigured")]
        return self._configure(context)

    def _configure(self, context: LaunchContext) -> list[Any]:
        """Repeats the request after a kill: the killed process's services stay visible for a while, and swallow it."""
        if not self._autostart.waiting:
            return []
        again = TimerAction(
            period=_AGAIN_S, actions=[OpaqueFunction(function=self._configure)], cancel_on_shutdown=True
        )
        return [self._change(Transition.TRANSITION_CONFIGURE), *([again] if self._killed else [])]

    def _changed(self, context: LaunchContext) -> list[Any]:
        event = context.locals.event
        step = self._autostart.state_changed(event.start_state, event.goal_state)
        if step is Step.ACTIVATE:
            return [self._change(Transition.TRANSITION_ACTIVATE)]
        return self._fail(f"the {self._name} could not be configured") if step is Step.FAILED else []

    def _ended(self, event: ProcessExited, context: LaunchContext) -> list[Any]:
        self._killed = event.returncode != 0
        failed = self._autostart.process_ended(event.returncode) is Step.FAILED and not context.is_shutdown
        return self._fail(f"the {self._name} ended with code {event.returncode}") if failed else []

    def _fail(self, what: str) -> list[Any]:
        what += ": its own message above says why"
        if self._exit_on_failure:
            # Only an exception makes `ros2 launch` exit with a non-zero code.
            raise RuntimeError(what)
        return [LogInfo(msg=f"{what}. The launch continues without it; exit_on_failure:=true ends it instead")]

    def _change(self, transition: int) -> EmitEvent:
        matcher = matches_action(self._node)
        return EmitEvent(event=ChangeState(lifecycle_node_matcher=matcher, transition_id=transition))
