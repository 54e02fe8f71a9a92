# SPDX-License-Identifier: Apache-2.0
"""A gate checks one kind of command and produces the output; position gates follow their commands smoothly.

The output stays within limits of speed and acceleration, so that a stop at any moment stays within them too.
Displacements and velocities are *blocks*: float64 [blocks, dims], with a limit on each block's length. A tool has two
blocks of three numbers, translation and rotation; each joint is a block of one.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Command, Instant, Measured, Sent
from specvla_ros.control.guard.settings import GuardSettings

# Tolerances for a driver's uneven period; the output still keeps its bounds.
SLACK_S = 0.02
TOLERANCE = 1.001
REST = 1e-9
_NEAR = 0.5  # max distance of command and robot for motion to resume, as a fraction of the lead
_BEHIND_S = 0.1  # max lag of the output, as time at full speed; the command timeout is added
RETURN_M = 0.05  # commands may return a tool up to this far outside the workspace; beyond, return it by hand
_GAIN = 20.0  # 1/s: an error decays in 50 ms if the limits allow it
_WINDOW_S = 0.05
_TINY = 1e-12
_REACHED = 1e-4  # metres or radians
_PERIODS = 2.0  # max motion of a late tick, in periods
_UNSEEN_S = 0.5  # how long a target at rest is still sent to a robot whose position is unknown

Place = TypeVar("Place")


@dataclass(frozen=True)
class Bounds:
    """Limits of each block, float64 [blocks] each, per second and per second squared."""

    speed: np.ndarray
    acceleration: np.ndarray


def lengths(blocks: np.ndarray) -> np.ndarray:
    """Length of each block, float64 [blocks]."""
    return np.sqrt((blocks * blocks).sum(axis=1))


def shortened_to(blocks: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Each block, shortened to its limit [blocks] if longer."""
    return blocks * np.minimum(1.0, limit / np.maximum(lengths(blocks), _TINY))[:, None]


def slewed(velocity: np.ndarray, wanted: np.ndarray, bounds: Bounds, dt_s: float) -> np.ndarray:
    """The velocity closest to the wanted one within the limits; within the speed limit if `velocity` is (convexity)."""
    step = shortened_to(shortened_to(wanted, bounds.speed) - velocity, bounds.acceleration * dt_s)
    return velocity + step


def braked(velocity: np.ndarray, bounds: Bounds, dt_s: float) -> np.ndarray:
    """The velocity after braking for `dt_s` without a change of direction."""
    speed = lengths(velocity)
    left = np.maximum(0.0, speed - bounds.acceleration * dt_s)
    return velocity * (left / np.maximum(speed, _TINY))[:, None]


def toward(
    velocity: np.ndarray, error: np.ndarray, feed: np.ndarray, bounds: Bounds, dt_s: float, gain: float = _GAIN
) -> np.ndarray:
    """The velocity that follows a reference at displacement `error`, moving at `feed`."""
    far = lengths(error)
    # Slow enough to brake within the remaining distance, at half the acceleration, since the feed uses some of it.
    pace = np.minimum(min(gain, 1 / dt_s) * far, np.sqrt(bounds.acceleration * far))
    return slewed(velocity, feed + error * (pace / np.maximum(far, _TINY))[:, None], bounds, dt_s)


