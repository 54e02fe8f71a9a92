# SPDX-License-Identifier: Apache-2.0
"""Chooses between a product's fused launch and the libraries' product with separate kernels.

This is the only place of the decision. While an engine warms up, each shape is timed both ways on the device, once. A
shape that was not timed uses the fused launch if it has few rows and a dtype with tensor cores: the same in every run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median

import torch
from torch import Tensor

FEW_ROWS = 64  # of a forward of trees; more rows are bound by arithmetic, where the libraries' products are faster
_ROUNDS = 7
# Memory that empties the L2 cache, in which a forward finds none of its weights: several times the cache, and enough to
# keep the device busy until the timed call is launched. An Orin's 4 MB do not take what the weights have left of it.
_CACHES, _MIN_COLD_BYTES, _MAX_COLD_BYTES = 4, 16 << 20, 256 << 20
_Key = tuple[object, ...]

_faster: dict[_Key, bool] = {}  # by device, dtype, rows, weight's shape and kind
# Set in the thread that warms up, not in another thread whose engine ticks meanwhile.
_timing: ContextVar[bool] = ContextVar("timing", default=False)


def is_fused(
    fused: Callable[[], Tensor],
    apart: Callable[[], Tensor],
    x: Tensor,
    weight: Tensor,
    kind: str,
    most_rows: int = FEW_ROWS,
) -> bool:
    """True if the fused launch should run; times both if `timing` is on and this shape has not been timed yet.

    `kind` names what is fused with the product of x, [n_rows, in_features], and the weight. Above `most_rows` rows it
    is always False.
    """
    if x.shape[0] > most_rows or x.dtype.itemsize != 2 or (kind in ("norm", "gate") and x.dtype == torch.float16):
        return False  # float32 has no exact tensor cores, float16 may overflow before the norm's scale
    key = (x.device, x.dtype, x.shape[0], weight.shape, kind)
    if _timing.get() and key not in _faster and not torch.cuda.is_current_stream_capturing():
        _faster[key] = seconds(fused, x.device) <= seconds(apart, x.device)
    return _faster.get(key, True)


@contextmanager
def timing() -> Iterator[None]:
    """Enables timing of new shapes in a context; later forwards of the process use the results."""
    before = _timing.set(True)
    try:
        yield
    finally:
        _timing.reset(before)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call, with a cold cache as in a forward; waits for the device."""
    call()  # compiles, and allocates workspaces
    # Emptying the cache also keeps the device busy until the call has been launched.
    cold = torch.empty(cold_bytes(device), dtype=torch.int8, device=device)
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


def cold_bytes(device: torch.device) -> int:
    """Bytes to overwrite so that a GPU's L2 cache holds nothing of a forward."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _MAX_COLD_BYTES)
    return max(_MIN_COLD_BYTES, min(_CACHES * int(cache), _MAX_COLD_BYTES))
