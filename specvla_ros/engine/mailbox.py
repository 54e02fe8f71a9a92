# SPDX-License-Identifier: Apache-2.0
"""The queue of observations that wait for a slot: the newest of each robot, and their order."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specvla_ros.engine.outcome import Drop, DropReason, Freshness
from specvla_ros.engine.prepared_images import PreparedImages
from specvla_ros.models.observation import Observation


@dataclass(frozen=True, eq=False)
class Waiting:
    """An observation and its vision input; None if that is computed with the prompt."""

    observation: Observation
    images: PreparedImages | None = None


@dataclass
class _Stream:
    """One robot's entry."""

    budget_s: float = 0.0  # deadline for answering its frames, counted from their arrival
    priority: int = 0  # higher priorities are served first, regardless of budgets
    last_stamp_ns: int = 0  # stamp of the last accepted observation; only newer ones are accepted
    waiting: Waiting | None = None
    # `time.monotonic_ns()` when waiting began. A newer observation replaces an older one and keeps its turn, so that a
    # camera's rate does not affect its turn.
    since_ns: int = 0

    @property
    def turn(self) -> tuple[int, float]:
        """Sort key: the smallest is served next, by priority, then by deadline on this machine's clock."""
        return -self.priority, self.since_ns + self.budget_s * 1e9


class Mailbox:
    """Holds the newest observation of each stream until a slot is free. Any thread may submit.

    `now_ns` is the clock of the observations' stamps; None disables the staleness limit. `limit` is the max number of
    streams at once.
    """

    def __init__(self, now_ns: Callable[[], int] | None) -> None:
        self.now_ns = now_ns
        self.limit = 1
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    @property
    def waiting(self) -> bool:
        return any(stream.waiting is not None for stream in [*self._streams.values()])

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the registered streams: opened explicitly or by an observation, and not closed since."""
        return tuple(self._streams)

    @property
    def last_stamp_ns(self) -> int:
        return max((stream.last_stamp_ns for stream in [*self._streams.values()]), default=0)

    @contextmanager
    def without_clock(self) -> Iterator[None]:
        """Disables the staleness limit within the context."""
        now_ns, self.now_ns = self.now_ns, None
        try:
            yield
        finally:
            self.now_ns = now_ns

    def open(self, name: str, *, budget_s: float, priority: int) -> bool:
        """Registers a stream, or updates a registered one; False if the limit is reached."""
        with self._lock:
            stream = self._place(name)
            if stream is not None:
                stream.budget_s, stream.priority = budget_s, priority
            return stream is not None

    def close(self, name: str, reason: DropReason, before_epoch: float = math.inf) -> list[Drop]:
        """Removes a stream and drops its waiting observation, unless that is of `before_epoch` or later."""
        void = self.drop(reason, before_epoch, name)
        with self._lock:
            stream = self._streams.get(name)
            if stream is not None and stream.waiting is None:
                del self._streams[name]
        return void

    def submit(self, observation: Observation, images: PreparedImages | None = None) -> list[Drop]:
        """Accepts the newest observation of its stream and drops the one that still waited."""
        with self._lock:
            stream = self._place(observation.stream)
            if stream is None:
                detail = f"decode.streams is {self.limit}, already used by {', '.join(map(repr, self._streams))}"
                return [Drop(observation, DropReason.TOO_MANY_STREAMS, detail)]
            if observation.stamp_ns <= stream.last_stamp_ns:
                return [Drop(observation, DropReason.OUT_OF_ORDER, _order_problem(observation, stream.last_stamp_ns))]
            superseded, stream.waiting = stream.waiting, Waiting(observation, images)
            stream.last_stamp_ns = observation.stamp_ns
            if superseded is None:
                stream.since_ns = time.monotonic_ns()
        return [Drop(superseded.observation, DropReason.SUPERSEDED)] if superseded is not None else []

    def next(self, room: Callable[[str], bool] = lambda _: True) -> Waiting | None:
        """The observation that `take` would return now, if it is not too old."""
        with self._lock:
            stream = self._first(room)
            return stream.waiting if stream is not None else None

    def take(self, max_age_s: float, room: Callable[[str], bool] = lambda _: True) -> Waiting | Drop | None:
        """Takes the next observation out, as a drop if it exceeds the age limit (0: none); None if none may start.

        `room`: returns whether a frame of a stream may start.
        """
        with self._lock:
            stream = self._first(room)
            if stream is None:
                return None
            waiting, stream.waiting = stream.waiting, None
        assert waiting is not None
        return self.dropped_for_age(waiting.observation, max_age_s, DropReason.STALE) or waiting

    def age_s(self, observation: Observation) -> float:
        """Age of an observation's image in seconds; 0 without a clock."""
        return (self.now_ns() - observation.stamp_ns) * 1e-9 if self.now_ns is not None else 0.0

    def dropped_for_age(self, observation: Observation, max_age_s: float, reason: DropReason) -> Drop | None:
        """A drop if the observation is older than the limit (0: no limit), else None."""
        if self.now_ns is None:
            return None
        problem = Freshness(max_age_s).problem(observation.stamp_ns, self.now_ns(), reason)
        return Drop(observation, *problem) if problem is not None else None

    def drop(self, reason: DropReason, before_epoch: float = math.inf, only: str | None = None) -> list[Drop]:
        """Drops waiting observations of epochs before `before_epoch`; `only`: limits this to one stream."""
        void = []
        with self._lock:
            for name, stream in self._streams.items():
                waiting = stream.waiting
                if waiting is not None and waiting.observation.epoch < before_epoch and only in (None, name):
                    void.append(waiting.observation)
                    stream.waiting = None
        return [Drop(observation, reason) for observation in void]

    def take_any_stamp(self, only: str | None = None) -> None:
        """Forgets the last stamp of a stream (None: of all), after a clock jump or for another recording."""
        with self._lock:
            for name, stream in self._streams.items():
                if only in (None, name):
                    stream.last_stamp_ns = 0

    def _first(self, room: Callable[[str], bool]) -> _Stream | None:
        """The next stream among those with room. The caller holds the lock."""
        ready = [each for name, each in self._streams.items() if each.waiting is not None and room(name)]
        return min(ready, key=lambda each: each.turn, default=None)

    def _place(self, name: str) -> _Stream | None:
        """A stream's entry, created if the limit allows. The caller holds the lock."""
        if name not in self._streams and len(self._streams) < self.limit:
            self._streams[name] = _Stream()
        return self._streams.get(name)


def _order_problem(observation: Observation, last_stamp_ns: int) -> str:
    if observation.stamp_ns == last_stamp_ns:
        return "has the stamp of the last accepted frame: the camera driver does not update header.stamp"
    return f"{(last_stamp_ns - observation.stamp_ns) * 1e-9:.3f} s older than the last accepted frame"