def stopping_way(velocity: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Displacement while braking without a change of direction, float64 [blocks, dims]."""
    return velocity * (lengths(velocity) / (2 * bounds.acceleration))[:, None]


class Window(Generic[Place]):
    """Recent commands, to estimate their speed in spite of jitter."""

    def __init__(self) -> None:
        self._places: deque[tuple[float, Place]] = deque()

    def forget(self) -> None:
        """Drops all commands; the next one is the first."""
        self._places.clear()

    def add(self, time_s: float, place: Place) -> tuple[Place, float, float] | None:
        """Adds a command; returns the oldest, the time since it and the mean period, or None for the first."""
        while len(self._places) > 1 and time_s - self._places[0][0] > _WINDOW_S:
            self._places.popleft()
        self._places.append((time_s, place))
        if len(self._places) < 2:
            return None
        span_s = max(time_s - self._places[0][0], 1e-3)
        return self._places[0][1], span_s, span_s / (len(self._places) - 1)


class Gate(ABC):
    """Checks commands of one kind and produces the output. Called only by the guard, at its rate."""

    return_m = RETURN_M

    def __init__(self, settings: GuardSettings, bounds: Bounds, zero: np.ndarray) -> None:
        self._settings, self._bounds = settings, bounds
        self._pace = bounds  # the limits with the current speed scale
        self._longest_s = _PERIODS / settings.rate_hz
        self._zero = zero  # float64 [blocks, dims], the velocity of a robot at rest
        self._velocity = zero
        self._command: Any = None
        self._sent_s = 0.0  # when the driver sent it

    def scale(self, share: float) -> None:
        """Limits the output to this fraction of the speed limits."""
        self._pace = Bounds(self._bounds.speed * share, self._bounds.acceleration)

    def robot_stopped(self, measured: Measured | None) -> None:  # noqa: B027 (a zero velocity has no target)
        """Takes the state of a robot that reports to be stopped; None: it reports nothing of the kind."""

    @property
    def at_rest(self) -> bool:
        return bool(np.abs(self._velocity).max() <= REST)

    @property
    @abstractmethod
    def wants_motion(self) -> bool:
        """True if the command asks for motion."""

    @abstractmethod
    def take(self, command: Any, measured: Measured, now: Instant) -> Refusal | None:
        """Takes a command, or returns why it is refused; the previous command is then dropped."""

    def forget(self) -> None:
        """Drops the command."""
        self._command = None

    @abstractmethod
    def watch(self, measured: Measured) -> None:
        """Takes each measurement, to detect a robot that does not move although commanded to."""

    @abstractmethod
    def conditions(self, measured: Measured) -> list[Refusal]:
        """Reasons not to continue in the robot's current state."""

    def lag(self, now: Instant) -> Refusal | None:
        """Refusal of commands that change faster than the limits allow to follow; called while motion passes."""
        return None

    def not_near(self, measured: Measured) -> Refusal | None:
        """Reason not to resume motion in the robot's current state."""
        return None

    def report(self) -> dict[str, object]:
        """Figures about the commands, by name, for diagnostics."""
        return {}

    def begin(self, measured: Measured) -> None:
        """Starts or resumes motion, from rest."""
        self._velocity = self._zero

    @abstractmethod
    def go(self, now: Instant, dt_s: float) -> Sent | None:
        """The next output, following the command; None: nothing."""

    @abstractmethod
    def stop(self, measured: Measured, now: Instant, dt_s: float) -> Sent | None:
        """The next output, braking, then holding; None: nothing."""

    def halt(self, now: Instant) -> None:
        """Resets the velocity after an output gap in which the robot has stopped by itself."""
        self._velocity = self._zero


class SmoothGate(Gate, Generic[Place]):
    """Gate of tool or joint positions. The output follows the command within the limits, and brakes to hold.

    Args:
        lead: float64 [blocks], max distance of a command, or of the output, from the measured robot.
        max_offset: float64 [blocks], max distance of a robot from the position at which it is held.
        reached_within: float64 [blocks], max distance at which it counts as having reached that position, or as still
            there.
        max_offset_once_reached: float64 [blocks], as `max_offset`, once it has reached the position.
    """

    # Messages, filled in by `_words`.
    not_following: str
    too_far_to_resume: str
    ran_away: str

    def __init__(
        self,
        settings: GuardSettings,
        bounds: Bounds,
        zero: np.ndarray,
        lead: np.ndarray,
        max_offset: np.ndarray,
        reached_within: np.ndarray,
        max_offset_once_reached: np.ndarray,
    ) -> None:
        super().__init__(settings, bounds, zero)
        self._lead, self._max_offset, self._reached_within = lead, max_offset, reached_within
        self._max_offset_once_reached = np.minimum(max_offset, max_offset_once_reached)
        self._command: Place | None = None
        self._feed = zero  # velocity of successive commands
        self._fed_s = 0.0  # how long the feed is valid
        self._arrived_s = 0.0  # arrival of the command, on the steady clock
        self._sent: Place | None = None
        self._joined = False
        self._lost_s = 0.0  # lost by late ticks since the output was last near the command
        self._held = True  # at rest by a stop, not by a command
        self._unseen_s = 0.0  # how long the held robot's position has been unknown
        self._reached = False  # the held robot has reached its commanded position
        self._recalling = False
        self._recall: Place | None = None  # position of a robot that did not move; the target returns to it
        self._recalled = False  # the target has returned since motion last passed
        self._stopped_at: Place | None = None  # where a robot stands that reports to be stopped
        self._window: Window[Place] = Window()

    # Operations on positions

    @abstractmethod
    def _way(self, there: Place, here: Place) -> np.ndarray: ...

    @abstractmethod
    def _moved(self, here: Place, way: np.ndarray) -> Place: ...

    @abstractmethod
    def _where(self, measured: Measured) -> Place | None:
        """Position of the robot; None: unknown."""

    @abstractmethod
    def _accept(self, command: Any, measured: Measured, elapsed_s: float) -> Place | Refusal:
        """A command's first position, or why it is refused; `elapsed_s`: time since the previous command."""

    @abstractmethod
    def _inside(self, sent: Place, velocity: np.ndarray, dt_s: float) -> np.ndarray:
        """The velocity, braked if it leads out of the allowed region."""

    @abstractmethod
    def _message(self, sent: Place) -> Sent: ...

    @abstractmethod
    def _words(self, message: str, away: np.ndarray, allowed: np.ndarray) -> str: ...

    def _ahead(self, command: Place, sent: Place, now: Instant) -> tuple[np.ndarray, np.ndarray]:
        """Displacement to the command's current position, and its velocity."""
        ahead_s = min(now.steady_s - self._arrived_s, self._fed_s)
        return self._way(command, sent) + self._feed * ahead_s, self._feed

    def _behind(self, command: Place, sent: Place, now: Instant) -> tuple[np.ndarray, float]:
        """Displacement to the command's end, and the time left for it."""
        return self._way(command, sent), 0.0

    # The gate

    @property
    def wants_motion(self) -> bool:
        if self._command is None or self._sent is None:
            return self._command is not None
        return bool(np.abs(self._way(self._command, self._sent)).max() > REST)

    def take(self, command: Command, measured: Measured, now: Instant) -> Refusal | None:
        sent_s = command.stamp.seconds(now)
        place = self._accept(command, measured, sent_s - self._sent_s)
        self._sent_s = sent_s
        if isinstance(place, Refusal):
            self.forget()
            return place
        self._feed, self._fed_s = self._zero, 0.0
        earlier = self._window.add(sent_s, place)
        if earlier is not None:
            first, span_s, self._fed_s = earlier
            self._feed = shortened_to(self._way(place, first) / span_s, self._bounds.speed)
        self._command, self._arrived_s = place, now.steady_s
        return None

    def forget(self) -> None:
        super().forget()
        self._window.forget()

    def conditions(self, measured: Measured) -> list[Refusal]:
        here = self._where(measured)
        if here is None or self._sent is None or self._held:
            return []
        away = lengths(self._way(self._sent, here))
        if (away <= self._lead).all():
            return []
        return [Refusal(Cause.NOT_FOLLOWING, self._words(self.not_following, away, self._lead))]

    def not_near(self, measured: Measured) -> Refusal | None:
        here = self._where(measured)
        if self._command is None or here is None:
            return Refusal(Cause.NOT_NEAR, "there is no command to resume with")
        away = lengths(self._way(self._command, here))
        if (away <= _NEAR * self._lead).all():
            return None
        return Refusal(Cause.NOT_NEAR, self._words(self.too_far_to_resume, away, self._lead))

    def begin(self, measured: Measured) -> None:
        if self._sent is None or self._left_behind(measured):
            self._sent = self._where(measured)
        super().begin(measured)
        self._joined = self._held = self._recalled = self._reached = False
        self._recall = None

    def go(self, now: Instant, dt_s: float) -> Sent | None:
        if self._sent is None or self._command is None:
            return None
        dt_s = self._brake_lost_time(dt_s)
        error, feed = self._ahead(self._command, self._sent, now)
        velocity = toward(self._velocity, error, feed, self._pace, dt_s)
        return self._move(self._sent, self._inside(self._sent, velocity, dt_s), dt_s)

    def stop(self, measured: Measured, now: Instant, dt_s: float) -> Sent | None:
        if self._sent is None:
            return None
        dt_s = self._brake_lost_time(dt_s)
        sent = self._move(self._sent, self._stopping_velocity(self._sent, dt_s), dt_s)
        self._held = self.at_rest and self._recall is None
        if self._held and self._stopped_at is not None:
            # It does not listen, and may sink or be led by hand: once it runs again, it must not move from there.
            self._sent = self._stopped_at
            return None
        here = self._where(measured)
        if not self._held or here is None:
            self._reached = self._reached and self._held
            self._unseen_s = self._unseen_s + dt_s if self._held else 0.0
            # Its driver may have ended: when it starts again, it must not hear where the robot was.
            return sent if self._unseen_s <= _UNSEEN_S else None
        near = bool((lengths(self._way(self._sent, here)) <= self._reached_within).all())
        unseen_s, self._unseen_s = self._unseen_s, 0.0
        if unseen_s > _UNSEEN_S and not near:
            self._sent = here
            return self._message(here)
        self._reached = self._reached or near
        # The robot was moved by hand or did not follow: holding its commanded position would move it.
        return None if self._left_behind(measured) else sent

    def lag(self, now: Instant) -> Refusal | None:
        if self._sent is None or self._command is None:
            return None
        if (self._pace.speed < self._bounds.speed).any():  # slower than the driver's own limits
            self._joined = False
            return None
        way, left_s = self._behind(self._command, self._sent, now)
        behind = lengths(way)
        allowed = self._bounds.speed * (_BEHIND_S + self._settings.command_timeout_s + left_s)
        if (behind <= 0.5 * allowed).all():
            self._joined, self._lost_s = True, 0.0
        allowed = allowed + self._bounds.speed * self._lost_s  # which is not the driver's fault
        if not self._joined or (behind <= allowed).all():
            return None
        return Refusal(Cause.OVER_ACCELERATION, self._words(self.ran_away, behind, allowed))

    def _stopping_velocity(self, sent: Place, dt_s: float) -> np.ndarray:
        """Brakes, then returns to a robot that did not move: otherwise it would move by itself when released."""
        if self._recall is None or not (self._recalling or self.at_rest):
            return braked(self._velocity, self._bounds, dt_s)
        way = self._way(self._recall, sent)
        self._recalling = bool(np.abs(way).max() > _REACHED)
        if not self._recalling:
            self._recall, self._recalled = None, True
            return braked(self._velocity, self._bounds, dt_s)
        # As fast as the limits allow: a robot that reacts again meanwhile follows the rest of this motion.
        return toward(self._velocity, way, self._zero, self._bounds, dt_s, gain=math.inf)

    def robot_stopped(self, measured: Measured | None) -> None:
        self._stopped_at = None if measured is None else self._where(measured)
        if measured is not None:
            self.recall(measured)

    def recall(self, measured: Measured) -> None:
        """Returns the target to a robot that does not move, so that it does not move when released."""
        # Only once: a robot that reacts again moves late, and returning to it repeatedly would make it oscillate.
        if self._recall is None and not self._recalled:
            self._recall, self._recalling = self._where(measured), False

    def _not_moved(self, measured: Measured, detail: str) -> list[Refusal]:
        """Recalls the target to a robot that did not move, and returns the refusal."""
        self.recall(measured)
        return [Refusal(Cause.NOT_FOLLOWING, detail)]

    def _brake_lost_time(self, dt_s: float) -> float:
        """Duration of the next step: a late tick must not catch up in one message, since the robot waited meanwhile."""
        lost_s = dt_s - self._longest_s
        if lost_s > 0:
            self._lost_s += lost_s
            self._velocity = braked(self._velocity, self._bounds, lost_s)
        return min(dt_s, self._longest_s)

    def _move(self, sent: Place, velocity: np.ndarray, dt_s: float) -> Sent:
        self._velocity = velocity
        if not self.at_rest:
            sent = self._moved(sent, velocity * dt_s)
        self._sent = sent
        return self._message(sent)

    def _left_behind(self, measured: Measured) -> bool:
        here = self._where(measured)
        if self._sent is None or here is None:
            return False
        most = self._max_offset_once_reached if self._reached else self._max_offset
        return bool((lengths(self._way(self._sent, here)) > most).any())
