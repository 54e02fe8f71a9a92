# SPDX-License-Identifier: Apache-2.0
"""What the numbers of an action mean: frame, rotation, gripper, and the period of the data that taught them."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

# The columns of an action's values, in this order; a robot without a gripper has the first six.
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


class Reference(str, Enum):
    """What an action's pose is counted from."""

    DELTA = "delta"  # from the tool's pose at the picture's stamp
    ABSOLUTE = "absolute"  # from the origin of the base frame


class ActionFrame(str, Enum):
    """The frame in which a displacement is written."""

    BASE = "base"
    TOOL = "tool"


class Rotation(str, Enum):
    """How three numbers say a rotation, in radians."""

    ROTATION_VECTOR = "rotation_vector"  # axis times angle
    RPY = "rpy"  # roll, pitch, yaw about the fixed axes x, y, z, in this order: Rz(yaw) Ry(pitch) Rx(roll)


class GripperSign(str, Enum):
    """What the gripper's number says."""

    OPEN_HIGH = "open_high"  # larger opens: 1 open, 0 closed in OpenVLA's data
    CLOSE_HIGH = "close_high"  # larger closes
    NONE = "none"  # there is no gripper


@dataclass(frozen=True)
class ActionConvention:
    """How the values of an action are to be read.

    Args:
        dt_s: seconds over which a displacement is meant, and between two actions of a chunk: the data's period.
        reference: what the pose is counted from.
        frame: in which a displacement is written.
        rotation: how its rotation is written.
        gripper: what the last number says.
        translation_unit_m: metres that 1 of x, y, z stands for; what is published is in metres.
        rotation_unit_rad: radians that 1 of roll, pitch, yaw stands for; what is published is in radians.
        source: where this is written, for a reader; empty: the user said so.
    """

    dt_s: float
    reference: Reference = Reference.DELTA
    frame: ActionFrame = ActionFrame.BASE
    rotation: Rotation = Rotation.ROTATION_VECTOR
    gripper: GripperSign = GripperSign.OPEN_HIGH
    translation_unit_m: float = 1.0
    rotation_unit_rad: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class StampedAction:
    """An action, or a chunk of them, as it arrives.

    Args:
        stamp_s: of the picture, seconds on the robot's clock.
        values: float64 [horizon, 6 or 7]: translation in metres, rotation in radians, gripper.
        convention: how to read them.
    """

    stamp_s: float
    values: np.ndarray
    convention: ActionConvention
