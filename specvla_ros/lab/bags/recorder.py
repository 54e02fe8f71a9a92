# SPDX-License-Identifier: Apache-2.0
"""Writes actions to an MCAP bag that ROS 2 tools read; written actions survive a crash of the process."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from mcap.writer import CompressionType, Writer

from specvla_ros import __version__
from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.message_types import DECODE_STATS, VLA_ACTION, MessageTypes
from specvla_ros.lab.files import replace_file
from specvla_ros.messages.action_message import ActionMeaning, decode_stats_fields, vla_action_fields

ACTION_TOPIC = "/policy/action"
DECODE_STATS_TOPIC = "/policy/decode_stats"
_TYPES = {ACTION_TOPIC: VLA_ACTION, DECODE_STATS_TOPIC: DECODE_STATS}

# Copied at each use, so that YAML writes no aliases, which some readers of these profiles do not support.
_FOREVER = {"sec": 9223372036, "nsec": 854775807}
# Reliable, volatile, keep last 10, as rmw enum values: the QoS of the policy node.
_PROFILE = {
    "history": 1,
    "depth": 10,
    "reliability": 1,
    "durability": 2,
    "deadline": dict(_FOREVER),
    "lifespan": dict(_FOREVER),
    "liveliness": 1,
    "liveliness_lease_duration": dict(_FOREVER),
    "avoid_ros_namespace_conventions": False,
}
_QOS = yaml.safe_dump([_PROFILE])


class BagRecorder:
    """A new bag with the policy node's topics, in a new directory; `metadata` describes its origin.

    Without chunks and flushed after each action, so that all earlier actions stay readable if the process is killed.
    `close` writes metadata.yaml.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, str], meaning: ActionMeaning) -> None:
        self._directory, self._meaning = directory, meaning
        self._file_path = directory / f"{directory.name}_0.mcap"
        try:
            directory.mkdir(parents=True)
            self._file = self._file_path.open("wb")
        except OSError as error:
            raise UserError(
                f"bag {directory} cannot be recorded: {error.strerror}; choose a new, writable directory"
            ) from error
        self._types = MessageTypes()
        self._counts: Counter[str] = Counter()
        self._first_ns, self._last_ns = 2**63 - 1, 0
        self._writer = Writer(self._file, compression=CompressionType.NONE, use_chunking=False)
        self._writer.start(profile="ros2", library=f"specvla_ros {__version__}")
        self._channels = {topic: self._add_channel(topic, msgtype) for topic, msgtype in _TYPES.items()}
        self._writer.add_metadata("specvla_ros", dict(metadata))
        self._file.flush()

    def record(
        self,
        action: Action,
        *,
        seq: int,
        time_ns: int,
        publish_s: float,
        latency_s: float,
        drop_counts: Mapping[str, int],
    ) -> None:
        """Writes an action and its decode statistics; the header's stamp is the image's.

        `time_ns` is the bag time, which never decreases; `publish_s` is the time since the last token.
        """
        stamp_ns, frame_id = action.observation.stamp_ns, action.observation.frame_id
        fields = vla_action_fields(action, self._meaning, seq=seq, publish_s=publish_s, latency_s=latency_s)
        self._write(ACTION_TOPIC, fields, time_ns, stamp_ns, self._meaning.base_frame)
        fields = decode_stats_fields(action, seq=seq, drop_counts=drop_counts)
        self._write(DECODE_STATS_TOPIC, fields, time_ns, stamp_ns, frame_id)
        self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file:
            self._writer.finish()
        replace_file(self._directory / "metadata.yaml", yaml.safe_dump(self._metadata(), sort_keys=False))

    def _add_channel(self, topic: str, msgtype: str) -> int:
        schema = self._writer.register_schema(msgtype, "ros2msg", self._types.definition(msgtype).encode())
        metadata = {"offered_qos_profiles": _QOS, "topic_type_hash": self._types.type_hash(msgtype)}
        return self._writer.register_channel(topic, "cdr", schema, metadata)

    def _write(self, topic: str, fields: Mapping[str, Any], time_ns: int, stamp_ns: int, frame_id: str) -> None:
        raw = self._types.serialise(_TYPES[topic], fields, stamp_ns=stamp_ns, frame_id=frame_id)
        self._writer.add_message(
            self._channels[topic], log_time=time_ns, data=raw, publish_time=time_ns, sequence=self._counts[topic]
        )
        self._counts[topic] += 1
        self._first_ns, self._last_ns = min(self._first_ns, time_ns), max(self._last_ns, time_ns)

    def _metadata(self) -> dict[str, Any]:
        """Metadata in rosbag2's format version 8 (Jazzy, Kilted); older readers ignore unknown fields."""
        total = sum(self._counts.values())
        start = {"nanoseconds_since_epoch": self._first_ns if total else 0}
        duration = {"nanoseconds": self._last_ns - self._first_ns if total else 0}
        topics = []
        for topic, msgtype in _TYPES.items():
            described = {
                "name": topic,
                "type": msgtype,
                "serialization_format": "cdr",
                "offered_qos_profiles": _QOS,
                "type_description_hash": self._types.type_hash(msgtype),
            }
            topics.append({"topic_metadata": described, "message_count": self._counts[topic]})
        name = self._file_path.name
        file = {"path": name, "starting_time": dict(start), "duration": dict(duration), "message_count": total}
        information = {
            "version": 8,
            "storage_identifier": "mcap",
            "duration": duration,
            "starting_time": start,
            "message_count": total,
            "topics_with_message_count": topics,
            "compression_format": "",
            "compression_mode": "",
            "relative_file_paths": [name],
            "files": [file],
            "custom_data": None,
            "ros_distro": "",
        }
        return {"rosbag2_bagfile_information": information}
