# SPDX-License-Identifier: Apache-2.0
"""A gripper: what it may be told, and its position from an action's number, without chatter around the middle."""

from dataclasses import dataclass
from enum import Enum

from specvla_ros.control.convention import GripperSign
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter

TRAVEL_S = 0.3  # that a trajectory gives a gripper


class GripperOutput(str, Enum):
    """How a gripper is commanded."""

    NONE = "none"
    ARRAY = "array"
    TRAJECTORY = "trajectory"
    ACTION = "action"  # the driver sends an array, and the guard makes a goal of it


@dataclass(frozen=True)
class GripperLimits:
    """What a gripper may be told."""

    ROS_PREFIX = "gripper."

    output: str = parameter(
        GripperOutput.NONE.value,
        "How the gripper is commanded: as an array, as a trajectory, as an action's goals, or not at all.",
        choices=tuple(each.value for each in GripperOutput),
    )
    joint: str = parameter("", "Name of the gripper's joint, for a trajectory.")
    open_value: float = parameter(0.0, "Position of an open gripper; as the closed one's: not set.", unit="m or rad")
    closed_value: float = parameter(0.0, "Position of a closed gripper.", unit="m or rad")

    def __post_init__(self) -> None:
        check(self)

    def require(self) -> None:
        """Raises UserError with what is missing."""
        if self.output == GripperOutput.TRAJECTORY.value and not self.joint:
            raise UserError("gripper.output: trajectory needs gripper.joint: the name of the gripper's joint")
        if self.output != GripperOutput.NONE.value and self.open_value == self.closed_value:
            raise UserError(
                f"gripper.output: {self.output} needs gripper.open_value and gripper.closed_value: the ends of the "
                "gripper's range, in metres or radians"
            )


@dataclass(frozen=True)
class GripperSettings(GripperLimits):
    """What the driver tells a gripper, and when it opens and closes."""

    open_value: float = parameter(
        0.04, "The robot's value of an open gripper: metres of a finger, or radians of a joint.", unit="m or rad"
    )
    threshold: float = parameter(
        0.5, "The gripper opens above this share of openness, and closes below it.", minimum=0.0, maximum=1.0
    )
    hysteresis: float = parameter(
        0.1, "Half the width of the band around the threshold in which the gripper stays.", minimum=0.0, maximum=0.5
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold - self.hysteresis <= self.threshold + self.hysteresis < 1:
            raise UserError(
                f"gripper.threshold {self.threshold:g} with gripper.hysteresis {self.hysteresis:g} leaves no openness "
                "at which the gripper would open, or none at which it would close; both must fit between 0 and 1"
            )


class Gripper:
    """Open or closed, as the actions say; it begins without a command."""

    def __init__(self, settings: GripperSettings) -> None:
        self._settings = settings
        self._opened: bool | None = None

    @property
    def position(self) -> float | None:
        """What to command, in the robot's unit; None: nothing yet."""
        if self._opened is None:
            return None
        return self._settings.open_value if self._opened else self._settings.closed_value

    def reset(self) -> None:
        """Forgets the last command: none is given until an action says so."""
        self._opened = None

    def take(self, value: float, sign: GripperSign) -> None:
        """An action's gripper number, in [0, 1] by the training data."""
        if sign is GripperSign.NONE:
            return
        openness = value if sign is GripperSign.OPEN_HIGH else 1.0 - value
        settings = self._settings
        if openness > settings.threshold + settings.hysteresis:
            self._opened = True
        elif openness < settings.threshold - settings.hysteresis:
            self._opened = False
