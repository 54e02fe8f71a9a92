# SPDX-License-Identifier: Apache-2.0
"""Causes for refusing motion, and which of them latch."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """All causes for which the guard blocks motion, with a description that may contain guard settings."""

    words: str

    def __new__(cls, value: str, words: str = "") -> "Cause":
        each = str.__new__(cls, value)
        each._value_, each.words = value, words
        return each

    STOP = "stop", "stop was pressed"
    NOT_FINITE = "not_finite", "NaN or infinity in a command"
    BAD_FORM = "bad_form", "a command with a wrong frame, wrong names or lengths, or an undecodable message"
    OVER_SPEED = "over_speed", "a command, or the step between two, faster than the limits"
    OVER_ACCELERATION = "over_acceleration", "commands that change faster than the limits allow to follow"
    OUTSIDE = "outside", "the robot, a command or its stopping point outside the workspace or a joint's range"
    TOOL_TOO_FAST = "tool_too_fast", "joints within their limits move the tool faster than its limit"
    FAR = "far", "a command too far from the measured robot"
    NOT_FOLLOWING = "not_following", "the robot does not follow its commands"
    POSE_JUMP = "pose_leaps", "the measured pose jumped further than the robot can move: its real pose is unknown"
    DRIVER_SILENT = "driver_silent", "no new command from the driver within {command_timeout_s:g} s"
    POLICY_SILENT = "policy_silent", "no new action within {action_timeout_s:g} s, while the driver commands motion"
    STATE_MISSING = "state_missing", "no valid measured pose or joints within {state_timeout_s:g} s"
    CLOCK = "clock", "the clock stood still or jumped"
    STALLED = "stalled", "the guard itself did not run for a while"
    ROBOT_STOPPED = "robot_stopped", "the robot reports that it is not running: a protective stop or another mode"
    NOT_OBEYING = "not_obeying", "the robot kept moving after a stop command"
    NOT_ENABLED = "not_enabled", "the dead-man's switch was not held, or the stop button fell silent"
    NOT_CONFIRMED = "not_confirmed", "the current instruction is not confirmed"
    TWO_SOURCES = "two_sources", "two publishers on one topic, or two nodes with one name"
    NOT_NEAR = "not_near", "after a hold: the driver's command is not near the robot"

    @property
    def latches(self) -> bool:
        """True if motion needs `clear_stop` afterwards.

        Latching causes: a pressed stop; commands that a correct driver never sends, since that driver would continue to
        send them; a robot that does not follow (it hit something), does not obey or reports a stop; a measured pose
        that jumps, since motion would resume from it. All other causes end by themselves, from rest: a late or missing
        component is not a broken one, and holding the dead-man's switch is already a decision to resume.
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
        Cause.POSE_JUMP,
        Cause.ROBOT_STOPPED,
        Cause.NOT_OBEYING,
    }
)
_KEPT = 100  # max refusals between two log reports


@dataclass(frozen=True)
class Refusal:
    """A cause with its detail: one sentence with figures."""

    cause: Cause
    detail: str


class Tally:
    """Counts refusals: each rejected command, and each time a condition starts to fail."""

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
        """Takes the conditions that fail now; counts those that did not fail before."""
        for refusal in refusals:
            if refusal.cause not in self._failing:
                self.add(refusal)
        self._failing = frozenset(refusal.cause for refusal in refusals)

    def take_new(self) -> list[Refusal]:
        """Returns the refusals since the last call, for the log."""
        new, self._new = self._new, []
        return new
