# SPDX-License-Identifier: Apache-2.0
"""LeRobot's calibration of motors: the angle of each joint for a percent of its calibrated range.

Without degrees, LeRobot's motors give -100 to 100 from one end of a joint's calibrated range to the other, and 0 in its
middle (lerobot/motors/motors_bus.py, RANGE_M100_100). The joint's zero must be there too, as in the SO-101's URDF.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import Fields, load_json

_TURN = 4095  # of a motor's encoder, as LeRobot counts it: Feetech STS, Dynamixel X
_HINT = "; is it the robot's calibration file, ~/.cache/huggingface/lerobot/calibration/robots/TYPE/ID.json?"


def radians_per_percent(path: Path, joints: Sequence[str]) -> np.ndarray:
    """Radians per percent of each joint's range, float64 [joints]; negative for a motor with an inverted drive mode.

    Raises UserError if the file is missing or malformed, or lacks a joint.
    """
    try:
        motors = load_json(path)
    except FileNotFoundError:
        raise UserError(f"action.calibration: there is no file {path.absolute()}{_HINT}") from None
    if not isinstance(motors, dict):
        raise UserError(f"{path} holds no motors by name{_HINT}")
    if missing := [name for name in joints if name not in motors]:
        raise UserError(
            f"{path} has no motor '{missing[0]}'; it has: {', '.join(motors)}; action.joints must name the motors"
        )
    file = Fields(motors, path, "", _HINT)
    return np.array([_of_motor(file.inner(name)) for name in joints])


def _of_motor(motor: Fields) -> float:
    low, high = (motor.whole(name, minimum=-_TURN, maximum=2 * _TURN) for name in ("range_min", "range_max"))
    if low >= high:
        raise motor.wrong("range_max", "larger than range_min")
    sign = -1.0 if motor.whole("drive_mode", minimum=0, maximum=1) else 1.0
    return sign * (high - low) * math.pi / _TURN / 100
