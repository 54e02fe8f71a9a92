# SPDX-License-Identifier: Apache-2.0
"""Gripper: limits of its commands, and its position from an action's value, with hysteresis against chatter."""

from dataclasses import dataclass
from enum import Enum

from specvla_ros.control.convention import GripperSign
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter

TRAVEL_S = 0.3  # duration of a gripper trajectory


class GripperOutput(str, Enum):
    """Command interface of a gripper."""

    NONE = "none"
    ARRAY = "array"
    TRAJECTORY = "trajectory"
    ACTION = "action"  # the driver sends an array, which the guard converts to a goal


@dataclass(frozen=True)
class GripperLimits:
    """Limits of gripper commands."""

    ROS_PREFIX = "gripper."

    output: str = parameter(
        GripperOutput.NONE.value,
        "Command interface of the gripper: array, trajectory, action goals or none.",
        choices=tuple(each.value for each in GripperOutput),
    )
    joint: str = parameter("", "Name of the gripper's joint, for a trajectory.")
    open_value: float = parameter(0.0, "Position of the open gripper; same as closed: not set.", unit="m or rad")
    closed_value: float = parameter(0.0, "Position of the closed gripper.", unit="m or rad")

    def __post_init__(self) -> None:
        check(self)

    def require(self) -> None:
        """Raises UserError for missing settings."""
        if self.output == GripperOutput.TRAJECTORY.value and not self.joint:
            raise UserError("gripper.output: trajectory needs gripper.joint: the name of the gripper's joint")
        if self.output != GripperOutput.NONE.value and self.open_value == self.closed_value:
            raise UserError(
                f"gripper.output: {self.output} needs gripper.open_value and gripper.closed_value, which are both "
                f"{self.open_value:g}: set them to the ends of the gripper's range, in metres or radians"
            )


@dataclass(frozen=True)
class GripperSettings(GripperLimits):
    """The driver's gripper commands, and its thresholds for opening and closing."""

    open_value: float = parameter(
        0.04, "The robot's value for an open gripper: metres of a finger, or radians of a joint.", unit="m or rad"
    )
    threshold: float = parameter(
        0.5, "The gripper opens above this openness and closes below it; 0: closed, 1: open.", minimum=0.0, maximum=1.0
    )
    hysteresis: float = parameter(
        0.1, "Half the width of the band around the threshold in which the state is kept.", minimum=0.0, maximum=0.5
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold - self.hysteresis <= self.threshold + self.hysteresis < 1:
            raise UserError(
                f"gripper.threshold {self.threshold:g} with gripper.hysteresis {self.hysteresis:g} never opens or "
                "never closes the gripper; threshold ± hysteresis must lie between 0 and 1"
            )


class Gripper:
    """Open or closed according to actions; starts without a command."""

    def __init__(self, settings: GripperSettings) -> None:
        self._settings = settings
        self._opened: bool | None = None

    @property
    def position(self) -> float | None:
        """Position to command, in the robot's unit; None: nothing yet."""
        if self._opened is None:
            return None
        return self._settings.open_value if self._opened else self._settings.closed_value

    def reset(self) -> None:
        """Drops the last command; there is none until the next action."""
        self._opened = None

    def take(self, value: float, sign: GripperSign) -> None:
        """Takes an action's gripper value, in [0, 1] in the training data."""
        if sign is GripperSign.NONE:
            return
        openness = value if sign is GripperSign.OPEN_HIGH else 1.0 - value
        settings = self._settings
        if openness > settings.threshold + settings.hysteresis:
            self._opened = True
        elif openness < settings.threshold - settings.hysteresis:
            self._opened = False
