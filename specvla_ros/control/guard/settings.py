# SPDX-License-Identifier: Apache-2.0
"""Settings of the guard and its node."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np

from specvla_ros.control.convention import NO_NAMES
from specvla_ros.control.gripper import GripperLimits
from specvla_ros.control.guard.robot_state import StateRule
from specvla_ros.control.limits import JointLimits, Limits, ToolSource
from specvla_ros.control.robot_model import completed
from specvla_ros.errors import UserError, together
from specvla_ros.settings.parameter import check, parameter, section


class Output(str, Enum):
    """Kind of guarded command."""

    NONE = "none"  # not chosen: refused
    POSE = "pose"
    TWIST = "twist"
    JOINT_TRAJECTORY = "joint_trajectory"
    JOINT_TRAJECTORY_CHUNK = "joint_trajectory_chunk"
    POSITION_ARRAY = "position_array"
    VELOCITY_ARRAY = "velocity_array"

    @property
    def of_joints(self) -> bool:
        """True if joints are commanded, not the tool."""
        return self not in (Output.NONE, Output.POSE, Output.TWIST)

    @property
    def topic(self) -> str:
        """Name of the topics of these commands."""
        return _ARRAYS.get(self.value) or self.value.removesuffix("_chunk")


_ARRAYS = {"position_array": "joint_positions", "velocity_array": "joint_velocities"}
# For motion sent ahead: share of the joints' acceleration with which the guard moves and brakes, and the time after
# which a controller follows a message: its way, and a control period. The arm joins the new motion from wherever it is
# by then; braked as hard as it can, it would swing beyond its end.
CHUNK_BRAKING, HEARD_S = 0.8, 0.02
JOINT_OUTPUTS = tuple(each.value for each in Output if each.of_joints)


@dataclass(frozen=True)
class GuardSettings:
    """Limits of what the guard passes, and timeouts for detecting failures."""

    output: str = parameter(
        Output.NONE.value,
        "Kind of command to guard, the same as the driver's; must be set.",
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
        "Output rate, on the steady clock. Must exceed the robot controller's rate: at the same rate the controller "
        "would find no command in one cycle and two in the next.",
        unit="Hz",
        minimum=20.0,
        maximum=500.0,
    )
    stop_time_s: float = parameter(
        0.2,
        "Maximum time from a failed condition to zero velocity sent; limits that need longer are refused.",
        unit="s",
        minimum=0.02,
        maximum=5.0,
        basic=True,
    )
    command_timeout_s: float = parameter(
        0.1,
        "Motion stops if no command arrives for this long; older commands are ignored.",
        unit="s",
        minimum=0.01,
        maximum=2.0,
        basic=True,
    )
    action_timeout_s: float = parameter(
        1.0,
        "Motion stops if no action arrives for this long; must exceed the time between two actions.",
        unit="s",
        minimum=0.05,
        maximum=60.0,
        basic=True,
    )
    max_action_age_s: float = parameter(
        1.0, "Actions from older images do not count as a heartbeat.", unit="s", minimum=0.05, maximum=60.0
    )
    state_timeout_s: float = parameter(
        0.2, "Motion stops if the measured pose or joints are older than this.", unit="s", minimum=0.02, maximum=5.0
    )
    clock_timeout_s: float = parameter(
        0.3, "Motion stops if the node's clock stands still for this long.", unit="s", minimum=0.02, maximum=5.0
    )
    require_enable: bool = parameter(True, "Pass motion only while ~/enable is true.", basic=True)
    enable_timeout_s: float = parameter(
        0.5, "Motion stops if ~/enable or ~/stop_pressed is silent for this long.", unit="s", minimum=0.02, maximum=10.0
    )
    require_stop_button: bool = parameter(
        False, "Pass motion only while ~/stop_pressed is false. Once received, it must be repeated in any case."
    )
    robot_states: tuple[str, ...] = parameter(
        NO_NAMES,
        "Required robot states, each 'TOPIC PACKAGE/msg/TYPE FIELD=VALUE|VALUE'; any other value latches a stop.",
    )
    override: bool = parameter(
        False, "Also accept commands on override/…; while they arrive, they replace the driver's."
    )
    speed_scale: float = parameter(
        1.0, "Initial fraction of the speed limits; ~/speed_scale changes it.", minimum=0.0, maximum=1.0
    )
    obey_time_s: float = parameter(
        0.5, "How long the robot may still move after a stop command.", unit="s", minimum=0.1, maximum=10.0
    )
    require_confirm: bool = parameter(False, "Pass motion only for an instruction confirmed on ~/confirm.")
    max_lead_m: float = parameter(
        0.1, "Maximum distance of a command from the measured tool.", unit="m", minimum=0.001, maximum=2.0
    )
    max_lead_rad: float = parameter(
        0.5,
        "Maximum rotation of a command from the measured tool, or distance of a joint's command from its position.",
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
        """Maximum duration of a stop within the limits, plus one period before it and one for rounding up."""
        return self._slowest_stop[0] + 2 / self.rate_hz

    @property
    def joint_braking(self) -> np.ndarray:
        """Accelerations with which the guard moves and brakes joints, float64 [joints]."""
        share = CHUNK_BRAKING if self.kind is Output.JOINT_TRAJECTORY_CHUNK else 1.0
        return share * self.joints.accelerations

    def completed(self) -> "GuardSettings":
        """Fills in missing joint limits if joints are commanded; see `robot_model.completed`."""
        return replace(self, joints=completed(self.joints)) if self.kind.of_joints else self

    def require(self) -> None:
        """Raises UserError for missing settings, or for limits whose stop takes longer than `stop_time_s`."""
        if self.kind is Output.NONE:
            kinds = ", ".join(each.value for each in Output if each is not Output.NONE)
            raise UserError(f"parameter 'output' is not set; set it to what the driver sends: {kinds}")
        what_for = f"output: {self.output}"
        joints = [partial(self.joints.require, what_for)] if self.kind.of_joints else []
        together(partial(self.limits.require, what_for), *joints, self.gripper.require, lambda: self.state_rules)
        if self.ramp_s > self.stop_time_s + 1e-9:
            raise UserError(
                f"a stop takes {self.ramp_s:.3f} s, with two output periods, but stop_time_s promises "
                f"{self.stop_time_s:g} s: {self._slowest_stop[1]}; raise the acceleration or stop_time_s, or lower the "
                "speed"
            )

    @property
    def _slowest_stop(self) -> tuple[float, str]:
        """The longest stop in seconds, and the speed and acceleration that it comes from."""
        if self.kind.of_joints:
            joints = self.joints
            worst = int((joints.speeds / self.joint_braking).argmax())
            speed, acceleration = joints.speeds[worst], self.joint_braking[worst]
            stop_s = float(speed / acceleration)
            words = f"{joints.names[worst]} brakes from {speed:.3g} rad/s with {acceleration:.3g} rad/s²"
            if self.kind is not Output.JOINT_TRAJECTORY_CHUNK:
                return stop_s, words
            return stop_s + HEARD_S, f"{words}, {CHUNK_BRAKING:g} of its acceleration, {HEARD_S:g} s after the stop"
        limits = self.limits
        linear_s = limits.linear_speed / limits.linear_acceleration
        return max(linear_s, limits.angular_speed / limits.angular_acceleration), (
            f"limits.* brake from {limits.linear_speed:g} m/s with {limits.linear_acceleration:g} m/s² and from "
            f"{limits.angular_speed:g} rad/s with {limits.angular_acceleration:g} rad/s²"
        )


@dataclass(frozen=True)
class GuardParameters:
    """All parameters of the guard's node; none changes while it runs."""

    guard: GuardSettings = section(GuardSettings)
    tool: ToolSource = section(ToolSource)
    escalation_service: str = parameter(
        "",
        "Service called if the robot does not obey: std_srvs/Trigger, or ros2_control's switch_controller.",
    )
    escalation_controllers: tuple[str, ...] = parameter(NO_NAMES, "Controllers that switch_controller deactivates.")
    realtime_priority: int = parameter(
        10,
        "SCHED_FIFO priority of the guard's threads, if the system allows it; 0: normal scheduling.",
        minimum=0,
        maximum=99,
    )
    black_box_s: float = parameter(
        120.0, "Length of the recording written on a stop; 0: no black box.", unit="s", minimum=0.0, maximum=3600.0
    )
    black_box_dir: str = parameter("~/.ros/black_box", "Directory of the recordings, one MCAP file per stop.")
    black_box_files: int = parameter(20, "Maximum number of files; the oldest are deleted.", minimum=1, maximum=10_000)
    diagnostics_period_s: float = parameter(1.0, "Period of the diagnostics.", unit="s", minimum=0.05, maximum=60.0)
