# SPDX-License-Identifier: Apache-2.0
"""The driver's control step. It starts at the measured pose of the tool, or of the joints, and follows actions.

It comes to rest when poses stop arriving, when its own loop stalls, when the clock jumps, and while a guard blocks
motion. It then starts again at the robot's measured pose.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol

import numpy as np

from specvla_ros.control.bounded_motion import Target
from specvla_ros.control.convention import StampedAction
from specvla_ros.control.follower import MAX_ADVANCE_S, ActionFollower
from specvla_ros.control.pose import Place, PoseHistory
from specvla_ros.errors import UserError

# Between two control steps, a clock that gains this much on the steady one, or goes back, has jumped.
_JUMP_S = 0.25
STALL_S = 0.5
_AWAY_S = 0.5
_SAMPLES = 8  # for the clocks' offset, as in NTP's clock filter


class NotFollowingError(RuntimeError):
    """No action is followed at present; the message says why."""


class Tracking(Protocol[Place]):
    """Velocities that keep a robot at its targets; see `bounded_motion.TrackingVelocity`."""

    def rest(self) -> None:
        """Starts at rest."""

    def next(self, target: Target[Place], measured: Place | None, passed_s: float, speed_scale: float) -> np.ndarray:
        """The velocity to send; `measured`: None if unknown."""


class Driver(Generic[Place]):
    """Follows actions while poses are fresh and the clock is sound; otherwise it comes to rest.

    Times `now_s` are seconds on the robot's clock, which also stamps actions and poses.

    Args:
        follower: moves within the limits.
        history: measured poses, added by the caller; shared with the follower.
        tracking: for a robot that takes velocities, so that its pose must be measured continuously; None: positions.
        pose_timeout_s: the tool comes to rest if the newest pose is older than this.
        start_output: called when motion starts; raises UserError if it cannot.
        say: called with each reason to come to rest, in words.
    """

    def __init__(
        self,
        follower: ActionFollower[Place],
        history: PoseHistory[Place],
        *,
        tracking: Tracking[Place] | None,
        pose_timeout_s: float,
        pose_source: str,
        start_output: Callable[[], None],
        say: Callable[[str], object],
    ) -> None:
        self.follower, self._history, self._tracking = follower, history, tracking
        self._pose_timeout_s, self._pose_source = pose_timeout_s, pose_source
        self._start_output, self._say = start_output, say
        self._away_since_s = math.inf
        self._last_step: tuple[float, float] | None = None  # robot's clock, steady clock
        self.target: Target[Place]
        self.anchored = False  # motion has started at a measured pose
        self.holding = False  # a hold was requested
        self.guarded = False  # a guard reports that it blocks motion
        self.action_publishers = 1
        self.mismatch = ""  # of two measurements of the robot, in words; empty: they agree
        self.unmeasured = ""  # what else the output needs to have measured, in words; empty: nothing
        self.speed_scale = 1.0  # fraction of the speed to move with
        self.problem = ""  # why the tool is at rest, in words; empty: it is not
        self.stalls = self.clock_jumps = 0

    def take(self, action: StampedAction, now_s: float) -> None:
        """Follows an action, or raises NotFollowingError or ActionRefusedError."""
        if self.problem:
            raise NotFollowingError(self.problem)
        if self.holding:
            raise NotFollowingError("the driver is holding")
        if self.guarded:
            raise NotFollowingError("the guard blocks motion")
        if not self.anchored:
            raise NotFollowingError(f"no {self.follower.space.what} yet")
        self.follower.take(action, now_s)

    def passing(self, passing: bool, now_s: float) -> None:
        """Takes the guard's state. While the guard blocks motion the robot stays, so its target must stay too."""
        if not passing:
            self.follower.forget_gripper()  # its last command must not be repeated when motion resumes
            if not self.guarded:
                self.follower.hold(now_s)
        self.guarded = not passing

    def step(self, now_s: float, steady_s: float) -> Target[Place] | None:
        """Runs one control step and returns the target to send; None: nothing yet."""
        passed_s = self._watch_clock(now_s, steady_s)
        if not self.anchored and not self._anchor(now_s):
            if self._tracking is not None:
                self._tracking.rest()
            return None
        problem = self._input_problem(now_s)
        if problem and not self.problem:
            self.follower.hold(now_s)
            self._say(f"coming to rest: {problem}")
        self.problem = problem
        self.target = self.follower.step(now_s, self.speed_scale)
        self._return_where_held(now_s)
        if self._tracking is None:
            return self.target
        newest = self._history.newest
        measured = newest[1] if newest is not None and not self.problem and not self.guarded else None
        # The scale that the target moves with: a new one, in one step, would be a jump that the guard latches.
        velocity = self._tracking.next(self.target, measured, min(passed_s, MAX_ADVANCE_S), self.follower.scale)
        return replace(self.target, velocity=velocity)

    def _return_where_held(self, now_s: float) -> None:
        """Moves the target to a robot held elsewhere, by the guard or by hand, so that it is not pulled back."""
        newest, follower = self._history.newest, self.follower
        if newest is None:
            return
        space, here = follower.space, self.target.pose
        away = space.away(here, newest[1]) if self.guarded else not space.follows(here, newest[1])
        if self.target.moving or not away:
            self._away_since_s = math.inf
            return
        self._away_since_s = min(self._away_since_s, now_s)
        if newest[0] < self._away_since_s + (0.0 if self.guarded else _AWAY_S):
            return  # it may still have been moving when it was measured
        if self.mismatch:
            # A target that went to the pose of another point would take the arm along, and the pose with it, forever.
            self.anchored = False
        elif self._tracking is not None or (self.guarded and not self._start_problem()):
            follower.rest_at(newest[1])  # a jump of the target does not reach the robot
        else:
            follower.return_to(newest[1], now_s)

    def _anchor(self, now_s: float) -> bool:
        """Starts at the measured pose, once there is one."""
        newest = self._history.newest
        problem = self._input_problem(now_s)
        if newest is not None and not problem:
            problem = self.follower.space.start_problem(newest[1]) or self._start_problem()
        self.problem = problem
        if problem or newest is None:
            return False
        self.follower.rest_at(newest[1])
        self.target = self.follower.step(now_s)
        self.anchored = True
        return True

    def _start_problem(self) -> str:
        """Starts the output at the robot's position; returns why it cannot, in words."""
        try:
            self._start_output()
        except UserError as error:
            return str(error)
        return ""

    def _input_problem(self, now_s: float) -> str:
        newest, what = self._history.newest, self.follower.space.what
        if newest is None:
            return f"no {what} received from {self._pose_source} yet"
        age_s = now_s - newest[0]
        if age_s > self._pose_timeout_s:
            return f"the newest {what} is {age_s:.2f} s old, and the limit is {self._pose_timeout_s:g} s"
        if self.unmeasured or self.mismatch:
            return self.unmeasured or self.mismatch
        if self.action_publishers > 1:
            return f"{self.action_publishers} nodes publish actions: only one may"
        return ""

    def _watch_clock(self, now_s: float, steady_s: float) -> float:
        """Steady time since the last step.

        After a stall the followed action is out of date; stamps before and after a clock jump do not compare.
        """
        last, self._last_step = self._last_step, (now_s, steady_s)
        if last is None:
            return 0.0
        passed_s, real_s = now_s - last[0], steady_s - last[1]
        if real_s > STALL_S and self.anchored:
            self.stalls += 1
            self._say(f"the control loop stalled for {real_s:.3f} s: coming to rest")
            self.follower.hold(now_s)
        if 0 <= passed_s <= real_s + _JUMP_S:
            return real_s
        self._say(f"the clock jumped by {passed_s:.3f} s: coming to rest and starting again")
        self.clock_jumps += 1
        self._history.clear()
        if self.anchored:
            self.follower.rest_at(self.target.pose)
        self.follower.forget()
        self.anchored = False
        return real_s


