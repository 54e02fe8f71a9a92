# SPDX-License-Identifier: Apache-2.0
"""A loop of its own thread on the steady clock, that nothing else in the process can hold up for long."""

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_STOP_TIMEOUT_S = 2.0
# How long another thread may keep the interpreter before this one gets it; Python's own default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class LoopFigures:
    """How the loop ran since the last look.

    Args:
        ticks: how many.
        late_s: float64 [ticks], from when a tick was due to when it began.
        took_s: float64 [ticks], how long it took.
    """

    ticks: int
    late_s: np.ndarray
    took_s: np.ndarray


class SteadyLoop:
    """Calls `step` at a rate. A tick that comes too late is not made up for: the next one is due on the old grid.

    Args:
        rate_hz: ticks per second.
        step: called on the loop's thread.
        on_fault: called with the traceback of a step that raised; the loop goes on.
    """

    def __init__(self, rate_hz: float, step: Callable[[], None], on_fault: Callable[[str], None]) -> None:
        self._period_s, self._step, self._on_fault = 1 / rate_hz, step, on_fault
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._late_s: list[float] = []
        self._took_s: list[float] = []
        self._thread = threading.Thread(target=self._run, name="guard output", daemon=True)

    def start(self) -> None:
        """Begins."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # What lives now lives on; without it in the collector's way a collection takes microseconds, not 20 ms.
        gc.collect()
        gc.freeze()
        self._thread.start()

    def stop(self) -> bool:
        """Ends; False when a step hangs."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def take_figures(self) -> LoopFigures:
        """Those since the last call."""
        with self._lock:
            late, self._late_s, took, self._took_s = self._late_s, [], self._took_s, []
        return LoopFigures(len(late), np.array(late), np.array(took))

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                self._step()
            except Exception:
                self._on_fault(traceback.format_exc())
            ended_s = time.monotonic()
            with self._lock:
                self._late_s.append(began_s - due_s)
                self._took_s.append(ended_s - began_s)
            due_s += self._period_s * max(1, np.ceil((ended_s - due_s) / self._period_s))
            time.sleep(max(0.0, due_s - time.monotonic()))
