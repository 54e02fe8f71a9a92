# SPDX-License-Identifier: Apache-2.0
"""Tests whether joints are commanded in the controller's order: moves one joint at a time a little and back.

An array of positions has no names. In a wrong order its first message already sends joints to each other's positions,
so the trial first commands no motion, and ends at the first joint that moves without a command.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from specvla_ros.control.bounded_motion import Axes
from specvla_ros.errors import UserError

WAY = 0.02  # rad or m that each joint moves, and back
_ANSWER, _UNASKED = 0.5 * WAY, 0.25 * WAY  # min motion of the commanded joint, max of any other
_SPEED, _SPEED_SHARE = 0.05, 0.2  # rad/s or m/s, and fraction of the joint's maximum
_ACCELERATION, _JERK = 0.5, 20.0
_STILL_S, _PATIENCE_S = 0.2, 1.0  # wait after each move: if the joint has moved, and if not
_MAX_PASSED_S = 0.05  # per control step, so that a late loop causes no jump


def choose_ways(
    names: Sequence[str],
    start: np.ndarray,
    ranges: np.ndarray,
    allowed: Callable[[np.ndarray], bool],
    home: np.ndarray | None = None,
) -> np.ndarray:
    """Displacement of each joint, float64 [n]: forward if in range and allowed, else backward.

    A joint in front of `home` prefers backward, so that interrupted trials do not add up.

    Args:
        names: joint names.
        start: float64 [n], current positions.
        ranges: float64 [n, 2].
        allowed: returns whether the arm may be at these positions, float64 [n].
        home: float64 [n], start of the first trial; None: this is the first.

    Raises:
        UserError: a joint can move in neither direction.
    """
    ways = np.zeros(len(names))
    for index, (name, (low, high)) in enumerate(zip(names, ranges, strict=True)):
        ahead = home is not None and start[index] > home[index]
        for way in (-WAY, WAY) if ahead else (WAY, -WAY):
            there = start.copy()
            there[index] += way
            if not ways[index] and low <= there[index] <= high and allowed(there):
                ways[index] = way
        if not ways[index]:
            raise UserError(
                f"the joint order trial would move '{name}' by {WAY:g}, which leaves its range or the workspace in "
                "both directions; move the arm further inside by other means, or set joints.controller"
            )
    return ways


class JointOrderTrial:
    """One trial; `step` is called at the control rate until it is `done`.

    Args:
        names: joint names, in the order of the commands.
        start: float64 [n], last commanded positions.
        ways: float64 [n], from `choose_ways`.
        max_speed: float64 [n].
    """

    def __init__(self, names: Sequence[str], start: np.ndarray, ways: np.ndarray, max_speed: np.ndarray) -> None:
        self._names, self._start = names, start
        self._speeds = np.minimum(_SPEED, _SPEED_SHARE * max_speed)
        turns = [(joint, change) for joint, way in enumerate(ways) for change in (way, -way)]
        self._turns = deque([(0, 0.0), *turns])  # joint and displacement of each turn; the first has none
        self._axes = Axes(np.full(1, _SPEED), np.full(1, _ACCELERATION), np.full(1, _JERK))  # of the turn's joint
        self._goal, self._ends_s = 0.0, 0.0
        self._from: np.ndarray | None = None  # float64 [n], as measured at the start of this turn
        self._passed_s, self._stepped_s = 0.0, 0.0
        self.problem = ""  # what failed, in words; empty: nothing so far
        self.done = False

    def step(self, measured: np.ndarray, now_s: float) -> np.ndarray:
        """Joint positions to send, float64 [n]; `measured`: current ones; `now_s`: steady time."""
        if self._from is None:
            self._from, self._stepped_s = measured, now_s
        self._passed_s += min(now_s - self._stepped_s, _MAX_PASSED_S)
        self._stepped_s = now_s
        rested_s = self._passed_s - self._ends_s
        if self.problem:
            self.done = rested_s >= 0
        else:
            self._judge(measured, measured - self._from, rested_s)
        positions = self._start.copy()
        positions[self._turns[0][0]] += self._axes.at(self._passed_s).position[0]
        return positions

    def _judge(self, measured: np.ndarray, moved: np.ndarray, rested_s: float) -> None:
        joint, change = self._turns[0]
        asked = np.arange(len(moved)) == (joint if change else -1)
        unasked = ~asked & (np.abs(moved) > (_UNASKED if change else _ANSWER))
        if unasked.any():
            ways = zip(self._names, moved, unasked, strict=True)
            others = ", ".join(f"'{name}' by {way:.3f}" for name, way, wrong in ways if wrong)
            sent = f"'{self._names[joint]}' was commanded to move by {change:g}" if change else "no joint was commanded"
            self._fail(f"{sent}, but these moved: {others}")
        elif rested_s >= _STILL_S and (not change or moved[joint] * np.sign(change) >= _ANSWER):
            self._next(measured)
        elif rested_s >= _PATIENCE_S:
            self._fail(f"'{self._names[joint]}' was commanded to move by {change:g} but moved by {moved[joint]:.3f}")

    def _next(self, measured: np.ndarray) -> None:
        if len(self._turns) == 1:
            self.done = True
            return
        self._turns.popleft()
        self._from = measured
        joint, change = self._turns[0]
        self._goal += change
        self._go(self._goal, self._speeds[joint])

    def _go(self, goal: float, speed: float) -> None:
        legs = self._axes.to(np.array([goal]), self._axes.at(self._passed_s), 0.0, np.zeros(1), speed)
        self._axes.follow(self._passed_s, legs)
        self._ends_s = self._passed_s + sum(leg.duration for leg in legs)

    def _fail(self, what: str) -> None:
        self.problem = (
            f"{what}: joints.names is not in the controller's order, or a joint does not follow. joints.names is "
            f"[{', '.join(self._names)}]; correct it, then configure the driver again"
        )
        self._go(0.0, self._speeds.min())
