# SPDX-License-Identifier: Apache-2.0
"""Gate of joint velocities.

A forward velocity controller keeps the last velocity it was sent, and so does the arm. So a stop sends zeros, again and
again, and never nothing; after a gap in its output the guard sends them at once, since the arm did not stop meanwhile.
"""

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointVelocities, Measured, SentVelocities
from specvla_ros.control.guard.gate import REST, TOLERANCE, Bounds, Gate, braked, slewed, stopping_way
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.guard.tool_gates import (
    AHEAD_S,
    ANSWERS_S,
    EDGE_M,
    JITTER_S,
    slow_enough,
    text,
    tool_bounds,
    tool_problem,
    within,
)
from specvla_ros.control.robot_model import ToolKinematics

_EDGE = 0.01  # rad or m: tolerance for a driver that brakes at a range's very end
_MOVED = 0.005  # rad or m, more than encoder noise
_UNANSWERED = 0.03  # max rad or m commanded to a joint for ANSWERS_S that it does not follow


class JointVelocityGate(Gate):
    """Gate of joint velocities, float64 [joints]; each joint has its own limits.

    The output slews towards the command, and to zero for a stop. With `kinematics` the tool of the measured joints is
    also held to its speed limit and, where it would come to rest, to the workspace. Without, motion stops once the
    measured tool exceeds them.
    """

    def __init__(self, settings: GuardSettings, kinematics: ToolKinematics | None = None) -> None:
        joints = settings.joints
        super().__init__(settings, Bounds(joints.speeds, joints.accelerations), np.zeros((len(joints.names), 1)))
        self._kinematics, self._names = kinematics, joints.names
        self._low, self._high = np.array(joints.position_min), np.array(joints.position_max)
        self._tool_bounds, self._tool_speed = tool_bounds(settings), settings.limits.linear_speed
        self._command: np.ndarray | None = None  # float64 [joints, 1]
        self._here: np.ndarray | None = None  # float64 [joints], as measured
        self._unmoved_from: np.ndarray | None = None  # positions when each joint last moved
        self._way = np.zeros(len(joints.names))  # commanded to each since then
        self._unanswered_s = np.zeros(len(joints.names))

    @property
    def wants_motion(self) -> bool:
        return self._command is not None and bool(np.abs(self._command).max() > REST)

    def take(self, command: JointVelocities, measured: Measured, now: Instant) -> Refusal | None:
        sent_s = command.stamp.seconds(now)
        refusal = self._problem(command.velocities) or self._change(command.velocities, sent_s - self._sent_s)
        self._command, self._sent_s = None if refusal else command.velocities[:, None], sent_s
        return refusal

    def conditions(self, measured: Measured) -> list[Refusal]:
        here = measured.joints
        if here is None or self._command is None:
            return []
        found = tool_problem(measured, self._tool_bounds, self._settings.limits)
        # Where the arm would come to rest if it braked now, from the command and from the output.
        for velocity in (self._command, self._velocity):
            rest = here + (velocity * AHEAD_S + stopping_way(velocity, self._bounds))[:, 0]
            found = found or self._out_of_range(here, rest) or self._tool_outside(here, rest)
        if found:
            return [found]
        late = self._unanswered_s > ANSWERS_S
        if not late.any():
            return []
        worst = int((np.abs(self._way) * late).argmax())
        detail = f"{self._names[worst]} was commanded {abs(self._way[worst]):.3f} further but did not move"
        return [Refusal(Cause.NOT_FOLLOWING, f"{detail} for {ANSWERS_S:g} s")]

    def watch(self, measured: Measured) -> None:
        self._here = here = measured.joints
        if here is None:
            return
        if self._unmoved_from is None:
            self._unmoved_from = here
        moved = np.abs(here - self._unmoved_from) >= _MOVED
        self._unmoved_from = np.where(moved, here, self._unmoved_from)
        self._way = np.where(moved, 0.0, self._way)

    def begin(self, measured: Measured) -> None:
        super().begin(measured)  # wherever the joints are: a velocity has no position
        self._unmoved_from = None
        self._way, self._unanswered_s = np.zeros(len(self._names)), np.zeros(len(self._names))

    def go(self, now: Instant, dt_s: float) -> SentVelocities:
        wanted, dt_s = self._zero if self._command is None else self._command, min(dt_s, self._longest_s)
        velocity = slewed(self._velocity, wanted, self._pace, dt_s)
        self._velocity = self._slow_enough(braked(self._velocity, self._bounds, dt_s), velocity)
        self._way = self._way + self._velocity[:, 0] * dt_s
        self._unanswered_s = np.where(np.abs(self._way) > _UNANSWERED, self._unanswered_s + dt_s, 0.0)
        return SentVelocities(self._velocity[:, 0])

    def stop(self, measured: Measured, now: Instant, dt_s: float) -> SentVelocities:
        self._velocity = braked(self._velocity, self._bounds, dt_s)
        if self.at_rest:  # else a stop because of joints that do not follow could never be cleared
            self._way, self._unanswered_s = np.zeros(len(self._names)), np.zeros(len(self._names))
        return SentVelocities(self._velocity[:, 0])

    def _slow_enough(self, brakes: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        if self._kinematics is None or self._here is None:
            return velocity
        return slow_enough(self._kinematics.tool_moves(self._here)[:3], brakes, velocity, self._tool_speed)

    def scale(self, share: float) -> None:
        super().scale(share)
        self._tool_speed = share * self._settings.limits.linear_speed

    def _out_of_range(self, here: np.ndarray, rest: np.ndarray) -> Refusal | None:
        low, high = np.minimum(self._low, here) - _EDGE, np.maximum(self._high, here) + _EDGE
        outside = (rest < low) | (rest > high)
        if not outside.any():
            return None
        worst = int(outside.argmax())
        ends = f"{self._low[worst]:g} to {self._high[worst]:g}"
        return Refusal(Cause.OUTSIDE, f"the velocity leads {self._names[worst]} to {rest[worst]:.3f}, outside {ends}")

    def _tool_outside(self, here: np.ndarray, rest: np.ndarray) -> Refusal | None:
        if self._kinematics is None:
            return None
        place, limits = self._kinematics.pose_at(rest).position, self._settings.limits
        if within(place, limits.widened(self._kinematics.pose_at(here).position, EDGE_M)):
            return None
        return Refusal(Cause.OUTSIDE, f"the velocities lead the tool to {text(place)} m, outside the workspace")

    def _problem(self, velocities: np.ndarray) -> Refusal | None:
        count = len(self._names)
        if velocities.shape != (count,):
            detail = f"the command has {velocities.size} velocities, but joints.names has {count}"
            return Refusal(Cause.BAD_FORM, detail)
        if not np.isfinite(velocities).all():
            return Refusal(Cause.NOT_FINITE, "the command holds NaN or infinity")
        over = np.abs(velocities) / (self._bounds.speed * TOLERANCE)
        if (over <= 1).all():
            return None
        worst = int(over.argmax())
        detail = f"{self._names[worst]} is commanded {abs(velocities[worst]):.4g} per second"
        return Refusal(Cause.OVER_SPEED, f"{detail}, and joints.max_speed is {self._bounds.speed[worst]:g}")

    def _change(self, velocities: np.ndarray, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        change = np.abs(velocities - self._command[:, 0])
        over = change / (self._bounds.acceleration * (elapsed_s + JITTER_S))
        if (over <= 1).all():
            return None
        worst = int(over.argmax())
        detail = f"the velocity of {self._names[worst]} changed by {change[worst]:.4g} within {elapsed_s:.3f} s"
        return Refusal(Cause.OVER_ACCELERATION, f"{detail}, more than joints.max_acceleration allows")
