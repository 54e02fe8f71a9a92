# SPDX-License-Identifier: Apache-2.0
"""Gates of the commands to a tool: its velocity, and its pose."""

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, SentPose, SentTwist, ToolPose, TwistCommand
from specvla_ros.control.guard.gate import (
    NEAR,
    SLACK_S,
    TOLERANCE,
    Measured,
    outside_m,
    text,
    time_s,
    too_fast,
    widened,
    within,
)
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.guard.tracking import (
    Bounds,
    Window,
    braked,
    lengths,
    shortened_to,
    slewed,
    stopping_way,
    toward,
)
from specvla_ros.control.pose import Pose, quaternion_matrix, rotation_matrix, rotation_vector

_UNITS = (("m/s", "limits.linear_speed"), ("rad/s", "limits.angular_speed"))
_REST = 1e-9
_JITTER_S = 0.05  # what a busy machine may delay one of two commands
_EDGE_M = 0.01  # a driver that brakes to the workspace's very edge is right
_AHEAD_S = 0.03  # commands on their way to the robot
_BEHIND_S = 0.1  # at full speed, what goes out may lag so far behind the commands, and by their timeout
_MOVED_M, _MOVED_RAD = 0.001, 0.005  # more than a sensor's noise
_ANSWERS_S = 0.2  # at full speed, a robot that is sent on and does not move at all is not reached
_APART = np.array([0.01, 0.05])  # metres and radians that an arm at rest may stand from where it was sent


def tool_bounds(settings: GuardSettings) -> Bounds:
    """Of translation and rotation."""
    limits = settings.limits
    return Bounds(
        np.array([limits.linear_speed, limits.angular_speed]),
        np.array([limits.linear_acceleration, limits.angular_acceleration]),
    )


def pose_of(message: ToolPose, base_frame: str) -> Pose | Refusal:
    """A pose that came in, or why it is none."""
    if message.stamp.frame_id != base_frame:
        return Refusal(Cause.BAD_FORM, f"its frame is '{message.stamp.frame_id}', and base_frame is '{base_frame}'")
    if not (np.isfinite(message.position).all() and np.isfinite(message.quaternion).all()):
        return Refusal(Cause.NOT_FINITE, "it holds NaN or infinity")
    try:
        return Pose(message.position, quaternion_matrix(*message.quaternion))
    except ValueError as error:
        return Refusal(Cause.BAD_FORM, str(error))


def difference(there: Pose, here: Pose) -> np.ndarray:
    """float64 [2, 3]: the way in metres and the turn as a rotation vector, from here to there."""
    return np.stack([there.position - here.position, rotation_vector(there.rotation @ here.rotation.T)])


