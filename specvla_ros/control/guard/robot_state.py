# SPDX-License-Identifier: Apache-2.0
"""The robot's own state, by rules on fields of its messages, and a check that it comes to rest when stopped."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Measured
from specvla_ros.errors import UserError

_RULE = re.compile(r"(?P<topic>\S+)\s+(?P<type>\w+/msg/\w+)\s+(?P<field>\w[^=]*?)\s*=\s*(?P<values>.+)")
_PART = re.compile(r"(\w+)(?:\[([^\]]+)\])?")
_STILL_M_S = 0.02  # a tool measured slower than this is at rest


@dataclass(frozen=True)
class StateRule:
    """A field that must have one of the given values to allow motion: 'TOPIC TYPE FIELD=VALUE|VALUE'.

    A field is a path such as `state.id`; `controllers[arm]` is the element of a list whose `name` is arm.
    """

    topic: str
    message_type: str  # package/msg/Name
    field: str
    allowed: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "StateRule":
        """Parses a rule; raises UserError with the required form."""
        found = _RULE.fullmatch(text.strip())
        if found is None:
            raise UserError(
                f"invalid robot_states rule '{text}': expected 'TOPIC PACKAGE/msg/TYPE FIELD=VALUE|VALUE', such as "
                "'/io_and_status_controller/safety_mode ur_dashboard_msgs/msg/SafetyMode mode=1|2'"
            )
        values = tuple(value.strip() for value in found["values"].split("|"))
        return cls(found["topic"], found["type"], found["field"], values)

    def problem(self, message: Any) -> str:
        """Returns the reason why the rule forbids motion, in words; empty if it does not."""
        try:
            value = _text(self._value(message))
        except LookupError as error:
            return f"{self.topic} has no {error.args[0]}"
        if value in self.allowed:
            return ""
        return f"{self.topic}: {self.field} is {value}, but must be {' or '.join(self.allowed)}"

    def _value(self, message: Any) -> Any:
        for name, key in _PART.findall(self.field):
            if not hasattr(message, name):
                raise LookupError(name)
            message = getattr(message, name)
            if key:
                named = [each for each in message if each.name == key]
                if not named:
                    raise LookupError(f"{name}[{key}]")
                message = named[0]
        return message


def _text(value: Any) -> str:
    if isinstance(value, bytes):  # a ROS byte
        return str(int.from_bytes(value, "little"))
    return str(value).lower() if isinstance(value, bool) else str(value)


class RobotStates:
    """The newest state per rule. A state published only on change stays valid while its publisher lives."""

    def __init__(self, rules: Sequence[StateRule]) -> None:
        self._problems: dict[StateRule, str | None] = dict.fromkeys(rules)  # None: nothing received yet
        self._gone: frozenset[str] = frozenset()

    def take(self, rule: StateRule, message: Any) -> Refusal | None:
        """Takes a message; returns its refusal if it forbids motion."""
        self._problems[rule] = problem = rule.problem(message)
        return Refusal(Cause.ROBOT_STOPPED, problem) if problem else None

    def gone(self, topics: frozenset[str]) -> None:
        """Voids the states received on topics that no longer have a publisher."""
        self._gone = topics
        for rule in self._problems:
            if rule.topic in topics:
                self._problems[rule] = None

    def problems(self) -> list[Refusal]:
        found = []
        for rule, problem in self._problems.items():
            if problem is None:
                what = "it has no publisher" if rule.topic in self._gone else "no message yet"
                found.append(Refusal(Cause.STATE_MISSING, f"{rule.topic}: {what}"))
            elif problem:
                found.append(Refusal(Cause.ROBOT_STOPPED, problem))
        return found


class Obedience:
    """Checks that the robot comes to rest after motion has ended, so that the guard can escalate if not."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._looking = False
        self._zero_s: float | None = None  # since when the output is at rest

    def look(self, passing: bool, at_rest: bool, measured: Measured, now_s: float) -> Refusal | None:
        """Checks once per tick; returns a refusal, once, if the robot keeps moving after a stop command.

        `now_s` is on the node's clock, which a simulated robot moves by.
        """
        if passing:
            self._looking, self._zero_s = True, None
        if passing or not self._looking or not at_rest or measured.velocity is None:
            return None
        self._zero_s = now_s if self._zero_s is None else self._zero_s
        speed = float(np.linalg.norm(measured.velocity))
        if speed <= _STILL_M_S:
            self._looking = False
        elif now_s - self._zero_s > self._after_s:
            self._looking = False
            detail = f"the tool still moves at {speed:.3f} m/s, {now_s - self._zero_s:.2f} s after the stop command"
            return Refusal(Cause.NOT_OBEYING, detail)
        return None
