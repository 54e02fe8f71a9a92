# SPDX-License-Identifier: Apache-2.0
"""The space of an action's goals: tool poses. Joint positions are in joint_space.py.

The follower and the driver's control are the same for both. They ask the space for all that differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Protocol

import numpy as np

from specvla_ros.control.bounded_motion import Onward, Target
from specvla_ros.control.convention import ActionConvention, ActionFrame, Reference, Rotation, StampedAction
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Place, Pose, rotation_matrix, rpy_matrix

_POSE_VALUES = 6
_FOLLOWING_M, _FOLLOWING_RAD = 0.03, 0.2  # further from its commanded pose, the measured pose counts
_STILL_M = 0.0003  # sensor noise
_NEAR_M, _NEAR_RAD = 0.003, 0.02


class RefusalReason(str, Enum):
    """Reason why an action is refused."""

    NOT_FINITE = "not_finite"
    WRONG_SHAPE = "wrong_shape"
    WRONG_SPACE = "wrong_space"  # a tool's motion for a driver that follows joints, or joints for one of tools
    TOO_OLD = "too_old"
    FROM_THE_FUTURE = "from_the_future"
    NOT_NEWER = "not_newer"  # than the last action taken: out of order or repeated
    NO_POSE = "no_pose"
    TOO_LARGE = "too_large"
    BLOCKED = "blocked"  # no motion to the goal stays in the workspace


class ActionRefusedError(ValueError):
    """An action is not followed; has the reason as a code, for counting, and in words."""

    def __init__(self, refusal: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal


class Motion(Protocol[Place]):
    """Motion from goal to goal within limits; see `bounded_motion.BoundedMotion`."""

    def rest_at(self, pose: Place) -> None:
        """Drops all motion; the robot is there and stays there."""

    def at(self, now_s: float) -> Target[Place]:
        """The target at a time."""

    def aim(
        self,
        goal: Place,
        now_s: float,
        *,
        move_s: float,
        turn_s: float,
        pace: tuple[float, float] = ...,
        onward: Onward[Place] = None,
    ) -> bool:
        """Plans the motion to a goal; returns False, and continues the previous one, if none stays within limits."""

    def brake(self, now_s: float) -> None:
        """Comes to rest as soon as the limits allow."""

    def copy(self) -> "Motion[Place]":
        """A motion that begins as this one, and then goes its own way."""


class ActionSpace(Protocol[Place]):
    """The places that actions name, and their tolerances. Distances are metres and radians."""

    what: str  # a measured place, in words

    def check(self, action: StampedAction) -> None:
        """Raises ActionRefusedError for values that no start could make right."""

    def goals(self, action: StampedAction, begin: Place) -> list[Place]:
        """The goals of a chunk, in order; raises ActionRefusedError if one is too far from the one before."""

    def grippers(self, action: StampedAction) -> Sequence[float | None]:
        """The gripper's value in each row of a chunk; None: there is none."""

    def pace(self, action: StampedAction, goals: Sequence[Place]) -> tuple[float, float] | None:
        """The fastest motion of a chunk, in metres and radians per second; None: its values do not tell."""

    def follows(self, sent: Place, measured: Place) -> bool:
        """True if a robot measured at one place counts as following the commanded one."""

    def away(self, target: Place, measured: Place) -> bool:
        """True if a robot that was stopped is not where its target is."""

    def motion(self, target: Target[Place], measured: Place) -> dict[str, str]:
        """The speed and the distance from the target, by name, for diagnostics."""

    def start_problem(self, measured: Place) -> str:
        """Describes why no motion may start at a measured place; empty: it may."""


