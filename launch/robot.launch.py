# SPDX-License-Identifier: Apache-2.0
"""Policy, driver, guard and tasks of a robot, one process each. Camera and controllers are started separately."""

from pathlib import Path

from launch.actions import DeclareLaunchArgument, LogInfo, OpaqueFunction
from launch.events.process import ProcessExited
from launch_ros.actions import LifecycleNode, Node
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription
from specvla_ros.control.guard.settings import GuardParameters
from specvla_ros.ros.bringup import (
    argument,
    autostart,
    bringup,
    clock_parameter,
    policy_parameters,
    respawning,
    switch,
    text,
)
from specvla_ros.ros.driver.parameters import DRY_RUN, DriverParameters
from specvla_ros.ros.task import TaskParameters
from specvla_ros.ros.wiring import COMMANDS, RobotTopics, image_remappings, refused_images_warning
from specvla_ros.settings.parameter import walk
from specvla_ros.settings.profiles import as_bool, merge_parameters

NODES = {"driver": DriverParameters, "guard": GuardParameters, "task": TaskParameters}


def generate_launch_description() -> LaunchDescription:
    """Takes all arguments of bringup too; see `ros2 launch specvla_ros robot.launch.py --show-args`."""
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "robot",
                description="Parameter file of driver, guard and task: limits, output, frames; see config/robots.",
            ),
            text("action_topic", RobotTopics.action, "The policy's actions, VlaAction."),
            text("tool_pose_topic", RobotTopics.tool_pose, "Measured PoseStamped."),
            text("joint_states_topic", RobotTopics.joint_states, "JointState topic."),
            *(text(f"{name}_topic", f"guard/{name}", f"Topic for the guard's {name}.") for name in COMMANDS),
            switch("task", "false", "Accept tasks on the action run_task; the policy then acts only during tasks."),
            text("rerun", "", "Output file for Rerun, such as run.rrd."),
            text("viewer", "", "Rerun's viewer: spawn, or the address of a running one."),
            OpaqueFunction(function=_read_robot),
            bringup({}),
            OpaqueFunction(function=_start),
        ]
    )


def _read_robot(context: LaunchContext) -> list:
    """Reads the robot's file before any process starts, so that an error in it leaves none behind.

    Its base_frame is the policy's too, unless an argument gives one.
    """
    nodes = NODES if _with_task(context) else NODES.keys() - {"task"}
    parameters = {node: _file_parameters(node, context) for node in nodes}
    if "base_frame" in parameters["driver"]:
        context.launch_configurations.setdefault("base_frame", str(parameters["driver"]["base_frame"]))
    return []


def _start(context: LaunchContext) -> list:
    common = {
        "package": "specvla_ros",
        "namespace": argument(context, "namespace"),
        "output": "screen",
    }
    again = respawning(context)
    topics = RobotTopics(
        argument(context, "tool_pose_topic"),
        argument(context, "joint_states_topic"),
        argument(context, "instruction_topic"),
        {name: argument(context, f"{name}_topic") for name in COMMANDS},
        argument(context, "action_topic"),
    )
    driver = LifecycleNode(
        executable="driver",
        name="driver",
        parameters=[_parameters("driver", context)],
        remappings=topics.driver,
        **common,
        **again,
    )
    nodes = [*_image_age_warning(context), *autostart(driver, "driver", context), driver, *_live_view(context, topics)]
    if _file_parameters("driver", context).get("output", DRY_RUN) == DRY_RUN:
        nodes.append(LogInfo(msg="output: none is a dry run: no guard is started"))
    else:
        guard = Node(
            executable="guard",
            name="guard",
            parameters=[_parameters("guard", context)],
            remappings=topics.guard,
            on_exit=_guard_ended,
            **common,  # never restarted: it would forget a latched stop
        )
        nodes.append(guard)
    if _with_task(context):
        task = Node(
            executable="task",
            name="task",
            parameters=[_parameters("task", context)],
            remappings=[("instruction", argument(context, "instruction_topic"))],
            **common,
            **again,
        )
        nodes.append(task)
    return nodes


def _guard_ended(event: ProcessExited, context: LaunchContext) -> None:
    """Ends the launch, with the last message, if the guard refuses its parameters: nothing can move without it."""
    if event.returncode == 2 and not context.is_shutdown:
        robot = argument(context, "robot")
        raise RuntimeError(
            f"the guard refused {robot}: its own message above says what to fix; nothing can move without it"
        )


def _image_age_warning(context: LaunchContext) -> list:
    """Warns before any motion if the policy answers images that driver and guard refuse."""
    if not as_bool("policy", argument(context, "policy")):
        return []
    usual = {"driver": DriverParameters().max_action_age_s, "guard": GuardParameters().guard.max_action_age_s}
    refused_s = min(_file_parameters(node, context).get("max_action_age_s", age_s) for node, age_s in usual.items())
    warning = refused_images_warning(policy_parameters(context)["max_image_age_s"], refused_s)
    return [LogInfo(msg=f"WARNING: {warning}")] if warning else []


def _with_task(context: LaunchContext) -> bool:
    return as_bool("task", argument(context, "task"))


def _live_view(context: LaunchContext, topics: RobotTopics) -> list:
    """A separate process that shows the run, if an argument asks for it."""
    shown = {"out": argument(context, "rerun"), "viewer": argument(context, "viewer")}
    if not any(shown.values()):
        return []
    limits = {name: value for name, value in _parameters("driver", context).items() if name.startswith("limits.")}
    return [
        Node(
            package="specvla_ros",
            executable="live_view",
            name="live_view",
            namespace=argument(context, "namespace"),
            parameters=[{**limits, **{name: ParameterValue(value, value_type=str) for name, value in shown.items()}}],
            remappings=[*image_remappings("image", argument(context, "image_topic")), *topics.live_view],
            output="screen",
        )
    ]


def _parameters(node: str, context: LaunchContext) -> dict:
    """A node's parameters in the robot's file; those for all nodes go to the nodes that declare them."""
    merged = _file_parameters(node, context)
    known = {name: {declared.name for declared in walk(kind())} for name, kind in NODES.items()}
    others = set().union(*(names for name, names in known.items() if name != node)) - known[node]
    parameters = {
        name: ParameterValue(value, value_type=str) if isinstance(value, str) else value
        for name, value in merged.items()
        if name not in others
    }
    return parameters | clock_parameter(context)


def _file_parameters(node: str, context: LaunchContext) -> dict:
    robot = Path(argument(context, "robot")).expanduser()
    # The namespace is an argument of bringup, so it may not be declared yet.
    namespace = context.launch_configurations.get("namespace", "")
    return merge_parameters([robot], {}, node=node, namespace=namespace)
