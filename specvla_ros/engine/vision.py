# SPDX-License-Identifier: Apache-2.0
"""Vision towers and projector in a tick: captured, timed, and before a forward or beside it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specvla_kernels.graph_capture import Capture, Captures, check_rows
from specvla_ros.models.target import VisionModel


class SideStream:
    """A stream beside the current one of a GPU. On a CPU, work runs in the order in which it is given.

    Attributes:
        concurrent: whether work on it may run beside other work.
    """

    def __init__(self, device: torch.device) -> None:
        self.concurrent = device.type == "cuda"
        if self.concurrent:
            self._stream, self._device = torch.cuda.Stream(device), device
            self._begun = torch.cuda.Event()

    def begin(self) -> None:
        """The next work on the side waits for the current stream's work until now, but for no later work."""
        if self.concurrent:
            self._begun.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Work within runs on the side."""
        if not self.concurrent:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begun)
            yield

    def join(self) -> None:
        """The current stream's next work waits for that on the side."""
        if self.concurrent:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def keep_for_current_stream(result: Tensor) -> Tensor:
    """The same tensor, computed on the side; its memory is not reused before the current stream is done with it."""
    if result.is_cuda:
        result.record_stream(torch.cuda.current_stream(result.device))
    return result


class Vision:
    """Runs a model's vision towers and projector."""

    def __init__(self, model: VisionModel) -> None:
        self._model = model
        self._captured: StaticVision | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        return (self._captured or self._model.image_embeddings)(pixels)

    def capture(self, captures: Captures) -> None:
        """See Capturable: captures the towers, if the model has any."""
        if not self._model.pixel_shape:
            return
        with captures.attempt("vision"):
            static = StaticVision(self._model, captures.capture)
            pixels = torch.randn(self._model.pixel_shape, generator=torch.Generator().manual_seed(0))
            check_rows(static(pixels), self._model.image_embeddings(pixels), what="the captured vision")
            self._captured = static

    def release(self) -> None:
        self._captured = None


class StaticVision:
    """Computes an image's embeddings: pixels are copied in, then the captured towers are replayed."""

    def __init__(self, model: VisionModel, capture: Capture) -> None:
        self._model = model
        decoder = model.decoder
        # NaN reveals a result that was not computed from pixels copied in later.
        self._pixels = torch.full(model.pixel_shape, torch.nan, dtype=decoder.dtype, device=decoder.device)
        self._replay = capture(self._run)

    def __call__(self, pixels: Tensor) -> Tensor:
        """`VisionModel.image_embeddings`, [image_tokens, hidden], without waiting; the next image overwrites it.

        `pixels`: [3 * towers, size, size], normalised, in host memory; fastest if pinned and in the decoder's dtype.
        """
        if self._pixels.is_cuda and (pixels.dtype != self._pixels.dtype or not pixels.is_pinned()):
            # New memory each time: the copy may still be running when the next image arrives.
            pixels = torch.empty(pixels.shape, dtype=self._pixels.dtype, pin_memory=True).copy_(pixels)
        self._pixels.copy_(pixels, non_blocking=True)
        return self._replay()

    def _run(self) -> Tensor:
        return self._model.image_embeddings(self._pixels)


class StageClock:
    """Times work on the model's device.

    On CUDA it records events and reads them after the tick's read-back, when they have completed anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._started = 0.0
        self._elapsed_s = 0.0
        self._measured = False

    def start(self) -> None:
        self._started, self._measured = time.perf_counter(), False
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        self._measured = True
        self._elapsed_s = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    def read_s(self) -> float:
        """Seconds from start to stop, returned once; 0 if nothing was timed since. Call after a read-back.

        0 too for work that nothing has waited for: an image still on the side, whose request was dropped.
        """
        if not self._measured:
            return 0.0
        self._measured = False
        if self._events is not None:
            if not self._events[1].query():
                return 0.0
            return self._events[0].elapsed_time(self._events[1]) * 1e-3
        return self._elapsed_s
