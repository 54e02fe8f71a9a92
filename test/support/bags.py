# SPDX-License-Identifier: Apache-2.0
"""Bags that tests write themselves."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mcap.writer import CompressionType
from mcap.writer import Writer as McapWriter
from PIL import Image
from rosbags.interfaces import (
    Nodetype,
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.rosbag2.enums import CompressionFormat, CompressionMode
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

STORE = get_typestore(Stores.ROS2_JAZZY)
TYPES = STORE.types
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
TEXT, NUMBERS = "std_msgs/msg/String", "std_msgs/msg/Float32MultiArray"
ANSWER = "specvla_ros/msg/VlaAction"
_MESSAGES = Path(__file__).resolve().parents[2] / "msg"
STORE.register(get_types_from_msg((_MESSAGES / "VlaAction.msg").read_text(encoding="utf-8"), ANSWER))
START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 200_000_000

_FOREVER = QosTime(9223372036, 854775807)
LATCHED = Qos(
    QosHistory.KEEP_LAST,
    1,
    QosReliability.RELIABLE,
    QosDurability.TRANSIENT_LOCAL,
    _FOREVER,
    _FOREVER,
    QosLiveliness.AUTOMATIC,
    _FOREVER,
    False,
)

# topic, type, bag time [ns], message
Entry = tuple[str, str, int, Any]


def header(stamp_ns: int, frame_id: str = "camera_optical_frame") -> Any:
    stamp = TYPES["builtin_interfaces/msg/Time"](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    return TYPES["std_msgs/msg/Header"](stamp=stamp, frame_id=frame_id)


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def image(stamp_ns: int, *, seed: int = 0, **changes: Any) -> Any:
    rgb = pixels(seed)
    height, width, _ = rgb.shape
    fields = dict(height=height, width=width, encoding="rgb8", is_bigendian=0, step=width * 3, data=rgb.reshape(-1))
    return TYPES[IMAGE](header=header(stamp_ns), **(fields | changes))


def compressed_image(stamp_ns: int, *, seed: int = 0) -> Any:
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).save(buffer, "PNG")
    return TYPES[COMPRESSED](header=header(stamp_ns), format="png", data=np.frombuffer(buffer.getvalue(), np.uint8))


def text(words: str) -> Any:
    return TYPES[TEXT](data=words)


def numbers(values: Sequence[float]) -> Any:
    layout = TYPES["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    return TYPES[NUMBERS](layout=layout, data=np.asarray(values, np.float32))


def answer(stamp_ns: int, values: Sequence[float], names: Sequence[str]) -> Any:
    """A policy's answer to the image of that stamp: `values` row by row."""
    empty = {"string": "", "float64": 0.0, "bool": False}
    declared: list[Any] = [*STORE.fielddefs[ANSWER][1]]
    fields = {name: empty.get(of[0], 0) for name, (kind, of) in declared if kind is Nodetype.BASE}
    given = {"header": header(stamp_ns), "names": [*names], "values": np.array(values), "tokens": np.empty(0, np.int32)}
    return TYPES[ANSWER](**fields | given)


def episode(frames: int = 5, *, instruction: str = "put carrot on plate", actions: bool = True) -> list[Entry]:
    """An instruction, then images, each followed by its action 10 ms later."""
    entries: list[Entry] = [("/instruction", TEXT, START_NS, text(instruction))]
    for index in range(frames):
        time_ns = START_NS + index * PERIOD_NS
        entries.append(("/camera/image_raw", IMAGE, time_ns, image(time_ns, seed=index)))
        if actions:
            recorded = numbers([0.001 * index, 0.0, -0.001, 0.01, 0.0, 0.02, float(index % 2)])
            entries.append(("/ground_truth/action", NUMBERS, time_ns + 10_000_000, recorded))
    return entries


def write_bag(
    directory: Path,
    entries: Iterable[Entry],
    *,
    sqlite: bool = False,
    compression: CompressionMode = CompressionMode.NONE,
    topics: Sequence[tuple[str, str]] = (),
) -> Path:
    """A bag as rosbag2 leaves it; `topics` are announced even if no message comes."""
    storage = StoragePlugin.SQLITE3 if sqlite else StoragePlugin.MCAP
    writer = Writer(directory, version=8, storage_plugin=storage)
    writer.set_compression(compression, CompressionFormat.ZSTD)
    with writer:
        connections = {name: writer.add_connection(name, kind, typestore=STORE) for name, kind in topics}
        for topic, msgtype, time_ns, message in entries:
            if topic not in connections:
                qos = [LATCHED] if msgtype == TEXT else []
                connections[topic] = writer.add_connection(topic, msgtype, typestore=STORE, offered_qos_profiles=qos)
            writer.write(connections[topic], time_ns, STORE.serialize_cdr(message, msgtype))
    return directory


def write_mcap(
    path: Path,
    entries: Iterable[Entry],
    *,
    compression: CompressionType = CompressionType.NONE,
    chunked: bool = True,
    chunk_size: int = 20_000,
    encoding: str = "cdr",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """One MCAP file, laid out as asked."""
    with path.open("wb") as file:
        writer = McapWriter(file, chunk_size=chunk_size, compression=compression, use_chunking=chunked)
        writer.start(profile="ros2", library="test")
        channels: dict[str, int] = {}
        for topic, msgtype, time_ns, message in entries:
            if topic not in channels:
                definition, _ = STORE.generate_msgdef(msgtype, ros_version=2)
                schema = writer.register_schema(msgtype, "ros2msg", definition.encode())
                channels[topic] = writer.register_channel(topic, encoding, schema, dict(metadata or {}))
            raw = bytes(STORE.serialize_cdr(message, msgtype))
            writer.add_message(channels[topic], log_time=time_ns, data=raw, publish_time=time_ns)
        writer.finish()
    return path
