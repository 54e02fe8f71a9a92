# SPDX-License-Identifier: Apache-2.0
"""The images of an observation as the vision tower reads them, prepared before or beside the ticks.

Resizing a camera image takes milliseconds, during which the device would idle if a tick waited for it. So a frame that
the next tick may start is preprocessed on submission. A frame that has to wait may be replaced by a newer one, and is
preprocessed during the tick that may make room for it. A frame not ready when its tick starts is preprocessed there.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Pixels, PreparesImages, Target


class PreparedImages:
    """The vision tower's input for one observation, computed once by the first thread that needs it."""

    def __init__(self, compute: Callable[[], Pixels]) -> None:
        self._compute: Callable[[], Pixels] | None = compute
        self._lock = threading.Lock()
        self._pixels: Pixels = ()
        self._error: Exception | None = None

    @property
    def started(self) -> bool:
        """True if the input is ready or a thread is computing it."""
        return self._compute is None or self._lock.locked()

    def prepare(self) -> None:
        """Computes the input, or waits for the thread that does. Errors are kept for `pixels`."""
        with self._lock:
            if self._compute is None:
                return
            try:
                self._pixels = self._compute()
            except Exception as error:  # the preparing thread does not report the frame's outcome
                self._error = error
            self._compute = None

    def pixels(self) -> Pixels:
        """The vision tower's input tensors in host memory; raises the error of the computation, if any."""
        self.prepare()
        if self._error is not None:
            raise self._error
        return self._pixels


def prepared_images(target: Target, observation: Observation) -> PreparedImages | None:
    """The vision input of an observation, not computed yet; None if the target computes it with its prompt."""
    if not isinstance(target, PreparesImages):
        return None
    return PreparedImages(lambda: tuple(_sendable(each, target) for each in target.pixels(observation)))


def _sendable(pixels: Tensor, target: Target) -> Tensor:
    """Converts to the decoder's dtype; for a GPU also pins the memory, so that the host does not wait for the copy."""
    decoder = target.decoder
    if decoder.device.type != "cuda":
        return pixels.to(decoder.dtype)
    return torch.empty(pixels.shape, dtype=decoder.dtype, pin_memory=True).copy_(pixels)
