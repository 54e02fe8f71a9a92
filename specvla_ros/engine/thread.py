# SPDX-License-Identifier: Apache-2.0
"""The thread that drives an engine: runs calls between ticks, ticks while there is work, and delivers the outcomes.

Importing this module does not import torch: an engine may be loaded on the thread.
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

from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation

if TYPE_CHECKING:
    from specvla_ros.engine.batch import TickWork
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.prepared_images import PreparedImages

_log = logging.getLogger(__name__)

Call = Callable[["Engine"], Sequence[Outcome] | None]  # its returned outcomes are delivered


class EngineThread:
    """Drives an engine on its own thread. No other code may use the engine until the thread has ended.

    The methods may be called from any thread. An observation goes to the engine's mailbox immediately; all other calls
    run between two ticks, in order. Exceptions in a call or a tick are reported, and the thread continues.

    Args:
        load: returns a warmed-up engine; called on the thread.
        on_outcome: called with each action and each dropped frame, on this thread or the caller's of `submit`.
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
        """True once the thread has ended and other code may use the engine."""
        return not self._thread.is_alive()

    def submit(self, observation: Observation) -> None:
        """Submits the newest observation of its stream and drops the one that still waited."""
        self._loaded.result()
        assert self._engine is not None, "the thread has ended"
        for drop in self._engine.submit(observation):
            self._on_outcome(drop)
        with self._wake:
            self._wake.notify()

    def call(self, call: Call) -> None:
        """Runs a call with the engine and delivers the outcomes that it returns."""
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def finish(self) -> None:
        """Lets the thread end once nothing waits or is in flight; returns immediately."""
        with self._wake:
            self._finishing = True
            self._wake.notify()

    def end(self, last: Call = lambda _: None, timeout_s: float | None = None) -> bool:
        """Ends the thread after the current tick and all earlier calls; True if it has ended.

        Args:
            last: the last call to run.
            timeout_s: max time to wait for the end; None: no limit.
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
            # The traceback of an unexpected error would keep a half-loaded model alive.
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
        """Runs a call and reports its exceptions; those inside a tick the engine has already turned into drops."""
        try:
            outcomes = call(engine) or ()
        except Exception:
            self._on_fault(traceback.format_exc())
        else:
            self._hand_over(outcomes)

    def _tick(self, engine: Engine) -> Sequence[Outcome]:
        return engine.tick()

    def _hand_over(self, outcomes: Sequence[Outcome]) -> None:
        """Delivers each outcome: one that fails, such as a robot's that cannot be published, costs no other robot."""
        for outcome in outcomes:
            try:
                self._on_outcome(outcome)
            except Exception:
                self._on_fault(traceback.format_exc())


@dataclass(frozen=True)
class Decoded:
    """The outcome of an observation."""

    outcome: Outcome
    seconds: float  # sum over the ticks until then


@dataclass
class _Waiting:
    observation: Observation  # kept alive, since its identity is the key
    future: Future[Decoded]
    on_partial: Callable[[Action], object] | None
    seconds: float = 0.0


class SharedEngine(EngineThread):
    """An engine shared by many callers: packs waiting observations into common forwards and returns each outcome.

    Args:
        engine: a warmed-up engine.
        tick_time: maps a tick's work and measured seconds to the seconds it counts as.
    """

    def __init__(
        self, engine: Engine, tick_time: Callable[[TickWork, float], float] = lambda _, seconds: seconds
    ) -> None:
        self._tick_time = tick_time
        self._waiting: dict[int, _Waiting] = {}  # only accessed by the thread
        super().__init__(
            lambda: engine,
            on_outcome=self._answer,
            on_fault=lambda trace: _log.error("a robot's request failed; the others continue:\n%s", trace),
        )

    def prepared(self, observation: Observation) -> PreparedImages | None:
        """The preprocessed vision input of an observation; takes a few milliseconds of the caller's thread."""
        from specvla_ros.engine.prepared_images import prepared_images  # imports torch

        self._loaded.result()
        assert self._engine is not None, "the thread has ended"
        images = prepared_images(self._engine.target, observation)
        if images is not None:
            images.prepare()
        return images

    def decode(
        self,
        observation: Observation,
        images: PreparedImages | None = None,
        on_partial: Callable[[Action], object] | None = None,
    ) -> Future[Decoded]:
        """Decodes an observation; without the vision input from `prepared`, the engine's thread computes it.

        `on_partial` is called on the engine's thread with the first actions of an answer that is still being decoded.
        With `decode.tail: needed` there are none, since they would end the answer early for other callers too.
        """
        future: Future[Decoded] = Future()

        def begin(engine: Engine) -> Sequence[Outcome]:
            self._waiting[id(observation)] = _Waiting(observation, future, on_partial)
            return engine.submit(observation, images)

        self.call(begin)
        return future

    def close(self, stream: str) -> None:
        """Removes a robot; its waiting observation ends as a drop."""
        self.call(lambda engine: engine.close(stream))

    def stop(self) -> None:
        """Ends the thread after the current tick; waiting callers get a drop."""
        self.end(lambda engine: engine.flush())

    def _tick(self, engine: Engine) -> Sequence[Outcome]:
        asked = any(waiting.on_partial is not None for waiting in self._waiting.values())
        engine.takes_partial = asked and engine.settings.tail == "whole"
        started_s = time.perf_counter()
        outcomes = engine.tick()
        seconds = self._tick_time(engine.last_work, time.perf_counter() - started_s)
        for waiting in self._waiting.values():
            waiting.seconds += seconds
        return outcomes

    def _answer(self, outcome: Outcome) -> None:
        if isinstance(outcome, Action) and outcome.partial:
            begun = self._waiting.get(id(outcome.observation))
            if begun is not None and begun.on_partial is not None:
                begun.on_partial(outcome)
            return
        waiting = self._waiting.pop(id(outcome.observation), None)
        if waiting is not None:
            with suppress(InvalidStateError):  # a caller that has gone has cancelled it
                waiting.future.set_result(Decoded(outcome, waiting.seconds))


def _unexpected(error: Exception) -> Exception:
    """An error with the traceback in its message, for developers."""
    where = "".join(traceback.format_exception(error))
    return RuntimeError(f"the policy could not be loaded: {type(error).__name__}: {error}\n{where}")
