# SPDX-License-Identifier: Apache-2.0
"""Chooses between our fused launch of a product and the libraries' product with other kernels.

Decided here alone. While an engine warms up, each shape is timed both ways on the device, once; a shape that was not
timed runs as our launch where its rows are few and its dtype has tensor cores for it: the same in every run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median

import torch
from torch import Tensor

FEW_ROWS = 64  # of a forward of trees; rows above are bound by arithmetic, where the libraries' products are at home
_ROUNDS = 7
_CACHE_BYTES = 256 << 20  # more than any device's second-level cache: a forward finds no weight of its own there
_Key = tuple[object, ...]

_faster: dict[_Key, bool] = {}  # by device, dtype, rows, weight's shape and kind
# Of the thread that warms up, not of another whose engine ticks meanwhile.
_timing: ContextVar[bool] = ContextVar("timing", default=False)


def is_fused(
    fused: Callable[[], Tensor],
    apart: Callable[[], Tensor],
    x: Tensor,
    weight: Tensor,
    kind: str,
    most_rows: int = FEW_ROWS,
) -> bool:
    """Whether to run the fused launch; times both where `timing` is on and this shape has not been timed yet.

    `kind` says what stands around the product of x, [n_rows, in_features], and the weight; above `most_rows` it is
    never fused.
    """
    if x.shape[0] > most_rows or x.dtype.itemsize != 2 or (kind in ("norm", "gate") and x.dtype == torch.float16):
        return False  # float32 has no tensor cores that are exact, float16 may overflow in front of the norm's scale
    key = (x.device, x.dtype, x.shape[0], weight.shape, kind)
    if _timing.get() and key not in _faster and not torch.cuda.is_current_stream_capturing():
        _faster[key] = seconds(fused, x.device) <= seconds(apart, x.device)
    return _faster.get(key, True)


@contextmanager
def timing() -> Iterator[None]:
    """Times the shapes that are met inside; later forwards of the process use the results."""
    before = _timing.set(True)
    try:
        yield
    finally:
        _timing.reset(before)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, with a cold cache as in a forward; waits for the device."""
    call()  # compiles, and allocates workspaces
    # What empties the cache also keeps the device busy until the call has been launched.
    cold = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)
    times = []
    for _ in range(_ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()
        start.record()
        call()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(stop) for start, stop in times)
