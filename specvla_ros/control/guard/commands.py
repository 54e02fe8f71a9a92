# SPDX-License-Identifier: Apache-2.0
"""Incoming commands and measurements, unchecked; the robot's measured state; and outgoing commands."""

from dataclasses import dataclass

import numpy as np

from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.pose import Pose


@dataclass(frozen=True)
class Instant:
    """The current time on both clocks."""

    steady_s: float  # steady clock, which is never set
    clock_ns: int  # node's clock, the clock of stamps


@dataclass(frozen=True)
class Stamp:
    """Stamp of a message."""

    ns: int | None  # on the node's clock; None: the message has none
    frame_id: str = ""

    def seconds(self, now: Instant) -> float:
        """Time of sending: the stamp, since delivery may bunch messages; without a stamp the arrival time."""
        return now.steady_s if self.ns is None else self.ns * 1e-9


@dataclass(frozen=True)
class TwistCommand:
    """A velocity of the tool."""

    stamp: Stamp
    velocity: np.ndarray  # float64 [6], m/s and rad/s


@dataclass(frozen=True)
class ToolPose:
    """Measured or commanded pose of the tool."""

    stamp: Stamp
    position: np.ndarray  # float64 [3], metres
    quaternion: tuple[float, float, float, float]  # w x y z


@dataclass(frozen=True)
class JointCommand:
    """Commanded joint positions; a single point must be reached as soon as the limits allow."""

    stamp: Stamp  # its frame is ignored
    names: tuple[str, ...] | None  # joint names; None: in the order of the parameters
    positions: np.ndarray  # float64 [points, joints]
    times_s: np.ndarray  # float64 [points], time from now to each point
    velocities: np.ndarray | None = None  # float64 [points, joints]; None: not given


@dataclass(frozen=True)
class JointVelocities:
    """Commanded joint velocities, in the order of the parameters."""

    stamp: Stamp
    velocities: np.ndarray  # float64 [joints]


@dataclass(frozen=True)
class GripperCommand:
    """Commanded gripper position."""

    names: tuple[str, ...] | None  # joint names; None: not given
    positions: np.ndarray  # float64 [1]


@dataclass(frozen=True)
class JointPositions:
    """Measured joint positions."""

    stamp: Stamp
    names: tuple[str, ...]  # joint names, possibly more than are commanded
    positions: np.ndarray  # float64 [joints]


@dataclass(frozen=True)
class Measured:
    """Measured state of the robot."""

    tool: Pose | None  # in the base frame; None: unknown
    joints: np.ndarray | None  # float64 [joints] in the order of the parameters; None: unknown or not needed
    velocity: np.ndarray | None  # float64 [3] m/s, of the tool over the last 0.1 s; None: unknown


@dataclass(frozen=True)
class SentTwist:
    """Outgoing twist: float64 [6], m/s and rad/s in the base frame."""

    velocity: np.ndarray


@dataclass(frozen=True)
class SentJoints:
    """Outgoing joint positions and velocities, float64 [joints] each, in the order of the parameters."""

    positions: np.ndarray
    velocities: np.ndarray
    after_s: float  # time to a trajectory's point, which the measured joints can reach within their speed limits
    path: JointPath | None = None  # a chunk's coming motion, to be sent in place of the point
    sent_before: bool = False  # the controller has this motion already, from an earlier message


@dataclass(frozen=True)
class SentVelocities:
    """Outgoing joint velocities: float64 [joints], in the order of the parameters."""

    velocities: np.ndarray


Command = TwistCommand | ToolPose | JointCommand | JointVelocities
Sent = SentTwist | Pose | SentJoints | SentVelocities
