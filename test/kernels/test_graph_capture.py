# SPDX-License-Identifier: Apache-2.0
"""The capture on a GPU, with torch's own signatures but no GPU: what it calls, and what a failure leaves behind."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from specvla_kernels import graph_capture
from specvla_kernels.graph_capture import capture_on


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that does nothing, and kernels for it."""
    calls = SimpleNamespace(
        graph_pool_handle=MagicMock(return_value=(0, 1)),
        Stream=MagicMock(),
        stream=MagicMock(),
        current_stream=MagicMock(),
        CUDAGraph=MagicMock(),
        graph=create_autospec(torch.cuda.graph),
    )
    calls.graph.return_value.__exit__.return_value = False
    calls.stream.return_value.__exit__.return_value = False
    for name, call in vars(calls).items():
        monkeypatch.setattr(torch.cuda, name, call)
    calls.ended = MagicMock()
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", MagicMock(), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", calls.ended, raising=False)
    monkeypatch.setattr(graph_capture, "has_kernels", lambda store: store.dtype is not torch.float64)
    return calls


def store(dtype: torch.dtype) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))


def test_work_runs_once_before_it_is_captured_and_not_when_it_is_replayed(cuda: SimpleNamespace) -> None:
    capture = capture_on(store(torch.bfloat16))
    assert capture is not None
    results = [torch.zeros(1), torch.ones(1)]
    left = iter(results)
    replay = capture(lambda: next(left))
    assert replay() is results[1] and replay() is results[1]
    assert cuda.CUDAGraph.return_value.replay.call_count == 2
    side = cuda.Stream.return_value
    side.wait_stream.assert_called_once_with(cuda.current_stream.return_value)
    cuda.current_stream.return_value.wait_stream.assert_called_once_with(side)
    cuda.ended.assert_not_called()


def test_a_capture_that_fails_is_over_for_the_allocator(cuda: SimpleNamespace) -> None:
    capture = capture_on(store(torch.bfloat16))
    assert capture is not None
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("cannot end")
    with pytest.raises(RuntimeError, match="cannot end"):
        capture(lambda: torch.zeros(1))
    cuda.ended.assert_called_once_with(0, (0, 1))
    cuda.stream.return_value.__exit__.assert_called_once()  # the current stream is as before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_on_a_gpu_what_others_free_is_not_what_a_graph_works_on() -> None:
    """Products that are split among programs, whose sums cuBLAS keeps in its workspace."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, *weights = (
        torch.randn(n, 8192, dtype=torch.bfloat16, device="cuda", generator=generator) for n in (3, 64, 96, 128)
    )
    capture = capture_on(x)
    assert capture is not None

    def products() -> torch.Tensor:
        return torch.cat([torch.mm(x, weight.T) for weight in weights], dim=1)

    expected = products()
    replay = capture(products)
    capture(products)  # its graph ends at once, and with it what torch keeps for its stream
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    torch.testing.assert_close(replay(), expected, atol=2.0, rtol=0.02)
    assert all(each.isnan().all() for each in others), "a replay wrote to memory of somebody else"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
def test_on_a_gpu_a_failed_capture_leaves_random_numbers_and_later_captures_alone() -> None:
    x = torch.ones(4, device="cuda")
    capture = capture_on(x)
    assert capture is not None
    with pytest.raises(RuntimeError):
        capture(lambda: x.mul(x.sum().item()))
    assert torch.randn(3, device="cuda").isfinite().all()
    assert capture(lambda: x + 1)().tolist() == [2.0] * 4


def test_without_kernels_nothing_can_be_captured(cuda: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="no Triton kernels for float64"):
        capture_on(store(torch.float64))
    assert capture_on(torch.empty(1)) is None
