"""The door of the engine: the newest observation waits here for a slot, and for nothing else."""

from collections.abc import Callable

from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Drop, DropReason


class Admission:
    """Holds one observation at a time.

    Args:
        now_ns: the clock of the observations' stamps; None switches the staleness limit off.
    """

    def __init__(self, now_ns: Callable[[], int] | None) -> None:
        self.now_ns = now_ns
        self.waiting: Observation | None = None
        self._last_stamp_ns = 0

    def submit(self, observation: Observation) -> list[Drop]:
        """Lets the newest observation wait; one that still waited is dropped for it."""
        if observation.stamp_ns <= self._last_stamp_ns:
            age_s = (self._last_stamp_ns - observation.stamp_ns) * 1e-9
            return [Drop(observation, DropReason.OUT_OF_ORDER, f"{age_s:.3f} s before the last frame taken")]
        drops = self.drop(DropReason.SUPERSEDED)
        self.waiting = observation
        self._last_stamp_ns = observation.stamp_ns
        return drops

    def take(self, max_age_s: float) -> Observation | Drop | None:
        """The observation that waits, dropped if it is older than a limit; 0: no limit."""
        observation, self.waiting = self.waiting, None
        if observation is None or not max_age_s or self.now_ns is None:
            return observation
        age_s = (self.now_ns() - observation.stamp_ns) * 1e-9
        if age_s > max_age_s:
            return Drop(observation, DropReason.STALE, f"{age_s:.3f} s old, the limit is {max_age_s:g} s")
        return observation

    def drop(self, reason: DropReason) -> list[Drop]:
        """Drops what waits."""
        drops = [Drop(self.waiting, reason)] if self.waiting is not None else []
        self.waiting = None
        return drops

    def take_any_stamp(self) -> None:
        """Forgets the last stamp: for a clock that jumped, or another recording."""
        self._last_stamp_ns = 0
