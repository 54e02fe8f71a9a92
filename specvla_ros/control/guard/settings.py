# SPDX-License-Identifier: Apache-2.0
"""What the guard is held to, declared once."""

from dataclasses import dataclass, replace
from enum import Enum

from specvla_ros.control.gripper import GripperLimits
from specvla_ros.control.guard.robot_state import StateRule
from specvla_ros.control.limits import NO_NAMES, JointLimits, Limits, ToolSource
from specvla_ros.control.robot_model import completed
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter, section


class Output(str, Enum):
    """The kind of command that is guarded."""

    NONE = "none"  # nothing was chosen: refused
    POSE = "pose"
    TWIST = "twist"
    JOINT_TRAJECTORY = "joint_trajectory"
    POSITION_ARRAY = "position_array"

    @property
    def of_joints(self) -> bool:
        """Whether joints are commanded, not the tool."""
        return self in (Output.JOINT_TRAJECTORY, Output.POSITION_ARRAY)


@dataclass(frozen=True)
class GuardSettings:
    """What the guard lets through, and how soon it notices what fails."""

    output: str = parameter(
        Output.NONE.value,
        "The kind of command to guard; must be chosen, as the driver's.",
        choices=tuple(each.value for each in Output),
        basic=True,
    )
    base_frame: str = parameter(
        "base_link", "The robot's base: frame of limits, commands and measured pose.", basic=True
    )
    limits: Limits = section(Limits)
    joints: JointLimits = section(JointLimits)
    gripper: GripperLimits = section(GripperLimits)
    rate_hz: float = parameter(
        250.0,
        "How often a command goes out, on the steady clock. As often as the robot's controller looks is too seldom: it "
        "would find none in one turn and two in the next.",
        unit="Hz",
        minimum=20.0,
        maximum=500.0,
    )
    stop_time_s: float = parameter(
        0.2,
        "Longest time from the failing of a condition to zero velocity going out; limits that need longer are refused.",
        unit="s",
        minimum=0.02,
        maximum=5.0,
        basic=True,
    )
    command_timeout_s: float = parameter(
        0.1,
        "Silence of the driver, and age of a command, that stop motion.",
        unit="s",
        minimum=0.01,
        maximum=2.0,
        basic=True,
    )
    action_timeout_s: float = parameter(
        1.0,
        "Silence of the policy that stops motion; longer than the time between two actions.",
        unit="s",
        minimum=0.05,
        maximum=60.0,
        basic=True,
    )
    max_action_age_s: float = parameter(
        1.0, "Age of an action's picture above which it is no sign of life.", unit="s", minimum=0.05, maximum=60.0
    )
    state_timeout_s: float = parameter(
        0.2, "Age of the measured pose and joints that stops motion.", unit="s", minimum=0.02, maximum=5.0
    )
    clock_timeout_s: float = parameter(
        0.3, "How long the node's clock may stand still.", unit="s", minimum=0.02, maximum=5.0
    )
    require_enable: bool = parameter(True, "Let motion through only while ~/enable says true.", basic=True)
    enable_timeout_s: float = parameter(
        0.5, "Silence of ~/enable that stops motion.", unit="s", minimum=0.02, maximum=10.0
    )
    require_stop_button: bool = parameter(
        False, "Let motion through only while ~/stop_pressed says false; once it was heard it must go on in any case."
    )
    robot_states: tuple[str, ...] = parameter(
        NO_NAMES,
        "What the robot must say of itself: 'TOPIC PACKAGE/msg/TYPE FIELD=VALUE|VALUE' each; anything else latches.",
    )
    override: bool = parameter(
        False, "Take commands on override/… too: while they come, they are followed in place of the driver's."
    )
    speed_scale: float = parameter(
        1.0, "Share of the limits of speed to begin with; ~/speed_scale changes it.", minimum=0.0, maximum=1.0
    )
    obey_time_s: float = parameter(
        0.5, "How long a robot that was told to stand may still move.", unit="s", minimum=0.1, maximum=10.0
    )
    require_confirm: bool = parameter(False, "Let motion through only for an instruction confirmed on ~/confirm.")
    max_lead_m: float = parameter(
        0.1, "How far a command may lie from the measured tool.", unit="m", minimum=0.001, maximum=2.0
    )
    max_lead_rad: float = parameter(
        0.5,
        "How far a command may be turned from the measured tool, or a joint's lie from where it is measured.",
        unit="rad or m",
        minimum=0.001,
        maximum=3.0,
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def kind(self) -> Output:
        return Output(self.output)

    @property
    def state_rules(self) -> tuple[StateRule, ...]:
        return tuple(StateRule.parse(text) for text in self.robot_states if text)

    @property
    def ramp_s(self) -> float:
        """Longest time that a stop within the limits takes, with a period before it and one that rounds it up."""
        if self.kind.of_joints:
            return float((self.joints.speeds / self.joints.accelerations).max()) + 2 / self.rate_hz
        limits = self.limits
        linear = limits.linear_speed / limits.linear_acceleration
        return max(linear, limits.angular_speed / limits.angular_acceleration) + 2 / self.rate_hz

    def completed(self) -> "GuardSettings":
        """With the limits of joints that are not given, where joints are commanded; see `robot_model.completed`."""
        return replace(self, joints=completed(self.joints)) if self.kind.of_joints else self

    def require(self) -> None:
        """Raises UserError for what is missing, or a stop that would take longer than promised."""
        if self.kind is Output.NONE:
            kinds = ", ".join(each.value for each in Output if each is not Output.NONE)
            raise UserError(f"parameter 'output' is not set; set it to what the driver sends: {kinds}")
        self.limits.require(f"output: {self.output}")
        if self.kind.of_joints:
            self.joints.require(f"output: {self.output}")
        self.gripper.require()
        _ = self.state_rules
        if self.ramp_s > self.stop_time_s + 1e-9:
            raise UserError(
                f"a stop from full speed within {'joints' if self.kind.of_joints else 'limits'}.* takes "
                f"{self.ramp_s:.3f} s, two periods of the output included, but stop_time_s promises "
                f"{self.stop_time_s:g} s; raise the acceleration there or stop_time_s, or lower the speed"
            )


@dataclass(frozen=True)
class GuardParameters:
    """Every parameter of the guard's node; none changes while it runs."""

    guard: GuardSettings = section(GuardSettings)
    tool: ToolSource = section(ToolSource)
    escalation_service: str = parameter(
        "",
        "Service that is asked when the robot does not obey: std_srvs/Trigger, or ros2_control's switch_controller.",
    )
    escalation_controllers: tuple[str, ...] = parameter(NO_NAMES, "Controllers that switch_controller deactivates.")
    realtime_priority: int = parameter(
        10,
        "Priority of the guard's threads under SCHED_FIFO, where the system allows it; 0: ordinary.",
        minimum=0,
        maximum=99,
    )
    black_box_s: float = parameter(
        120.0, "How much of the past is written on a stop; 0: no black box.", unit="s", minimum=0.0, maximum=3600.0
    )
    black_box_dir: str = parameter("~/.ros/black_box", "Where stops are written, one MCAP file each.")
    black_box_files: int = parameter(20, "How many files are kept there; the oldest go.", minimum=1, maximum=10_000)
    diagnostics_period_s: float = parameter(1.0, "Time between two diagnostics.", unit="s", minimum=0.05, maximum=60.0)
