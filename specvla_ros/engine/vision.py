"""The engine's image embeddings: captured where they can be, as they come elsewhere."""

import torch
from torch import Tensor

from specvla_kernels.graph_capture import Capture, check_rows
from specvla_ros.engine.static_vision import StaticVision
from specvla_ros.models.openvla import OpenVLA


class Vision:
    """Runs a model's vision towers and projector.

    Args:
        model: whose.
    """

    def __init__(self, model: OpenVLA) -> None:
        self._model = model
        self._captured: StaticVision | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """`OpenVLA.image_embeddings` of pixels in the host's memory."""
        return (self._captured or self._model.image_embeddings)(pixels)

    def capture(self, capture: Capture) -> int:
        """See Capturable; a model without towers has nothing to capture."""
        if not self._model.towers:
            return 0
        static = StaticVision(self._model, capture)
        self._check(static)
        self._captured = static
        return 1

    def release(self) -> None:
        """See Capturable."""
        self._captured = None

    def _check(self, static: StaticVision) -> None:
        """Compares the embeddings of one random image."""
        towers = self._model.config.towers
        size = towers[0].image_size
        pixels = torch.randn(3 * len(towers), size, size, generator=torch.Generator().manual_seed(0))
        check_rows(static(pixels), self._model.image_embeddings(pixels), what="the captured vision")
