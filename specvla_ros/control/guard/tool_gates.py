# SPDX-License-Identifier: Apache-2.0
"""Gates of tool commands: velocities and poses."""

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, Measured, Sent, SentTwist, ToolPose, TwistCommand
from specvla_ros.control.guard.gate import (
    REST,
    SLACK_S,
    TOLERANCE,
    Bounds,
    Gate,
    SmoothGate,
    braked,
    lengths,
    slewed,
    stopping_way,
)
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, quaternion_matrix

_ZERO = np.zeros((2, 3))
_UNITS = (("m/s", "limits.linear_speed"), ("rad/s", "limits.angular_speed"))
JITTER_S = 0.05  # max delay of one of two commands by a busy machine
_ROUNDING = 1e-9
_STANDS_M = 0.0005  # max distance from the measured tool of a target that copied its pose
EDGE_M = 0.01  # tolerance for a driver that brakes at the workspace's very edge
AHEAD_S = 0.03  # delay of commands to the robot
_MOVED_M, _MOVED_RAD = 0.001, 0.005  # more than sensor noise
ANSWERS_S = 0.2  # motion at full speed for this long without any response: the robot does not follow
_MAX_OFFSET = np.array([0.01, 0.05])  # max metres and radians of an arm at rest from its commanded pose
# Margins on the speed limit of a tool moved by joints: a factor for an arm that overshoots, and m/s for sensor noise.
_TOOL_SPEED, _TOOL_NOISE = 1.25, 0.03


def tool_bounds(settings: GuardSettings) -> Bounds:
    """Bounds of translation and rotation."""
    limits = settings.limits
    return Bounds(
        np.array([limits.linear_speed, limits.angular_speed]),
        np.array([limits.linear_acceleration, limits.angular_acceleration]),
    )


def pose_of(message: ToolPose, base_frame: str) -> Pose | Refusal:
    """The pose of a message, or why it is refused."""
    if message.stamp.frame_id != base_frame:
        return Refusal(Cause.BAD_FORM, f"its frame is '{message.stamp.frame_id}', and base_frame is '{base_frame}'")
    if not (np.isfinite(message.position).all() and np.isfinite(message.quaternion).all()):
        return Refusal(Cause.NOT_FINITE, "it holds NaN or infinity")
    try:
        return Pose(message.position, quaternion_matrix(*message.quaternion))
    except ValueError as error:
        return Refusal(Cause.BAD_FORM, str(error))


def text(position: np.ndarray) -> str:
    """Formats a position for a message."""
    return " ".join(f"{number:.3f}" for number in position)


def leads_out(place: np.ndarray, here: np.ndarray, limits: Limits, edge_m: float = 0.0) -> bool:
    """True if a commanded position, float64 [3], is outside the workspace and further out than the measured tool.

    A target at the just measured position is also allowed; the output does not move further out.
    """
    stands = float(np.linalg.norm(place - here)) <= _STANDS_M
    return not stands and not within(place, limits.widened(here, edge_m))


def within(here: np.ndarray, box: tuple[np.ndarray, np.ndarray]) -> bool:
    """True if a position, float64 [3], lies between two corners."""
    return bool((here >= box[0] - _ROUNDING).all() and (here <= box[1] + _ROUNDING).all())


def tool_problem(measured: Measured, bounds: Bounds, limits: Limits) -> Refusal | None:
    """Refusal of the motion of a tool moved by joints: where it would come to rest if it braked now, or its speed."""
    tool, velocity = measured.tool, np.zeros(3) if measured.velocity is None else measured.velocity
    if tool is None:
        return None
    rest = tool.position + velocity * AHEAD_S + stopping_way(np.stack([velocity, np.zeros(3)]), bounds)[0]
    if not within(rest, limits.widened(tool.position, EDGE_M)):
        return Refusal(Cause.OUTSIDE, f"the tool moves to {text(rest)} m, outside the workspace")
    speed, most = float(np.linalg.norm(velocity)), float(bounds.speed[0])
    if speed <= _TOOL_SPEED * most + _TOOL_NOISE:
        return None
    detail = f"the joints move the tool at {speed:.3f} m/s, and limits.linear_speed is {most:g}"
    return Refusal(Cause.TOOL_TOO_FAST, detail)


