# SPDX-License-Identifier: Apache-2.0
"""The thread that loads and runs the engine: the only one that touches torch."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one only from Python 3.11 on
from typing import TYPE_CHECKING, TypeVar

from specvla_ros.engine.outcome import Outcome
from specvla_ros.errors import UserError, missing_package
from specvla_ros.models.observation import Observation
from specvla_ros.ros.policy.parameters import PolicyParameters
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # the engine imports torch, which a machine that only configures may lack
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.settings import EngineSettings

Progress = Callable[[str, float], None]
Answer = TypeVar("Answer")

_ANSWER_TIMEOUT_S = 5.0  # longer than any tick
_STOP_TIMEOUT_S = 10.0


class InferenceThread:
    """Loads the policy, drives the engine and hands back what comes out.

    Its methods may be called from any thread. An observation goes to the engine's mailbox at once; everything else is
    done between two ticks, in the order of the calls. Only `wait_loaded`, `set_acceptance`, `switch` and `stop` wait.

    Args:
        load: makes the engine; called on the thread, with a callback for its progress.
        on_progress: called on the thread with what is being done and the fraction done.
        on_outcome: called with each action and each dropped frame, on the thread or on that of `submit`.
        on_fault: called on the thread with the traceback of an unexpected exception.
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
        self._calls: list[Callable[[Engine], None]] = []
        self._engine: Engine | None = None
        self._stopping = False
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

    def submit(self, observation: Observation) -> None:
        """Puts the newest observation before the engine; one that still waited is dropped for it."""
        engine = self._engine
        assert engine is not None, "an image came before the policy was loaded"
        self._hand_back(engine.submit(observation))
        with self._wake:
            self._wake.notify()

    def open(self, stream: str, *, budget_s: float, priority: int) -> None:
        """Has the engine take a robot in, or give it another budget: see `Engine.open`."""
        self._call(lambda engine: engine.open(stream, budget_s=budget_s, priority=priority))

    def close(self, stream: str, *, before_epoch: int) -> None:
        """Has the engine let a robot go, with what it has learned from it.

        Args:
            stream: its name.
            before_epoch: epoch whose frames stay: when the engine's turn comes, the robot may be active again.
        """
        self._call(lambda engine: self._hand_back(engine.close(stream, before_epoch=before_epoch)))

    def begin_epoch(self, epoch: int, stream: str = "", *, forget_stamps: bool = False) -> None:
        """Has the engine drop what is of a robot's earlier epochs; an action that is just ready may still come out.

        Args:
            epoch: the robot's new epoch.
            stream: its name; empty: the only one there is.
            forget_stamps: whether any stamp may come next, as after a clock jump.
        """
        if forget_stamps and self._engine is not None:
            self._engine.mailbox.take_any_stamp(stream)  # at once: the next image may come before the tick's end
        self._call(lambda engine: self._hand_back(engine.flush(before_epoch=epoch, stream=stream)))

    def check_instruction(self, instruction: str, on_checked: Callable[[str], None]) -> None:
        """Has the engine check an instruction; `on_checked` gets what is wrong with it, empty when nothing is."""

        def check(engine: Engine) -> None:
            try:
                engine.check_instruction(instruction)
                problem = ""
            except UserError as error:
                problem = str(error)
            except Exception as error:  # the robot does not follow what could not be checked
                problem = f"it could not be checked: {type(error).__name__}: {error}"
            on_checked(problem)

        self._call(check)

    def set_max_image_age(self, seconds: float) -> None:
        """Changes the engine's staleness limit; 0: none."""
        self._call(lambda engine: engine.set_max_image_age(seconds))

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Changes the engine's acceptance rule.

        Raises:
            UserError: the settings do not fit the policy, or the engine did not answer in time; the old rule stays.
        """
        self._ask(lambda engine: engine.set_acceptance(settings))

    def switch(self, settings: EngineSettings) -> dict[str, str]:
        """Has the engine decode otherwise; what is in flight is dropped.

        Returns:
            The new description, as `wait_loaded` does.

        Raises:
            UserError: it cannot, or the engine did not answer in time; it goes on as before.
        """

        def change(engine: Engine) -> dict[str, str]:
            self._hand_back(engine.switch(settings))
            return _description(engine)

        return self._ask(change)

    def stop(self) -> bool:
        """Ends the thread after the tick under way and frees the engine; False when it did not end in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _call(self, call: Callable[[Engine], None]) -> None:
        with self._wake:
            self._calls.append(call)
            self._wake.notify()

    def _ask(self, change: Callable[[Engine], Answer]) -> Answer:
        """Waits for what a change to the engine returns or raises."""
        if not self.loaded:
            raise UserError("the policy is still being loaded; set this parameter again when it is active")
        answer: Future[Answer] = Future()

        def call(engine: Engine) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(change(engine))
            except Exception as error:
                answer.set_exception(error if isinstance(error, UserError) else UserError(f"it failed: {error}"))

        self._call(call)
        try:
            return answer.result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            if answer.cancel():
                raise UserError(
                    f"the engine was busy with one tick for {_ANSWER_TIMEOUT_S:g} s, so nothing was changed; try again"
                ) from None
            return answer.result()  # it has begun: loading a draft head and capturing CUDA graphs can take longer

    def _run(self) -> None:
        engine = self._make_engine()
        if engine is not None:
            self._serve(engine)
        self._engine = engine = None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _make_engine(self) -> Engine | None:
        try:
            engine = self._load(self._report)
            self._report("warming up", 1.0)
            engine.warm_up()
        except Exception as error:  # handed to whoever waits for the engine
            # The traceback would keep a half-loaded model alive.
            self._loaded.set_exception(error if isinstance(error, UserError) else _unexpected(error))
            return None
        self._engine = engine
        self._loaded.set_result(_description(engine))
        return engine

    def _report(self, what: str, fraction: float) -> None:
        if self._stopping:
            raise UserError("stopped before the policy was loaded")
        self._on_progress(what, fraction)

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._calls or engine.busy)
                if self._stopping:
                    return
                calls, self._calls = self._calls, []
            for call in calls:
                self._guarded(call, engine)
            if engine.busy:
                self._guarded(self._tick, engine)

    def _guarded(self, call: Callable[[Engine], None], engine: Engine) -> None:
        """The engine turns the faults of a tick into drops; the node also survives those of everything around it."""
        try:
            call(engine)
        except Exception:
            self._on_fault(traceback.format_exc())

    def _tick(self, engine: Engine) -> None:
        self._hand_back(engine.tick())

    def _hand_back(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._on_outcome(outcome)


def load_engine(parameters: PolicyParameters, now_ns: Callable[[], int], progress: Progress) -> Engine:
    """Loads the checkpoint. Takes minutes for a large one; imports torch.

    Args:
        parameters: which checkpoint, and how to run it.
        now_ns: clock of the images' stamps.
        progress: called with what is being done and the fraction done.

    Raises:
        UserError: a Python package is missing, or the checkpoint or a parameter is wrong.
    """
    progress("importing torch", 0.0)
    try:
        from specvla_ros.engine.engine import Engine
        from specvla_ros.models.checkpoint import leave_a_core, load_target
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    leave_a_core()
    policy = load_target(parameters.checkpoint, **vars(parameters.model), progress=progress)
    return Engine(policy, parameters.decoding, now_ns=now_ns)


def _description(engine: Engine) -> dict[str, str]:
    return {key: str(value) for key, value in engine.describe().items()}


def _unexpected(error: Exception) -> Exception:
    """An error whose message tells a developer where it came from."""
    where = "".join(traceback.format_exception(error))
    return RuntimeError(f"the policy could not be loaded: {type(error).__name__}: {error}\n{where}")
