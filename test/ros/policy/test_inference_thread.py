# SPDX-License-Identifier: Apache-2.0
"""The thread that owns the engine: who calls it, who waits, and what it survives. A scripted engine, no torch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENCE_S, wait_until

from specvla_ros.engine.mailbox import Mailbox, Waiting
from specvla_ros.engine.outcome import Drop, DropReason, Outcome
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation
from specvla_ros.ros.policy import inference_thread
from specvla_ros.ros.policy.inference_thread import InferenceThread


class ScriptedEngine:
    """Notes what is called on which thread; a tick may be held up."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.warm_up_s = 0.5
        self.threads: set[str] = set()
        self.mailbox = Mailbox(None)
        self.decoded: list[Observation] = []
        self.acceptance: object = "strict"
        self.in_tick, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.switching: Callable[[], None] = lambda: None

    def _note(self, name: str) -> None:
        self.called.append(name)
        self.threads.add(threading.current_thread().name)

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        self._note("warm_up")

    def describe(self) -> dict[str, object]:
        self._note("describe")
        return {"acceptance": self.acceptance}

    @property
    def busy(self) -> bool:
        return self.mailbox.waiting

    def submit(self, observation: Observation) -> list[Drop]:
        return self.mailbox.submit(observation)

    def tick(self) -> list[Outcome]:
        self._note("tick")
        waiting = self.mailbox.take(0.0)
        assert isinstance(waiting, Waiting)
        self.decoded.append(waiting.observation)
        self.in_tick.set()
        assert self.go_on.wait(PATIENCE_S)
        return []

    def flush(self, *, before_epoch: int, stream: str) -> list[Drop]:
        self._note("flush")
        return self.mailbox.drop(DropReason.EPOCH_CHANGED, before_epoch, stream)

    def check_instruction(self, instruction: str) -> None:
        self._note("check_instruction")
        if not instruction:
            raise UserError("the instruction is empty")
        if instruction == "fault":
            raise RuntimeError("a fault")

    def set_max_image_age(self, seconds: float) -> None:
        self._note("set_max_image_age")

    def set_acceptance(self, settings: object) -> None:
        self._note("set_acceptance")
        if settings == "too tight":
            raise UserError("smaller than one bin")
        if settings == "fault":
            raise RuntimeError("no memory")
        self.acceptance = settings

    def switch(self, settings: object) -> list[Drop]:
        self._note("switch")
        self.switching()
        self.acceptance = settings
        return []


@contextmanager
def running(engine: ScriptedEngine, **changes: Any) -> Iterator[Any]:
    callbacks: dict[str, Any] = {
        "on_progress": lambda what, fraction: None,
        "on_outcome": lambda outcome: None,
        "on_fault": lambda trace: pytest.fail(trace),
    }
    thread = InferenceThread(lambda progress: engine, **{**callbacks, **changes})  # type: ignore[arg-type, return-value]
    try:
        yield thread
    finally:
        engine.go_on.set()
        assert thread.stop()


def frame(stamp: int = 1, epoch: int = 0) -> Observation:
    return Observation(np.zeros((4, 4, 3), np.uint8), "lift the red cube", stamp, epoch=epoch)


@contextmanager
def tick_held_up(
    engine: ScriptedEngine, thread: InferenceThread, observation: Observation | None = None
) -> Iterator[None]:
    """As a large policy's tick, until the block's end."""
    engine.in_tick.clear()
    engine.go_on.clear()
    thread.submit(observation or frame())
    assert engine.in_tick.wait(PATIENCE_S)
    yield
    engine.go_on.set()


def test_only_the_thread_itself_touches_the_engine() -> None:
    engine, checked = ScriptedEngine(), threading.Event()
    with running(engine) as thread:
        assert thread.wait_loaded() == {"acceptance": "strict", "warm_up_s": "0.5"}
        assert thread.set_acceptance("near") == {"acceptance": "near", "warm_up_s": "0.5"}
        assert thread.switch("nearer") == {"acceptance": "nearer", "warm_up_s": "0.5"}
        thread.call(lambda engine: engine.set_max_image_age(1.0))
        thread.begin_epoch(1)
        thread.submit(frame(epoch=1))
        assert engine.in_tick.wait(PATIENCE_S)
        thread.check_instruction("lift", lambda problem: checked.set())
        assert checked.wait(PATIENCE_S)
    asked = {"set_acceptance", "switch", "set_max_image_age", "flush", "tick", "check_instruction"}
    assert asked <= set(engine.called)
    assert engine.threads == {"inference"}


def test_the_newest_frame_wins_however_long_a_tick_takes() -> None:
    engine = ScriptedEngine()
    outcomes: list[Drop] = []
    with running(engine, on_outcome=outcomes.append) as thread:
        thread.wait_loaded()
        with tick_held_up(engine, thread):
            for stamp in (2, 4, 3):
                thread.submit(frame(stamp))
        wait_until(lambda: len(engine.decoded) == 2)
    assert [observation.stamp_ns for observation in engine.decoded] == [1, 4]
    assert [(drop.observation.stamp_ns, drop.reason) for drop in outcomes] == [
        (2, DropReason.SUPERSEDED),
        (3, DropReason.OUT_OF_ORDER),
    ]


