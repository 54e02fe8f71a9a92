# SPDX-License-Identifier: Apache-2.0
"""LeRobot datasets of the formats v3.0 and v2.1: features, tasks, and the files that hold each episode.

v3.0 packs several episodes into a Parquet file and, per camera, into an MP4 file; v2.1 has files of their own for each
episode. An episode is given as DATASET/episode_000012, a path that does not exist as a file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from specvla_ros.errors import UserError
from specvla_ros.settings.json_file import load_json, shown

if TYPE_CHECKING:
    import pyarrow

READ_VERSIONS = ("v2.1", "v3.0")
INFO_FILE = "meta/info.json"
AGAIN = "copy or download the dataset again"
_EPISODE = "episode_{:06d}"
_EPISODE_NAME = re.compile(r"episode_(\d{6,9})")
_FLOATS = ("float16", "float32", "float64")
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TABLE_TYPES = (*_FLOATS, *_WHOLE, "bool", "string", "image", "video")


@dataclass(frozen=True)
class Feature:
    """One feature of the frames, as declared in info.json."""

    key: str  # for example observation.images.front
    dtype: str  # image, video, string, or NumPy's name of the type
    shape: tuple[int, ...]  # of one frame's value; [height, width, channels] of an image
    names: tuple[str, ...]  # of the values of a vector; empty: not given
    depth: bool = False  # a depth map, which is not a colour image

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("image", "video")


@dataclass(frozen=True)
class EpisodeVideo:
    """The part of a video file that shows an episode."""

    path: Path
    from_s: float  # time of the episode's first frame in the file, seconds


@dataclass(frozen=True)
class Episode:
    """The files of one episode."""

    index: int
    length: int  # number of frames
    data: Path  # Parquet file, which may hold other episodes too
    videos: Mapping[str, EpisodeVideo]  # by feature


@dataclass(frozen=True)
class LeRobotDataset:
    """The description of a dataset, from its files in meta/."""

    path: Path
    version: str
    fps: float
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]  # instructions by task_index
    episodes: Mapping[int, Episode]  # by episode_index, ascending

    @property
    def episode_paths(self) -> tuple[Path, ...]:
        """The paths by which commands name the episodes."""
        return tuple(self.path / _EPISODE.format(index) for index in self.episodes)


def is_dataset(directory: Path) -> bool:
    """True for a directory with LeRobot's meta/info.json."""
    return (directory / INFO_FILE).is_file()


def as_episode(path: Path) -> tuple[Path, int] | None:
    """The dataset and the index in a path such as DATASET/episode_000012; None for any other path."""
    match = _EPISODE_NAME.fullmatch(path.name)
    if match is None or path.exists() or not is_dataset(path.parent):
        return None
    return path.parent, int(match[1])


def open_episode(path: Path) -> tuple[LeRobotDataset, Episode]:
    """The episode at a path that `as_episode` accepts; UserError if the dataset does not have it."""
    found = as_episode(path)
    assert found is not None
    dataset, index = open_dataset(found[0]), found[1]
    if index not in dataset.episodes:
        first, last = min(dataset.episodes), max(dataset.episodes)
        raise UserError(f"dataset {dataset.path} has no episode {index}; it has {first} to {last}")
    return dataset, dataset.episodes[index]


def episode_files(path: Path) -> tuple[Path, ...]:
    """All files that the episode at a path is read from."""
    dataset, episode = open_episode(path)
    tasks = dataset.path / ("meta/tasks.jsonl" if dataset.version == "v2.1" else "meta/tasks.parquet")
    return (dataset.path / INFO_FILE, tasks, episode.data, *(video.path for video in episode.videos.values()))


def name_of(bag: Path) -> str:
    """The name that results give a bag: its own, or that of a dataset's episode after the dataset's."""
    if as_episode(bag) is not None:
        return f"{bag.parent.resolve().name}_{bag.name}"
    return bag.name if bag.name not in ("", "..") else bag.resolve().name


def origin(dataset: Path) -> dict[str, str | None]:
    """Identifies a dataset for other people: its name, codebase version, and the hub's commit if it was downloaded.

    The commit is that of a snapshot in the hub's cache, or the one that a download to a folder leaves beside its files
    (huggingface_hub's `local_dir`).
    """
    version, folder = open_dataset(dataset).version, dataset.resolve()
    if folder.parent.name == "snapshots":  # datasets--OWNER--NAME/snapshots/COMMIT
        name = folder.parent.parent.name.removeprefix("datasets--").replace("--", "/")
        return {"name": name, "codebase_version": version, "revision": folder.name}
    left = folder / f".cache/huggingface/download/{INFO_FILE}.metadata"
    lines = left.read_text(encoding="utf-8", errors="replace").splitlines() if left.is_file() else []
    return {"name": folder.name, "codebase_version": version, "revision": lines[0].strip() if lines else None}


def refuse_dataset(path: Path) -> None:
    """Raises UserError if a path that should be one recording is a whole dataset."""
    if is_dataset(path):
        episodes = open_dataset(path).episode_paths
        raise UserError(
            f"{path} is a LeRobot dataset with {len(episodes)} episodes: give one of them, such as {episodes[0]}"
        )


