# SPDX-License-Identifier: Apache-2.0
"""Follows stamped actions with bounded motion, from the robot's pose in the image, at the training data's rate.

A pose is the tool's or, for actions of joints, the posture of the joints: the action space says which. The goal of an
action is the pose at the image's stamp plus the displacement (the image goal), to be reached `dt` after the stamp.
Late, frequent or repeated actions therefore never count the same motion twice.

While the robot follows closely, the pose at the stamp is the commanded pose. A position controller lags: counting from
the measured pose would subtract that lag from every displacement, and a tool that sags under its load would sink a
little with every action. If the robot was away from its commanded pose (pushed, blocked, held), its measured pose
counts. docs/explanation/late-actions.md has the figures.
"""

import math
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic

import numpy as np

from specvla_ros.control.action_space import ActionRefusedError, ActionSpace, Motion, RefusalReason
from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.gripper import Gripper
from specvla_ros.control.pose import Place, PoseHistory, PoseUnknownError
from specvla_ros.errors import SYNCHRONISE

# A late goal is caught up with at the pace of the fastest action within this time.
_PACE_S = 2.0
# Factor on that pace, to make up for accelerating and braking.
_HASTE = 1.5
MAX_ADVANCE_S = 0.05  # max advance of the motion in one control step
_SCALE_RATE = 2.0  # 1/s, rate of change of the speed scale: the motion's time must not stop at once


class Compensation(str, Enum):
    """Compensation of the motion between an action's image and its arrival."""

    IMAGE_GOAL = "image_goal"  # the goal counts from the tool's pose at the image's stamp
    NONE = "none"  # the goal counts from the commanded pose when the action arrives


@dataclass(frozen=True)
class _Step(Generic[Place]):
    """One goal of the followed action."""

    goal: Place  # a tool's in the base frame
    due_s: float  # time to reach it, of the way
    gripper: float | None  # the action's gripper value; None: it has none


@dataclass(frozen=True)
class _Begun(Generic[Place]):
    """Start of an incomplete chunk."""

    pose: Place
    begin_s: float  # of the way
    rows: int  # received so far