def test_a_new_epoch_voids_the_frames_before_it_alone() -> None:
    engine = ScriptedEngine()
    outcomes: list[Drop] = []
    with running(engine, on_outcome=outcomes.append) as thread:
        thread.wait_loaded()
        with tick_held_up(engine, thread):
            thread.submit(frame(2))
            thread.begin_epoch(1)
        wait_until(lambda: outcomes)
        with tick_held_up(engine, thread, frame(3, epoch=1)):
            thread.begin_epoch(2, forget_stamps=True)
            thread.submit(frame(1, epoch=2))
        wait_until(lambda: len(engine.decoded) == 3)
    assert [observation.epoch for observation in engine.decoded] == [0, 1, 2]
    assert [(drop.observation.stamp_ns, drop.reason) for drop in outcomes] == [(2, DropReason.EPOCH_CHANGED)]


def test_a_refused_change_is_told_to_who_asked() -> None:
    engine = ScriptedEngine()
    with running(engine) as thread:
        thread.wait_loaded()
        with pytest.raises(UserError, match="smaller than one bin"):
            thread.set_acceptance("too tight")
        with pytest.raises(UserError, match="it failed: no memory"):
            thread.set_acceptance("fault")
        assert engine.acceptance == "strict"


def test_no_change_while_the_policy_loads() -> None:
    engine, loading = ScriptedEngine(), threading.Event()
    engine.warm_up = lambda _: loading.wait(PATIENCE_S)  # type: ignore[method-assign, assignment]
    with running(engine) as thread:
        with pytest.raises(UserError, match="still being loaded"):
            thread.set_acceptance("near")
        loading.set()


def test_a_change_that_a_long_tick_keeps_waiting_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_thread, "_ANSWER_TIMEOUT_S", 0.05)
    engine = ScriptedEngine()
    with running(engine) as thread:
        thread.wait_loaded()
        with tick_held_up(engine, thread), pytest.raises(UserError, match="nothing was changed; try again"):
            thread.set_acceptance("near")
        thread.call(lambda engine: engine.set_max_image_age(1.0))
        wait_until(lambda: "set_max_image_age" in engine.called)
        assert "set_acceptance" not in engine.called


def test_a_change_that_has_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_thread, "_ANSWER_TIMEOUT_S", 0.01)
    engine, began = ScriptedEngine(), threading.Event()

    def capture_graphs() -> None:
        began.set()
        threading.Event().wait(0.1)  # longer than the answer's limit

    engine.switching = capture_graphs
    with running(engine) as thread:
        thread.wait_loaded()
        for _ in range(100):  # a busy machine may not begin within the limit
            try:
                assert thread.switch("near") == {"acceptance": "near", "warm_up_s": "0.5"}
                break
            except UserError:
                assert not began.is_set()
        assert engine.acceptance == "near"


def test_what_is_wrong_with_an_instruction_is_told() -> None:
    engine, problems, checked = ScriptedEngine(), [], threading.Semaphore(0)

    def on_checked(problem: str) -> None:
        problems.append(problem)
        checked.release()

    with running(engine) as thread:
        for instruction in ("lift", "", "fault"):
            thread.check_instruction(instruction, on_checked)
            assert checked.acquire(timeout=PATIENCE_S)
    assert problems == ["", "the instruction is empty", "it could not be checked: RuntimeError: a fault"]


def test_a_fault_outside_of_the_engines_own_net_is_survived() -> None:
    engine, faults, seen = ScriptedEngine(), [], threading.Event()

    def on_fault(trace: str) -> None:
        faults.append(trace)
        seen.set()

    def fail(*, before_epoch: int, stream: str) -> list[Drop]:
        raise RuntimeError("no such tensor")

    with running(engine, on_fault=on_fault) as thread:
        thread.wait_loaded()
        engine.flush = fail  # type: ignore[method-assign]
        thread.begin_epoch(1)
        assert seen.wait(PATIENCE_S)
        thread.set_acceptance("near")
    assert engine.acceptance == "near"
    assert len(faults) == 1 and "no such tensor" in faults[0]


def test_stopping_ends_a_load_at_its_next_report() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def load(progress: Callable[[str, float], None]) -> Any:
        progress("reading shard 1", 0.0)
        reached.set()
        assert go_on.wait(PATIENCE_S)
        progress("reading shard 2", 0.5)
        pytest.fail("it read on")

    thread = InferenceThread(
        load, on_progress=lambda *_: None, on_outcome=lambda outcome: None, on_fault=lambda trace: pytest.fail(trace)
    )
    assert reached.wait(PATIENCE_S)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(thread.stop()))
    stopping.start()
    wait_until(lambda: thread._stopping)
    go_on.set()
    stopping.join(PATIENCE_S)
    assert stopped == [True]
    with pytest.raises(UserError, match="stopped before the policy was loaded"):
        thread.wait_loaded()