def slow_enough(moves: np.ndarray, brakes: np.ndarray, velocity: np.ndarray, speed: float) -> np.ndarray:
    """The velocity of joints, float64 [joints, 1], closest to `velocity` at which the tool keeps a speed limit.

    `moves`: float64 [3, joints], of the tool by each joint. Any velocity from `brakes` to `velocity` is reachable.
    """
    slow, more = moves @ brakes[:, 0], moves @ (velocity - brakes)[:, 0]
    # Maximum share for which the tool's speed, |slow + share * more|, is within the limit.
    room, along, square = speed**2 - slow @ slow, slow @ more, more @ more
    if square + 2 * along <= room:
        return velocity
    share = (np.sqrt(along**2 + square * room) - along) / square if room > 0 else 0.0
    slower: np.ndarray = brakes + share * (velocity - brakes)
    return slower


def _moves(before: Pose, after: Pose) -> bool:
    way_m, turn_rad = before.distance(after)
    return way_m >= _MOVED_M or turn_rad >= _MOVED_RAD


def _too_fast(what: str, value: float, limit: float, unit: str, name: str) -> Refusal:
    return Refusal(Cause.OVER_SPEED, f"{what} is {value:.4g} {unit}, and {name} is {limit:g}")


def _answers(settings: GuardSettings, bounds: Bounds) -> np.ndarray:
    """Max metres and radians commanded without a response: a blocked tool covers this distance when released."""
    lead = np.array([settings.max_lead_m, settings.max_lead_rad])
    return np.minimum(lead, bounds.speed * ANSWERS_S + _MAX_OFFSET / 2)