@dataclass(frozen=True)
class ToolSpace(ActionSpace[Pose]):
    """Tool poses in the base frame. An action that moves or turns the tool further than `max_step_*` is refused.

    The first of absolute poses counts from the tool's pose in the image: otherwise the arm would run to the workspace's
    edge at millimetres that are taken for metres.
    """

    limits: Limits
    max_step_m: float = 0.3
    max_step_rad: float = np.pi
    what: str = "tool pose"

    def check(self, action: StampedAction) -> None:
        values = action.values
        if action.convention.frame is ActionFrame.JOINTS:
            detail = "its values are joint positions, but this driver follows tool poses: set action_space to joints"
            raise ActionRefusedError(RefusalReason.WRONG_SPACE, detail)
        if values.ndim != 2 or not len(values) or values.shape[1] not in (_POSE_VALUES, _POSE_VALUES + 1):
            detail = f"expected values of shape [horizon, 6 or 7], got {values.shape}"
            raise ActionRefusedError(RefusalReason.WRONG_SHAPE, detail)
        if action.convention.reference is Reference.DELTA and np.isfinite(values).all():
            self._check_size(*_sizes(values))

    def _check_size(self, way: float, turn: float) -> None:
        if way > self.max_step_m:
            detail = f"it moves the tool by {way:.3f} m, and the limit is {self.max_step_m:g} m"
            raise ActionRefusedError(RefusalReason.TOO_LARGE, detail)
        if turn > self.max_step_rad:
            detail = f"it turns the tool by {turn:.3f} rad, and the limit is {self.max_step_rad:g} rad"
            raise ActionRefusedError(RefusalReason.TOO_LARGE, detail)

    def goals(self, action: StampedAction, begin: Pose) -> list[Pose]:
        """Displacements add up: each counts from the goal before."""
        goals = [begin]
        for row in action.values:
            goals.append(_goal(row, goals[-1], action.convention))
        if action.convention.reference is Reference.ABSOLUTE:
            ways, turns = zip(*(one.distance(other) for one, other in pairwise(goals)), strict=True)
            self._check_size(max(ways), max(turns))
        return goals[1:]

    def grippers(self, action: StampedAction) -> Sequence[float | None]:
        values = action.values
        return values[:, _POSE_VALUES].tolist() if values.shape[1] > _POSE_VALUES else [None] * len(values)

    def pace(self, action: StampedAction, goals: Sequence[Pose]) -> tuple[float, float] | None:
        if action.convention.reference is not Reference.DELTA:
            return None
        way, turn = _sizes(action.values)
        return way / action.convention.dt_s, turn / action.convention.dt_s

    def follows(self, sent: Pose, measured: Pose) -> bool:
        error_m, error_rad = sent.distance(measured)
        return error_m <= _FOLLOWING_M and error_rad <= _FOLLOWING_RAD

    def away(self, target: Pose, measured: Pose) -> bool:
        way_m, turn_rad = target.distance(measured)
        # Outside the workspace the guard refuses targets further out than the tool.
        sunk = self.limits.outside_m(target.position) > 0
        return way_m > (_STILL_M if sunk else _NEAR_M) or turn_rad > _NEAR_RAD

    def motion(self, target: Target[Pose], measured: Pose) -> dict[str, str]:
        speed, away_m = float(np.linalg.norm(target.velocity[:3])), target.pose.distance(measured)[0]
        return {"speed m/s": f"{speed:.3f}", "from target m": f"{away_m:.4f}"}

    def start_problem(self, measured: Pose) -> str:
        return self.limits.start_problem(measured.position)


def _sizes(values: np.ndarray) -> tuple[float, float]:
    """The longest translation and the largest rotation of a chunk."""
    way, turn = (float(np.linalg.norm(values[:, part], axis=1).max()) for part in (slice(3), slice(3, 6)))
    return way, turn


def _goal(row: np.ndarray, start: Pose, convention: ActionConvention) -> Pose:
    matrix = rpy_matrix if convention.rotation is Rotation.RPY else rotation_matrix
    position, rotation = row[:3], matrix(row[3:6])
    if convention.reference is Reference.ABSOLUTE:
        return Pose(position.copy(), rotation)
    if convention.frame is ActionFrame.TOOL:
        return Pose(start.position + start.rotation @ position, start.rotation @ rotation)
    return Pose(start.position + position, rotation @ start.rotation)
