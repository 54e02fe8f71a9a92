# SPDX-License-Identifier: Apache-2.0
"""Commands and measurements as they come in, unchecked; where the robot is; and what goes out."""

from dataclasses import dataclass

import numpy as np

from specvla_ros.control.pose import Pose


@dataclass(frozen=True)
class Instant:
    """Now, on both clocks.

    Args:
        steady_s: of the steady clock, which nobody sets.
        clock_ns: of the node's clock, which stamps are of.
    """

    steady_s: float
    clock_ns: int


@dataclass(frozen=True)
class Stamp:
    """Of a message.

    Args:
        ns: on the node's clock; None: the message has none.
        frame_id: its frame.
    """

    ns: int | None
    frame_id: str = ""

    def seconds(self, now: Instant) -> float:
        """When the message was sent, as far as it says: delivery bunches what was apart, so stamps beat arrivals."""
        return now.steady_s if self.ns is None else self.ns * 1e-9


@dataclass(frozen=True)
class TwistCommand:
    """A velocity of the tool.

    Args:
        stamp: when and in which frame.
        velocity: float64 [6], m/s and rad/s.
    """

    stamp: Stamp
    velocity: np.ndarray


@dataclass(frozen=True)
class ToolPose:
    """Where the tool is, or is to be.

    Args:
        stamp: when and in which frame.
        position: float64 [3], metres.
        quaternion: w x y z.
    """

    stamp: Stamp
    position: np.ndarray
    quaternion: tuple[float, float, float, float]


@dataclass(frozen=True)
class JointCommand:
    """Where joints are to be.

    Args:
        stamp: when; the frame is nobody's.
        names: of the joints; None: in the order of the parameters.
        positions: float64 [points, joints].
        times_s: float64 [points], from now to each point; one point alone is wanted as soon as the limits allow.
    """

    stamp: Stamp
    names: tuple[str, ...] | None
    positions: np.ndarray
    times_s: np.ndarray


@dataclass(frozen=True)
class JointPositions:
    """Where joints were measured.

    Args:
        stamp: when.
        names: of the joints, more than are commanded perhaps.
        positions: float64 [joints].
    """

    stamp: Stamp
    names: tuple[str, ...]
    positions: np.ndarray


@dataclass(frozen=True)
class Measured:
    """Where the robot is.

    Args:
        tool: pose in the base frame; None: not known.
        joints: float64 [joints] in the order of the parameters; None: not known, or not needed.
    """

    tool: Pose | None
    joints: np.ndarray | None


@dataclass(frozen=True)
class SentTwist:
    """Goes out: float64 [6], m/s and rad/s in the base frame."""

    velocity: np.ndarray


@dataclass(frozen=True)
class SentPose:
    """Goes out: float64 [3] metres and float64 [3, 3] in the base frame."""

    position: np.ndarray
    rotation: np.ndarray


@dataclass(frozen=True)
class SentJoints:
    """Goes out: float64 [joints] each, positions and velocities, in the order of the parameters."""

    positions: np.ndarray
    velocities: np.ndarray


Command = TwistCommand | ToolPose | JointCommand
Sent = SentTwist | SentPose | SentJoints
