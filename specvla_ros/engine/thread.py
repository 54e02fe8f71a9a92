# SPDX-License-Identifier: Apache-2.0
"""The thread that drives an engine: calls between ticks, a tick while there is work, and the outcomes handed over.

Importing this costs no torch: an engine may be loaded on the thread.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specvla_ros.engine.outcome import Outcome
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation

if TYPE_CHECKING:
    from specvla_ros.engine.batch import TickWork
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.mailbox import Pictures

_log = logging.getLogger(__name__)

Call = Callable[["Engine"], Sequence[Outcome] | None]  # what it returns is handed over


class EngineThread:
    """Drives an engine on a thread of its own. Nobody else may use that engine meanwhile.

    The methods may be called from any thread. An observation goes to the engine's mailbox at once; everything else is
    done between two ticks, in the order of the calls. What a call or a tick raises is reported, and the thread goes on.

    Args:
        load: makes the engine, a warm one; called on the thread.
        on_outcome: called with each action and each dropped frame, on the thread or on that of `submit`.
        on_fault: called on the thread, in the handler of an unexpected exception, with its traceback.
        on_end: called last on the thread.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        on_outcome: Callable[[Outcome], None],
        on_fault: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
        name: str = "engine",
    ) -> None:
        self._load, self._on_outcome, self._on_fault, self._on_end = load, on_outcome, on_fault, on_end
        self._wake = threading.Condition()
        self._calls: list[Call] = []
        self._engine: Engine | None = None
        self._loaded: Future[None] = Future()
        self._stopping = self._finishing = False
        # A daemon, so that a hanging driver cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the engine may be used otherwise again."""
        return not self._thread.is_alive()

    def submit(self, observation: Observation) -> None:
        """Submits the newest observation of its stream; one that still waited is dropped for it."""
        self._loaded.result()
        assert self._engine is not None, "the thread has ended"
        self._hand_over(self._engine.submit(observation))
        with self._wake:
            self._wake.notify()

    def call(self, call: Call) -> None:
        """Runs a call with the engine; outcomes that it returns are handed over."""
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def finish(self) -> None:
        """Ends the thread when nothing waits and nothing is in flight, and does not wait for that."""
        with self._wake:
            self._finishing = True
            self._wake.notify()

    def end(self, last: Call = lambda _: None, timeout_s: float | None = None) -> bool:
        """Ends the thread after the tick under way and the calls before this one; True if it has ended.

        Args:
            last: the last of them.
            timeout_s: after which it is no longer waited for; None: never.
        """
        with self._wake:
            self._calls.append(last)
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return self.ended

    def _run(self) -> None:
        try:
            self._engine = self._load()
        except Exception as error:
            # An unexpected error's own traceback would keep a half-loaded model alive.
            self._loaded.set_exception(error if isinstance(error, UserError) else _unexpected(error))
        else:
            self._loaded.set_result(None)
            self._serve(self._engine)
        self._engine = None
        self._on_end()

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._finishing or self._calls or engine.busy)
                calls, self._calls = self._calls, []
                stopping = self._stopping
            for call in calls:
                self._guarded(call, engine)
            if stopping or (self._finishing and not engine.busy):
                return
            if engine.busy:
                self._guarded(self._tick, engine)

    def _guarded(self, call: Call, engine: Engine) -> None:
        """The engine turns the faults of a tick into drops; the thread also survives those around it."""
        try:
            self._hand_over(call(engine) or ())
        except Exception:
            self._on_fault(traceback.format_exc())

    def _tick(self, engine: Engine) -> Sequence[Outcome]:
        return engine.tick()

    def _hand_over(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._on_outcome(outcome)


@dataclass(frozen=True)
class Decoded:
    """The outcome of an observation."""

    outcome: Outcome
    seconds: float  # of the ticks meanwhile


@dataclass
class _Waiting:
    observation: Observation  # kept: its identity is the key
    future: Future[Decoded]
    seconds: float = 0.0


class SharedEngine(EngineThread):
    """An engine that many callers share: what waits is packed into each forward, and each gets its own outcome.

    Args:
        engine: a warm one.
        tick_time: seconds that a tick counts for, from its work and its seconds here.
    """

    def __init__(
        self, engine: Engine, tick_time: Callable[[TickWork, float], float] = lambda _, seconds: seconds
    ) -> None:
        self._tick_time = tick_time
        self._waiting: dict[int, _Waiting] = {}  # touched by the thread alone
        super().__init__(
            lambda: engine,
            on_outcome=self._answer,
            on_fault=lambda trace: _log.error("a robot's request failed; the others go on:\n%s", trace),
        )

    def prepared(self, observation: Observation) -> Pictures | None:
        """The prepared pictures of an observation; takes some milliseconds of the caller's thread."""
        from specvla_ros.engine.mailbox import pictures_of  # imports torch

        self._loaded.result()
        assert self._engine is not None, "the thread has ended"
        pictures = pictures_of(self._engine.target, observation)
        if pictures is not None:
            pictures.prepare()
        return pictures

    def decode(self, observation: Observation, pictures: Pictures | None = None) -> Future[Decoded]:
        """Decodes an observation; without the pictures of `prepared`, the engine's thread prepares them."""
        future: Future[Decoded] = Future()

        def begin(engine: Engine) -> Sequence[Outcome]:
            self._waiting[id(observation)] = _Waiting(observation, future)
            return engine.submit(observation, pictures)

        self.call(begin)
        return future

    def close(self, stream: str) -> None:
        """Lets a robot go; its waiting observation ends as a drop."""
        self.call(lambda engine: engine.close(stream))

    def stop(self) -> None:
        """Ends the thread after the tick under way; waiting callers get a drop."""
        self.end(lambda engine: engine.flush())

    def _tick(self, engine: Engine) -> Sequence[Outcome]:
        started_s = time.perf_counter()
        outcomes = engine.tick()
        seconds = self._tick_time(engine.last_work, time.perf_counter() - started_s)
        for waiting in self._waiting.values():
            waiting.seconds += seconds
        return outcomes

    def _answer(self, outcome: Outcome) -> None:
        waiting = self._waiting.pop(id(outcome.observation), None)
        if waiting is not None:
            with suppress(InvalidStateError):  # whoever is gone has cancelled it
                waiting.future.set_result(Decoded(outcome, waiting.seconds))


def _unexpected(error: Exception) -> Exception:
    """An error whose message tells a developer where it came from."""
    where = "".join(traceback.format_exception(error))
    return RuntimeError(f"the policy could not be loaded: {type(error).__name__}: {error}\n{where}")
