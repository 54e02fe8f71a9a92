# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of anything that runs on memory that stays where it is, each compared with the eager run."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels

# Of a row's length. Another size sums in another order, in every layer; a row that is wrong is off by its whole length.
_TOLERANCES = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.2}
_EXACT = 1e-6


def randomize(keys: Tensor, values: Tensor) -> None:
    """Gives every row of an unused store finite keys and values, for the work of a check to look at."""
    generator = torch.Generator(keys.device).manual_seed(0)
    for store in (keys, values):
        store.normal_(generator=generator)


def check_rows(found: Tensor, expected: Tensor, *, what: str, dtype: torch.dtype | None = None) -> None:
    """Compares results row by row; waits for the device.

    Args:
        found: [n, size], of captured work.
        expected: like found, without capture.
        what: the captured work, for the error.
        dtype: that it is computed in; None: that of what is expected.

    Raises:
        RuntimeError: they are not finite, or differ by more than rounding.
    """
    tolerance = _TOLERANCES.get(dtype or expected.dtype, _EXACT)
    expected = expected.double()
    off = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    worst = float(off.max()) if bool(off.isfinite().all()) else torch.nan
    if not worst <= tolerance:
        raise RuntimeError(f"{what} is off by {worst:.2g} of a row's length")


Result = TypeVar("Result")


class Capture(Protocol):
    """Makes work repeatable that reads and writes the same memory whenever it runs."""

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """What does it again and gives the result, whose memory is the same each time too."""


class Capturable(Protocol):
    """Work that runs captured, or as it comes; or what else takes too long to be met in a tick first."""

    def capture(self, capture: Capture) -> int:
        """Captures it and compares the result with that of the same work without capture.

        Returns:
            How many captures it took.

        Raises:
            Exception: whatever goes wrong.
        """

    def release(self) -> None:
        """Forgets what was captured: it runs as it comes again."""


def capture_on(store: Tensor) -> Capture | None:
    """How work on such a store is captured; None on a CPU, where nothing is gained.

    What one of these has captured is to be dropped together: with a graph, torch drops the workspace of cuBLAS that all
    graphs of the same stream use (pytorch/pytorch#193402).

    Args:
        store: of keys or values.

    Raises:
        RuntimeError: the operators do not run as kernels there, and so read spans on the host.
    """
    if not store.is_cuda:
        return None
    if not has_kernels(store):
        raise RuntimeError(f"there are no Triton kernels for {str(store.dtype).removeprefix('torch.')} here")
    return _cuda_graphs(store.device)


def _cuda_graphs(device: torch.device) -> Capture:
    """Captures that share the memory of what is in between: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)

    def capture(run: Callable[[], Result]) -> Callable[[], Result]:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        # The outer context brings the current stream back if the capture cannot be ended.
        with torch.cuda.stream(side):
            run()  # compiles kernels and allocates workspaces, which a capture cannot
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of the process may use the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    result = run()
            except Exception:
                _end_allocation(device, pool)
                raise
        current.wait_stream(side)

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    return capture


def _end_allocation(device: torch.device, pool: Any) -> None:
    """Tells the allocator that a failed capture is over.

    Not every torch does so itself, and an assertion then fails the next time that memory is short
    (pytorch/pytorch#180395).
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
