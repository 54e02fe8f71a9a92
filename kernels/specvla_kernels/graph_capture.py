# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of work on fixed memory, each compared with the eager run."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specvla_kernels.device import has_kernels, why_no_kernels
from specvla_kernels.product_contest import timing

# Relative to a row's length. Another size sums in another order in every layer; a wrong row is off by its whole length.
_TOLERANCES = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.2}
_EXACT = 1e-6


TILE_ROWS = 64  # of a matrix product: a partial tile takes as long as a whole one
_PART = 8  # above 512 rows, sizes are multiples of an eighth of the next power of two


def padded_rows(rows: int, measured: Sequence[int] = ()) -> int:
    """The captured size for a number of rows: the smallest fit of `measured` (ascending, above a tile), if any.

    Up to a tile, and beyond the last measured size, sizes are powers of two, then multiples of a tile or an eighth.
    """
    power = 1 << (rows - 1).bit_length()
    step = min(power, max(TILE_ROWS, power // _PART))
    by_rule = -(-rows // step) * step
    return by_rule if rows <= TILE_ROWS else next((size for size in measured if size >= rows), by_rule)


def paddings(low: int, high: int, measured: Sequence[int] = ()) -> Iterator[int]:
    """The sizes that `padded_rows` gives for `low` to `high` rows, ascending."""
    rows = padded_rows(low, measured)
    yield rows
    while rows < high:
        rows = padded_rows(rows + 1, measured)
        yield rows


def randomize(keys: Tensor, values: Tensor) -> None:
    """Fills an unused store with finite keys and values, to be read by a check."""
    generator = torch.Generator(keys.device).manual_seed(0)
    for store in (keys, values):
        store.normal_(generator=generator)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Differences of results [n, size] by row, relative to the row's length, float64 [n]; waits for the device."""
    expected = expected.double()
    return (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)


def fits(errors: Tensor, dtype: torch.dtype) -> bool:
    """True if no row of a work in this dtype differs by more than rounding."""
    return bool((errors <= _TOLERANCES.get(dtype, _EXACT)).all())


def check_errors(errors: Tensor, dtype: torch.dtype, *, what: str) -> None:
    """Raises RuntimeError, naming the work, if rows are not finite or differ by more than rounding."""
    if not fits(errors, dtype):
        worst = float(errors.max()) if bool(errors.isfinite().all()) else torch.nan
        raise RuntimeError(f"{what} is off by {worst:.2g} of a row's length")


def check_rows(found: Tensor, expected: Tensor, *, what: str, dtype: torch.dtype | None = None) -> None:
    """`check_errors` of results [n, size]. `dtype` is that of the work; None: that of `expected`."""
    check_errors(row_errors(found, expected), dtype or expected.dtype, what=what)


Result = TypeVar("Result")


class Capture(Protocol):
    """Captures work that reads and writes the same memory whenever it runs, for replay."""

    def __call__(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Returns a replay of the work, whose result also has the same memory each time."""


class Captures:
    """An engine's captured work, and its eager work by reason.

    Args:
        on_attempt: called with each piece of work before it is captured.
    """

    def __init__(self, capture: Capture, on_attempt: Callable[[str], None] = lambda _: None) -> None:
        self.capture = capture
        self._on_attempt = on_attempt
        self.count = 0
        self.failed: dict[str, list[str]] = {}

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One capture and its comparison; a failure is recorded, and the others continue."""
        self._on_attempt(what)
        with self.group(what):
            yield
            self.count += 1

    @contextmanager
    def group(self, what: str) -> Iterator[None]:
        """Several attempts and their setup; a failure between them is recorded too."""
        try:
            yield
        except Exception as error:  # it runs without a graph too, only slower
            self.failed.setdefault(_reason(error), []).append(what)

    def summary(self) -> str:
        """Summary for users: the number of captures, and the eager work with its reasons."""
        eager = [f"{', '.join(names)} ({reason})" for reason, names in self.failed.items()]
        return "; ".join([f"{self.count} captured", *([f"eager: {', '.join(eager)}"] if eager else [])])


def _reason(error: BaseException) -> str:
    """The first error in one line; an error while capturing makes the end of the capture fail too."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Capturable(Protocol):
    """Work that runs captured or eagerly, or whose first run takes too long for a tick."""

    def capture(self, captures: Captures) -> None:
        """Captures it, each size as an attempt, and compares the result with the eager one."""

    def release(self) -> None:
        """Drops the captures; the work runs eagerly again."""


def capture_on(store: Tensor) -> Capture | None:
    """The capture of work on a store of keys or values; None on a CPU, where it gains nothing.

    Raises RuntimeError if the operators run as references, which read spans on the host.
    """
    if not store.is_cuda:
        return None
    if not has_kernels(store):
        raise RuntimeError(f"operators run on references: {why_no_kernels(store.device, store.dtype)}")
    return _cuda_graphs(store.device)


def _cuda_graphs(device: torch.device) -> Capture:
    """Captures that share the memory of intermediate results, so that only one may run at a time."""
    memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Result]) -> Callable[[], Result]:
        nonlocal memory
        current, (side, pool) = torch.cuda.current_stream(device), memory
        side.wait_stream(current)
        # The outer context restores the current stream if the capture cannot be ended.
        with torch.cuda.stream(side):
            with timing():
                run()  # compiles kernels, which is not possible in a capture
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of the process may use the GPU meanwhile.
                with (
                    _own_workspaces(),
                    torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
                ):
                    result = run()
            except Exception:
                _end_failed_capture(device, pool)
                # The state of a stream and a pool is unknown after a failed capture.
                memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
                raise
        current.wait_stream(side)

        def replay() -> Result:
            graph.replay()
            return result

        return replay

    return capture


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Gives captured work cuBLAS workspaces in the graphs' own memory, which lives as long as a graph.

    A graph holds a workspace's bare address, and torch frees the workspace from before the capture whenever any graph
    of the same stream ends or a compiler clears them all (pytorch/pytorch#193402): replays would then write to memory
    that is reused or unmapped. Work outside must not use the graphs' workspaces afterwards either.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tells torch's allocator and random generator that a failed capture is over, which not every torch does.

    Otherwise an assertion fails the next time that memory is short (pytorch/pytorch#180395), and the next random number
    raises "Offset increment outside graph capture". Any successful capture ends the latter, such as an empty one.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            pass


def side_by_side(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Results of independent calls, which run on one stream each in a capture, else one after the other."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [call() for call in calls]
    current = torch.cuda.current_stream(device)
    others = [torch.cuda.Stream(device) for _ in calls[1:]]
    for stream in others:
        stream.wait_stream(current)
    results = [calls[0]()]
    for stream, call in zip(others, calls[1:], strict=True):
        with torch.cuda.stream(stream):
            results.append(call())
    for stream in others:
        current.wait_stream(stream)
    return results
