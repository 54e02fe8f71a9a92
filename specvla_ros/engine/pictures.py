# SPDX-License-Identifier: Apache-2.0
"""From camera images to pixels, beside the ticks: on the thread that submits a frame, or on one that works ahead.

Resizing a camera image takes milliseconds of a processor, in which a device would have nothing to do if a tick waited
for it. So a frame that the next tick may begin is prepared where it is submitted; one that has to wait is left as it
is, since a newer one may take its place, and prepared during the tick that may make room for it. What is not ready when
a tick begins the frame is computed there.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from specvla_ros.models.observation import Observation
from specvla_ros.models.target import Pixels, PreparesPictures, Target


class Pictures:
    """What the vision tower reads of one observation, computed once, by the first thread that needs it.

    Args:
        compute: gives it.
    """

    def __init__(self, compute: Callable[[], Pixels]) -> None:
        self._compute: Callable[[], Pixels] | None = compute
        self._lock = threading.Lock()
        self._pixels: Pixels = ()
        self._error: Exception | None = None

    @property
    def begun(self) -> bool:
        """Whether they are there, or some thread computes them."""
        return self._compute is None or self._lock.locked()

    def prepare(self) -> None:
        """Computes them, unless that is done already; waits for a thread that does. Errors are kept for `pixels`."""
        with self._lock:
            if self._compute is None:
                return
            try:
                self._pixels = self._compute()
            except Exception as error:  # whoever prepares is not who answers for the frame
                self._error = error
            self._compute = None

    def pixels(self) -> Pixels:
        """Tensors in the host's memory, as the target's vision tower reads them.

        Raises:
            Exception: whatever computing them raised.
        """
        self.prepare()
        if self._error is not None:
            raise self._error
        return self._pixels


def pictures_of(target: Target, observation: Observation) -> Pictures | None:
    """The pictures of an observation, not computed yet; None for a target that prepares them with its prompt."""
    if not isinstance(target, PreparesPictures):
        return None
    return Pictures(lambda: tuple(_sendable(each, target) for each in target.pixels(observation)))


def _sendable(pixels: Tensor, target: Target) -> Tensor:
    """In the decoder's dtype, and in memory from which a GPU fetches it while the host goes on."""
    decoder = target.decoder
    if decoder.device.type != "cuda":
        return pixels.to(decoder.dtype)
    return torch.empty(pixels.shape, dtype=decoder.dtype, pin_memory=True).copy_(pixels)
