# SPDX-License-Identifier: Apache-2.0
"""What driver and guard refused in a demo, in words, and whether the arm was let move meanwhile."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticStatus

from specvla_ros.control.follower import RefusalReason
from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.settings import GuardSettings

_REFUSED = {"guard: gate": "refused_", "driver: motion": "refused: "}  # names of statuses, and before their counts
_PASSING, _STOPPED = "passing", "stopped: "
_PRESSED = f"{_STOPPED}stop: "
# The driver's kinds of refused actions; the guard's have their words in Cause.
_DRIVER_WORDS = {
    RefusalReason.NOT_FINITE.value: "an action held NaN or infinity",
    RefusalReason.WRONG_SHAPE.value: "an action had another number of values than its convention says",
    RefusalReason.TOO_OLD.value: "an action's picture was too old: the policy, or the machine, is slow",
    RefusalReason.FROM_THE_FUTURE.value: "an action's picture is stamped ahead of the clock",
    RefusalReason.NOT_NEWER.value: "an action was no newer than the last one",
    RefusalReason.NO_POSE.value: "nobody knows where the tool was when an action's picture was taken",
    RefusalReason.TOO_LARGE.value: "an action went further than one step may",
    RefusalReason.BLOCKED.value: "no way to an action's goal stays in the workspace",
    "bad_state": "the measured pose or joints could not be used",
    "not_following": "an action came while the driver held still, as while the guard lets nothing through",
    "unreadable": "an action's numbers have another meaning than the driver knows",
    "unreachable": "the joints cannot follow where an action leads",
}


@dataclass
class Motion:
    """The last diagnostics of driver and guard, and what they refused."""

    guard: str = ""  # passing, holding or stopped, and why; empty: not heard yet
    driver: str = ""  # likewise
    refused: dict[str, dict[str, int]] = field(default_factory=dict)  # by who refused it: a count per kind
    in_motion: dict[str, Counter[str]] = field(default_factory=dict)  # of these, those after motion began in a task
    begun: bool = False  # whether motion was let through since the switch was pressed
    _begun_before: dict[str, bool] = field(default_factory=dict)  # at the last diagnostics of each

    @property
    def latched(self) -> bool:
        """Whether the guard stopped by itself, and stays so until it is cleared."""
        return self.guard.startswith(_STOPPED) and not self.guard.startswith(_PRESSED)

    @property
    def stopped_by(self) -> str:
        """Why the guard is stopped, in words; empty: it is not."""
        return self.guard.removeprefix(_STOPPED) if self.guard.startswith(_STOPPED) else ""

    def hear(self, status: DiagnosticStatus, *, held: bool, count: bool) -> None:
        """Takes a status of /diagnostics, if it is one of theirs.

        Args:
            status: of any node.
            held: whether the dead-man's switch is.
            count: whether refusals count: once the robot has ended, everything is refused.
        """
        if status.name not in _REFUSED:
            return
        who, prefix = status.name.partition(":")[0], _REFUSED[status.name]
        setattr(self, who, status.message)
        self.begun = held and (self.begun or (who == "guard" and self.guard.startswith(_PASSING)))
        if count:
            counted = [(each.key, int(each.value)) for each in status.values if each.key.startswith(prefix)]
            counts = {key.removeprefix(prefix): times for key, times in counted if times}
            if self._begun_before.get(who):
                new = Counter(counts) - Counter(self.refused.get(who, {}))
                self.in_motion[who] = self.in_motion.get(who, Counter()) + new
            self.refused[who] = counts
        self._begun_before[who] = self.begun

    def sentences(self) -> Iterator[str]:
        """What was refused while the arm was let move, then what while it waited, a line each."""
        moving: dict[str, Mapping[str, int]] = {who: self.in_motion.get(who, {}) for who in self.refused}
        waiting = {who: Counter(counts) - Counter(moving[who]) for who, counts in self.refused.items()}
        for when, refused in (
            ("during the tasks", moving),
            ("between them, while nothing may move,", waiting),
        ):
            for who, counts in refused.items():
                yield f"{when} the {who} refused{':' if counts else ' nothing'}"
                yield from (f"  {_times(kind, times)}: {in_words(who, kind)}" for kind, times in counts.items())


def in_words(who: str, kind: str) -> str:
    """What a kind of refusal means."""
    if who == "driver":
        return _DRIVER_WORDS.get(kind, "see the driver's log")
    return Cause(kind).words.format(**vars(GuardSettings()))


def _times(kind: str, times: int) -> str:
    return f"{kind.replace('_', ' ')} {'once' if times == 1 else f'{times} times'}"
