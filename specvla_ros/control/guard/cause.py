# SPDX-License-Identifier: Apache-2.0
"""Why motion is refused, and which reasons latch."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """Every reason for which the guard lets no motion through, in words that name settings of the guard."""

    words: str

    def __new__(cls, value: str, words: str = "") -> "Cause":
        each = str.__new__(cls, value)
        each._value_, each.words = value, words
        return each

    STOP = "stop", "stop was pressed"
    NOT_FINITE = "not_finite", "NaN or infinity in a command"
    BAD_FORM = "bad_form", "a command of another frame, other names or lengths, or no message at all"
    OVER_SPEED = "over_speed", "a command, or two in a row, faster than the limits"
    OVER_ACCELERATION = "over_acceleration", "commands that change faster than the limits let anything follow"
    OUTSIDE = "outside", "the robot, a command, or where it leads, out of the workspace or of a joint's range"
    TOOL_TOO_FAST = "tool_too_fast", "joints within their limits move the tool faster than its own"
    FAR = "far", "a command too far from where the robot is measured"
    NOT_FOLLOWING = "not_following", "the robot does not go where it was sent"
    POSE_LEAPS = "pose_leaps", "the measured pose moved as no robot can: nobody knows where it is"
    DRIVER_SILENT = "driver_silent", "no new command of the driver within {command_timeout_s:g} s"
    POLICY_SILENT = "policy_silent", "no new action within {action_timeout_s:g} s, and the driver asks for motion"
    STATE_MISSING = "state_missing", "no sound measured pose or joints within {state_timeout_s:g} s"
    CLOCK = "clock", "the clock stood still, or jumped"
    STALLED = "stalled", "the guard itself did not run for a while"
    ROBOT_STOPPED = "robot_stopped", "the robot says that it does not run: a protective stop, another mode"
    NOT_OBEYING = "not_obeying", "the robot went on though it was told to stand"
    NOT_ENABLED = "not_enabled", "the dead-man's switch was not held, or the stop button fell silent"
    NOT_CONFIRMED = "not_confirmed", "nobody confirmed the instruction in force"
    TWO_SOURCES = "two_sources", "two publishers of one topic, or two nodes of one name"
    NOT_NEAR = "not_near", "after a hold: the driver's command is not near the robot"

    @property
    def latches(self) -> bool:
        """Whether motion needs `clear_stop` afterwards.

        A stop that somebody pressed does; what a right driver never sends, as the same driver would go on with it; a
        robot that does not follow, which has met something, does not obey, or says that it was stopped; and a
        measurement that leaps, as from where it leads to motion would begin. Everything else ends by itself, from rest:
        who is late, out of reach or alone is not broken, and a hand on the dead-man's switch is a decision to go on
        already.
        """
        return self in _LATCHING


_LATCHING = frozenset(
    {
        Cause.STOP,
        Cause.NOT_FINITE,
        Cause.BAD_FORM,
        Cause.OVER_SPEED,
        Cause.OVER_ACCELERATION,
        Cause.NOT_FOLLOWING,
        Cause.POSE_LEAPS,
        Cause.ROBOT_STOPPED,
        Cause.NOT_OBEYING,
    }
)
_KEPT = 100  # refusals between two looks of the log


@dataclass(frozen=True)
class Refusal:
    """A cause, and what it is in words: one sentence with figures."""

    cause: Cause
    detail: str


class Tally:
    """Counts refusals: each rejected command, and each time that a condition begins to fail."""

    def __init__(self) -> None:
        self.counts: Counter[Cause] = Counter()
        self.last: Refusal | None = None
        self._failing: frozenset[Cause] = frozenset()
        self._new: list[Refusal] = []

    def add(self, refusal: Refusal) -> None:
        self.counts[refusal.cause] += 1
        self.last = refusal
        if len(self._new) < _KEPT:
            self._new.append(refusal)

    def failing(self, refusals: list[Refusal]) -> None:
        """Notes the conditions that fail now; those that did not fail before count."""
        for refusal in refusals:
            if refusal.cause not in self._failing:
                self.add(refusal)
        self._failing = frozenset(refusal.cause for refusal in refusals)

    def take_new(self) -> list[Refusal]:
        """Those since the last call, for the log."""
        new, self._new = self._new, []
        return new
