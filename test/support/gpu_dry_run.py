# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there, for the steps of the report: their code runs, and nothing is computed or timed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton  # noqa: F401  (before the kernels: they then are Triton's)
from launches import launches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks import harness, saturated
from benchmarks.gpu import kernels, steps
from benchmarks.random_policy import SIZES, TOKENS, RandomPolicy
from specvla_ros.engine import engine, kernel_check
from specvla_ros.engine.settings import EngineSettings

_Modes = Callable[..., dict[str, EngineSettings]]


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


class _AtOnce:
    """In place of a thread that prepares pictures: fake tensors are one thread's."""

    def __init__(self, _: int) -> None:
        pass

    def submit(self, run: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(run(*arguments))
        return done


def _contiguous(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def contiguous(tensor: Tensor, **options: Any) -> Tensor:
        if options or not isinstance(tensor, FakeTensor) or tensor.is_contiguous():
            return real(tensor, **options)
        return torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)

    return contiguous


def _invert(real: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def invert(tensor: Tensor) -> Tensor:
        return torch.ops.aten.bitwise_not.default(tensor) if isinstance(tensor, FakeTensor) else real(tensor)

    return invert


def _nonzero(real: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is, since what is cannot be known."""

    def nonzero(tensor: Tensor, *, as_tuple: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return real(tensor, as_tuple=as_tuple)
        none = torch.empty(0, tensor.dim(), dtype=torch.int64, device=tensor.device)
        return none.unbind(1) if as_tuple else none

    return nonzero


def _equal(real: Callable[[Tensor, Tensor], bool]) -> Callable[[Tensor, Tensor], bool]:
    """What is computed nowhere is equal."""

    def equal(tensor: Tensor, other: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or real(tensor, other)

    return equal


def _decoder(job: steps.Job, layers: int = 0) -> Any:
    shape = SIZES[job.size].llama
    return launches.fake_decoder(replace(shape, num_hidden_layers=layers) if layers else shape)


@contextmanager
def _policy(job: steps.Job, tokens: int = TOKENS) -> Iterator[RandomPolicy]:
    yield launches.fake_policy(SIZES[job.size], tokens)


def _modes(real: _Modes) -> _Modes:
    """The head is not in a file, and the answers are of another rule."""

    def modes(job: steps.Job, tokens: int = TOKENS) -> dict[str, EngineSettings]:
        rule, small, chosen = launches.CASES["spec"].settings.acceptance, job.size == "tiny", real(job, tokens)
        depth = 2 if small else chosen["spec"].draft.depth  # a graph of each depth
        return {
            name: replace(each, acceptance=rule, draft=replace(each.draft, head="random", depth=depth))
            for name, each in chosen.items()
            if not small or name in ("ar", "spec", "specpipe")  # enough to show that it runs
        }

    return modes


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
        stack.enter_context(patch.object(kernel_check, "check_rows", lambda *_, **__: None))
        stack.enter_context(patch.object(Tensor, "equal", _equal(Tensor.equal)))
        stack.enter_context(patch.multiple(steps, _decoder=_decoder, _policy=_policy, _modes=_modes(steps._modes)))
        stack.enter_context(patch.object(harness, "capture_on", _run_again))
        stack.enter_context(patch.object(harness, "_WARM_UPS", 1))
        stack.enter_context(patch.object(saturated, "ThreadPoolExecutor", _AtOnce))
        # A build without CUDA has no guard for its device, and methods that are written by hand ask for one.
        stack.enter_context(patch.object(FakeTensor, "__float__", lambda _: 0.0, create=True))
        stack.enter_context(patch.object(Tensor, "contiguous", _contiguous(Tensor.contiguous)))
        stack.enter_context(patch.object(Tensor, "__invert__", _invert(Tensor.__invert__)))
        stack.enter_context(patch.object(Tensor, "nonzero", _nonzero(Tensor.nonzero)))
        stack.enter_context(patch.object(torch, "Generator", _HostGenerator))
        stack.enter_context(patch.object(kernels, "random_draft_head", lambda decoder: launches._head(Path(), decoder)))
        yield


if __name__ == "__main__":
    with device():
        steps.main(fake=True)
