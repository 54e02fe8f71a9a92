# SPDX-License-Identifier: Apache-2.0
"""The parameters of the driver."""

from dataclasses import dataclass
from functools import partial

from specvla_ros.control.follower import Compensation
from specvla_ros.control.gripper import GripperSettings
from specvla_ros.control.limits import Joints, Limits, ToolSource
from specvla_ros.errors import UserError, together
from specvla_ros.ros.driver.outputs import ROBOT_OUTPUTS
from specvla_ros.settings.parameter import check, parameter, section

DRY_RUN = "none"
TOOL, JOINTS = "tool", "joints"


@dataclass(frozen=True)
class JointParameters(Joints):
    """The arm's joints, and how the order of an array is checked."""

    controller: str = parameter(
        "",
        "Node of the controller that takes an array of joints, such as /forward_position_controller. Before any motion "
        "the driver asks it for its joints, whose order must be that of joints.names.",
    )
    check_order: bool = parameter(
        True,
        "Without joints.controller: at the first enabling each joint is moved by 0.02 and back, to check that a "
        "position_array is in the controller's order.",
    )


@dataclass(frozen=True)
class DriverParameters:
    """Every parameter of the driver."""

    output: str = parameter(
        DRY_RUN,
        "Kind of command sent to the robot; none is a dry run, which sends nothing.",
        choices=ROBOT_OUTPUTS.names,
        basic=True,
    )
    action_space: str = parameter(
        TOOL,
        "Space of the policy's actions: tool poses or joint positions. Actions of the other kind are refused.",
        choices=(TOOL, JOINTS),
        basic=True,
    )
    action_prefix: str = parameter(
        "",
        "With action_space: joints, the prefix of this arm's joint names (such as left_) in an action for two arms; "
        "only those values are followed, and another driver follows the others. Empty: all values are this arm's.",
    )
    rate_hz: float = parameter(100.0, "Control steps per second.", unit="Hz", minimum=50.0, maximum=200.0)
    base_frame: str = parameter("base_link", "The robot's base: frame of poses, twists and limits.", basic=True)
    tool: ToolSource = section(ToolSource)
    tool_pose_timeout_s: float = parameter(
        0.25,
        "The robot comes to rest after this time without a measured pose; with velocity_array also without measured "
        "joints.",
        unit="s",
        minimum=0.02,
        maximum=2.0,
    )
    compensate: str = parameter(
        Compensation.IMAGE_GOAL.value,
        "Reference of an action: the tool's measured pose at the image's stamp (image_goal), or its target when the "
        "action arrives (none), which is refused for actions of pipeline, specpipe and auto.",
        choices=tuple(each.value for each in Compensation),
    )
    max_action_age_s: float = parameter(
        1.0,
        "Actions from older images are refused.",
        unit="s",
        minimum=0.01,
        maximum=60.0,
        writable=True,
        basic=True,
    )
    max_future_s: float = parameter(
        0.1, "How far an action's stamp may be ahead of the clock.", unit="s", minimum=0.0, maximum=10.0, writable=True
    )
    max_step_m: float = parameter(
        0.3, "Actions with a longer translation are refused.", unit="m", minimum=0.001, maximum=2.0
    )
    max_step_rad: float = parameter(
        1.5,
        "Actions with a larger rotation are refused; of joints, those that move one further from row to row.",
        unit="rad",
        minimum=0.001,
        maximum=3.1416,
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
        """Raises UserError if a parameter is missing that must be set before a robot moves."""
        arm = [self._require_arm] if self.action_space == JOINTS else [self._require_one_arm]
        limits = [] if self.output == DRY_RUN else [partial(self.limits.require, f"output: {self.output}")]
        together(*limits, *arm, partial(self.tool.require, self.joints))

    def _require_one_arm(self) -> None:
        if self.action_prefix:
            raise UserError(
                f"action_prefix: {self.action_prefix} chooses an arm's joints by name: set action_space to joints"
            )

    def _require_arm(self) -> None:
        if not self.joints.model:
            raise UserError(
                "action_space: joints needs the robot's kinematics; set joints.model to its MJCF or URDF, and "
                "joints.names, joints.tool, joints.max_speed and joints.max_acceleration"
            )

    @property
    def pose_source(self) -> str:
        """Source of the measured poses: of the tool, or of the joints that the actions name."""
        return "joint_states" if self.action_space == JOINTS else self.tool.pose_source
