# SPDX-License-Identifier: Apache-2.0
"""Joint positions by name, merged from the JointStates of several publishers, live or recorded."""

import math
from collections.abc import Mapping, Sequence

from specvla_ros.errors import UserError

TOLERANCE_S = 0.05  # default maximum difference between the stamps of parts
STAMPED_BY = "its publisher must fill in the time of the measurement"
UNSTAMPED = f"header.stamp is 0: {STAMPED_BY}"
_MOST_HEARD = 64  # names listed when one is missing


def repeated(names: Sequence[str]) -> str:
    """The names that occur more than once, separated by commas; empty if none does."""
    return ", ".join(sorted({name for name in names if list(names).count(name) > 1}))


def positions_by_name(names: Sequence[str], positions: Sequence[float]) -> dict[str, float]:
    """A JointState's positions, possibly NaN; UserError unless each name is unique and has one position."""
    if len(names) != len(positions):
        raise UserError(f"it has {len(names)} names and {len(positions)} positions")
    if twice := repeated(names):
        raise UserError(f"it has a duplicate name: {twice}")
    return dict(zip(names, map(float, positions), strict=True))


class JointParts:
    """The newest position of each of `names`, of which a message may hold some, in any order, beside others.

    Args:
        names: joints or values that are read.
        tolerance_s: maximum difference between the stamps of a complete set.
    """

    def __init__(self, names: Sequence[str], tolerance_s: float = TOLERANCE_S) -> None:
        self.names, self._tolerance_ns = tuple(names), round(tolerance_s * 1e9)
        self._newest: dict[str, tuple[int, float]] = {}  # stamp and position by name
        self._heard: dict[str, None] = {}  # names of all messages since the last set was taken, in their order
        self._taken = False  # whether a set was taken
        self._broken = self._missing = ""

    @property
    def lacking(self) -> str:
        """The reason why the joints' last message was refused or completed no set; empty: it did."""
        return self._broken or self._missing

    def add(self, names: Sequence[str], positions: Sequence[float], stamp_ns: int) -> bool:
        """Takes a message; returns whether it completed a set. One without any of the joints may be broken.

        Raises UserError if the counts of names and positions differ, a name comes twice, a joint's position is not
        finite, or the stamp is 0.
        """
        mine = {}
        if not set(self.names).isdisjoint(names):
            try:
                mine = self._finite(positions_by_name(names, positions))
                if not stamp_ns:
                    raise UserError(UNSTAMPED)
            except UserError as error:
                self._broken = str(error)
                raise
            self._broken = ""
        self._newest |= {name: (stamp_ns, value) for name, value in mine.items()}
        self._heard |= dict.fromkeys(names if len(self._heard) < _MOST_HEARD else mine)
        self._missing = self._what_is_missing(stamp_ns)
        return bool(mine) and not self._missing

    def _finite(self, given: Mapping[str, float]) -> dict[str, float]:
        """The positions of the joints; UserError if one is not finite."""
        mine = {name: given[name] for name in self.names if name in given}
        if broken := [name for name, value in mine.items() if not math.isfinite(value)]:
            raise UserError(f"it has a value that is not finite: {broken[0]} is {mine[broken[0]]}")
        return mine

    def _what_is_missing(self, stamp_ns: int) -> str:
        for name in self.names:
            if name not in self._newest:
                new = "new " if self._taken else ""
                return f"no {new}message has '{name}'; they have {', '.join(self._heard)}"
            if abs(apart_ns := stamp_ns - self._newest[name][0]) > self._tolerance_ns:
                return (
                    f"'{name}' came {abs(apart_ns) * 1e-9:.3f} s {'before' if apart_ns > 0 else 'after'} the last "
                    f"message, maximum {self._tolerance_ns * 1e-9:g} s"
                )
        return ""

    def values(self) -> list[float]:
        """Positions of a complete set, in the order of `names`."""
        return [self._newest[name][1] for name in self.names]

    def stamps(self) -> list[int]:
        """Stamps of a complete set, ns, in the order of `names`."""
        return [self._newest[name][0] for name in self.names]

    def take(self) -> tuple[int, dict[str, float]]:
        """The complete set and the stamp of its oldest part, ns. The next set needs a new position of every joint.

        For motion: an arm's joints count as measured when the oldest of them was, and no position counts twice.
        """
        taken = min(self.stamps()), dict(zip(self.names, self.values(), strict=True))
        self._newest.clear()
        self._heard.clear()
        self._taken = True
        return taken
