# SPDX-License-Identifier: Apache-2.0
"""One episode of a LeRobot dataset as the messages of a bag, so that each command that reads bags also reads datasets.

The topics are those of a robot: /NAME/image_raw for the camera observation.images.NAME, /joint_states, /instruction and
/ground_truth/action; any other vector of numbers has a topic of its key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat, Qos
from rosbags.typesys import Stores, get_typestore

from specvla_ros.control.convention import is_gripper
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import ACTION_LABELS, ACTION_TOPIC, INSTRUCTION_TOPIC, LATCHED, STATE_TOPIC
from specvla_ros.lab.bags.lerobot.dataset import AGAIN, Episode, Feature, LeRobotDataset, check_columns

if TYPE_CHECKING:
    from specvla_ros.lab.bags.mcap_storage import StoredMessage
    from specvla_ros.lab.bags.video_frames import VideoFrames

STAMP_KEY = "stamp_ns"  # written by `specvla export`: the images' stamps, which LeRobot's timestamps round to 1 / fps
_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
_STATE, _TEXT = "sensor_msgs/msg/JointState", "std_msgs/msg/String"
_NUMBERS = "std_msgs/msg/Float64MultiArray"
_STATE_KEYS, _ACTION_KEYS = ("observation.state", "state"), ("action", "actions")
_INDICES = ("timestamp", "frame_index", "episode_index", "task_index")
# Episodes are an hour apart, from 2001-09-09: stamps are positive, and differ between the first 300 000 episodes.
_EPOCH_NS, _APART_NS = 10**18, 3600 * 10**9
_BLOCK_IMAGES, _BLOCK_NUMBERS = 16, 4096  # rows of the table that are read at once
_PERIOD_SHARE = 0.25  # of a period: maximum distance of a video's frame from its row's time


class EpisodeStorage:
    """An open episode, with the interface of `McapStorage`. Opening it checks all but the content of its images."""

    def __init__(self, dataset: LeRobotDataset, episode: Episode) -> None:
        self._dataset, self._episode = dataset, episode
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._topics = _topics(dataset.features)
        self._lacking: Counter[str] = Counter()  # images that the episode lacks, by topic
        self._why: dict[str, str] = {}
        self._videos: dict[str, VideoFrames] = {}
        self._read_numbers()
        for key in self._topics.values():
            if key in episode.videos:
                _video(episode, key, np.zeros(1), 0.0)
        self._texts = {i: self._task(i) for i in range(episode.length) if not i or self._tasks[i] != self._tasks[i - 1]}
        self.start_ns, self.end_ns = int(self._times_ns[0]), int(self._times_ns[-1])
        described: list[tuple[str, str, int, list[Qos]]] = [(INSTRUCTION_TOPIC, _TEXT, len(self._texts), [LATCHED])]
        described += [(topic, *self._described(key)) for topic, key in self._topics.items()]
        self.connections = [self._connection(number, *each) for number, each in enumerate(described)]

    @property
    def damage(self) -> str:
        """The images that are missing, known once the messages are read."""
        parts = [f"{count} images of {topic} are missing: {self._why[topic]}" for topic, count in self._lacking.items()]
        return "; ".join(parts)

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics in time order; videos are decoded here."""
        self._lacking.clear()
        wanted = {each.topic: each for each in self.connections if each.topic in topics}
        images = {topic: self._images(topic) for topic in wanted if self._feature(topic).is_camera}
        for i, time_ns in enumerate(self._times_ns.tolist()):
            for topic, connection in wanted.items():
                fields = self._image(topic, images[topic]) if topic in images else self._fields(topic, i)
                if fields is not None:
                    yield connection, time_ns, self._serialised(connection.msgtype, fields, time_ns, topic)

    def close(self) -> None:
        """Does nothing: files are only open while messages are read."""

    # The table

    def _read_numbers(self) -> None:
        keys = [key for key in self._topics.values() if not self._dataset.features[key].is_camera]
        stamped = [STAMP_KEY] if STAMP_KEY in self._dataset.features else []
        path, length = self._episode.data, self._episode.length
        found: dict[str, list[np.ndarray]] = {}
        try:
            for block in self._blocks([*_INDICES, *keys, *stamped], _BLOCK_NUMBERS):
                for name in block.column_names:
                    found.setdefault(name, []).append(np.array(block[name].to_pylist(), dtype=_type_of(name)))
            columns = {name: np.concatenate(parts) for name, parts in found.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged, or holds no numbers ({error}); {AGAIN}") from error
        rows = len(columns.get("frame_index", ()))
        if not length or rows != length or (columns["frame_index"] != np.arange(length)).any():
            raise UserError(
                f"{path} holds {rows} frames of episode {self._episode.index}, but its dataset lists {length} frames, "
                f"numbered from 0; {AGAIN}"
            )
        self._numbers = {key: columns[key].reshape(length, -1) for key in keys}
        self._times_s, self._tasks = columns["timestamp"], columns["task_index"].tolist()
        first_ns, seconds = _EPOCH_NS + self._episode.index * _APART_NS, np.nan_to_num(self._times_s, nan=-1.0)
        self._times_ns = columns[STAMP_KEY] if stamped else first_ns + np.rint(seconds * 1e9).astype(np.int64)
        increase = all((np.diff(each) > 0).all() for each in (seconds, self._times_ns))
        if not increase or seconds[0] < 0 or self._times_ns[0] <= 0:
            raise UserError(f"{path}: the timestamps of episode {self._episode.index} do not increase; {AGAIN}")

    def _blocks(self, columns: list[str], size: int) -> Iterator[Any]:
        """The episode's rows of some columns, block by block."""
        import pyarrow
        from pyarrow import compute, parquet

        path, index = self._episode.data, self._episode.index
        try:
            with parquet.ParquetFile(path) as file:
                check_columns(path, file.schema_arrow.names, columns)
                held = _episodes_by_group(path, path.stat().st_mtime_ns)
                groups = [at for at, episodes in enumerate(held) if index in episodes]
                for batch in file.iter_batches(size, groups, list(dict.fromkeys([*columns, "episode_index"]))):
                    rows = pyarrow.table(batch).filter(compute.equal(batch["episode_index"], index))
                    if rows.num_rows:
                        yield rows
        except FileNotFoundError:
            raise UserError(f"the dataset lacks {path}; {AGAIN}") from None
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} is damaged ({error}); {AGAIN}") from error

    def _task(self, i: int) -> str:
        text = self._dataset.tasks.get(self._tasks[i])
        if text is None:
            raise UserError(
                f"{self._episode.data}: frame {i} of episode {self._episode.index} has task_index {self._tasks[i]}, "
                f"but the dataset has the tasks {sorted(self._dataset.tasks)}; {AGAIN}"
            )
        return text

    # Messages

    def _feature(self, topic: str) -> Feature:
        return self._dataset.features.get(self._topics.get(topic, ""), Feature("", "string", (), ()))

    def _described(self, key: str) -> tuple[str, int, list[Qos]]:
        """Type, number of messages and QoS of a feature's topic."""
        feature, length = self._dataset.features[key], self._episode.length
        if feature.is_camera:
            return _IMAGE if feature.dtype == "video" else _COMPRESSED, length, []
        if key in _STATE_KEYS:
            return _STATE, length, []
        return _NUMBERS, int((~np.isnan(self._numbers[key]).all(axis=1)).sum()), []

    def _connection(self, number: int, topic: str, msgtype: str, count: int, qos: list[Qos]) -> Connection:
        nothing = MessageDefinition(MessageDefinitionFormat.NONE, "")
        return Connection(number, topic, msgtype, nothing, "", count, ConnectionExtRosbag2("cdr", qos), self)

    def _fields(self, topic: str, i: int) -> dict[str, Any] | None:
        """The fields of a message without an image; None if frame `i` has none."""
        if topic == INSTRUCTION_TOPIC:
            return {"data": self._texts[i]} if i in self._texts else None
        key = self._topics[topic]
        values = self._numbers[key][i]
        if topic == STATE_TOPIC:
            empty = np.empty(0)
            return {"name": self._state_names(key), "position": values, "velocity": empty, "effort": empty}
        if np.isnan(values).all():
            return None
        dimension, size = self._store.types["std_msgs/msg/MultiArrayDimension"], len(values)
        label = self._joints_label(key) if topic == ACTION_TOPIC else ""
        named = [dimension(label=label, size=size, stride=size)] if label else []
        layout = self._store.types["std_msgs/msg/MultiArrayLayout"](dim=named, data_offset=0)
        return {"layout": layout, "data": values}

    def _joints_label(self, key: str) -> str:
        """The label of an action that has the names of the state's values, so that it moves these; else empty."""
        names, count = self._dataset.features[key].names, self._numbers[key].shape[1]
        state = self._topics.get(STATE_TOPIC)
        known = self._state_names(state) if state is not None else []
        of_joints = len(set(names)) == len(names) == count and all(is_gripper(name) or name in known for name in names)
        return ACTION_LABELS.join(names) if of_joints else ""

    def _state_names(self, key: str) -> list[str]:
        """The state's names; state_0, state_1 … if the dataset does not name each value."""
        names, count = self._dataset.features[key].names, self._numbers[key].shape[1]
        return [*names] if len(set(names)) == len(names) == count else [f"state_{i}" for i in range(count)]

    def _images(self, topic: str) -> Iterator[np.ndarray | bytes | None]:
        """A camera's images in order, RGB or encoded; None for one that is missing."""
        key, episode = self._topics[topic], self._episode
        if key in episode.videos:
            self._videos[topic] = _video(episode, key, self._times_s, _PERIOD_SHARE / self._dataset.fps)
            yield from self._videos[topic]
            return
        for block in self._blocks([key], _BLOCK_IMAGES):
            yield from self._encoded(block[key])

    def _encoded(self, column: Any) -> list[bytes | None]:
        """The bytes of a column of images."""
        import pyarrow
        from pyarrow import compute

        try:
            cells: list[bytes | None] = compute.struct_field(column, "bytes").to_pylist()
        except (ValueError, NotImplementedError, pyarrow.ArrowException) as error:
            raise UserError(f"{self._episode.data} holds no images where they should be ({error}); {AGAIN}") from error
        return cells

    def _image(self, topic: str, images: Iterator[np.ndarray | bytes | None]) -> dict[str, Any] | None:
        """The fields of the next image; None, counted, if it is missing."""
        pixels = next(images, None)
        if pixels is None:
            self._lacking[topic] += 1
            video = self._videos.get(topic)
            self._why.setdefault(topic, video.why if video else f"{self._episode.data} does not hold them")
            return None
        if isinstance(pixels, bytes):
            form = "png" if pixels.startswith(b"\x89PNG") else "jpeg"
            return {"format": form, "data": np.frombuffer(pixels, np.uint8)}
        height, width, _ = pixels.shape
        shape = {"height": height, "width": width, "step": 3 * width, "encoding": "rgb8", "is_bigendian": 0}
        return {**shape, "data": pixels.reshape(-1)}

    def _serialised(self, msgtype: str, fields: Mapping[str, Any], time_ns: int, topic: str) -> bytes:
        types = self._store.types
        headed = {}
        if msgtype in (_IMAGE, _COMPRESSED, _STATE):
            stamp = types["builtin_interfaces/msg/Time"](sec=time_ns // 10**9, nanosec=time_ns % 10**9)
            frame = "" if msgtype == _STATE else topic.split("/")[1]
            headed = {"header": types["std_msgs/msg/Header"](stamp=stamp, frame_id=frame)}
        return bytes(self._store.serialize_cdr(types[msgtype](**headed, **fields), msgtype))


def camera_name(key: str) -> str:
    """The name of a camera, as in observation.images.NAME."""
    prefix = "observation.images."
    return re.sub(r"\W+", "_", key.removeprefix(prefix) if key.startswith(prefix) else key.rpartition(".")[2])


def _topics(features: Mapping[str, Feature]) -> dict[str, str]:
    """The features' keys by topic: colour cameras, and numbers in vectors."""
    topics: dict[str, str] = {}
    for key, feature in features.items():
        plain = "/" + re.sub(r"\W+", "/", key).strip("/")
        if feature.is_camera and not feature.depth:
            suffix = "image_raw" if feature.dtype == "video" else "image_raw/compressed"
            topic = f"/{camera_name(key)}/{suffix}"
            topics[topic if topic not in topics else f"{plain}/{suffix}"] = key
        elif key in _STATE_KEYS and STATE_TOPIC not in topics:
            topics[STATE_TOPIC] = key
        elif key in _ACTION_KEYS and ACTION_TOPIC not in topics:
            topics[ACTION_TOPIC] = key
        elif feature.dtype.startswith("float") and len(feature.shape) == 1 and key != "timestamp":
            topics[plain] = key
    return topics


def _type_of(column: str) -> type:
    return np.int64 if column in (*_INDICES[1:], STAMP_KEY) else np.float64


@lru_cache(maxsize=64)
def _episodes_by_group(path: Path, _: int) -> tuple[frozenset[int], ...]:
    """The episodes in each row group of a file.

    Read from the rows: a damaged file's statistics can end the process inside of pyarrow.
    """
    from pyarrow import compute, parquet

    with parquet.ParquetFile(path) as file:
        groups = (file.read_row_group(at, ["episode_index"]) for at in range(file.num_row_groups))
        return tuple(frozenset(compute.unique(group["episode_index"]).to_pylist()) for group in groups)


def _video(episode: Episode, key: str, times_s: np.ndarray, tolerance_s: float) -> VideoFrames:
    """The frames of a camera at times of the episode; UserError if the file is missing or not a video."""
    from specvla_ros.lab.bags.video_frames import VideoFrames, check_video

    video = episode.videos[key]
    check_video(video.path, AGAIN)
    return VideoFrames(video.path, (video.from_s + times_s).tolist(), tolerance_s)
