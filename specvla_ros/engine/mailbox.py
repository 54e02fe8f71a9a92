# SPDX-License-Identifier: Apache-2.0
"""Where observations wait for a slot: the newest of each robot, which of them is begun next, and their pixels.

Resizing a camera image takes milliseconds during which the device would idle if a tick waited for it. So a frame that
the next tick may begin is prepared where it is submitted. One that has to wait is prepared during the tick that may
make room for it, since a newer one may replace it. What is not ready when a tick begins the frame is computed there.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from specvla_ros.engine.outcome import Drop, DropReason, Freshness
from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Pixels, PreparesPictures, Target


class Pictures:
    """The vision tower's input of one observation, computed once, by the first thread that needs it."""

    def __init__(self, compute: Callable[[], Pixels]) -> None:
        self._compute: Callable[[], Pixels] | None = compute
        self._lock = threading.Lock()
        self._pixels: Pixels = ()
        self._error: Exception | None = None

    @property
    def begun(self) -> bool:
        """Whether they are there, or some thread computes them."""
        return self._compute is None or self._lock.locked()

    def prepare(self) -> None:
        """Computes them, or waits for a thread that does. Errors are kept for `pixels`."""
        with self._lock:
            if self._compute is None:
                return
            try:
                self._pixels = self._compute()
            except Exception as error:  # whoever prepares is not who answers for the frame
                self._error = error
            self._compute = None

    def pixels(self) -> Pixels:
        """Tensors in the host's memory, as the target's vision tower reads them; raises what computing them raised."""
        self.prepare()
        if self._error is not None:
            raise self._error
        return self._pixels


def pictures_of(target: Target, observation: Observation) -> Pictures | None:
    """The pictures of an observation, not computed yet; None for a target that prepares them with its prompt."""
    if not isinstance(target, PreparesPictures):
        return None
    return Pictures(lambda: tuple(_sendable(each, target) for each in target.pixels(observation)))


def _sendable(pixels: Tensor, target: Target) -> Tensor:
    """In the decoder's dtype, and pinned for a GPU so that the host does not wait for the copy."""
    decoder = target.decoder
    if decoder.device.type != "cuda":
        return pixels.to(decoder.dtype)
    return torch.empty(pixels.shape, dtype=decoder.dtype, pin_memory=True).copy_(pixels)


@dataclass(frozen=True, eq=False)
class Waiting:
    """An observation, and its pictures; None: they come with its prompt."""

    observation: Observation
    pictures: Pictures | None = None


@dataclass
class _Stream:
    """One robot's place."""

    budget_s: float = 0.0  # in which its frames should be answered, from their arrival on
    priority: int = 0  # streams of a higher one are begun first, whatever the budgets
    last_stamp_ns: int = 0  # stamp of the last observation taken in; only newer ones are
    waiting: Waiting | None = None
    # `time.monotonic_ns()` since which one waits. A newer one takes the place of an older one and keeps its turn, so
    # that a fast camera neither gains nor loses by its rate.
    since_ns: int = 0

    @property
    def turn(self) -> tuple[int, float]:
        """The smallest is begun next: by deadline, on this machine's clock alone."""
        return -self.priority, self.since_ns + self.budget_s * 1e9


