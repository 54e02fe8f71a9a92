# SPDX-License-Identifier: Apache-2.0
"""One demonstration as a ROS 2 bag: images, instruction and the expert's actions."""

import io
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

INSTRUCTION_TOPIC = "/instruction"
ACTION_TOPIC = "/ground_truth/action"
CAMERA_TOPIC = "/{}/image_raw/compressed"  # the camera's name; the first is FIRST_CAMERA
FIRST_CAMERA = "camera"
STATE_TOPIC = "/joint_states"
# The expert's action at each image under another instruction; filled with the other task's name.
HINDSIGHT_ACTION_TOPIC = "/hindsight/{}/action"
HINDSIGHT_INSTRUCTION_TOPIC = "/hindsight/{}/instruction"
ACTION_LABELS = ","  # between the names of an action's values, in its dimension's label
PARTIAL = ".partial"
_OPTIONS = "specvla_collect"  # in the custom data of a bag's metadata
_START_NS = 1_700_000_000 * 10**9
_JPEG_QUALITY = 95
_FOREVER = QosTime(sec=2**31 - 1, nsec=2**32 - 1)
LATCHED = Qos(
    history=QosHistory.KEEP_LAST,
    depth=1,
    reliability=QosReliability.RELIABLE,
    durability=QosDurability.TRANSIENT_LOCAL,
    deadline=_FOREVER,
    lifespan=_FOREVER,
    liveliness=QosLiveliness.AUTOMATIC,
    liveliness_lease_duration=_FOREVER,
    avoid_ros_namespace_conventions=False,
)


@dataclass(frozen=True)
class Hindsight:
    """The expert's actions under another instruction."""

    instruction: str
    actions: Sequence[np.ndarray]  # one per image, as the record's own


@dataclass(frozen=True)
class DemonstrationRecord:
    """Images, actions and instruction of one successful episode."""

    images: Sequence[np.ndarray]  # RGB, uint8 [height, width, 3]
    # One per image, gripper 1 open: float64 [7], metres and radians over 0.2 s; or by `action_names`, joints' goals.
    actions: Sequence[np.ndarray]
    instruction: str
    times_s: Sequence[float]  # the images' times in seconds, from 0
    hindsight: Mapping[str, Hindsight]  # the expert under other instructions, by the other task's name
    cameras: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)  # further cameras' images by name
    state_names: tuple[str, ...] = ()  # empty: no state is recorded
    states: Sequence[np.ndarray] = ()  # one per image, float64 [state_names]
    action_names: tuple[str, ...] = ()  # of the actions' values; empty: of a tool's displacement
    options: str = ""  # that it was recorded with, without spaces; for `recorded_options`


def write_demonstration(directory: Path, record: DemonstrationRecord) -> None:
    """Writes an MCAP bag that `specvla replay` and `train-policy` read; after an OSError `directory` does not exist."""
    # A worker whose parent was killed may still be writing the same episode.
    partial = directory.with_name(f".{directory.name}-{os.getpid()}{PARTIAL}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _write(partial / directory.name, record)  # the data file is named after the directory
        if not directory.exists():
            (partial / directory.name).rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recorded_options(directory: Path) -> str:
    """The options that a demonstration was recorded with; empty if its bag does not tell them."""
    try:  # a bag has some hundred lines, and a collection thousands of bags: too many to parse
        found = re.search(rf"^ *{_OPTIONS}:\s+(\S+)$", (directory / "metadata.yaml").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found else ""


def _write(directory: Path, record: DemonstrationRecord) -> None:
    store = get_typestore(Stores.ROS2_JAZZY)
    with Writer(directory, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        if record.options:
            writer.set_custom_data(_OPTIONS, record.options)

        def channel(topic: str, msgtype: str, qos: Sequence[Qos] = ()) -> Any:
            return writer.add_connection(topic, msgtype, typestore=store, offered_qos_profiles=qos)

        def write(connection: Any, at: int, **fields: Any) -> None:
            message = store.types[connection.msgtype](**fields)
            writer.write(connection, at, store.serialize_cdr(message, connection.msgtype))

        seen = {FIRST_CAMERA: record.images, **record.cameras}
        cameras = {name: channel(CAMERA_TOPIC.format(name), "sensor_msgs/msg/CompressedImage") for name in seen}
        joints = channel(STATE_TOPIC, "sensor_msgs/msg/JointState") if record.state_names else None
        instructions = {INSTRUCTION_TOPIC: record.instruction}
        actions = {ACTION_TOPIC: record.actions}
        for name, hindsight in record.hindsight.items():
            instructions[HINDSIGHT_INSTRUCTION_TOPIC.format(name)] = hindsight.instruction
            actions[HINDSIGHT_ACTION_TOPIC.format(name)] = hindsight.actions
        for topic, text in instructions.items():
            write(channel(topic, "std_msgs/msg/String", [LATCHED]), _START_NS, data=text)
        channels = {topic: channel(topic, "std_msgs/msg/Float64MultiArray") for topic in actions}
        dimension, size = store.types["std_msgs/msg/MultiArrayDimension"], len(record.action_names)
        named = [dimension(label=ACTION_LABELS.join(record.action_names), size=size, stride=size)] if size else []
        layout = store.types["std_msgs/msg/MultiArrayLayout"](dim=named, data_offset=0)
        new_time, new_header = store.types["builtin_interfaces/msg/Time"], store.types["std_msgs/msg/Header"]
        for i in range(len(record.images)):
            at = _START_NS + round(record.times_s[i] * 1e9)
            stamp = new_time(sec=at // 10**9, nanosec=at % 10**9)
            for name, images in seen.items():
                write(cameras[name], at, header=new_header(stamp, name), format="jpeg", data=_jpeg(images[i]))
            if joints is not None:
                names, state, none = [*record.state_names], np.asarray(record.states[i], dtype=np.float64), np.empty(0)
                write(joints, at, header=new_header(stamp, ""), name=names, position=state, velocity=none, effort=none)
            for topic, values in actions.items():
                write(channels[topic], at, layout=layout, data=np.asarray(values[i], dtype=np.float64))


def _jpeg(image: np.ndarray) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "jpeg", quality=_JPEG_QUALITY, subsampling=0)
    return np.frombuffer(stream.getvalue(), dtype=np.uint8)
