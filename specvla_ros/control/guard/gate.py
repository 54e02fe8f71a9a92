# SPDX-License-Identifier: Apache-2.0
"""What a gate of one kind of command must give, and what gates share."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, Sent, Stamp
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose

# A driver's period is never even; what these allow more, the bounds of what goes out take back.
SLACK_S = 0.02
TOLERANCE = 1.001
# How far outside of the workspace a tool may be and still be brought back by commands; past it, by hand.
RETURN_M = 0.05
# How near to the robot, as a share of the lead, a driver must be for motion to resume.
NEAR = 0.5
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Measured:
    """Where the robot is.

    Args:
        tool: pose in the base frame; None: not known.
        joints: float64 [joints] in the order of the parameters; None: not known, or not needed.
    """

    tool: Pose | None
    joints: np.ndarray | None


class Gate(Protocol):
    """Judges commands of one kind, and makes what goes out. It is called by the guard only, at its rate."""

    def take(self, command: Any, measured: Measured, now: Instant) -> Refusal | None:
        """Takes a command, or says why not; the one before is then forgotten."""

    def forget(self) -> None:
        """There is no command any more."""

    def watch(self, tool: Pose) -> None:
        """Takes each measured pose of the tool."""

    def conditions(self, measured: Measured) -> list[Refusal]:
        """What is wrong with going on, as the robot is."""

    def not_near(self, measured: Measured) -> Refusal | None:
        """Why motion must not resume, as the robot is."""

    @property
    def wants_motion(self) -> bool:
        """Whether the command is more than to stay."""

    @property
    def at_rest(self) -> bool:
        """Whether what goes out stands still."""

    def begin(self, measured: Measured) -> None:
        """Motion begins or resumes, from rest."""

    def go(self, now: Instant, dt_s: float) -> Sent | None:
        """What goes out next, following the command."""

    def stop(self, measured: Measured, dt_s: float) -> Sent | None:
        """What goes out next, braking, then holding; None: nothing."""

    def halt(self) -> None:
        """The output stood still for so long that the robot has stopped by itself."""


def time_s(stamp: Stamp, now: Instant) -> float:
    """When a command was sent, as far as it says; stamps are better than arrivals: delivery bunches what was apart."""
    return now.steady_s if stamp.ns is None else stamp.ns * 1e-9


def widened(limits: Limits, here: np.ndarray, edge_m: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The workspace's corners and an edge, widened to where the tool is: it may come back, and not get further out."""
    low, high = np.array(limits.workspace_min) - edge_m, np.array(limits.workspace_max) + edge_m
    return np.minimum(low, here), np.maximum(high, here)


def outside_m(limits: Limits, here: np.ndarray) -> float:
    """How far outside of the workspace a position is, along its worst axis; 0 inside."""
    low, high = np.array(limits.workspace_min) - here, here - np.array(limits.workspace_max)
    return float(max(0.0, low.max(), high.max()))


def within(here: np.ndarray, box: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether a position lies between two corners."""
    return bool((here >= box[0] - _ROUNDING).all() and (here <= box[1] + _ROUNDING).all())


def text(position: np.ndarray) -> str:
    """Numbers for a message."""
    return " ".join(f"{number:.3f}" for number in position)


def too_fast(what: str, value: float, limit: float, unit: str, name: str) -> Refusal:
    """A refusal of a speed."""
    return Refusal(Cause.OVER_SPEED, f"{what} is {value:.4g} {unit}, and {name} is {limit:g}")
