# SPDX-License-Identifier: Apache-2.0
"""Processes, topics and clocks in virtual time: what can be killed, frozen, silenced or set back at a chosen moment."""

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_EPOCH_NS = 1_700_000_000 * 10**9
_LATE_S = 0.002  # of a timer, at most
_DELAY_S = (0.0005, 0.003)  # of a message
_NEWEST = 10  # messages that wait for a process that does not run


class Clocks:
    """The steady time, and the nodes' clock (ROS time), which may stand, jump, or run at another rate."""

    def __init__(self) -> None:
        self.steady_s = 0.0
        self._since_s, self._base_ns, self._rate = 0.0, _EPOCH_NS, 1.0

    @property
    def ns(self) -> int:
        """The nodes' clock."""
        return self._base_ns + round((self.steady_s - self._since_s) * self._rate * 1e9)

    @property
    def s(self) -> float:
        """The nodes' clock in seconds."""
        return self.ns * 1e-9

    def change(self, *, rate: float = 1.0, jump_s: float = 0.0) -> None:
        """From now on the nodes' clock runs at this rate, after a jump."""
        self._base_ns = self.ns + round(jump_s * 1e9)
        self._since_s, self._rate = self.steady_s, rate


@dataclass
class Process:
    """Something that runs, until it is killed or stopped.

    Args:
        name: for faults.
        begin: makes its memory anew.
        alive: not killed.
        frozen: stopped (SIGSTOP).
        waiting: what came in while it was frozen.
        life: counts its starts; what an earlier life planned is void.
    """

    name: str
    begin: Callable[[], None]
    alive: bool = True
    frozen: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=lambda: deque(maxlen=_NEWEST))
    life: int = 0


@dataclass(frozen=True)
class Message:
    """What arrives.

    Args:
        value: the message.
        sent_s: steady time at which it was sent.
        sender: which publisher.
    """

    value: Any
    sent_s: float
    sender: str


class VirtualTime:
    """Runs timers and delivers messages in the order of virtual time; every draw is the seed's.

    Args:
        seed: of delays, lateness and phases.
    """

    def __init__(self, seed: int) -> None:
        self.clocks = Clocks()
        self.random = random.Random(seed)
        self.processes: dict[str, Process] = {}
        self.silent: set[str] = set()  # topics whose messages are lost
        self._sent_s: dict[str, list[float]] = {}  # steady times of each topic's messages that were not lost
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._listeners: dict[str, list[tuple[Process, Callable[[Message], None]]]] = {}

    def process(self, name: str, begin: Callable[[], None]) -> Process:
        """A new process, which begins at once."""
        made = self.processes[name] = Process(name, begin)
        begin()
        return made

    def every(self, period_s: float, process: Process, step: Callable[[], None]) -> None:
        """A timer of a process, at a phase of its own; what it could not do while it was frozen it does not make up."""
        life = process.life

        def tick(due_s: float) -> None:
            if process.life != life:
                return
            if process.alive and not process.frozen:
                step()
            after_s = due_s + period_s
            self.at(after_s + self.random.uniform(0, _LATE_S), lambda: tick(after_s))

        begin_s = self.clocks.steady_s + self.random.uniform(0, period_s)
        self.at(begin_s, lambda: tick(begin_s))

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Something that happens at a time."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, act))

    def after(self, delay_s: float, process: Process, act: Callable[[], None]) -> None:
        """Something that a process does later: when it runs again, if it is frozen then."""
        life = process.life
        self.at(self.clocks.steady_s + delay_s, lambda: self._do(process, life, act))

    def subscribe(self, topic: str, process: Process, take: Callable[[Message], Any]) -> None:
        """A process takes a topic's messages."""
        self._listeners.setdefault(topic, []).append((process, take))

    def publish(self, topic: str, value: Any, sender: str, delay_s: float = 0.0) -> None:
        """Sends a message to everybody who listens."""
        if topic in self.silent:
            return
        now_s = self.clocks.steady_s
        message = Message(value, now_s, sender)
        self._sent_s.setdefault(topic, []).append(now_s)
        for process, take in self._listeners.get(topic, []):
            late_s = delay_s + self.random.uniform(*_DELAY_S)
            self.at(now_s + late_s, partial(self._deliver, process, take, message))

    def last_heard_s(self, topic: str, before_s: float) -> float:
        """Steady time at which the last message of a topic was sent before a moment; lost ones do not count."""
        sent_s = self._sent_s.get(topic, [])
        return sent_s[max(0, bisect_left(sent_s, before_s) - 1)] if sent_s else 0.0

    def run_until(self, time_s: float) -> None:
        """Lets time pass."""
        while self._events and self._events[0][0] <= time_s:
            due_s, _, act = heapq.heappop(self._events)
            self.clocks.steady_s = max(self.clocks.steady_s, due_s)
            act()
        self.clocks.steady_s = time_s

    # What is done to processes

    def kill(self, name: str) -> None:
        """As kill -9."""
        process = self.processes[name]
        process.alive, process.frozen = False, False
        process.waiting.clear()
        process.life += 1

    def start(self, name: str) -> None:
        """A new process in place of one that was killed; it knows nothing."""
        process = self.processes[name]
        process.alive = True
        process.begin()

    def freeze(self, name: str) -> None:
        """As SIGSTOP."""
        self.processes[name].frozen = True

    def resume(self, name: str) -> None:
        """As SIGCONT: it finds what came meanwhile, its timers run on."""
        process = self.processes[name]
        process.frozen = False
        while process.waiting:
            process.waiting.popleft()()

    def _deliver(self, process: Process, take: Callable[[Message], None], message: Message) -> None:
        self._do(process, process.life, lambda: take(message))

    @staticmethod
    def _do(process: Process, life: int, act: Callable[[], None]) -> None:
        if not process.alive or process.life != life:
            return
        process.waiting.append(act) if process.frozen else act()
