"""Pictures of an episode as an MP4 file that browsers play."""

from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import numpy as np
from PIL import Image, ImageDraw

_BAR = 22  # pixels under the picture for the caption


class Film:
    """Writes H.264; also a context manager. The file is complete when it is closed.

    Args:
        path: of the MP4 file.
        rate_hz: pictures per second.
        scale: pictures are enlarged by this whole factor, so that small ones can be seen.
    """

    def __init__(self, path: Path, rate_hz: float, scale: int = 2) -> None:
        self._container = av.open(str(path), "w")
        self._rate = Fraction(rate_hz).limit_denominator(1000)
        self._scale = scale
        self._stream: av.VideoStream | None = None

    def add(self, image: np.ndarray, caption: str = "") -> None:
        """Adds a picture, RGB uint8 [height, width, 3], all of one size, with a line of text under it."""
        picture = Image.fromarray(image)
        picture = picture.resize((picture.width * self._scale, picture.height * self._scale), Image.Resampling.NEAREST)
        framed = Image.new("RGB", (picture.width + picture.width % 2, picture.height + _BAR + picture.height % 2))
        framed.paste(picture)
        ImageDraw.Draw(framed).text((6, picture.height + 5), caption, fill=(255, 255, 255))
        if self._stream is None:
            self._stream = self._container.add_stream("libx264", rate=self._rate)
            self._stream.width, self._stream.height = framed.size
            self._stream.pix_fmt = "yuv420p"
        for packet in self._stream.encode(av.VideoFrame.from_image(framed)):
            self._container.mux(packet)

    def close(self) -> None:
        """Writes the end of the file."""
        if self._stream is not None:
            for packet in self._stream.encode():
                self._container.mux(packet)
        self._container.close()

    def __enter__(self) -> "Film":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
