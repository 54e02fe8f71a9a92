# SPDX-License-Identifier: Apache-2.0
"""From an action's gripper number to a gripper's position, without chatter around the middle."""

from dataclasses import dataclass

from specvla_ros.control.convention import GripperSign
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter


@dataclass(frozen=True)
class GripperSettings:
    """What the robot's gripper takes, and when it opens and closes."""

    ROS_PREFIX = "gripper."

    open_value: float = parameter(
        0.04, "The robot's value of an open gripper: metres of a finger, or radians of a joint.", unit="m or rad"
    )
    closed_value: float = parameter(0.0, "The robot's value of a closed gripper.", unit="m or rad")
    threshold: float = parameter(
        0.5, "The gripper opens above this share of openness, and closes below it.", minimum=0.0, maximum=1.0
    )
    hysteresis: float = parameter(
        0.1, "Half the width of the band around the threshold in which the gripper stays.", minimum=0.0, maximum=0.5
    )

    def __post_init__(self) -> None:
        check(self)
        if not 0 < self.threshold - self.hysteresis <= self.threshold + self.hysteresis < 1:
            raise UserError(
                f"gripper.threshold {self.threshold:g} with gripper.hysteresis {self.hysteresis:g} leaves no openness "
                "at which the gripper would open, or none at which it would close; both must fit between 0 and 1"
            )


class Gripper:
    """Open or closed, as the actions say; it begins without a command.

    Args:
        settings: of the robot's gripper.
    """

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
