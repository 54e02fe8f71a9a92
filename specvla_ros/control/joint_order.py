# SPDX-License-Identifier: Apache-2.0
"""Finds out whether joints are commanded in the controller's order: each moves a little and back, and no other.

An array of positions has no names. In a wrong order its first message already sends joints to each other's positions,
so the trial begins by asking for no motion at all, and ends at the first joint that moves unasked.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from ruckig import InputParameter, Ruckig, Trajectory

from specvla_ros.errors import UserError

WAY = 0.02  # rad or m that each joint moves, and back
_ANSWER, _UNASKED = 0.5 * WAY, 0.25 * WAY  # by which the right joint moves at least, and any other at most
_SPEED, _SPEED_SHARE = 0.05, 0.2  # rad/s or m/s at most, and of the joint's largest
_ACCELERATION, _JERK = 0.5, 20.0
_STILL_S, _PATIENCE_S = 0.2, 1.0  # that are waited at the end of each way: if the joint has answered, and if not
_MAX_PASSED_S = 0.05  # in one control step: a late loop does not leap


def choose_ways(
    names: Sequence[str], start: np.ndarray, ranges: np.ndarray, allowed: Callable[[np.ndarray], bool]
) -> np.ndarray:
    """Which way each joint is moved, float64 [n]: forwards where that stays in its range and is allowed, or back.

    Args:
        names: of the joints.
        start: float64 [n], where they are.
        ranges: float64 [n, 2].
        allowed: whether the arm may be at these positions, float64 [n].

    Raises:
        UserError: a joint can go neither way.
    """
    ways = np.zeros(len(names))
    for index, (name, (low, high)) in enumerate(zip(names, ranges, strict=True)):
        for way in (WAY, -WAY):
            there = start.copy()
            there[index] += way
            if not ways[index] and low <= there[index] <= high and allowed(there):
                ways[index] = way
        if not ways[index]:
            raise UserError(
                f"to find out the joints' order '{name}' would be moved by {WAY:g}, which leaves its range or the "
                "workspace either way; bring the arm further inside by other means, or set joints.controller"
            )
    return ways


class _Creep:
    """A jerk-limited motion of one number, from 0."""

    def __init__(self) -> None:
        self._ruckig, self._input = Ruckig(1), InputParameter(1)
        self._input.max_acceleration, self._input.max_jerk = [_ACCELERATION], [_JERK]
        self._way, self._begun_s = Trajectory(1), 0.0

    def go(self, goal: float, speed: float, now_s: float) -> None:
        given = self._input
        given.max_velocity, given.target_position = [speed], [goal]
        if self._way.duration:
            begin = self._way.at_time(now_s - self._begun_s)
            given.current_position, given.current_velocity, given.current_acceleration = begin[:3]
        self._ruckig.calculate(given, self._way)
        self._begun_s = now_s

    @property
    def ends_s(self) -> float:
        return float(self._begun_s + self._way.duration)

    def at(self, now_s: float) -> float:
        return float(self._way.at_time(now_s - self._begun_s)[0][0])


class JointOrderTrial:
    """One trial; `step` is called at the control rate until it is `done`.

    Args:
        names: of the joints, in the order of the commands.
        start: float64 [n], where they were sent last.
        ways: float64 [n], of `choose_ways`.
        max_speed: float64 [n].
    """

    def __init__(self, names: Sequence[str], start: np.ndarray, ways: np.ndarray, max_speed: np.ndarray) -> None:
        self._names, self._start = names, start
        self._speeds = np.minimum(_SPEED, _SPEED_SHARE * max_speed)
        turns = [(joint, change) for joint, way in enumerate(ways) for change in (way, -way)]
        self._turns = deque([(0, 0.0), *turns])  # which joint is moved, and how far: at first none
        self._creep, self._goal = _Creep(), 0.0
        self._from: np.ndarray | None = None  # float64 [n], as measured when this turn began
        self._passed_s, self._stepped_s = 0.0, 0.0
        self.problem = ""  # what is wrong, in words; empty: nothing so far
        self.done = False

    def step(self, measured: np.ndarray, now_s: float) -> np.ndarray:
        """Where to send the joints, float64 [n]; `measured`: where they are; `now_s`: steady."""
        if self._from is None:
            self._from, self._stepped_s = measured, now_s
            self._creep.go(0.0, self._speeds[0], 0.0)
        self._passed_s += min(now_s - self._stepped_s, _MAX_PASSED_S)
        self._stepped_s = now_s
        rested_s = self._passed_s - self._creep.ends_s
        if self.problem:
            self.done = rested_s >= 0
        else:
            self._judge(measured, measured - self._from, rested_s)
        positions = self._start.copy()
        positions[self._turns[0][0]] += self._creep.at(self._passed_s)
        return positions

    def _judge(self, measured: np.ndarray, moved: np.ndarray, rested_s: float) -> None:
        joint, change = self._turns[0]
        asked = np.arange(len(moved)) == (joint if change else -1)
        unasked = ~asked & (np.abs(moved) > (_UNASKED if change else _ANSWER))
        if unasked.any():
            ways = zip(self._names, moved, unasked, strict=True)
            others = ", ".join(f"'{name}' by {way:.3f}" for name, way, wrong in ways if wrong)
            sent = f"'{self._names[joint]}' was sent on by {change:g}" if change else "each was sent to where it is"
            self._fail(f"{sent}, and what moved is {others}")
        elif rested_s >= _STILL_S and (not change or moved[joint] * np.sign(change) >= _ANSWER):
            self._next(measured)
        elif rested_s >= _PATIENCE_S:
            self._fail(f"'{self._names[joint]}' was sent on by {change:g} and moved by {moved[joint]:.3f}")

    def _next(self, measured: np.ndarray) -> None:
        if len(self._turns) == 1:
            self.done = True
            return
        self._turns.popleft()
        self._from = measured
        joint, change = self._turns[0]
        self._goal += change
        self._creep.go(self._goal, self._speeds[joint], self._passed_s)

    def _fail(self, what: str) -> None:
        self.problem = (
            f"{what}: joints.names is not in the controller's order, or a joint does not obey; it is "
            f"{', '.join(self._names)}; mend it, then configure the driver again"
        )
        self._creep.go(0.0, self._speeds.min(), self._passed_s)
