# SPDX-License-Identifier: Apache-2.0
"""The thread that loads and runs the engine: the only one that uses torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the builtin before Python 3.11
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specvla_ros.engine.outcome import Outcome
from specvla_ros.engine.thread import EngineThread
from specvla_ros.errors import UserError, missing_package
from specvla_ros.policy_parameters import ONE_ROBOT, PolicyParameters, Progress, load_complete
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # the engine imports torch, which a machine that only configures may lack
    from specvla_ros.engine.engine import Engine
    from specvla_ros.engine.settings import EngineSettings

Answer = TypeVar("Answer")

_ANSWER_TIMEOUT_S = 5.0  # longer than any tick
_STOP_TIMEOUT_S = 10.0


class InferenceThread(EngineThread):
    """Loads the policy, drives the engine and hands back its outcomes.

    Only `wait_loaded`, `set_acceptance`, `switch` and `stop` block. Callbacks run on this thread, `on_outcome` also on
    that of `submit`. `on_progress` gets the present step and the fraction done, `on_fault` a traceback.
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

    @property
    def device_fault(self) -> str:
        """The reason why the device has failed and every frame is dropped; empty: it works, or nothing is loaded."""
        engine = self._engine
        return engine.fault if engine is not None else ""

    def wait_loaded(self) -> dict[str, str]:
        """Waits until the policy is loaded and warm, and returns its description. Raises the errors of `load`."""
        self._loaded.result()
        return self._description

    def begin_epoch(self, epoch: int, stream: str = "", *, forget_stamps: bool = False) -> None:
        """Drops a robot's earlier epochs from the engine. An action that is just ready may still come out.

        `forget_stamps`: the next image may have any stamp, as after a clock jump.
        """
        if forget_stamps and self._engine is not None:
            self._engine.mailbox.take_any_stamp(stream)  # at once: the next image may come before the tick's end
        self.call(lambda engine: engine.flush(before_epoch=epoch, stream=stream))

    def check_instruction(self, instruction: str, on_checked: Callable[[str], None]) -> None:
        """Lets the engine check an instruction; `on_checked` gets the problem, or an empty string."""

        def check(engine: Engine) -> None:
            try:
                engine.check_instruction(instruction)
                problem = ""
            except UserError as error:
                problem = str(error)
            except Exception as error:  # an unchecked instruction is not followed
                problem = f"it could not be checked: {type(error).__name__}: {error}"
            on_checked(problem)

        self.call(check)

    def set_acceptance(self, settings: AcceptanceSettings) -> dict[str, str]:
        """Changes the engine's acceptance rule, and returns the new description. After UserError the old one stays."""

        def change(engine: Engine) -> dict[str, str]:
            engine.set_acceptance(settings)
            return _description(engine)

        return self._ask(change)

    def switch(self, settings: EngineSettings) -> dict[str, str]:
        """Changes the engine's settings, drops the frames in flight, and returns the new description.

        After UserError the old settings stay.
        """

        def change(engine: Engine) -> dict[str, str]:
            self._hand_over(engine.switch(settings))
            return _description(engine)

        return self._ask(change)

    def stop(self) -> bool:
        """Ends the thread after the current tick and frees the engine. Returns False if it did not end in time."""
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
            return answer.result()  # already started: loading a draft head or capturing CUDA graphs can take longer

    def _load_warm(self, load: Callable[[Progress], Engine]) -> Engine:
        engine = load(self._report)
        engine.warm_up(self._report)
        self._description = _description(engine)
        return engine

    def _report(self, what: str, fraction: float) -> None:
        if self._stopping:
            raise UserError("stopped before the policy was loaded")
        self._on_progress(what, fraction)


def load_engine(parameters: PolicyParameters, now_ns: Callable[[], int], progress: Progress) -> Engine:
    """Loads the checkpoint. Takes minutes for a large one; imports torch.

    Raises UserError if a Python package is missing, or if the checkpoint or a parameter is wrong.
    """
    progress("importing torch", 0.0)
    try:
        from specvla_ros.engine.engine import Engine
        from specvla_ros.models.checkpoint import leave_a_core, load_target
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    leave_a_core()
    # With several robots, each robot's own node checks the meaning of its actions.
    action = parameters.robot.action if parameters.robots == ONE_ROBOT else None
    checkpoint, model = Path(parameters.checkpoint), parameters.model
    load = partial(load_target, checkpoint, **vars(model))
    policy = load_complete(lambda shown: load(progress=shown), progress, checkpoint, model, action)
    return Engine(policy, parameters.decoding, now_ns=now_ns)


def _description(engine: Engine) -> dict[str, str]:
    described = engine.describe() | {"warm_up_s": f"{engine.warm_up_s:.1f}"}
    return {key: str(value) for key, value in described.items()}


def _free_gpu_memory() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
