# SPDX-License-Identifier: Apache-2.0
"""Reads ROS 2 bags, MCAP or sqlite3, without ROS."""

import heapq
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rosbags.interfaces import Connection, ConnectionExtRosbag2, Qos, QosDurability, QosReliability

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.message_types import MessageTypes
from specvla_ros.lab.bags.storage import Storage, open_storage
from specvla_ros.settings.json_file import shown

_log = logging.getLogger(__name__)

BAG_SUFFIXES = (".mcap", ".db3")
_MAX_METADATA_BYTES = 16 << 20


@dataclass(frozen=True)
class OfferedQos:
    """What the recorded publishers offered; the weakest of several."""

    reliable: bool = True  # else best effort
    transient_local: bool = False  # else volatile
    depth: int = 10  # of the history


@dataclass(frozen=True)
class Topic:
    """One topic of a bag."""

    name: str  # with its leading slash
    msgtype: str  # for example sensor_msgs/msg/Image
    count: int  # of its readable messages
    qos: OfferedQos


@dataclass(frozen=True)
class BagMessage:
    """One message."""

    topic: str
    msgtype: str
    time_ns: int  # when it was recorded, nanoseconds
    raw: bytes = field(repr=False)  # CDR bytes, encapsulation header included
    _types: MessageTypes = field(repr=False, compare=False)

    def message(self) -> Any:
        """The message itself: attributes named as its fields."""
        try:
            return self._types.deserialise(self.raw, self.msgtype)
        except UserError as error:
            raise UserError(f"topic {self.topic} at {self.time_ns * 1e-9:.3f} s: {error}") from error


