# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what LeRobot's dataset code imports beside its own: torchvision and accelerate.

LeRobot 0.4.4 asks for torch below 2.11, with torchvision built for it. Where neither can be had, these few classes let
its dataset code run unchanged with another torch: `ToTensor`, and the reader of torchvision's pyav backend, which seeks
to the keyframe before a time and decodes from there.
"""

import sys
from types import ModuleType
from typing import Any

import av
import datasets  # noqa: F401  before torchvision seems to be there
import numpy as np
import torch


class ToTensor:
    """float32 [3, height, width] in 0..1 of a Pillow image."""

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class VideoReader:
    """The frames of a video from the keyframe before a time."""

    def __init__(self, path: str, stream: str) -> None:
        self.container = av.open(path)
        self._stream = self.container.streams.video[0]
        self._frames = self.container.decode(self._stream)

    def seek(self, time_s: float, keyframes_only: bool = False) -> "VideoReader":
        assert self._stream.time_base is not None
        at = int(time_s / self._stream.time_base)
        self.container.seek(at, backward=True, any_frame=not keyframes_only, stream=self._stream)
        self._frames = self.container.decode(self._stream)
        return self

    def __iter__(self) -> "VideoReader":
        return self

    def __next__(self) -> dict[str, Any]:
        frame = next(self._frames)
        assert frame.pts is not None and frame.time_base is not None
        pixels = torch.as_tensor(frame.to_rgb().to_ndarray()).permute(2, 0, 1)
        return {"data": pixels, "pts": float(frame.pts * frame.time_base)}


def install() -> None:
    """Registers the stand-ins for the modules that are missing."""
    made: dict[str, dict[str, Any]] = {
        "torchvision": {"set_video_backend": lambda name: None, "__version__": "0"},
        "torchvision.io": {"VideoReader": VideoReader},
        "torchvision.transforms": {"ToTensor": ToTensor},
        "torchvision.transforms.v2": {"Transform": torch.nn.Module},
        "torchvision.transforms.v2.functional": {},
        "accelerate": {"Accelerator": object},
    }
    for name, content in made.items():
        module = ModuleType(name)
        vars(module).update(content, __path__=[])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
