# SPDX-License-Identifier: Apache-2.0
"""Follows stamped actions with bounded motion, from the tool's pose in the image, at the training data's rate.

The goal of an action is the tool's pose at the image's stamp plus the displacement (the image goal), to be reached `dt`
after the stamp. Late, frequent or repeated actions therefore never count the same motion twice.

While the robot follows closely, the pose at the stamp is the commanded pose. A position controller lags: counting from
the measured pose would subtract that lag from every displacement, and a tool that sags under its load would sink a
little with every action. If the robot was away from its commanded pose (pushed, blocked, held), its measured pose
counts. docs/explanation/late-actions.md has the figures.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from specvla_ros.control.bounded_motion import BoundedMotion, Target
from specvla_ros.control.convention import ActionConvention, ActionFrame, Reference, Rotation, StampedAction
from specvla_ros.control.gripper import Gripper
from specvla_ros.control.pose import Pose, PoseHistory, PoseUnknownError, rotation_matrix, rpy_matrix

# A late goal is caught up with at the pace of the fastest action within this time.
_PACE_S = 2.0
# Factor on that pace, to make up for accelerating and braking.
_HASTE = 1.5
MAX_ADVANCE_S = 0.05  # max advance of the motion in one control step
_SCALE_RATE = 2.0  # 1/s, rate of change of the speed scale: the motion's time must not stop at once
_POSE_VALUES = 6
_FOLLOWING_M, _FOLLOWING_RAD = 0.03, 0.2  # further from its commanded pose, the measured pose counts


class Compensation(str, Enum):
    """Compensation of the motion between an action's image and its arrival."""

    IMAGE_GOAL = "image_goal"  # the goal counts from the tool's pose at the image's stamp
    NONE = "none"  # the goal counts from the commanded pose when the action arrives


class RefusalReason(str, Enum):
    """Reason why an action is refused."""

    NOT_FINITE = "not_finite"
    WRONG_SHAPE = "wrong_shape"
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


@dataclass(frozen=True)
class _Step:
    """One goal of the followed action."""

    goal: Pose  # in the base frame
    due_s: float  # time to reach it
    gripper: float | None  # the action's gripper value; None: it has none


@dataclass(frozen=True)
class _Begun:
    """Start of an incomplete chunk."""

    pose: Pose
    begin_s: float
    rows: int  # received so far


