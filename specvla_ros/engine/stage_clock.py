"""How long a stage took on the device, without making the device wait."""

import time

import torch


class StageClock:
    """Times work on the model's device.

    On CUDA it records events and reads them behind the tick's one read-back, when they have passed anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._started = 0.0
        self._elapsed_s = 0.0
        self._measured = False

    def start(self) -> None:
        """Marks the beginning of the work."""
        self._started, self._measured = time.perf_counter(), False
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """Marks the end of the work."""
        self._measured = True
        self._elapsed_s = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def read_s(self) -> float:
        """Seconds between start and stop, once; 0 when nothing was timed since. Call behind a read-back."""
        if not self._measured:
            return 0.0
        self._measured = False
        if self._events is not None:
            return self._events[0].elapsed_time(self._events[1]) * 1e-3
        return self._elapsed_s
