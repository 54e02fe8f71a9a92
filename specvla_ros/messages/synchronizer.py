# SPDX-License-Identifier: Apache-2.0
"""Matches the samples of several sensors by stamp."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NS = 1e-9
_REMEMBERED = 64  # samples per sensor: half a second of a state at 125 Hz


@dataclass(frozen=True)
class Matched:
    """A sample of the leading sensor with the matching samples of the others by name."""

    lead: Any
    others: dict[str, Any]


@dataclass(frozen=True)
class Unmatched:
    """A sample of the leading sensor that found no match, and the reason as text."""

    lead: Any
    why: str


class Synchronizer:
    """Matches each sample of the leading sensor with the nearest received sample of every other sensor.

    A sample waits until all others have one within the tolerance of its stamp, in any order of arrival, but no longer
    than until the leading sensor's next sample, as a policy wants the newest. Each leading sample ends exactly once, as
    Matched or Unmatched, except the one still waiting. Without other sensors every sample is matched immediately.
    """

    def __init__(self, lead: str, others: Sequence[str], tolerance_s: float) -> None:
        self._lead, self._tolerance_s = lead, tolerance_s
        self._recent: dict[str, deque[tuple[int, Any]]] = {name: deque(maxlen=_REMEMBERED) for name in others}
        self._waiting: tuple[int, Any] | None = None

    def add(self, name: str, stamp_ns: int, sample: Any) -> list[Matched | Unmatched]:
        """Takes a sensor's sample; returns the leading samples that ended."""
        ended: list[Matched | Unmatched] = []
        if name == self._lead:
            ended += self.give_up()
            self._waiting = stamp_ns, sample
        else:
            self._recent[name].append((stamp_ns, sample))
        if self._waiting is not None:
            nearest = {other: self._nearest(other, self._waiting[0]) for other in self._recent}
            if all(found is not None and self._near(found[0]) for found in nearest.values()):
                others = {other: found[1] for other, found in nearest.items() if found is not None}
                ended.append(Matched(self._waiting[1], others))
                self._waiting = None
        return ended

    def give_up(self) -> list[Matched | Unmatched]:
        """Ends the waiting sample as Unmatched."""
        if self._waiting is None:
            return []
        (stamp_ns, sample), why = self._waiting, ""
        for other in self._recent:
            found = self._nearest(other, stamp_ns)
            if found is None:
                why = f"no '{other}' sample was received"
            elif not self._near(found[0]):
                gap_s = abs(found[0] - stamp_ns) * _NS
                why = f"no '{other}' sample within {self._tolerance_s:g} s, the nearest is {gap_s:.3f} s away"
        self._waiting = None
        return [Unmatched(sample, why)]

    def start_over(self) -> list[Matched | Unmatched]:
        """Ends the waiting sample and forgets all others, as after a clock jump: the same stamps may come again."""
        ended = self.give_up()
        for recent in self._recent.values():
            recent.clear()
        return ended

    def _nearest(self, other: str, stamp_ns: int) -> tuple[int, Any] | None:
        # Among equal stamps the last received wins: merged states of several publishers share a stamp and grow.
        return min(reversed(self._recent[other]), key=lambda found: abs(found[0] - stamp_ns), default=None)

    def _near(self, stamp_ns: int) -> bool:
        assert self._waiting is not None
        return abs(stamp_ns - self._waiting[0]) * _NS <= self._tolerance_s