def open_dataset(directory: Path) -> LeRobotDataset:
    """Reads a dataset's description; kept until info.json changes. UserError if it is damaged or of another version."""
    return _opened(directory, (directory / INFO_FILE).stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _opened(directory: Path, _: int) -> LeRobotDataset:
    path = directory / INFO_FILE
    info = load_json(path)
    version = str(info.get("codebase_version")) if isinstance(info, dict) else "none"
    if version not in READ_VERSIONS:
        raise UserError(
            f"{path}: codebase_version is {shown(version)}, but only {' and '.join(READ_VERSIONS)} are read; convert "
            "the dataset with the scripts in LeRobot"
        )
    try:
        features = {key: _feature(key, value) for key, value in info["features"].items()}
        fps = float(info["fps"])
        read = _episodes_v21 if version == "v2.1" else _episodes_v30
        episodes = read(directory, info, [key for key, feature in features.items() if feature.dtype == "video"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error
    if not 0 < fps < 10_000:
        raise UserError(f"{path}: fps is {shown(info['fps'])}, but must be a positive number")
    if not episodes:
        raise UserError(f"dataset {directory} is empty: it has no episodes")
    tasks = _tasks_v21(directory) if version == "v2.1" else _tasks_v30(directory)
    return LeRobotDataset(directory, version, fps, features, tasks, dict(sorted(episodes.items())))


def _feature(key: str, value: Mapping[str, Any]) -> Feature:
    if value["dtype"] not in _TABLE_TYPES:
        raise ValueError(f"feature {key} has the unknown dtype {shown(value['dtype'])}")
    names = value.get("names")
    while isinstance(names, dict):  # {"motors": [...]}, or {"axes": {"x": 0, ...}}
        names = next(iter(names.values())) if len(names) == 1 else list(names)
    listed = tuple(map(str, names)) if isinstance(names, list) else ()
    details = {**(value.get("info") or {}), **(value.get("video_info") or {})}
    depth = any(details.get(name) for name in ("is_depth_map", "video.is_depth_map"))
    return Feature(key, value["dtype"], tuple(map(int, value["shape"])), listed, depth)


def _inside(directory: Path, pattern: str, **values: Any) -> Path:
    """A file named by a pattern of info.json; ValueError if it would be outside the dataset."""
    relative = PurePath(pattern.format(**values))
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"the path {shown(str(relative))} is outside the dataset")
    return directory / relative


def _episodes_v30(directory: Path, info: Mapping[str, Any], cameras: list[str]) -> dict[int, Episode]:
    named = ("chunk_index", "file_index", "from_timestamp")
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    columns += [f"videos/{key}/{name}" for key in cameras for name in named]
    episodes = {}
    for file in sorted(directory.glob("meta/episodes/*/*.parquet")):
        for row in read_table(file, columns).to_pylist():
            part = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
            videos = {}
            for key in cameras:
                chunk, number, start_s = (row[f"videos/{key}/{name}"] for name in named)
                path = _inside(directory, info["video_path"], video_key=key, chunk_index=chunk, file_index=number)
                videos[key] = EpisodeVideo(path, float(start_s))
            index = int(row["episode_index"])
            episodes[index] = Episode(index, int(row["length"]), _inside(directory, info["data_path"], **part), videos)
    return episodes


def _episodes_v21(directory: Path, info: Mapping[str, Any], cameras: list[str]) -> dict[int, Episode]:
    episodes = {}
    for line in _json_lines(directory / "meta/episodes.jsonl"):
        index = int(line["episode_index"])
        part = {"episode_chunk": index // int(info["chunks_size"]), "episode_index": index}
        videos = {
            key: EpisodeVideo(_inside(directory, info["video_path"], video_key=key, **part), 0.0) for key in cameras
        }
        episodes[index] = Episode(index, int(line["length"]), _inside(directory, info["data_path"], **part), videos)
    return episodes


def _tasks_v30(directory: Path) -> dict[int, str]:
    """The tasks; their text is the table's index, which has any name."""
    path = directory / "meta/tasks.parquet"
    table = read_table(path)
    texts = [name for name in table.column_names if str(table.schema.field(name).type) in ("string", "large_string")]
    if "task_index" not in table.column_names or not texts:
        raise UserError(f"{path} lacks the column task_index or the tasks' text; {AGAIN}")
    try:
        return dict(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {AGAIN}") from error


def _tasks_v21(directory: Path) -> dict[int, str]:
    path = directory / "meta/tasks.jsonl"
    try:
        return {int(line["task_index"]): str(line["task"]) for line in _json_lines(path)}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}; {AGAIN}") from error


def _json_lines(path: Path) -> list[Any]:
    import json

    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"the dataset lacks {path}; {AGAIN}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {AGAIN}") from error


def read_table(path: Path, columns: list[str] | None = None) -> "pyarrow.Table":
    """A small Parquet file as a table; UserError if it is missing or damaged, or lacks a column."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            check_columns(path, file.schema_arrow.names, columns or [])
            return file.read(columns)
    except FileNotFoundError:
        raise UserError(f"the dataset lacks {path}; {AGAIN}") from None
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is damaged ({error}); {AGAIN}") from error


def check_columns(path: Path, held: list[str], needed: list[str]) -> None:
    """Raises UserError if a Parquet file lacks a column."""
    missing = [name for name in needed if name not in held]
    if missing:
        raise UserError(f"{path} lacks the column {', '.join(missing)}, which its dataset needs; {AGAIN}")