@dataclass(frozen=True, order=True)
class Offset:
    """A clock offset estimate, ordered by its error bound."""

    error_s: float  # error bound
    ahead_s: float  # lead of the policy's clock over the robot's


class ClockOffset:
    """Lead of a policy's clock over the robot's, estimated from returned actions by NTP's on-wire protocol.

    An image leaves with the robot's clock as its stamp (T1), arrives (T2) and is answered (T3) by the policy's clock,
    and its action arrives by the robot's (T4). The offset is ((T2 - T1) + (T3 - T4)) / 2. Its error is at most half the
    sum of both transfer times, since neither is negative (RFC 5905, sections 8 and 10: of the newest samples, the one
    with the shortest transfer counts).
    """

    def __init__(self) -> None:
        self._samples: deque[Offset] = deque(maxlen=_SAMPLES)

    def add(self, *, receive_s: float, latency_s: float, age_s: float) -> None:
        """Adds a sample: an action's times since its image's stamp, T2 - T1, T3 - T1, T4 - T1."""
        back_s = age_s - latency_s
        self._samples.append(Offset(error_s=max(0.0, (receive_s + back_s) / 2), ahead_s=(receive_s - back_s) / 2))

    @property
    def best(self) -> Offset | None:
        """The estimate with the smallest error bound; None if there is none."""
        return min(self._samples, default=None)