class ActionFollower:
    """Moves a tool according to actions. Without a new action it comes to rest at the last goal.

    All times are seconds on the robot's clock. `step` is called at the control rate.

    Args:
        history: measured poses, added by the caller.
        max_age_s, max_future_s: an action whose image is older, or further ahead of the clock, is refused.
        max_step_m, max_step_rad: an action with a longer translation or rotation is refused.
    """

    def __init__(
        self,
        motion: BoundedMotion,
        gripper: Gripper,
        history: PoseHistory,
        *,
        compensation: Compensation = Compensation.IMAGE_GOAL,
        max_age_s: float = 1.0,
        max_future_s: float = 0.1,
        max_step_m: float = 0.3,
        max_step_rad: float = math.pi,
    ) -> None:
        self._motion, self._gripper, self._history = motion, gripper, history
        self._compensation = compensation
        self._max_age_s, self._max_future_s = max_age_s, max_future_s
        self._max_step_m, self._max_step_rad = max_step_m, max_step_rad
        self._sent = PoseHistory()
        self._steps: deque[_Step] = deque()
        self._convention: ActionConvention | None = None
        self._last_stamp_s = -math.inf
        self._begun: _Begun | None = None  # a chunk that may be extended
        self._pace: deque[tuple[float, float, float]] = deque()  # time, m/s, rad/s
        self._stepped_s, self._motion_s = -math.inf, 0.0  # last control step: its time, and the motion's
        self._scale = 1.0  # rate of the motion's time

    def set_ages(self, max_age_s: float, max_future_s: float) -> None:
        """Changes the limits of the next actions' age; see the class."""
        self._max_age_s, self._max_future_s = max_age_s, max_future_s

    def rest_at(self, pose: Pose) -> None:
        """Drops the followed action; the tool is at this pose and stays there."""
        self._drop()
        self._sent.clear()
        self._motion.rest_at(pose)

    def forget(self) -> None:
        """Starts a new epoch: earlier actions are void, and stamps may start again."""
        self._last_stamp_s = -math.inf
        self._pace.clear()

    def forget_gripper(self) -> None:
        """Sends no gripper command until the next action."""
        self._gripper.reset()

    def hold(self, now_s: float) -> None:
        """Drops the followed action and comes to rest as soon as the limits allow."""
        self._drop()
        self._motion.brake(self._motion_time(now_s))

    def return_to(self, pose: Pose, now_s: float) -> None:
        """Drops the followed action and moves the target to the measured pose, within the limits; the tool stays."""
        self._drop()
        self._motion.aim(pose, self._motion_time(now_s), move_s=0.0, turn_s=0.0)

    def _drop(self) -> None:
        self._steps.clear()
        self._begun = None

    def take(self, action: StampedAction, now_s: float) -> None:
        """Follows an action in place of the previous one, which continues if ActionRefusedError is raised.

        A longer chunk with the stamp of a partial one continues from that one's start.
        """
        self._check(action, now_s)
        begun = self._begun if self._continues(action) else None
        if begun is None:
            try:
                pose = self._begin(action, now_s)
            except PoseUnknownError as error:
                raise ActionRefusedError(RefusalReason.NO_POSE, str(error)) from None
            begun = _Begun(pose, now_s if self._compensation is Compensation.NONE else action.stamp_s, 0)
        steps = _steps(action, begun.pose, begun.begin_s)
        self._note_pace(action, now_s)
        self._last_stamp_s = action.stamp_s
        self._convention = action.convention
        passed = sum(step.due_s <= now_s for step in steps)
        remaining = deque(steps[min(passed, len(steps) - 1) :])
        if not self._aim(remaining, now_s):
            raise ActionRefusedError(RefusalReason.BLOCKED, "no motion to its goal stays within the workspace")
        self._steps = remaining
        self._begun = replace(begun, rows=len(action.values)) if action.partial else None

    def _continues(self, action: StampedAction) -> bool:
        begun = self._begun
        return begun is not None and action.stamp_s == self._last_stamp_s and len(action.values) > begun.rows

    def step(self, now_s: float, speed_scale: float = 1.0) -> Target:
        """Runs one control step. A speed scale below 1 slows down the motion's time."""
        passed_s = min(max(0.0, now_s - self._stepped_s), MAX_ADVANCE_S)
        change = speed_scale - self._scale
        self._scale += math.copysign(min(abs(change), _SCALE_RATE * passed_s), change)
        while len(self._steps) > 1 and self._steps[0].due_s <= now_s:
            self._steps.popleft()
            self._aim(self._steps, now_s)
        self._motion_s, self._stepped_s = self._motion_time(now_s), now_s
        target = self._motion.at(self._motion_s)
        target = replace(target, velocity=target.velocity * self._scale, passed_s=passed_s)
        self._sent.add(now_s, target.pose)
        return target

    def _motion_time(self, now_s: float) -> float:
        """The motion's time. Its advance is bounded, so that a late control loop does not cause a jump."""
        return self._motion_s + min(max(0.0, now_s - self._stepped_s), MAX_ADVANCE_S) * self._scale

    def follows(self, sent: Pose, measured: Pose) -> bool:
        """True if a tool measured at one pose counts as following the commanded one."""
        error_m, error_rad = sent.distance(measured)
        return error_m <= _FOLLOWING_M and error_rad <= _FOLLOWING_RAD

    def _check(self, action: StampedAction, now_s: float) -> None:
        values = action.values
        if values.ndim != 2 or not len(values) or values.shape[1] not in (_POSE_VALUES, _POSE_VALUES + 1):
            detail = f"expected values of shape [horizon, 6 or 7], got {values.shape}"
            raise ActionRefusedError(RefusalReason.WRONG_SHAPE, detail)
        if not (np.isfinite(values).all() and math.isfinite(action.stamp_s)):
            raise ActionRefusedError(RefusalReason.NOT_FINITE, "its values are not all finite")
        if not (math.isfinite(action.convention.dt_s) and action.convention.dt_s > 0):
            raise ActionRefusedError(RefusalReason.NOT_FINITE, f"its action_dt is {action.convention.dt_s} s")
        age_s = now_s - action.stamp_s
        if age_s > self._max_age_s:
            detail = f"its image is {age_s:.3f} s old, and the limit is {self._max_age_s:g} s"
            raise ActionRefusedError(RefusalReason.TOO_OLD, detail)
        if age_s < -self._max_future_s:
            raise ActionRefusedError(RefusalReason.FROM_THE_FUTURE, f"its stamp lies {-age_s:.3f} s ahead of the clock")
        if action.stamp_s <= self._last_stamp_s and not self._continues(action):
            raise ActionRefusedError(RefusalReason.NOT_NEWER, "its image is not newer than that of the last action")
        if action.convention.reference is Reference.DELTA:
            self._check_size(values)

    def _check_size(self, values: np.ndarray) -> None:
        way = float(np.linalg.norm(values[:, :3], axis=1).max())
        turn = float(np.linalg.norm(values[:, 3:6], axis=1).max())
        if way > self._max_step_m:
            detail = f"it moves the tool by {way:.3f} m, and the limit is {self._max_step_m:g} m"
            raise ActionRefusedError(RefusalReason.TOO_LARGE, detail)
        if turn > self._max_step_rad:
            detail = f"it turns the tool by {turn:.3f} rad, and the limit is {self._max_step_rad:g} rad"
            raise ActionRefusedError(RefusalReason.TOO_LARGE, detail)

    def _begin(self, action: StampedAction, now_s: float) -> Pose:
        if self._compensation is Compensation.NONE:
            return self._motion.at(self._motion_time(now_s)).pose
        if action.convention.reference is Reference.ABSOLUTE:
            return Pose(np.zeros(3), np.eye(3))
        stamp_s = min(action.stamp_s, now_s)
        measured = self._history.at(stamp_s)
        try:
            sent = self._sent.at(stamp_s)
        except PoseUnknownError:  # just started
            return measured
        return sent if self.follows(sent, measured) else measured

    def _note_pace(self, action: StampedAction, now_s: float) -> None:
        dt_s = action.convention.dt_s
        if action.convention.reference is Reference.DELTA:
            speeds = [np.linalg.norm(action.values[:, part], axis=1).max() / dt_s for part in (slice(3), slice(3, 6))]
            self._pace.append((now_s, float(speeds[0]), float(speeds[1])))
        while self._pace and now_s - self._pace[0][0] > _PACE_S:
            self._pace.popleft()

    def _aim(self, steps: Sequence[_Step], now_s: float) -> bool:
        """Plans the motion to the next goal. A late goal is caught up with at the pace of the last actions."""
        step = steps[0]
        onward = (steps[1].goal, steps[1].due_s - step.due_s) if len(steps) > 1 else None
        present = self._motion.at(self._motion_time(now_s)).pose
        left_s = max(0.0, step.due_s - now_s)
        way_m, turn_rad = present.distance(step.goal)
        pace_m, pace_rad = (max((each[axis] for each in self._pace), default=0.0) or math.inf for axis in (1, 2))
        aimed = self._motion.aim(
            step.goal,
            self._motion_time(now_s),
            move_s=max(left_s, way_m / pace_m),
            turn_s=max(left_s, turn_rad / pace_rad),
            pace=(_HASTE * pace_m, _HASTE * pace_rad),
            onward=onward,
        )
        if aimed and step.gripper is not None and self._convention is not None:
            self._gripper.take(step.gripper, self._convention.gripper)
        return aimed


def _steps(action: StampedAction, begin: Pose, begin_s: float) -> list[_Step]:
    """The goals of a chunk, in order."""
    convention, pose = action.convention, begin
    steps = []
    for index, row in enumerate(action.values):
        pose = _goal(row, pose, convention)
        gripper = float(row[_POSE_VALUES]) if len(row) > _POSE_VALUES else None
        steps.append(_Step(pose, begin_s + (index + 1) * convention.dt_s, gripper))
    return steps


def _goal(row: np.ndarray, start: Pose, convention: ActionConvention) -> Pose:
    matrix = rpy_matrix if convention.rotation is Rotation.RPY else rotation_matrix
    position, rotation = row[:3], matrix(row[3:6])
    if convention.reference is Reference.ABSOLUTE:
        return Pose(position.copy(), rotation)
    if convention.frame is ActionFrame.TOOL:
        return Pose(start.position + start.rotation @ position, start.rotation @ rotation)
    return Pose(start.position + position, rotation @ start.rotation)
