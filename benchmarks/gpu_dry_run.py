# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, for the steps of gpu_report.py: their code runs, and nothing is computed or timed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_cuda  # noqa: F401  (before the kernels: they then are Triton's)
import gpu_steps
import harness
import launches
import torch

import kernels
from specvla_ros.engine import engine


def _run_again(_: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """In place of `capture_on`."""

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        return run

    return capture


class _HostGenerator(torch.Generator):
    """There is none on the device."""

    def __new__(cls, device: Any = None) -> "_HostGenerator":
        return super().__new__(cls)


@contextmanager
def device() -> Iterator[None]:
    """The engine's fake device, with what a benchmark asks of one beside."""
    answers: dict[str, Any] = {
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_allocated": lambda *_: 1 << 30,
        "max_memory_allocated": lambda *_: 2 << 30,
        "get_device_name": lambda *_: "no GPU: a dry run",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=80 << 30),
    }
    with ExitStack() as stack:
        stack.enter_context(launches.device())
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(engine, "device_fault", lambda _: ""))
        stack.enter_context(patch.object(harness, "capture_on", _run_again))
        stack.enter_context(patch.object(torch, "Generator", _HostGenerator))
        stack.enter_context(patch.object(kernels, "random_draft_head", lambda decoder: launches._head(Path(), decoder)))
        yield


if __name__ == "__main__":
    with device():
        gpu_steps.main(fake=True)
