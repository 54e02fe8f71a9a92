# SPDX-License-Identifier: Apache-2.0
"""Reads the frames of a video file at given times, in order."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np

from specvla_ros.errors import UserError


def check_video(path: Path, again: str) -> None:
    """Raises UserError if a file is missing or not a video; `again`: what to do."""
    if not path.is_file():
        raise UserError(f"video {path} is missing; {again}")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path} holds no video; {again}")
    except av.FFmpegError as error:
        raise UserError(f"video {path} is damaged ({error.strerror}); {again}") from error


class VideoFrames:
    """Iterates over the frames nearest to ascending times; None for a time without a frame.

    Args:
        times_s: times in the file, seconds.
        tolerance_s: maximum distance between a frame and its time, less than half of the frames' period.
    """

    def __init__(self, path: Path, times_s: Sequence[float], tolerance_s: float) -> None:
        self._path, self._times_s, self._tolerance_s = path, times_s, tolerance_s
        self.why = ""  # why the first time without a frame has none

    def __iter__(self) -> Iterator[np.ndarray | None]:
        """RGB, uint8 [height, width, 3]."""
        frames = self._decoded(max(0.0, self._times_s[0] - self._tolerance_s))
        newest = next(frames, None)
        for time_s in self._times_s:
            while newest is not None and _time_s(newest) < time_s - self._tolerance_s:
                newest = next(frames, None)
            if newest is not None and _time_s(newest) <= time_s + self._tolerance_s:
                yield newest.to_ndarray(format="rgb24")
            else:
                ended = "it ends before" if newest is None else "it has no frame at"
                self.why = self.why or f"{self._path}: {ended} {time_s:.3f} s"
                yield None

    def _decoded(self, from_s: float) -> Iterator[av.VideoFrame]:
        """The frames from the keyframe before a time, up to the first damage."""
        try:
            with av.open(str(self._path)) as container:
                stream = container.streams.video[0]
                assert stream.time_base is not None
                container.seek(int(from_s / stream.time_base), stream=stream)
                yield from (frame for frame in container.decode(stream) if frame.pts is not None)
        except av.FFmpegError as error:
            self.why = self.why or f"{self._path} is damaged ({error.strerror})"


def _time_s(frame: av.VideoFrame) -> float:
    assert frame.pts is not None and frame.time_base is not None
    return float(frame.pts * frame.time_base)
