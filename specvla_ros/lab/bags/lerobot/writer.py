# SPDX-License-Identifier: Apache-2.0
"""Writes LeRobot datasets of the format v3.0."""

import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.video.frame import PictureType
from PIL import Image
from pyarrow import parquet

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.lerobot import statistics
from specvla_ros.lab.bags.lerobot.statistics import ImageSample, Statistics

VERSION = "v3.0"
_CHUNKS_SIZE = 1000  # files in a folder
_DATA_MB, _VIDEO_MB = 100, 200  # a file that is larger gets no further episode
_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_EPISODES = "meta/episodes/chunk-000/file-000.parquet"
_INDICES = {"frame_index": pa.int64(), "episode_index": pa.int64(), "index": pa.int64(), "task_index": pa.int64()}
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_NUMBERS = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64()}
_ROWS = 64  # of a table with images that are in memory at once
# As LeRobot does it, every second frame is a keyframe, so that any frame is found quickly. No frame refers to a later
# one: decoding and presentation have the same order.
_ENCODER = {"g": "2", "bf": "0", "crf": "18", "preset": "veryfast"}


@dataclass(frozen=True)
class Numbers:
    """A vector of numbers in each frame."""

    dtype: str  # float32, float64 or int64
    names: tuple[str, ...] = ("value",)  # of its values

    @property
    def arrow(self) -> pa.DataType:
        kind = _NUMBERS[self.dtype]
        return kind if len(self.names) == 1 else pa.list_(kind, len(self.names))

    def as_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": [len(self.names)], "names": list(self.names)}


@dataclass(frozen=True)
class Layout:
    """The content of every frame of a dataset."""

    fps: int
    cameras: Mapping[str, tuple[int, int]]  # height and width by feature
    numbers: Mapping[str, Numbers]  # by feature
    images: bool = False  # PNG images in the tables, without loss, in place of videos
    robot: str = ""  # the robot's type, for the record


@dataclass(frozen=True)
class Frame:
    """The images, numbers and instruction of one moment."""

    images: Mapping[str, np.ndarray]  # RGB uint8 [height, width, 3] by feature
    numbers: Mapping[str, Sequence[float] | np.ndarray]  # by feature
    task: str


@dataclass
class _Files:
    """A sequence of files that episodes are appended to."""

    pattern: str
    limit_mb: float
    key: str = ""
    chunk: int = 0
    number: int = -1
    path: Path = Path()

    def next(self, root: Path) -> Path:
        """The path of a new file."""
        self.number += 1
        if self.number == _CHUNKS_SIZE:
            self.chunk, self.number = self.chunk + 1, 0
        named = {"video_key": self.key, "chunk_index": self.chunk, "file_index": self.number}
        self.path = root / self.pattern.format(**named)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.path

    @property
    def full(self) -> bool:
        return self.number < 0 or self.path.stat().st_size > self.limit_mb * 2**20


class _Video:
    """One camera's videos."""

    def __init__(self, root: Path, key: str, fps: int, size: tuple[int, int]) -> None:
        self._root, self._fps, self._size = root, fps, size
        self.files = _Files(_VIDEO, _VIDEO_MB, key)
        self._container: av.container.OutputContainer | None = None
        self._stream: av.VideoStream | None = None
        self._frames, self._keyframe = 0, True  # frames in the file; the next one is a keyframe

    def begin(self) -> float:
        """Starts an episode; returns the time of its first frame in the file, in seconds."""
        if self._container is None or self.files.full:
            self.close()
            self._container = av.open(str(self.files.next(self._root)), "w", options={"movflags": "+faststart"})
            self._stream = self._container.add_stream("libx264", rate=self._fps, options=_ENCODER)
            self._stream.height, self._stream.width = self._size
            self._stream.pix_fmt = "yuv420p"
            self._frames = 0
        self._keyframe = True
        return self._frames / self._fps

    def add(self, image: np.ndarray) -> None:
        assert self._container is not None and self._stream is not None
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame.pts, frame.time_base = self._frames, Fraction(1, self._fps)
        frame.pict_type = PictureType.I if self._keyframe else PictureType.NONE
        self._container.mux(self._stream.encode(frame))
        self._frames, self._keyframe = self._frames + 1, False

    @property
    def end_s(self) -> float:
        """Time after the last frame in the file."""
        return self._frames / self._fps

    def close(self) -> None:
        if self._container is not None and self._stream is not None:
            self._container.mux(self._stream.encode())
            self._container.close()
            self._container = None


