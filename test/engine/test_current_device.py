# SPDX-License-Identifier: Apache-2.0
"""Whatever thread drives an engine, its kernels are launched with the policy's GPU as the thread's current device."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.draft_heads import policy_with_random_head

from specvla_kernels.device import on_device
from specvla_ros.engine import engine as engines
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.runner import Runner
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.engine.thread import EngineThread
from specvla_ros.engine.verifier import Verifier
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.eagle import drafter as eagle
from specvla_ros.speculation.settings import DraftSettings


def test_every_launch_is_on_the_policys_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_with_random_head(tmp_path, seed=5, hidden_size=64, layers=2)
    current = threading.local()
    launches: list[bool] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        assert device == policy.decoder.device
        current.depth = getattr(current, "depth", 0) + 1
        try:
            yield
        finally:
            current.depth -= 1

    def launching(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            launches.append(getattr(current, "depth", 0) > 0)
            return method(*args, **kwargs)

        return run

    monkeypatch.setattr(engines, "on_device", entered)
    for owner, name in ((Runner, "run"), (Runner, "embed"), (Verifier, "verify"), (Verifier, "capture")):
        monkeypatch.setattr(owner, name, launching(getattr(owner, name)))
    monkeypatch.setattr(eagle.TreeGrower, "__init__", launching(eagle.TreeGrower.__init__))
    settings = EngineSettings("spec", draft=DraftSettings(nodes=6, depth=2, top_k=2))
    engine = Engine(policy, settings)
    assert launches and all(launches), "a draft head is quantised, and its weights are multiplied"

    def frame(stamp_ns: int) -> Observation:
        return Observation(np.zeros((32, 32, 3), np.uint8), "put carrot on plate", stamp_ns)

    def counted(act: Callable[[], object]) -> None:
        launches.clear()
        act()
        assert launches and all(launches)

    counted(engine.warm_up)
    counted(lambda: engine.act(frame(1)))
    engine.switch(EngineSettings("specpipe", draft=settings.draft))
    counted(lambda: engine.act(frame(2)))
    ended = threading.Event()
    thread = EngineThread(lambda: engine, on_outcome=lambda _: ended.set(), on_fault=print)

    def submitted() -> None:
        thread.submit(frame(3))
        assert ended.wait(60)

    counted(submitted)
    assert thread.end(timeout_s=60)


def test_a_gpu_is_made_current_and_a_cpu_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(asked.append(device)))  # type: ignore[func-returns-value]
    with on_device(torch.device("cpu")), on_device(torch.device("cuda:1")):
        assert asked == [torch.device("cuda:1")]