class TwistGate(Gate):
    """Gate of tool velocities. The output slews towards the command, and to zero for a stop."""

    def __init__(self, settings: GuardSettings) -> None:
        super().__init__(settings, tool_bounds(settings), _ZERO)
        self._command: np.ndarray | None = None
        self._unmoved_from: Pose | None = None
        self._unmoved = np.zeros(2)
        self._answers = _answers(settings, self._bounds)

    @property
    def wants_motion(self) -> bool:
        return self._command is not None and bool(np.abs(self._command).max() > REST)

    def take(self, command: TwistCommand, measured: Measured, now: Instant) -> Refusal | None:
        velocity, sent_s = command.velocity.reshape(2, 3), command.stamp.seconds(now)
        refusal = self._problem(command, velocity) or self._change(velocity, sent_s - self._sent_s)
        self._command, self._sent_s = None if refusal else velocity, sent_s
        return refusal

    def conditions(self, measured: Measured) -> list[Refusal]:
        tool = measured.tool
        if tool is None or self._command is None:
            return []
        # Where the tool would come to rest if it braked now, from the command and from the output.
        box = self._settings.limits.widened(tool.position, EDGE_M)
        for velocity in (self._command, self._velocity):
            rest = tool.position + velocity[0] * AHEAD_S + stopping_way(velocity, self._bounds)[0]
            if not within(rest, box):
                return [Refusal(Cause.OUTSIDE, f"the twist leads to {text(rest)} m, outside the workspace")]
        if (self._unmoved <= self._answers).all():
            return []
        unmoved_m, unmoved_rad = self._unmoved
        detail = f"{unmoved_m:.3f} m and {unmoved_rad:.3f} rad were commanded, but the tool did not move"
        return [Refusal(Cause.NOT_FOLLOWING, detail)]

    def begin(self, measured: Measured) -> None:
        super().begin(measured)  # at any tool pose: a velocity has no position
        self._unmoved_from = None

    def go(self, now: Instant, dt_s: float) -> SentTwist:
        wanted = self._zero if self._command is None else self._command
        self._velocity = slewed(self._velocity, wanted, self._pace, min(dt_s, self._longest_s))
        self._unmoved = self._unmoved + lengths(self._velocity) * dt_s
        return SentTwist(self._velocity.reshape(6))

    def stop(self, measured: Measured, now: Instant, dt_s: float) -> SentTwist:
        self._velocity = braked(self._velocity, self._bounds, dt_s)
        if self.at_rest:
            self._unmoved = np.zeros(2)
        return SentTwist(self._velocity.reshape(6))

    def watch(self, measured: Measured) -> None:
        tool = measured.tool
        if tool is not None and (self._unmoved_from is None or _moves(self._unmoved_from, tool)):
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
                return _too_fast("the twist", speed, limit, unit, name)
        return None

    def _change(self, velocity: np.ndarray, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        change = lengths(velocity - self._command)
        if (change <= self._bounds.acceleration * (elapsed_s + JITTER_S)).all():
            return None
        detail = f"the twist changed by {change[0]:.4g} m/s and {change[1]:.4g} rad/s within {elapsed_s:.3f} s"
        return Refusal(Cause.OVER_ACCELERATION, f"{detail}, more than the limits of acceleration allow")


class PoseGate(SmoothGate[Pose]):
    """Gate of tool poses."""

    not_following = "the tool is {0:.3f} m and {1:.3f} rad from its commanded pose"
    too_far_to_resume = "the command is {0:.3f} m and {1:.3f} rad from the measured tool, too far to resume"
    ran_away = "the commands ran away by {0:.3f} m and {1:.3f} rad from what the limits allow"

    def __init__(self, settings: GuardSettings) -> None:
        lead, bounds = np.array([settings.max_lead_m, settings.max_lead_rad]), tool_bounds(settings)
        offset = np.minimum(lead, _MAX_OFFSET)
        super().__init__(
            settings, bounds, _ZERO, lead, max_offset=offset, reached_within=offset, max_offset_once_reached=offset
        )
        self._unmoved_from: Pose | None = None
        self._sent_then: Pose | None = None  # commanded pose when the tool last moved
        self._answers = _answers(settings, bounds)
        self._unanswered_s = 0.0  # how long it has been commanded away from there

    def conditions(self, measured: Measured) -> list[Refusal]:
        found = super().conditions(measured)
        if found or measured.tool is None or self._sent is None or self._held or self._sent_then is None:
            return found
        on = lengths(self._way(self._sent, self._sent_then))
        if (on <= self._answers).all() and self._unanswered_s <= ANSWERS_S:
            return []
        detail = f"the tool was commanded to move by {on[0]:.3f} m and {on[1]:.3f} rad but did not move"
        return self._not_moved(measured, detail)

    def go(self, now: Instant, dt_s: float) -> Sent | None:
        sent = super().go(now, dt_s)
        if self._sent is not None and self._sent_then is not None:
            away = lengths(self._way(self._sent, self._sent_then)) > _MAX_OFFSET
            self._unanswered_s = self._unanswered_s + dt_s if away.any() else 0.0
        return sent

    def watch(self, measured: Measured) -> None:
        tool = measured.tool
        if tool is not None and (self._unmoved_from is None or _moves(self._unmoved_from, tool)):
            self._answered(tool)

    def begin(self, measured: Measured) -> None:
        super().begin(measured)
        self._answered(measured.tool)

    def _answered(self, tool: Pose | None) -> None:
        self._unmoved_from, self._sent_then, self._unanswered_s = tool, self._sent, 0.0

    def _way(self, there: Pose, here: Pose) -> np.ndarray:
        return here.way_to(there).reshape(2, 3)

    def _moved(self, here: Pose, way: np.ndarray) -> Pose:
        return here.displaced(way.reshape(6))

    def _where(self, measured: Measured) -> Pose | None:
        return measured.tool

    def _accept(self, command: ToolPose, measured: Measured, elapsed_s: float) -> Pose | Refusal:
        pose = pose_of(command, self._settings.base_frame)
        if isinstance(pose, Refusal):
            return pose
        return self._problem(pose, measured) or self._jump(pose, elapsed_s) or pose

    def _inside(self, sent: Pose, velocity: np.ndarray, dt_s: float) -> np.ndarray:
        rest = sent.position + velocity[0] * dt_s + stopping_way(velocity, self._bounds)[0]
        if within(rest, self._settings.limits.widened(sent.position)):
            return velocity
        return braked(self._velocity, self._bounds, dt_s)

    def _message(self, sent: Pose) -> Pose:
        return sent

    def _words(self, message: str, away: np.ndarray, allowed: np.ndarray) -> str:
        return message.format(*away)

    def _problem(self, pose: Pose, measured: Measured) -> Refusal | None:
        limits = self._settings.limits
        here = pose.position if measured.tool is None else measured.tool.position
        if leads_out(pose.position, here, limits):
            return Refusal(Cause.OUTSIDE, f"the pose {text(pose.position)} m is outside the workspace")
        if measured.tool is None:
            return None
        away = lengths(self._way(pose, measured.tool))
        if (away <= self._lead).all():
            return None
        detail = f"the pose is {away[0]:.3f} m and {away[1]:.3f} rad from the measured tool"
        return Refusal(Cause.FAR, f"{detail}; max_lead_m is {self._lead[0]:g}, max_lead_rad {self._lead[1]:g}")

    def _jump(self, pose: Pose, elapsed_s: float) -> Refusal | None:
        if self._command is None:
            return None
        step = lengths(self._way(pose, self._command))
        for way, limit, (unit, name) in zip(step, self._bounds.speed, _UNITS, strict=True):
            if way > limit * (elapsed_s * TOLERANCE + SLACK_S):
                what = f"a step of {way:.4g} within {elapsed_s:.3f} s"
                return _too_fast(what, way / max(elapsed_s, 1e-3), limit, unit, name)
        return None