class Mailbox:
    """Holds the newest observation of each stream until a slot is free. Any thread may submit.

    `now_ns` is the clock of the observations' stamps; None switches the staleness limit off. At most `limit` streams
    may be there at once.
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
        """Names of those that are there: opened, or with an observation taken in since they were closed."""
        return tuple(self._streams)

    @property
    def last_stamp_ns(self) -> int:
        return max((stream.last_stamp_ns for stream in [*self._streams.values()]), default=0)

    @contextmanager
    def without_clock(self) -> Iterator[None]:
        """Meanwhile no observation is too old."""
        now_ns, self.now_ns = self.now_ns, None
        try:
            yield
        finally:
            self.now_ns = now_ns

    def open(self, name: str, *, budget_s: float, priority: int) -> bool:
        """Makes a place for a stream, or changes one's; False: there are as many as may be."""
        with self._lock:
            stream = self._place(name)
            if stream is not None:
                stream.budget_s, stream.priority = budget_s, priority
            return stream is not None

    def close(self, name: str, reason: DropReason, before_epoch: float = math.inf) -> list[Drop]:
        """Gives a stream's place to another, unless an observation of `before_epoch` or later waits."""
        void = self.drop(reason, before_epoch, name)
        with self._lock:
            stream = self._streams.get(name)
            if stream is not None and stream.waiting is None:
                del self._streams[name]
        return void

    def submit(self, observation: Observation, pictures: Pictures | None = None) -> list[Drop]:
        """Takes the newest observation of its stream in; one that still waited is dropped for it."""
        with self._lock:
            stream = self._place(observation.stream)
            if stream is None:
                detail = f"decode.streams is {self.limit}, and {', '.join(map(repr, self._streams))} came before"
                return [Drop(observation, DropReason.TOO_MANY_STREAMS, detail)]
            if observation.stamp_ns <= stream.last_stamp_ns:
                age_s = (stream.last_stamp_ns - observation.stamp_ns) * 1e-9
                return [Drop(observation, DropReason.OUT_OF_ORDER, f"{age_s:.3f} s before the last frame taken")]
            superseded, stream.waiting = stream.waiting, Waiting(observation, pictures)
            stream.last_stamp_ns = observation.stamp_ns
            if superseded is None:
                stream.since_ns = time.monotonic_ns()
        return [Drop(superseded.observation, DropReason.SUPERSEDED)] if superseded is not None else []

    def next(self, room: Callable[[str], bool] = lambda _: True) -> Waiting | None:
        """The observation that would be taken now, if it is not too old."""
        with self._lock:
            stream = self._first(room)
            return stream.waiting if stream is not None else None

    def take(self, max_age_s: float, room: Callable[[str], bool] = lambda _: True) -> Waiting | Drop | None:
        """The observation whose turn it is, dropped if it is older than a limit (0: none); None: none may be begun.

        `room`: whether a frame of a stream may be begun.
        """
        with self._lock:
            stream = self._first(room)
            if stream is None:
                return None
            waiting, stream.waiting = stream.waiting, None
        assert waiting is not None
        return self.dropped_for_age(waiting.observation, max_age_s, DropReason.STALE) or waiting

    def dropped_for_age(self, observation: Observation, max_age_s: float, reason: DropReason) -> Drop | None:
        """The drop of an observation that is older than a limit by now; 0: no limit."""
        if self.now_ns is None:
            return None
        problem = Freshness(max_age_s).problem(observation.stamp_ns, self.now_ns(), reason)
        return Drop(observation, *problem) if problem is not None else None

    def drop(self, reason: DropReason, before_epoch: float = math.inf, only: str | None = None) -> list[Drop]:
        """Drops the waiting observations of earlier epochs than `before_epoch`; `only`: of this stream."""
        void = []
        with self._lock:
            for name, stream in self._streams.items():
                waiting = stream.waiting
                if waiting is not None and waiting.observation.epoch < before_epoch and only in (None, name):
                    void.append(waiting.observation)
                    stream.waiting = None
        return [Drop(observation, reason) for observation in void]

    def take_any_stamp(self, only: str | None = None) -> None:
        """Forgets the last stamp of a stream, None: of all: for a clock that jumped, or another recording."""
        with self._lock:
            for name, stream in self._streams.items():
                if only in (None, name):
                    stream.last_stamp_ns = 0

    def _first(self, room: Callable[[str], bool]) -> _Stream | None:
        """The stream whose turn it is, of those that have room. The lock is held."""
        ready = [each for name, each in self._streams.items() if each.waiting is not None and room(name)]
        return min(ready, key=lambda each: each.turn, default=None)

    def _place(self, name: str) -> _Stream | None:
        """A stream's place, made if there is room for one more. The lock is held."""
        if name not in self._streams and len(self._streams) < self.limit:
            self._streams[name] = _Stream()
        return self._streams.get(name)
