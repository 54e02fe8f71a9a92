# SPDX-License-Identifier: Apache-2.0
"""The policy node on the simulated robot, on simulated time; ends after the last episode."""

from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.ros.bringup import argument, choice, ending_launch, source_launch, text
from specvla_ros.settings.profiles import as_number

TOPICS = {
    "image_topic": "/camera/image_raw",
    "instruction_topic": "/instruction",
    # For a policy with two cameras, or one that reads the joints.
    "sensor_topics": "wrist=/wrist/image_raw,state=/joint_states",
}


def generate_launch_description() -> LaunchDescription:
    """Takes all arguments of bringup too, with profile:=cpu; the topics and the clock are the simulated robot's."""
    arguments = [
        text("checkpoint", str(nano_policy()), "Directory of the checkpoint; default: the package's nano policy."),
        choice(
            "clock",
            "realtime",
            ["lockstep", "realtime"],
            "Time in the simulated world while the policy computes: stopped (lockstep) or running.",
        ),
        text("tasks", "all", "Names of tasks, comma-separated; all: every task."),
        text("episodes", "3", "Episodes of each task; 0: endless."),
        text("seed", "0", "Seed of the first round."),
    ]
    return source_launch(arguments, _act, forced=TOPICS, forwarded=("checkpoint",))


def _act(context: LaunchContext) -> list:
    from specvla_ros.lab.simulation import require_gl
    from specvla_ros.lab.simulation.tasks import choose_tasks

    require_gl()
    tasks = [name.strip() for name in argument(context, "tasks").split(",") if name.strip()] or ["all"]
    if tasks != ["all"]:
        choose_tasks(tasks)  # for an unknown task it raises an error that lists the others
    robot = Node(
        package="specvla_ros",
        executable="sim_robot",
        name="sim_robot",
        parameters=[
            {
                "tasks": tasks,
                "episodes": int(as_number("episodes", argument(context, "episodes"))),
                "seed": int(as_number("seed", argument(context, "seed"))),
                "clock": ParameterValue(argument(context, "clock"), value_type=str),
            }
        ],
        output="screen",
    )
    return ending_launch(robot, "the simulated robot", "the last episode has ended")