class Bag:
    """An open bag; also a context manager. `topics` are those with messages, by name."""

    def __init__(
        self, path: Path, files: tuple[Path, ...], storages: list[Storage], scratch: TemporaryDirectory[str]
    ) -> None:
        self.path = path
        self.files = files
        self._storages = storages
        self._scratch = scratch
        self._types = MessageTypes()
        self.topics = _topics(storages)
        if not self.topics:
            self.close()
            raise UserError(f"bag {path} is empty: no message can be read from it. {self.damage}".rstrip())
        filled = [storage for storage in storages if any(connection.msgcount for connection in storage.connections)]
        self.start_ns = min(storage.start_ns for storage in filled)
        self.end_ns = max(storage.end_ns for storage in filled)

    @property
    def damage(self) -> str:
        """Why not all of the bag could be read, as far as it is known so far; empty: all is well.

        Some damage shows only when the messages are read: ask again at the end.
        """
        return "; ".join(storage.damage for storage in self._storages if storage.damage)

    def warn_of_damage(self) -> None:
        """Logs the damage, if any; for readers that go on with what there is."""
        if self.damage:
            _log.warning("bag %s: %s", self.path, self.damage)

    def topic(self, name: str) -> Topic:
        for topic in self.topics:
            if topic.name == name:
                return topic
        held = "\n".join(f"  {topic.name}  {topic.msgtype}  {topic.count} messages" for topic in self.topics)
        raise UserError(f"bag {self.path} has no messages on topic '{name}'; it holds:\n{held}")

    def messages(self, topics: Collection[str] = ()) -> Iterator[BagMessage]:
        """The messages of some topics, by default all, in time order, up to the first damage; see `damage`."""
        wanted = frozenset(self.topic(name).name for name in topics) or frozenset(topic.name for topic in self.topics)
        for storage in self._storages:
            for connection in storage.connections:
                if connection.topic in wanted:
                    _check_cdr(self.path, connection)
                    self._types.learn(connection.msgtype, connection.msgdef)
        return self._in_time_order(wanted)

    def _in_time_order(self, topics: frozenset[str]) -> Iterator[BagMessage]:
        parts = [storage.messages(topics) for storage in self._storages]
        for connection, time_ns, raw in heapq.merge(*parts, key=lambda message: message[1]):
            yield BagMessage(connection.topic, connection.msgtype, time_ns, bytes(raw), self._types)

    def close(self) -> None:
        for storage in self._storages:
            storage.close()
        self._scratch.cleanup()

    def __enter__(self) -> "Bag":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_bag(path: str | Path) -> Bag:
    """Opens a bag: its directory, or one .mcap or .db3 file.

    metadata.yaml only says which files belong to the bag, so that one that is missing or wrong, as a killed recorder
    leaves it, does no harm.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"bag {path} does not exist; give a bag's directory, or an .mcap or .db3 file")
    files, compression = _directory_files(path) if path.is_dir() else (_single_file(path), "")
    scratch = TemporaryDirectory(prefix="specvla_bag_")
    storages: list[Storage] = []
    try:
        for file in files:
            storages.append(open_storage(file, Path(scratch.name), compression))
    except BaseException:
        for storage in storages:
            storage.close()
        scratch.cleanup()
        raise
    return Bag(path, files, storages, scratch)


def _single_file(path: Path) -> tuple[Path, ...]:
    if path.suffix == ".bag":
        raise UserError(f"{path} is a ROS 1 bag; convert it first: rosbags-convert --src {path} --dst {path.stem}")
    if path.suffix == ".zstd":
        raise UserError(f"{path} is one file of a compressed bag; give the bag's directory instead: {path.parent}")
    if path.name == "metadata.yaml":
        raise UserError(f"{path} only describes a bag; give the bag's directory instead: {path.parent}")
    return (path,)


def _directory_files(directory: Path) -> tuple[tuple[Path, ...], str]:
    """The data files in the order of recording, and whether rosbag2 compressed `file` or `message`; empty: neither."""
    information = _information(directory)
    names = information.get("relative_file_paths") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and _is_file_name(name) for name in names):
        raise UserError(
            f"{directory / 'metadata.yaml'}: relative_file_paths is {shown(names)}, but it must be a list of names of "
            "files; mend it, or remove metadata.yaml"
        )
    listed = [directory / PurePath(name).name for name in names]
    files = listed or sorted((file for file in directory.iterdir() if file.suffix in BAG_SUFFIXES), key=_natural)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"bag {directory} lacks files that its metadata.yaml lists: {', '.join(missing)}; copy them there, or give "
            "one of the data files alone"
        )
    if not files:
        bags = [child.name for child in sorted(directory.iterdir()) if (child / "metadata.yaml").exists()]
        hint = f"; it holds the bags {', '.join(bags)}: give one of them" if bags else ""
        raise UserError(f"directory {directory} is no ROS 2 bag: no .mcap or .db3 file in it{hint}")
    return tuple(files), _compression(directory, information)


def _is_file_name(name: str) -> bool:
    return 0 < len(PurePath(name).name.encode("utf-8", "replace")) < 256 and name.isprintable()


def _compression(directory: Path, information: dict[str, Any]) -> str:
    mode = str(information.get("compression_mode") or "none").lower()
    if mode not in ("file", "message"):
        return ""
    form = information.get("compression_format")
    if form != "zstd":
        raise UserError(
            f"{directory / 'metadata.yaml'}: compression_format is {shown(form)}, but only zstd can be read; "
            "decompress the bag first"
        )
    return mode


def _information(directory: Path) -> dict[str, Any]:
    """What metadata.yaml says; nothing when it is missing or cannot be read."""
    path = directory / "metadata.yaml"
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            return {}
        information = yaml.safe_load(path.read_text(encoding="utf-8"))["rosbag2_bagfile_information"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return {}
    return information if isinstance(information, dict) else {}


def _topics(storages: list[Storage]) -> tuple[Topic, ...]:
    by_name: dict[str, list[Connection]] = {}
    for storage in storages:
        for connection in storage.connections:
            if connection.msgcount:
                by_name.setdefault(connection.topic, []).append(connection)
    return tuple(
        Topic(name, same[0].msgtype, sum(connection.msgcount for connection in same), _offered_qos(same))
        for name, same in sorted(by_name.items())
    )


def _offered_qos(connections: list[Connection]) -> OfferedQos:
    profiles: list[Qos] = [
        profile
        for connection in connections
        if isinstance(connection.ext, ConnectionExtRosbag2)
        for profile in connection.ext.offered_qos_profiles
    ]
    if not profiles or not all(isinstance(profile.depth, int) for profile in profiles):
        return OfferedQos()
    return OfferedQos(
        reliable=all(profile.reliability is not QosReliability.BEST_EFFORT for profile in profiles),
        transient_local=all(profile.durability is QosDurability.TRANSIENT_LOCAL for profile in profiles),
        depth=max(1, *(profile.depth for profile in profiles)),
    )


def _check_cdr(path: Path, connection: Connection) -> None:
    encoding = connection.ext.serialization_format if isinstance(connection.ext, ConnectionExtRosbag2) else "cdr"
    if encoding != "cdr":
        raise UserError(
            f"bag {path}: topic {connection.topic} is encoded as '{encoding}', but only cdr, the encoding of ROS 2, "
            "is supported; convert the bag with ros2 bag convert"
        )


def _natural(file: Path) -> list[tuple[int, str]]:
    """bag_10 comes after bag_2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.name)]
