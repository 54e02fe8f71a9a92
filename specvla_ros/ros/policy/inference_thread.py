# SPDX-License-Identifier: Apache-2.0
"""The thread that loads and runs the engine: the only one that touches torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one only from Python 3.11 on
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from specvla_ros.engine.outcome import Outcome
from specvla_ros.engine.thread import EngineThread
from specvla_ros.errors import UserError, missing_package
from specvla_ros.policy_parameters import PolicyParameters
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # the engine imports torch, which a machine that only configures may lack
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.settings import EngineSettings

Progress = Callable[[str, float], None]
Answer = TypeVar("Answer")

_ANSWER_TIMEOUT_S = 5.0  # longer than any tick
_STOP_TIMEOUT_S = 10.0


class InferenceThread(EngineThread):
    """Loads the policy, drives the engine and hands back what comes out.

    Only `wait_loaded`, `set_acceptance`, `switch` and `stop` wait. The callbacks are called on the thread, `on_outcome`
    also on that of `submit`; `on_progress` gets what is being done and the fraction done, `on_fault` a traceback.
    """

    def __init__(
        self,
        load: Callable[[Progress], Engine],
        *,
        on_progress: Progress,
        on_outcome: Callable[[Outcome], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._on_progress = on_progress
        self._description: dict[str, str] = {}
        super().__init__(
            partial(self._load_warm, load),
            on_outcome=on_outcome,
            on_fault=on_fault,
            on_end=_free_gpu_memory,
            name="inference",
        )

    @property
    def loaded(self) -> bool:
        return self._loaded.done()

    def wait_loaded(self) -> dict[str, str]:
        """Waits until the policy is loaded and warm, and returns its description; raises what `load` raised."""
        self._loaded.result()
        return self._description

    def begin_epoch(self, epoch: int, stream: str = "", *, forget_stamps: bool = False) -> None:
        """Has the engine drop what is of a robot's earlier epochs; an action that is just ready may still come out.

        `forget_stamps`: any stamp may come next, as after a clock jump.
        """
        if forget_stamps and self._engine is not None:
            self._engine.mailbox.take_any_stamp(stream)  # at once: the next image may come before the tick's end
        self.call(lambda engine: engine.flush(before_epoch=epoch, stream=stream))

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

        self.call(check)

    def set_acceptance(self, settings: AcceptanceSettings) -> None:
        """Changes the engine's acceptance rule; the old one stays where UserError is raised."""
        self._ask(lambda engine: engine.set_acceptance(settings))

    def switch(self, settings: EngineSettings) -> dict[str, str]:
        """Has the engine decode otherwise, and returns the new description; what is in flight is dropped.

        It goes on as before where UserError is raised.
        """

        def change(engine: Engine) -> dict[str, str]:
            self._hand_over(engine.switch(settings))
            return _description(engine)

        return self._ask(change)

    def stop(self) -> bool:
        """Ends the thread after the tick under way and frees the engine; False when it did not end in time."""
        return self.end(timeout_s=_STOP_TIMEOUT_S)

    def _ask(self, change: Callable[[Engine], Answer]) -> Answer:
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

        self.call(call)
        try:
            return answer.result(_ANSWER_TIMEOUT_S)
        except FutureTimeoutError:
            if answer.cancel():
                raise UserError(
                    f"the engine was busy with one tick for {_ANSWER_TIMEOUT_S:g} s, so nothing was changed; try again"
                ) from None
            return answer.result()  # it has begun: loading a draft head and capturing CUDA graphs can take longer

    def _load_warm(self, load: Callable[[Progress], Engine]) -> Engine:
        engine = load(self._report)
        self._report("warming up", 1.0)
        engine.warm_up()
        self._description = _description(engine)
        return engine

    def _report(self, what: str, fraction: float) -> None:
        if self._stopping:
            raise UserError("stopped before the policy was loaded")
        self._on_progress(what, fraction)


def load_engine(parameters: PolicyParameters, now_ns: Callable[[], int], progress: Progress) -> Engine:
    """Loads the checkpoint. Takes minutes for a large one; imports torch.

    Raises UserError where a Python package is missing, or the checkpoint or a parameter is wrong.
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


def _free_gpu_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
