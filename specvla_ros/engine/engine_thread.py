# SPDX-License-Identifier: Apache-2.0
"""An engine that many ask at once: it has a thread of its own, and packs what waits into each forward."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop, Outcome
from specvla_ros.engine.pictures import Pictures, pictures_of
from specvla_ros.engine.tally import TickWork
from specvla_ros.models.observation import Observation

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """What became of an observation."""

    outcome: Outcome
    seconds: float  # of the ticks meanwhile


@dataclass
class _Waiting:
    observation: Observation  # kept: its identity is the key
    future: "Future[Decoded]"
    seconds: float = 0.0


class EngineThread:
    """Drives an engine on a thread of its own; its methods may be called from any other.

    Args:
        engine: a warm one. Nobody else may use it meanwhile.
        tick_time: seconds that a tick counts for, of its work and those that it took here.
    """

    def __init__(
        self, engine: Engine, tick_time: Callable[[TickWork, float], float] = lambda _, seconds: seconds
    ) -> None:
        self._engine = engine
        self._tick_time = tick_time
        self._wake = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._waiting: dict[int, _Waiting] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def prepared(self, observation: Observation) -> Pictures | None:
        """The pictures of an observation as the policy reads them; takes some milliseconds of the caller's thread."""
        pictures = pictures_of(self._engine.target, observation)
        if pictures is not None:
            pictures.prepare()
        return pictures

    def decode(self, observation: Observation, pictures: Pictures | None = None) -> "Future[Decoded]":
        """What will become of an observation.

        Args:
            observation: what is seen.
            pictures: what `prepared` gave for it; None: the engine's thread prepares them.
        """
        future: Future[Decoded] = Future()

        def begin() -> None:
            self._waiting[id(observation)] = _Waiting(observation, future)
            self._hand_out(self._engine.submit(observation, pictures))

        self._call(begin)
        return future

    def open(self, stream: str, budget_s: float) -> None:
        """Takes a robot in; whether there is room is for the caller to know."""
        self._call(lambda: self._engine.open(stream, budget_s=budget_s))

    def close(self, stream: str) -> None:
        """Lets a robot go; what it waited for ends as a drop."""
        self._call(lambda: self._hand_out(self._engine.close(stream)))

    def stop(self) -> None:
        """Ends the thread after the tick under way; whoever waits is told."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._calls or self._engine.busy)
                calls, self._calls = self._calls, []
                stopping = self._stopping
            for call in calls:
                try:
                    call()
                except Exception:  # of one robot; the others go on
                    _log.exception("a robot's request failed")
            if stopping:
                self._hand_out(self._engine.flush())
                return
            if self._engine.busy:
                self._tick()

    def _tick(self) -> None:
        started_s = time.perf_counter()
        outcomes = self._engine.tick()
        seconds = self._tick_time(self._engine.last_work, time.perf_counter() - started_s)
        for waiting in self._waiting.values():
            waiting.seconds += seconds
        self._hand_out(outcomes)

    def _hand_out(self, outcomes: list[Outcome] | list[Drop]) -> None:
        for outcome in outcomes:
            waiting = self._waiting.pop(id(outcome.observation), None)
            if waiting is not None:
                with suppress(InvalidStateError):  # whoever is gone has cancelled it
                    waiting.future.set_result(Decoded(outcome, waiting.seconds))
