# SPDX-License-Identifier: Apache-2.0
"""Reads the robot's state from live or recorded JointStates by joint name. Needs no ROS."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from specvla_ros.errors import UserError
from specvla_ros.messages.synchronizer import TOLERANCE_S

_log = logging.getLogger(__name__)


def positions_by_name(message: Any) -> dict[str, float]:
    """A JointState's positions, possibly NaN; UserError unless each name is unique and has one position."""
    names, values = list(message.name), list(message.position)
    if len(names) != len(values):
        raise UserError(f"it has {len(names)} names and {len(values)} positions")
    if len(set(names)) < len(names):
        raise UserError(f"it has a duplicate name: {', '.join(names)}")
    return dict(zip(names, values, strict=True))


class StateReader:
    """Reads states by name, whatever a message's order, and merges partial states of several publishers.

    Args:
        names: names of the values in the policy's order; empty: taken from the first message.
        dims: number of values the policy reads; 0: all.
        tolerance_s: maximum difference between the stamps of merged parts.
    """

    def __init__(self, names: Sequence[str], dims: int = 0, tolerance_s: float = TOLERANCE_S) -> None:
        self.names, self._dims, self._tolerance_ns = tuple(names), dims, round(tolerance_s * 1e9)
        self._newest: dict[str, tuple[int, float]] = {}  # stamp and value by name
        self.stamp_ns = 0  # stamp of the newest part of the last complete state
        self.lacking = ""  # why the last message did not complete a state; empty: it did
        if names and dims and len(names) != dims:
            raise UserError(f"state_names has {len(names)} names, but the policy reads {dims} values")

    def read(self, message: Any, stamp_ns: int) -> np.ndarray | None:
        """Returns the complete state, float64 [dims], after a message; None if parts are missing, see `lacking`.

        Raises UserError if the number of names or values is wrong, or a value that the policy reads is not finite.
        """
        self.stamp_ns = stamp_ns
        if not message.name and not self.names:
            return self._checked(list(message.position))
        given = positions_by_name(message)
        if not self.names:
            self._checked([*given.values()])
            self.names = tuple(given)
            if self._dims:
                order = ", ".join(self.names)
                _log.warning("the state is read in the first message's order, %s: set state_names to fix it", order)
        mine = {name: given[name] for name in self.names if name in given}
        self._checked([*mine.values()], whole=False)
        self._newest |= {name: (stamp_ns, value) for name, value in mine.items()}
        past = (-(2**63), 0.0)
        late = [n for n in self.names if abs(self._newest.get(n, past)[0] - stamp_ns) > self._tolerance_ns]
        self.lacking = f"it has no '{late[0]}', required by state_names; it has {', '.join(given)}" if late else ""
        if late or not mine:
            return None
        stamps, values = zip(*(self._newest[name] for name in self.names), strict=True)
        self.stamp_ns = max(stamps)
        return np.array(values)

    def _checked(self, values: list[float], *, whole: bool = True) -> np.ndarray:
        if whole and self._dims and len(values) != self._dims:
            raise UserError(
                f"it has {len(values)} values, but the policy reads {self._dims}; set state_names to the names that "
                "the policy reads, in its order"
            )
        state = np.array(values, dtype=np.float64)
        if not np.isfinite(state).all():
            raise UserError(f"it has a value that is not finite: {state.tolist()}")
        return state