@dataclass
class _Table:
    """The tables of the frames' numbers and, without videos, images."""

    root: Path
    schema: pa.Schema
    files: _Files = field(default_factory=lambda: _Files(_DATA, _DATA_MB))
    writer: parquet.ParquetWriter | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        if self.writer is None or self.files.full:
            self.close()
            self.writer = parquet.ParquetWriter(self.files.next(self.root), self.schema, compression="snappy")

    def add(self, row: dict[str, Any], *, at_once: int) -> None:
        self.rows.append(row)
        if len(self.rows) == at_once:
            self.flush()

    def flush(self) -> None:
        if self.rows and self.writer is not None:
            self.writer.write_table(pa.Table.from_pylist(self.rows, self.schema))
            self.rows.clear()

    def close(self) -> None:
        self.flush()
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class LeRobotWriter:
    """A new dataset, also a context manager. It appears at its path when it is complete, or not at all."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        if directory.exists():
            raise UserError(f"{directory} exists; give a new directory for the dataset with --out")
        self._directory, self._layout = directory, layout
        self._root = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)
        videos = {} if layout.images else layout.cameras
        self._videos = {key: _Video(self._root, key, layout.fps, size) for key, size in videos.items()}
        self._table = _Table(self._root, _schema(layout))
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._statistics: list[dict[str, Statistics]] = []
        self.frames = 0

    def add_episode(self, frames: Iterable[Frame]) -> int:
        """Writes an episode and returns its number of frames; without any, nothing is written."""
        samples = {key: ImageSample() for key in self._layout.cameras}
        columns: dict[str, list[Any]] = {key: [] for key in (*self._layout.numbers, "timestamp", *_INDICES)}
        first, tasks, starts = self.frames, dict[str, None](), dict[str, float]()
        for i, frame in enumerate(frames):
            if not i:
                self._table.begin()
                starts = {key: video.begin() for key, video in self._videos.items()}
            tasks[frame.task] = None
            task = self._tasks.setdefault(frame.task, len(self._tasks))
            indices = {"frame_index": i, "episode_index": len(self._episodes), "index": self.frames, "task_index": task}
            row: dict[str, Any] = {"timestamp": i / self._layout.fps, **indices}
            row |= {key: self._cell(key, values) for key, values in frame.numbers.items()}
            for key, values in row.items():
                columns[key].append(values)
            for key, image in frame.images.items():
                samples[key].add(image)
                if key in self._videos:
                    self._videos[key].add(image)
                else:
                    row[key] = {"bytes": _png(image), "path": f"frame-{i:06d}.png"}
            self._table.add(row, at_once=_ROWS)
            self.frames += 1
        if self.frames > first:
            self._table.flush()
            self._finish_episode(first, columns, samples, [*tasks], starts)
        return self.frames - first

    def _cell(self, key: str, values: Sequence[float] | np.ndarray) -> Any:
        cell = np.asarray(values, dtype=self._layout.numbers[key].dtype)
        return cell.item() if len(self._layout.numbers[key].names) == 1 else cell.tolist()

    def _finish_episode(
        self,
        first: int,
        columns: Mapping[str, list[Any]],
        samples: Mapping[str, ImageSample],
        tasks: list[str],
        starts: Mapping[str, float],
    ) -> None:
        files = self._table.files
        row: dict[str, Any] = {"episode_index": len(self._episodes), "tasks": tasks, "length": self.frames - first}
        row |= {"data/chunk_index": files.chunk, "data/file_index": files.number}
        row |= {"dataset_from_index": first, "dataset_to_index": self.frames}
        for key, video in self._videos.items():
            row |= {f"videos/{key}/chunk_index": video.files.chunk, f"videos/{key}/file_index": video.files.number}
            row |= {f"videos/{key}/from_timestamp": starts[key], f"videos/{key}/to_timestamp": video.end_s}
        of_episode = {key: statistics.of_images(sample.images) for key, sample in samples.items()}
        for key, values in columns.items():
            of_episode[key] = statistics.of_numbers(np.array(values).reshape(len(values), -1))
        for key, each in of_episode.items():
            row |= {f"stats/{key}/{name}": value.tolist() for name, value in each.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._episodes.append(row)
        self._statistics.append(of_episode)

    def close(self) -> None:
        """Writes the description; the dataset is then complete. UserError if it has no frames."""
        self._close_files()
        if not self._episodes:
            raise UserError("no frame can be exported; see the reasons above")
        self._write_json("meta/info.json", self._info())
        keys = self._statistics[0]
        total = {key: statistics.together([episode[key] for episode in self._statistics]) for key in keys}
        self._write_json("meta/stats.json", statistics.as_lists(total))
        episodes = self._root / _EPISODES
        episodes.parent.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(self._episodes), episodes)
        parquet.write_table(_tasks_table([*self._tasks]), self._root / "meta/tasks.parquet")
        self._root.rename(self._directory)

    def _close_files(self) -> None:
        self._table.close()
        for video in self._videos.values():
            video.close()

    def discard(self) -> None:
        """Removes what was written."""
        self._close_files()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> "LeRobotWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if self._root.exists():
                self.discard()

    def _info(self) -> dict[str, Any]:
        layout = self._layout
        features = {key: self._camera_json(size) for key, size in layout.cameras.items()}
        features |= {key: each.as_json() for key, each in layout.numbers.items()}
        indices = {"timestamp": "float32", **dict.fromkeys(_INDICES, "int64")}
        features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in indices.items()}
        return {
            "codebase_version": VERSION,
            "robot_type": layout.robot or None,
            "total_episodes": len(self._episodes),
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNKS_SIZE,
            "data_files_size_in_mb": _DATA_MB,
            "video_files_size_in_mb": _VIDEO_MB,
            "fps": layout.fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": _DATA,
            "video_path": None if layout.images else _VIDEO,
            "features": features,
        }

    def _camera_json(self, size: tuple[int, int]) -> dict[str, Any]:
        shape = {"shape": [*size, 3], "names": ["height", "width", "channels"]}
        if self._layout.images:
            return {"dtype": "image", **shape}
        video = {"height": size[0], "width": size[1], "codec": "h264", "pix_fmt": "yuv420p", "is_depth_map": False}
        described = {
            f"video.{name}": value for name, value in {**video, "fps": self._layout.fps, "channels": 3}.items()
        }
        return {"dtype": "video", **shape, "info": {**described, "has_audio": False}}

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")


def _schema(layout: Layout) -> pa.Schema:
    images = dict.fromkeys(layout.cameras, _IMAGE) if layout.images else {}
    numbers = {key: each.arrow for key, each in layout.numbers.items()}
    return pa.schema({**images, **numbers, "timestamp": pa.float32(), **_INDICES})


def _tasks_table(tasks: Sequence[str]) -> pa.Table:
    """The tasks as pandas writes a table whose index is their text: LeRobot reads them with pandas."""
    index, text = "task_index", "task"
    table = pa.table({index: pa.array(range(len(tasks)), pa.int64()), text: pa.array(tasks, pa.string())})
    columns = [
        {"name": index, "field_name": index, "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {"name": text, "field_name": text, "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ]
    described = {"index_columns": [text], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def _png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "png", compress_level=1)
    return stream.getvalue()
