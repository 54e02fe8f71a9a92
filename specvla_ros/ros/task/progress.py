# SPDX-License-Identifier: Apache-2.0
"""How a task goes, from the actions that its policy publishes. No ROS here."""

import math
from collections import deque
from dataclasses import dataclass, field

_RATE_OVER_S = 2.0


@dataclass
class Progress:
    """One task's actions and time.

    Two clocks: the node's, which may be simulated and counts the task's time, and a steady one, which tells silence
    and rates apart from a clock that stands still.
    """

    time_limit_s: float  # seconds, on the node's clock
    began_s: float  # the task's beginning on the node's clock
    steady_s: float  # the same moment on the steady clock
    actions: int = 0
    latency_s: float = math.nan
    _arrivals_s: deque[float] = field(default_factory=deque)

    def add_action(self, latency_s: float, steady_s: float) -> None:
        """Counts an action.

        Args:
            latency_s: from its image to its publication.
            steady_s: when it came.
        """
        self.actions += 1
        self.latency_s = latency_s
        self._arrivals_s.append(steady_s)
        self._forget(steady_s)

    def elapsed_s(self, now_s: float) -> float:
        """Since the beginning, on the node's clock; 0 while that clock is before it."""
        return max(0.0, now_s - self.began_s)

    def left_s(self, now_s: float) -> float:
        """Until the time limit."""
        return max(0.0, self.time_limit_s - self.elapsed_s(now_s))

    def silence_s(self, steady_s: float) -> float:
        """Since the newest action, or since the beginning."""
        return steady_s - (self._arrivals_s[-1] if self._arrivals_s else self.steady_s)

    def rate_hz(self, steady_s: float) -> float:
        """Actions per second of the last two, or of the time since the beginning where that is less."""
        newest = self._arrivals_s[-1] if self._arrivals_s else self.steady_s
        self._forget(steady_s)
        recent = sum(steady_s - arrival_s <= _RATE_OVER_S for arrival_s in self._arrivals_s)
        span_s = min(_RATE_OVER_S, max(steady_s, newest) - self.steady_s)
        return recent / span_s if span_s > 0 else 0.0

    def _forget(self, steady_s: float) -> None:
        while len(self._arrivals_s) > 1 and steady_s - self._arrivals_s[0] > _RATE_OVER_S:
            self._arrivals_s.popleft()
