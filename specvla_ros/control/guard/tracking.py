# SPDX-License-Identifier: Apache-2.0
"""Follows commands within limits of speed and acceleration, so that a stop from any moment stays within them too.

Everything here works on *blocks*: float64 [blocks, dims], of which each block's length is limited. A tool is two blocks
of three numbers, translation and rotation; each joint is a block of one.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

_GAIN = 20.0  # 1/s: an error decays in 50 ms where the limits allow it
_WINDOW_S = 0.05
_TINY = 1e-12

Item = TypeVar("Item")


@dataclass(frozen=True)
class Bounds:
    """Limits of each block.

    Args:
        speed: float64 [blocks], per second.
        acceleration: float64 [blocks], per second squared.
    """

    speed: np.ndarray
    acceleration: np.ndarray


def lengths(blocks: np.ndarray) -> np.ndarray:
    """Length of each block, float64 [blocks]."""
    return np.sqrt((blocks * blocks).sum(axis=1))


def shortened_to(blocks: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Each block, shortened to its limit [blocks] where it is longer."""
    return blocks * np.minimum(1.0, limit / np.maximum(lengths(blocks), _TINY))[:, None]


def slewed(velocity: np.ndarray, wanted: np.ndarray, bounds: Bounds, dt_s: float) -> np.ndarray:
    """The velocity after a time: as near to the wanted one as the limits allow.

    Stays within the speed if `velocity` does: a ball is convex.
    """
    step = shortened_to(shortened_to(wanted, bounds.speed) - velocity, bounds.acceleration * dt_s)
    return velocity + step


def braked(velocity: np.ndarray, bounds: Bounds, dt_s: float) -> np.ndarray:
    """The velocity after braking straight ahead for a time."""
    speed = lengths(velocity)
    left = np.maximum(0.0, speed - bounds.acceleration * dt_s)
    return velocity * (left / np.maximum(speed, _TINY))[:, None]


def toward(velocity: np.ndarray, error: np.ndarray, feed: np.ndarray, bounds: Bounds, dt_s: float) -> np.ndarray:
    """The velocity with which to follow a moving reference.

    Args:
        velocity: float64 [blocks, dims], now.
        error: float64 [blocks, dims], from here to the reference.
        feed: float64 [blocks, dims], the reference's velocity.
        dt_s: until the next time.
    """
    far = lengths(error)
    # Never faster than what can be braked on the way that is left; half of the acceleration, as the feed takes some.
    pace = np.minimum(np.minimum(_GAIN, 1 / dt_s) * far, np.sqrt(bounds.acceleration * far))
    return slewed(velocity, feed + error * (pace / np.maximum(far, _TINY))[:, None], bounds, dt_s)


def stopping_way(velocity: np.ndarray, bounds: Bounds) -> np.ndarray:
    """How far braking straight ahead leads at most, float64 [blocks, dims]."""
    return velocity * (lengths(velocity) / (2 * bounds.acceleration))[:, None]


class Window(Generic[Item]):
    """The commands of the last moments: how fast they go, whatever the jitter of their arrival."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, Item]] = deque()

    def forget(self) -> None:
        """The next one is a first one."""
        self._items.clear()

    def add(self, time_s: float, item: Item) -> tuple[Item, float, float] | None:
        """Adds a command.

        Args:
            time_s: later than that of the one before.

        Returns:
            The oldest of the window, the time since then, and the mean time between two; None for a first command.
        """
        while len(self._items) > 1 and time_s - self._items[0][0] > _WINDOW_S:
            self._items.popleft()
        self._items.append((time_s, item))
        if len(self._items) < 2:
            return None
        span_s = max(time_s - self._items[0][0], 1e-3)
        return self._items[0][1], span_s, span_s / (len(self._items) - 1)