class ActionFollower(Generic[Place]):
    """Moves a robot according to actions. Without a new action it comes to rest at the last goal.

    All times are seconds on the robot's clock; those *of the way* go by slower with a speed scale below 1, so that slow
    motion takes the same way, and moves the gripper at the same places. `step` is called at the control rate.

    Args:
        space: meaning of the actions' values, and of the poses.
        history: measured poses, added by the caller.
        max_age_s, max_future_s: an action whose image is older, or further ahead of the clock, is refused.
    """

    def __init__(
        self,
        space: ActionSpace[Place],
        motion: Motion[Place],
        gripper: Gripper,
        history: PoseHistory[Place],
        *,
        compensation: Compensation = Compensation.IMAGE_GOAL,
        max_age_s: float = 1.0,
        max_future_s: float = 0.1,
    ) -> None:
        self.space = space
        self._motion, self._gripper, self._history = motion, gripper, history
        self._compensation = compensation
        self._max_age_s, self._max_future_s = max_age_s, max_future_s
        self._sent = PoseHistory[Place]()
        self._steps: deque[_Step[Place]] = deque()
        self._convention: ActionConvention | None = None
        self._last_stamp_s = -math.inf
        self._begun: _Begun[Place] | None = None  # a chunk that may be extended
        self._pace: deque[tuple[float, float, float]] = deque()  # time, m/s, rad/s
        # The last control step: its time, that of the way, and that of the motion, which a late step does not advance.
        self._stepped_s, self._way_s, self._motion_s = -math.inf, 0.0, 0.0
        self._scale = 1.0  # rate of the motion's time
        self.changes = 0  # of the plan, other than the step to a chunk's next row

    def set_ages(self, max_age_s: float, max_future_s: float) -> None:
        """Changes the limits of the next actions' age; see the class."""
        self._max_age_s, self._max_future_s = max_age_s, max_future_s

    def rest_at(self, pose: Place) -> None:
        """Drops the followed action; the robot is at this pose and stays there."""
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

    def return_to(self, pose: Place, now_s: float) -> None:
        """Drops the followed action and moves the target to the measured pose, within the limits; the robot stays."""
        self._drop()
        self._motion.aim(pose, self._motion_time(now_s), move_s=0.0, turn_s=0.0)

    def _drop(self) -> None:
        self.changes += 1
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
            age_s = 0.0 if self._compensation is Compensation.NONE else now_s - action.stamp_s
            begun = _Begun(pose, self._way_time(now_s) - age_s * self._scale, 0)
        goals = self.space.goals(action, begun.pose)
        self._note_pace(self.space.pace(action, goals), now_s)
        self._convention = action.convention
        dues_s = [begun.begin_s + (index + 1) * action.convention.dt_s for index in range(len(goals))]
        steps = [*map(_Step, goals, dues_s, self.space.grippers(action))]
        passed = sum(step.due_s <= self._way_time(now_s) for step in steps)
        remaining = deque(steps[min(passed, len(steps) - 1) :])
        if not self._aim(remaining, now_s):
            raise ActionRefusedError(
                RefusalReason.BLOCKED, "no motion to its goal stays within workspace and speed limits"
            )
        self._steps, self._last_stamp_s = remaining, action.stamp_s
        self.changes += 1
        self._begun = replace(begun, rows=len(action.values)) if action.partial else None

    def _continues(self, action: StampedAction) -> bool:
        begun = self._begun
        return begun is not None and action.stamp_s == self._last_stamp_s and len(action.values) > begun.rows

    def step(self, now_s: float, speed_scale: float = 1.0) -> Target[Place]:
        """Runs one control step. A speed scale below 1 slows down the motion's time."""
        passed_s = min(max(0.0, now_s - self._stepped_s), MAX_ADVANCE_S)
        change = speed_scale - self._scale
        self._scale += math.copysign(min(abs(change), _SCALE_RATE * passed_s), change)
        while len(self._steps) > 1 and self._steps[0].due_s <= self._way_time(now_s):
            self._steps.popleft()
            self._aim(self._steps, now_s)
        self._motion_s, self._way_s, self._stepped_s = self._motion_time(now_s), self._way_time(now_s), now_s
        target = self._motion.at(self._motion_s)
        target = replace(target, velocity=target.velocity * self._scale, passed_s=passed_s)
        self._sent.add(now_s, target.pose)
        return target

    def coming(self, now_s: float, period_s: float, horizon_s: float) -> list[Target[Place]]:
        """The targets after the last control step, at `now_s`, if no other action arrives.

        One for every `period_s`, at most 0.1 s, until the robot is at rest. After `horizon_s` it brakes.
        """
        ahead = copy(self)
        ahead._steps, ahead._motion = self._steps.copy(), self._motion.copy()
        ahead._gripper, ahead._sent, ahead._pace = copy(self._gripper), PoseHistory(), self._pace.copy()
        targets: list[Target[Place]] = []
        scale, brakes_at = self._scale, math.ceil(horizon_s / period_s)
        while not targets or targets[-1].moving or len(ahead._steps) > 1:
            if len(targets) == brakes_at:
                ahead.hold(now_s + period_s * len(targets))
                scale = scale if scale > 0.5 else 0.0  # slow motion would also brake slowly
            then_s = now_s + period_s * len(targets)
            ahead.step(then_s + period_s / 2, scale)  # a row begins in the first step after the one before is due
            targets.append(replace(ahead.step(then_s + period_s, scale), passed_s=period_s))
        return targets

    @property
    def scale(self) -> float:
        """The present speed, as a fraction of the planned one."""
        return self._scale

    def _motion_time(self, now_s: float) -> float:
        """The motion's time. Its advance is bounded, so that a late control loop does not cause a jump."""
        return self._motion_s + min(max(0.0, now_s - self._stepped_s), MAX_ADVANCE_S) * self._scale

    def _way_time(self, now_s: float) -> float:
        """The time by which a chunk's rows fall due. After a late control loop, rows that have passed are skipped."""
        return self._way_s + (max(0.0, now_s - self._stepped_s) * self._scale if self._stepped_s > -math.inf else 0.0)

    def _check(self, action: StampedAction, now_s: float) -> None:
        self.space.check(action)
        if not (np.isfinite(action.values).all() and math.isfinite(action.stamp_s)):
            raise ActionRefusedError(RefusalReason.NOT_FINITE, "its values are not all finite")
        if not (math.isfinite(action.convention.dt_s) and action.convention.dt_s > 0):
            raise ActionRefusedError(RefusalReason.NOT_FINITE, f"its action_dt is {action.convention.dt_s} s")
        age_s = now_s - action.stamp_s
        if age_s > self._max_age_s:
            detail = f"its image is {age_s:.3f} s old, and the limit is {self._max_age_s:g} s"
            raise ActionRefusedError(RefusalReason.TOO_OLD, detail)
        if age_s < -self._max_future_s:
            detail = f"its stamp lies {-age_s:.3f} s ahead of the clock: {SYNCHRONISE}"
            raise ActionRefusedError(RefusalReason.FROM_THE_FUTURE, detail)
        if action.stamp_s <= self._last_stamp_s and not self._continues(action):
            raise ActionRefusedError(RefusalReason.NOT_NEWER, "its image is not newer than that of the last action")

    def _begin(self, action: StampedAction, now_s: float) -> Place:
        if self._compensation is Compensation.NONE:
            return self._motion.at(self._motion_time(now_s)).pose
        stamp_s = min(action.stamp_s, now_s)
        measured = self._history.at(stamp_s)
        try:
            sent = self._sent.at(stamp_s)
        except PoseUnknownError:  # just started
            return measured
        return sent if self.space.follows(sent, measured) else measured

    def _note_pace(self, fastest: tuple[float, float] | None, now_s: float) -> None:
        if fastest is not None:
            self._pace.append((now_s, *fastest))
        while self._pace and now_s - self._pace[0][0] > _PACE_S:
            self._pace.popleft()

    def _aim(self, steps: Sequence[_Step[Place]], now_s: float) -> bool:
        """Plans the motion to the next goal. A late goal is caught up with at the pace of the last actions."""
        step = steps[0]
        onward = (steps[1].goal, steps[1].due_s - step.due_s) if len(steps) > 1 else None
        present = self._motion.at(self._motion_time(now_s)).pose
        left_s = max(0.0, step.due_s - self._way_time(now_s))
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
