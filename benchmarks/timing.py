"""Wall-clock times of contestants that take turns."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def take_turns(contestants: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, run in turns so that drift of the machine falls on all alike; one warm-up turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            synchronise(device)
            started = time.perf_counter()
            run()
            synchronise(device)
            if turn:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronise(device: str) -> None:
    """Waits until a GPU is through with what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
