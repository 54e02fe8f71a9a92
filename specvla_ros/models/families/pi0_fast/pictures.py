# SPDX-License-Identifier: Apache-2.0
"""From camera images to what PaliGemma's vision tower reads, as LeRobot prepares them."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def padded_picture(image: np.ndarray, height: int, width: int) -> Tensor:
    """Scaled to fit, black around it, float32 [3, height, width] from -1 to 1.

    Bilinear without antialiasing; an odd row or column of padding goes below or to the right (openpi's
    resize_with_pad).

    Args:
        image: uint8 RGB [height, width, 3].
        height: of the result.
        width: of the result.
    """
    pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    # A picture of extreme shape keeps a row: the original makes none of it, and fails.
    high, wide = (max(1, int(side / ratio)) for side in image.shape[:2])
    if (high, wide) != image.shape[:2]:
        pixels = F.interpolate(pixels, size=(high, wide), mode="bilinear", align_corners=False).clamp(0, 1)
    top, left = (height - high) // 2, (width - wide) // 2
    around = (left, width - wide - left, top, height - high - top)
    return F.pad(pixels[0], around) * 2 - 1