class TwistGate:
    """Velocities of the tool. What goes out slews towards the command, and to zero when it must stop.

    Args:
        settings: the guard's.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings, self._bounds = settings, tool_bounds(settings)
        self._command: np.ndarray | None = None
        self._sent_s = 0.0  # when the driver sent it
        self._velocity = np.zeros((2, 3))
        self._unmoved_from: Pose | None = None
        self._unmoved = np.zeros(2)

    @property
    def wants_motion(self) -> bool:
        return self._command is not None and bool(np.abs(self._command).max() > _REST)

    @property
    def at_rest(self) -> bool:
        return bool(np.abs(self._velocity).max() <= _REST)

    def take(self, command: TwistCommand, measured: Measured, now: Instant) -> Refusal | None:
        velocity, sent_s = command.velocity.reshape(2, 3), time_s(command.stamp, now)
        refusal = self._problem(command, velocity) or self._change(velocity, sent_s - self._sent_s)
        self._command, self._sent_s = None if refusal else velocity, sent_s
        return refusal

    def forget(self) -> None:
        self._command = None

    def conditions(self, measured: Measured) -> list[Refusal]:
        tool = measured.tool
        if tool is None or self._command is None:
            return []
        # Where it would come to rest if the stop began now, of the command and of what goes out.
        box = widened(self._settings.limits, tool.position, _EDGE_M)
        for velocity in (self._command, self._velocity):
            rest = tool.position + velocity[0] * _AHEAD_S + stopping_way(velocity, self._bounds)[0]
            if not within(rest, box):
                detail = f"the twist leads to {text(rest)} m, out of the workspace"
                return [Refusal(Cause.OUTSIDE, detail)]
        return self._unmoved_problem()

    def not_near(self, measured: Measured) -> Refusal | None:
        return None  # a velocity has no place: it begins at rest wherever the tool is

    def begin(self, measured: Measured) -> None:
        self._velocity = np.zeros((2, 3))
        self._unmoved_from = None

    def go(self, now: Instant, dt_s: float) -> SentTwist:
        wanted = np.zeros((2, 3)) if self._command is None else self._command
        self._velocity = slewed(self._velocity, wanted, self._bounds, dt_s)
        self._unmoved = self._unmoved + lengths(self._velocity) * dt_s
        return SentTwist(self._velocity.reshape(6))

    def stop(self, measured: Measured, dt_s: float) -> SentTwist:
        self._velocity = braked(self._velocity, self._bounds, dt_s)
        if self.at_rest:
            self._unmoved = np.zeros(2)
        return SentTwist(self._velocity.reshape(6))

    def halt(self) -> None:
        self._velocity = np.zeros((2, 3))

    def watch(self, tool: Pose) -> None:
        """Takes each measured pose: a robot that is told to go must move."""
        if self._unmoved_from is None or _moves(self._unmoved_from, tool):
            self._unmoved_from, self._unmoved = tool, np.zeros(2)

    def _problem(self, command: TwistCommand, velocity: np.ndarray) -> Refusal | None:
        if not np.isfinite(velocity).all():
            return Refusal(Cause.NOT_FINITE, "the twist holds NaN or infinity")
        frame = self._settings.base_frame
        if command.stamp.frame_id != frame:
            detail = f"the twist's frame is '{command.stamp.frame_id}', and base_frame is '{frame}'"
            return Refusal(Cause.BAD_FORM, detail)
        for speed, limit, (unit, name) in zip(lengths(velocity), self._bounds.speed, _UNITS, strict=True):
            if speed > limit * TOLERANCE:
                return too_fast("the twist", speed, limit, unit, name)
        return None

    def _change(self, velocity: np.ndarray, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        change = lengths(velocity - self._command)
        if (change <= self._bounds.acceleration * (elapsed_s + _JITTER_S)).all():
            return None
        detail = f"the twist changed by {change[0]:.4g} m/s and {change[1]:.4g} rad/s within {elapsed_s:.3f} s"
        return Refusal(Cause.OVER_ACCELERATION, f"{detail}, more than the limits of acceleration allow")

    def _unmoved_problem(self) -> list[Refusal]:
        settings = self._settings
        if self._unmoved[0] <= settings.max_lead_m and self._unmoved[1] <= settings.max_lead_rad:
            return []
        detail = f"{self._unmoved[0]:.3f} m and {self._unmoved[1]:.3f} rad were commanded, and the tool did not move"
        return [Refusal(Cause.NOT_FOLLOWING, detail)]


def _moves(before: Pose, after: Pose) -> bool:
    """Whether a measured tool has moved."""
    way, turn = lengths(difference(after, before))
    return bool(way >= _MOVED_M or turn >= _MOVED_RAD)


class PoseGate:
    """Poses of the tool. What goes out follows the command within the limits, and brakes to hold.

    Args:
        settings: the guard's.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings, self._bounds = settings, tool_bounds(settings)
        self._lead = np.array([settings.max_lead_m, settings.max_lead_rad])
        self._command: Pose | None = None
        self._feed = np.zeros((2, 3))
        self._fed_s = self._arrived_s = self._sent_s = 0.0
        self._sent: Pose | None = None
        self._velocity = np.zeros((2, 3))
        self._joined = False
        self._held = True  # at rest by stop, not by command
        self._window: Window[Pose] = Window()
        self._unmoved_from: Pose | None = None
        self._sent_then: Pose | None = None  # when the tool moved last
        self._answers = np.minimum(self._lead, self._bounds.speed * _ANSWERS_S + _APART / 2)

    @property
    def wants_motion(self) -> bool:
        if self._command is None or self._sent is None:
            return self._command is not None
        return bool(np.abs(difference(self._command, self._sent)).max() > _REST)

    @property
    def at_rest(self) -> bool:
        return bool(np.abs(self._velocity).max() <= _REST)

    def take(self, command: ToolPose, measured: Measured, now: Instant) -> Refusal | None:
        pose, sent_s = pose_of(command, self._settings.base_frame), time_s(command.stamp, now)
        if not isinstance(pose, Refusal):
            pose = self._problem(pose, measured) or self._jump(pose, sent_s - self._sent_s) or pose
        self._sent_s = sent_s
        if isinstance(pose, Refusal):
            self.forget()
            return pose
        earlier = self._window.add(sent_s, pose)
        self._feed, self._fed_s = np.zeros((2, 3)), 0.0
        if earlier is not None:
            first, span_s, self._fed_s = earlier
            self._feed = shortened_to(difference(pose, first) / span_s, self._bounds.speed)
        self._command, self._arrived_s = pose, now.steady_s
        return None

    def forget(self) -> None:
        self._command = None
        self._window.forget()

    def conditions(self, measured: Measured) -> list[Refusal]:
        if measured.tool is None or self._sent is None or self._held:
            return []
        lead = lengths(difference(self._sent, measured.tool))
        if (lead > self._lead).any():
            detail = f"the tool is {lead[0]:.3f} m and {lead[1]:.3f} rad from where it was sent"
            return [Refusal(Cause.NOT_FOLLOWING, detail)]
        if self._sent_then is None:
            return []
        on = lengths(difference(self._sent, self._sent_then))
        if (on <= self._answers).all():
            return []
        detail = f"the tool was sent {on[0]:.3f} m and {on[1]:.3f} rad on, and did not move"
        return [Refusal(Cause.NOT_FOLLOWING, detail)]

    def watch(self, tool: Pose) -> None:
        """Takes each measured pose: a robot that is sent on must move, or it is not reached."""
        if self._unmoved_from is None or _moves(self._unmoved_from, tool):
            self._unmoved_from, self._sent_then = tool, self._sent

    def not_near(self, measured: Measured) -> Refusal | None:
        if self._command is None or measured.tool is None:
            return Refusal(Cause.NOT_NEAR, "there is no command to resume with")
        away = lengths(difference(self._command, measured.tool))
        if (away <= NEAR * self._lead).all():
            return None
        detail = f"the command is {away[0]:.3f} m and {away[1]:.3f} rad from the measured tool"
        return Refusal(Cause.NOT_NEAR, f"{detail}, too far to resume")

    def begin(self, measured: Measured) -> None:
        if self._sent is None or self._left_behind(measured):
            self._sent = measured.tool
        self._velocity, self._joined, self._held = np.zeros((2, 3)), False, False
        self._unmoved_from, self._sent_then = measured.tool, self._sent

    def go(self, now: Instant, dt_s: float) -> SentPose | None:
        if self._sent is None or self._command is None:
            return None
        ahead_s = min(now.steady_s - self._arrived_s, self._fed_s)
        error = difference(self._command, self._sent) + self._feed * ahead_s
        velocity = toward(self._velocity, error, self._feed, self._bounds, dt_s)
        rest = self._sent.position + velocity[0] * dt_s + stopping_way(velocity, self._bounds)[0]
        if not within(rest, widened(self._settings.limits, self._sent.position)):
            velocity = braked(self._velocity, self._bounds, dt_s)
        return self._move(velocity, dt_s)

    def stop(self, measured: Measured, dt_s: float) -> SentPose | None:
        if self._sent is None:
            return None
        sent = self._move(braked(self._velocity, self._bounds, dt_s), dt_s)
        self._held = self.at_rest
        # Somebody moved the robot meanwhile, or it was not reached: to hold it where it was sent would move it.
        return None if self._held and self._left_behind(measured) else sent

    def halt(self) -> None:
        self._velocity = np.zeros((2, 3))

    def lag(self) -> Refusal | None:
        """Commands that change faster than the limits let anything follow."""
        if self._sent is None or self._command is None:
            return None
        behind = lengths(difference(self._command, self._sent))
        allowed = self._bounds.speed * (_BEHIND_S + self._settings.command_timeout_s)
        self._joined |= bool((behind <= 0.5 * allowed).all())
        if not self._joined or (behind <= allowed).all():
            return None
        detail = f"the commands ran away by {behind[0]:.3f} m and {behind[1]:.3f} rad from what the limits allow"
        return Refusal(Cause.OVER_ACCELERATION, detail)

    def _move(self, velocity: np.ndarray, dt_s: float) -> SentPose:
        assert self._sent is not None
        self._velocity = velocity
        if not self.at_rest:
            turn = rotation_matrix(velocity[1] * dt_s) @ self._sent.rotation
            self._sent = Pose(self._sent.position + velocity[0] * dt_s, turn)
        return SentPose(self._sent.position, self._sent.rotation)

    def _left_behind(self, measured: Measured) -> bool:
        if self._sent is None or measured.tool is None:
            return False
        return bool((lengths(difference(self._sent, measured.tool)) > np.minimum(self._lead, _APART)).any())

    def _problem(self, pose: Pose, measured: Measured) -> Refusal | None:
        limits = self._settings.limits
        here = pose.position if measured.tool is None else measured.tool.position
        if outside_m(limits, pose.position) > 0 and not within(pose.position, widened(limits, here)):
            return Refusal(Cause.OUTSIDE, f"the pose {text(pose.position)} m is outside of the workspace")
        if measured.tool is None:
            return None
        away = lengths(difference(pose, measured.tool))
        if (away <= self._lead).all():
            return None
        detail = f"the pose is {away[0]:.3f} m and {away[1]:.3f} rad from the measured tool"
        return Refusal(Cause.FAR, f"{detail}; max_lead_m is {self._lead[0]:g}, max_lead_rad {self._lead[1]:g}")

    def _jump(self, pose: Pose, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        step = lengths(difference(pose, self._command))
        for way, limit, (unit, name) in zip(step, self._bounds.speed, _UNITS, strict=True):
            if way > limit * (elapsed_s * TOLERANCE + SLACK_S):
                return too_fast(
                    f"a step of {way:.4g} within {elapsed_s:.3f} s", way / max(elapsed_s, 1e-3), limit, unit, name
                )
        return None
