"""Vision towers and projector on memory that stays where it is, so that they can be captured once."""

import torch
from torch import Tensor

from specvla_kernels.graph_capture import Capture
from specvla_ros.models.openvla import OpenVLA


class StaticVision:
    """The embeddings of an image: its pixels are copied in, the towers run as they were captured, a copy comes out.

    Args:
        model: whose towers and projector run.
        capture: makes them repeatable.

    Raises:
        Exception: whatever the capture raises.
    """

    def __init__(self, model: OpenVLA, capture: Capture) -> None:
        self._model = model
        towers, decoder = model.config.towers, model.decoder
        shape = (3 * len(towers), towers[0].image_size, towers[0].image_size)
        # NaN shows in a result that does not come from pixels copied in later.
        self._pixels = torch.full(shape, torch.nan, dtype=decoder.dtype, device=decoder.device)
        self._replay = capture(self._run)

    def __call__(self, pixels: Tensor) -> Tensor:
        """What `OpenVLA.image_embeddings` gives; the host does not wait for the device.

        Args:
            pixels: [3 * towers, size, size], normalised, in the host's memory.

        Returns:
            [image_tokens, hidden].
        """
        # New memory each time: the copy may still be under way when the next image comes.
        memory = torch.empty(pixels.shape, dtype=self._pixels.dtype, pin_memory=self._pixels.is_cuda)
        self._pixels.copy_(memory.copy_(pixels), non_blocking=True)
        return self._replay().clone()  # the next image overwrites it

    def _run(self) -> Tensor:
        return self._model.image_embeddings(self._pixels)
