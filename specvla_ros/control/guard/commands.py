# SPDX-License-Identifier: Apache-2.0
"""Commands and measurements as they come in, unchecked; where the robot is; and what goes out."""

from dataclasses import dataclass

import numpy as np

from specvla_ros.control.pose import Pose


@dataclass(frozen=True)
class Instant:
    """Now, on both clocks."""

    steady_s: float  # of the steady clock, which nobody sets
    clock_ns: int  # of the node's clock, which stamps are of


@dataclass(frozen=True)
class Stamp:
    """Of a message."""

    ns: int | None  # on the node's clock; None: the message has none
    frame_id: str = ""

    def seconds(self, now: Instant) -> float:
        """When the message was sent, as far as it says: delivery bunches what was apart, so stamps beat arrivals."""
        return now.steady_s if self.ns is None else self.ns * 1e-9


@dataclass(frozen=True)
class TwistCommand:
    """A velocity of the tool."""

    stamp: Stamp
    velocity: np.ndarray  # float64 [6], m/s and rad/s


@dataclass(frozen=True)
class ToolPose:
    """Where the tool is, or is to be."""

    stamp: Stamp
    position: np.ndarray  # float64 [3], metres
    quaternion: tuple[float, float, float, float]  # w x y z


@dataclass(frozen=True)
class JointCommand:
    """Where joints are to be; a single point is wanted as soon as the limits allow."""

    stamp: Stamp  # its frame does not matter
    names: tuple[str, ...] | None  # of the joints; None: in the order of the parameters
    positions: np.ndarray  # float64 [points, joints]
    times_s: np.ndarray  # float64 [points], from now to each point


@dataclass(frozen=True)
class GripperCommand:
    """Where a gripper is to be."""

    names: tuple[str, ...] | None  # of joints; None: it names none
    positions: np.ndarray  # float64, one


@dataclass(frozen=True)
class JointPositions:
    """Where joints were measured."""

    stamp: Stamp
    names: tuple[str, ...]  # of the joints, more than are commanded perhaps
    positions: np.ndarray  # float64 [joints]

    def of(self, names: tuple[str, ...]) -> np.ndarray | None:
        """Positions of these joints, float64 [names]; NaN where they are not one each, None: of another part."""
        if not set(names) <= set(self.names):
            return None
        if len(self.positions) != len(self.names):
            return np.full(len(names), np.nan)
        return self.positions[[self.names.index(name) for name in names]]


@dataclass(frozen=True)
class Measured:
    """Where the robot is."""

    tool: Pose | None  # in the base frame; None: not known
    joints: np.ndarray | None  # float64 [joints] in the order of the parameters; None: not known, or not needed
    velocity: np.ndarray | None  # float64 [3] m/s, of the tool over the last 0.1 s; None: not known


@dataclass(frozen=True)
class SentTwist:
    """Goes out: float64 [6], m/s and rad/s in the base frame."""

    velocity: np.ndarray


@dataclass(frozen=True)
class SentJoints:
    """Goes out: float64 [joints] each, positions and velocities, in the order of the parameters."""

    positions: np.ndarray
    velocities: np.ndarray
    after_s: float  # in which a trajectory's point is to be reached: the measured joints get there within their speed


Command = TwistCommand | ToolPose | JointCommand
Sent = SentTwist | Pose | SentJoints
