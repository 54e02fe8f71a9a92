"""Times of single calls whose operands lie in memory, not in a cache."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
_FLUSHED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # more than the caches; on a GPU also longer than a launch takes
_WARM_UPS = 3


class ColdTimer:
    """Before each timed call a buffer larger than the caches is overwritten, so that its bound in bytes holds.

    On a GPU each call is recorded in a CUDA graph and timed between two events while the GPU is busy: what Python needs
    to launch it is not counted.

    Args:
        device: cpu or cuda.
        repeats: timed calls of each contestant.
    """

    def __init__(self, device: str, repeats: int) -> None:
        self._on_gpu = device.startswith("cuda")
        self._flushed = torch.empty(_FLUSHED_BYTES[device.partition(":")[0]], dtype=torch.uint8, device=device)
        self._repeats = repeats

    def seconds(self, contestants: Mapping[str, Call]) -> dict[str, float | str]:
        """Median seconds of each, taking turns; for one that fails, why."""
        found: dict[str, float | str] = {}
        ready: dict[str, Call] = {}
        for name, call in contestants.items():
            try:
                ready[name] = _recorded(call) if self._on_gpu else _warm(call)
            except Exception as error:  # a compiler that fails must not end the comparison
                found[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(self._repeats):
            for name, call in ready.items():
                times[name].append(self._gpu_seconds(call) if self._on_gpu else self._cpu_seconds(call))
        return found | {name: statistics.median(each) for name, each in times.items()}

    def launch_seconds(self) -> float:
        """What a call takes that does next to nothing: no other is measured to take less."""
        one = torch.zeros(1, device=self._flushed.device)
        found = self.seconds({"": lambda: one.add_(1.0)})[""]
        assert isinstance(found, float), found
        return found

    def _cpu_seconds(self, call: Call) -> float:
        self._flushed.zero_()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def _gpu_seconds(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3


def _warm(call: Call) -> Call:
    call()
    return call


def _recorded(call: Call) -> Call:
    """Replays the call; it is made a few times before, on the side, as compilers and caches want it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
