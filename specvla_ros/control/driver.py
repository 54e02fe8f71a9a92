# SPDX-License-Identifier: Apache-2.0
"""The driver's control step. It starts at the measured tool pose and follows actions.

It comes to rest when poses stop arriving, when its own loop stalls, when the clock jumps, and while a guard blocks
motion. It then starts again at the robot's measured pose.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from specvla_ros.control.bounded_motion import Target, shortened, tracking_velocity
from specvla_ros.control.convention import StampedAction
from specvla_ros.control.follower import MAX_ADVANCE_S, ActionFollower
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import PoseHistory
from specvla_ros.errors import UserError

# Between two control steps, a clock that gains this much on the steady one, or goes back, has jumped.
_JUMP_S = 0.25
STALL_S = 0.5
_OUTSIDE_M = 0.005
_STILL_M = 0.0003  # sensor noise
_NEAR_M, _NEAR_RAD = 0.003, 0.02
_AWAY_S = 0.5
_SAMPLES = 8  # for the clocks' offset, as in NTP's clock filter


class NotFollowingError(RuntimeError):
    """No action is followed at present; the message says why."""


class Driver:
    """Follows actions while poses are fresh and the clock is sound; otherwise it comes to rest.

    Times `now_s` are seconds on the robot's clock, which also stamps actions and poses.

    Args:
        follower: moves within the limits.
        history: measured poses, added by the caller; shared with the follower.
        follows_velocity: whether the robot takes velocities, so that its pose must be measured continuously.
        pose_timeout_s: the tool comes to rest if the newest pose is older than this.
        start_output: called when motion starts; raises UserError if it cannot.
        say: called with each reason to come to rest, in words.
    """

    def __init__(
        self,
        follower: ActionFollower,
        history: PoseHistory,
        limits: Limits,
        *,
        follows_velocity: bool,
        pose_timeout_s: float,
        pose_source: str,
        start_output: Callable[[], None],
        say: Callable[[str], object],
    ) -> None:
        self.follower, self._history, self._limits = follower, history, limits
        self._follows_velocity = follows_velocity
        self._pose_timeout_s, self._pose_source = pose_timeout_s, pose_source
        self._start_output, self._say = start_output, say
        self._away_since_s = math.inf
        self._last_step: tuple[float, float] | None = None  # robot's clock, steady clock
        self._velocity = np.zeros(6)  # sent last
        self.target: Target
        self.anchored = False  # motion has started at a measured pose
        self.holding = False  # a hold was requested
        self.guarded = False  # a guard reports that it blocks motion
        self.action_publishers = 1
        self.mismatch = ""  # of two measurements of the robot, in words; empty: they agree
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
            raise NotFollowingError("no tool pose yet")
        self.follower.take(action, now_s)

    def passing(self, passing: bool, now_s: float) -> None:
        """Takes the guard's state. While the guard blocks motion the robot stays, so its target must stay too."""
        if not passing:
            self.follower.forget_gripper()  # its last command must not be repeated when motion resumes
            if not self.guarded:
                self.follower.hold(now_s)
        self.guarded = not passing

    def step(self, now_s: float, steady_s: float) -> Target | None:
        """Runs one control step and returns the target to send; None: nothing yet."""
        passed_s = self._watch_clock(now_s, steady_s)
        if not self.anchored and not self._anchor(now_s):
            self._velocity = np.zeros(6)
            return None
        problem = self._input_problem(now_s)
        if problem and not self.problem:
            self.follower.hold(now_s)
            self._say(f"coming to rest: {problem}")
        self.problem = problem
        self.target = self.follower.step(now_s, self.speed_scale)
        self._return_where_held(now_s)
        if not self._follows_velocity:
            return self.target
        self._velocity = self._velocity_to_send(min(passed_s, MAX_ADVANCE_S))
        return replace(self.target, velocity=self._velocity)

    def _velocity_to_send(self, passed_s: float) -> np.ndarray:
        """The velocity with a pose error correction; if the error is unknown, slews to the uncorrected velocity."""
        newest, limits = self._history.newest, self._limits
        if not self.problem and not self.guarded and newest is not None:
            return tracking_velocity(self.target, newest[1], limits, self.speed_scale)
        change = self.target.velocity - self._velocity
        return self._velocity + shortened(
            change, limits.linear_acceleration * passed_s, limits.angular_acceleration * passed_s
        )

    def _return_where_held(self, now_s: float) -> None:
        """Moves the target to a robot held elsewhere, by the guard or by hand, so that it is not pulled back."""
        newest, follower = self._history.newest, self.follower
        if newest is None:
            return
        if self.guarded:
            way_m, turn_rad = self.target.pose.distance(newest[1])
            # Outside the workspace the guard refuses targets further out than the tool.
            sunk = self._limits.outside_m(self.target.pose.position) > 0
            away = way_m > (_STILL_M if sunk else _NEAR_M) or turn_rad > _NEAR_RAD
        else:
            away = not follower.follows(self.target.pose, newest[1])
        if self.target.moving or not away:
            self._away_since_s = math.inf
            return
        self._away_since_s = min(self._away_since_s, now_s)
        if newest[0] < self._away_since_s + (0.0 if self.guarded else _AWAY_S):
            return  # it may still have been moving when it was measured
        if self._follows_velocity or (self.guarded and not self._start_problem()):
            follower.rest_at(newest[1])  # a jump of the target does not reach the robot
        else:
            follower.return_to(newest[1], now_s)

    def _anchor(self, now_s: float) -> bool:
        """Starts at the measured tool pose, once there is one."""
        newest = self._history.newest
        problem = self._input_problem(now_s)
        if newest is not None and not problem:
            limits, position = self._limits, newest[1].position
            if limits.outside_m(position) > _OUTSIDE_M:
                problem = (
                    f"the tool is at {position.round(3).tolist()}, outside the workspace {list(limits.workspace_min)} "
                    f"to {list(limits.workspace_max)}; bring it inside by other means"
                )
            else:
                problem = self._start_problem()
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
        newest = self._history.newest
        if newest is None:
            return f"no tool pose received from {self._pose_source} yet"
        age_s = now_s - newest[0]
        if age_s > self._pose_timeout_s:
            return f"the newest tool pose is {age_s:.2f} s old, and the limit is {self._pose_timeout_s:g} s"
        if self.mismatch:
            return self.mismatch
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
        self._samples.append(Offset(error_s=(receive_s + back_s) / 2, ahead_s=(receive_s - back_s) / 2))

    @property
    def best(self) -> Offset | None:
        """The estimate with the smallest error bound; None if there is none."""
        return min(self._samples, default=None)
