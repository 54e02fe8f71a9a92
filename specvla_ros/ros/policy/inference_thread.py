"""The one thread that may touch torch: it loads the policy, feeds the engine and hands back what comes out."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one only from Python 3.11 on
from functools import partial
from typing import TYPE_CHECKING

from specvla_ros.engine.observation import Observation
from specvla_ros.engine.outcome import Drop, DropReason, Outcome
from specvla_ros.errors import UserError
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # the engine imports torch, which a machine that only configures may lack
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.settings import EngineSettings

Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


class InferenceThread:
    """Owns the engine. All methods return at once, but for `wait_loaded`, `switch` and `stop`.

    Args:
        load: makes the engine; called on the thread, with a callback for its progress.
        on_progress: called on the thread with what is being done and the fraction done.
        on_outcome: called on the thread with each action and each dropped frame that the engine answers.
        on_fault: called on the thread with the traceback of an exception that should not have been.
    """

    def __init__(
        self,
        load: Callable[[Progress], Engine],
        *,
        on_progress: Progress,
        on_outcome: Callable[[Outcome], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._load = load
        self._on_progress = on_progress
        self._on_outcome = on_outcome
        self._on_fault = on_fault
        self._wake = threading.Condition()
        self._requests: list[Callable[[Engine], None]] = []
        self._newest: Observation | None = None
        self._stopping = False
        self._check_acceptance: Callable[[AcceptanceSettings], object] | None = None
        self._loaded: Future[dict[str, str]] = Future()
        # A daemon, so that a hanging driver cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    @property
    def loaded(self) -> bool:
        """Whether `wait_loaded` would return at once."""
        return self._loaded.done()

    def wait_loaded(self) -> dict[str, str]:
        """Waits until the policy is loaded and warm, and returns its description.

        Raises:
            UserError: what `load` raised, or the thread was stopped meanwhile.
        """
        return self._loaded.result()

    def submit(self, observation: Observation) -> list[Drop]:
        """Leaves the newest observation for the engine; one that still lay there is dropped for it."""
        with self._wake:
            drops = [Drop(self._newest, DropReason.SUPERSEDED)] if self._newest is not None else []
            self._newest = observation
            self._wake.notify()
        return drops

    def flush(self) -> list[Drop]:
        """Drops what waits and what is in flight; an action that is just ready may still come out."""
        return self._drop_newest_and(lambda engine: self._hand_back(engine.flush()))

    def reset(self) -> list[Drop]:
        """Flushes, and takes any stamp next."""
        return self._drop_newest_and(lambda engine: self._hand_back(engine.reset()))

    def check_instruction(self, text: str, on_checked: Callable[[str], None]) -> None:
        """Has the engine check an instruction; `on_checked` gets what is wrong with it, empty when nothing is."""

        def check(engine: Engine) -> None:
            try:
                engine.check_instruction(text)
                problem = ""
            except UserError as error:
                problem = str(error)
            except Exception as error:  # the robot does not follow what could not be checked
                problem = f"it could not be checked: {type(error).__name__}: {error}"
            on_checked(problem)

        self._request(check)

    def set_max_image_age(self, seconds: float) -> None:
        """Changes the engine's staleness limit."""
        self._request(lambda engine: engine.set_max_image_age(seconds))

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Changes the engine's acceptance rule behind the tick under way; before it is loaded this does nothing.

        Raises:
            UserError: the settings do not fit the policy.
        """
        if self._check_acceptance is not None:
            self._check_acceptance(settings)
            self._request(lambda engine: engine.set_acceptance(settings))

    def switch(self, settings: EngineSettings, timeout_s: float) -> dict[str, str]:
        """Has the engine decode otherwise behind the tick under way, and waits for it; what was in flight is dropped.

        Returns:
            What is loaded and how it decodes now, as `wait_loaded` does.

        Raises:
            UserError: it cannot, or does not come to it in time; it goes on as before.
        """
        if not self.loaded:
            raise UserError("the policy is still being loaded: set this when it is")
        done: Future[dict[str, str]] = Future()

        def change(engine: Engine) -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                self._hand_back(engine.switch(settings))
                done.set_result(_description(engine))
            except Exception as error:
                done.set_exception(error if isinstance(error, UserError) else UserError(f"it failed: {error}"))

        self._request(change)
        try:
            return done.result(timeout_s)
        except FutureTimeoutError:
            if done.cancel():
                raise UserError(f"the engine did not come to it within {timeout_s:g} s") from None
            return done.result()  # it has begun: a draft head and CUDA graphs take as long as they take

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the tick under way and frees the engine; False when it did not end in time."""
        with self._wake:
            self._stopping = True
            self._newest = None
            self._wake.notify()
        self._settle(UserError("stopped before the policy was loaded"))
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drop_newest_and(self, request: Callable[[Engine], None]) -> list[Drop]:
        with self._wake:
            drops = [Drop(self._newest, DropReason.EPOCH_CHANGED)] if self._newest is not None else []
            self._newest = None
            self._requests.append(request)
            self._wake.notify()
        return drops

    def _request(self, request: Callable[[Engine], None]) -> None:
        with self._wake:
            self._requests.append(request)
            self._wake.notify()

    def _run(self) -> None:
        engine = self._make_engine()
        if engine is not None:
            self._serve(engine)
        self._check_acceptance = None
        del engine
        _free_device_memory()

    def _make_engine(self) -> Engine | None:
        try:
            engine = self._load(self._report)
            self._report("warming up", 1.0)
            engine.warm_up()
        except Exception as error:  # handed to whoever waits for the engine
            # The traceback would keep a half-loaded model alive.
            self._settle(error if isinstance(error, UserError) else _unexpected(error))
            return None
        self._check_acceptance = engine.rule_for
        self._settle(_description(engine))
        return engine

    def _report(self, what: str, fraction: float) -> None:
        if self._stopping:
            raise UserError("stopped before the policy was loaded")
        self._on_progress(what, fraction)

    def _settle(self, result: dict[str, str] | Exception) -> None:
        try:
            if isinstance(result, Exception):
                self._loaded.set_exception(result)
            else:
                self._loaded.set_result(result)
        except InvalidStateError:  # the other side was quicker
            _log.debug("the policy's loading was settled already")

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._requests or self._newest or engine.busy)
                if self._stopping:
                    return
                requests, self._requests = self._requests, []
                newest, self._newest = self._newest, None
            for request in requests:
                self._guarded(request, engine)
            if newest is not None:
                self._guarded(partial(self._submit, newest), engine)
            if engine.busy:
                self._guarded(self._tick, engine)

    def _guarded(self, request: Callable[[Engine], None], engine: Engine) -> None:
        try:
            request(engine)
        except Exception:  # whatever it is, the node must outlive it
            self._on_fault(traceback.format_exc())

    def _submit(self, observation: Observation, engine: Engine) -> None:
        self._hand_back(engine.submit(observation))

    def _tick(self, engine: Engine) -> None:
        try:
            outcomes = engine.tick()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            self._hand_back([Drop(drop.observation, DropReason.ENGINE_FAULT, detail) for drop in engine.flush()])
            raise
        self._hand_back(outcomes)

    def _hand_back(self, outcomes: list[Outcome] | list[Drop]) -> None:
        for outcome in outcomes:
            self._on_outcome(outcome)


def _description(engine: Engine) -> dict[str, str]:
    return {key: str(value) for key, value in engine.describe().items()}


def _unexpected(error: Exception) -> Exception:
    """An error whose message tells a developer where it came from."""
    where = "".join(traceback.format_exception(error))
    return RuntimeError(f"the policy could not be loaded: {type(error).__name__}: {error}\n{where}")


def _free_device_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
