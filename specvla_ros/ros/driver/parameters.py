# SPDX-License-Identifier: Apache-2.0
"""The parameters of the driver."""

from dataclasses import dataclass

from specvla_ros.control.follower import Compensation
from specvla_ros.control.gripper import GripperSettings
from specvla_ros.control.limits import Joints, Limits, ToolSource
from specvla_ros.ros.driver.outputs import ROBOT_OUTPUTS
from specvla_ros.settings.parameter import check, parameter, section

DRY_RUN = "none"


@dataclass(frozen=True)
class JointParameters(Joints):
    """The arm's joints, and how the order of a position_array is known."""

    controller: str = parameter(
        "",
        "Node of the controller that takes a position_array, such as /forward_position_controller: it is asked for its "
        "joints, whose order must be that of joints.names, before anything moves.",
    )
    check_order: bool = parameter(
        True,
        "Without joints.controller: at the first enabling each joint is moved by 0.02 and back, to see that a "
        "position_array is in the controller's order.",
    )


@dataclass(frozen=True)
class DriverParameters:
    """Every parameter of the driver."""

    output: str = parameter(
        DRY_RUN,
        "What the robot is sent; none is a dry run, which sends nothing.",
        choices=ROBOT_OUTPUTS.names,
        basic=True,
    )
    rate_hz: float = parameter(100.0, "Control steps per second.", unit="Hz", minimum=50.0, maximum=200.0)
    base_frame: str = parameter("base_link", "The robot's base: frame of poses, twists and limits.", basic=True)
    tool: ToolSource = section(ToolSource)
    tool_pose_timeout_s: float = parameter(
        0.25, "Without a measured pose for this long the tool comes to rest.", unit="s", minimum=0.02, maximum=2.0
    )
    compensate: str = parameter(
        Compensation.IMAGE_GOAL.value,
        "What an action counts from: where the tool was measured at the picture's stamp (image_goal), or where it is "
        "being sent on arrival (none), which is refused for actions of pipeline, specpipe and auto.",
        choices=tuple(each.value for each in Compensation),
    )
    max_action_age_s: float = parameter(
        1.0,
        "Actions whose picture is older are refused.",
        unit="s",
        minimum=0.01,
        maximum=60.0,
        writable=True,
        basic=True,
    )
    max_future_s: float = parameter(
        0.1, "How far an action's stamp may lie ahead of the clock.", unit="s", minimum=0.0, maximum=10.0, writable=True
    )
    max_step_m: float = parameter(
        0.3, "A longer translation of one action is refused.", unit="m", minimum=0.001, maximum=2.0
    )
    max_step_rad: float = parameter(
        1.5, "A larger rotation of one action is refused.", unit="rad", minimum=0.001, maximum=3.1416
    )
    realtime_priority: int = parameter(
        8,
        "Priority of the driver's threads under SCHED_FIFO, where the system allows it; below the guard's; 0: none.",
        minimum=0,
        maximum=99,
    )
    limits: Limits = section(Limits)
    joints: JointParameters = section(JointParameters)
    gripper: GripperSettings = section(GripperSettings)
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics.", unit="s", minimum=0.05, maximum=60.0)

    def __post_init__(self) -> None:
        check(self)

    def check_complete(self) -> None:
        """Raises UserError for what has to be set before a robot moves."""
        if self.output != DRY_RUN:
            self.limits.require(f"output: {self.output}")
        self.tool.require(self.joints)
