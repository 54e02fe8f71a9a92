# SPDX-License-Identifier: Apache-2.0
"""Reads ROS 2 bags, MCAP or sqlite3, and episodes of LeRobot datasets, without ROS."""

import heapq
import logging
import re
import shlex
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import yaml
import zstandard
from rosbags.interfaces import Connection, ConnectionExtRosbag2, Qos, QosDurability, QosReliability
from rosbags.rosbag2 import Reader

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.lerobot.dataset import as_episode, episode_files, open_episode, refuse_dataset
from specvla_ros.lab.bags.lerobot.episode import EpisodeStorage
from specvla_ros.lab.bags.mcap_storage import MAX_BLOCK_BYTES, MCAP_MAGIC, McapStorage, StoredMessage, decompress_zstd
from specvla_ros.lab.bags.message_types import MessageTypes
from specvla_ros.lab.bags.video_packets import DECODED_TYPE, VIDEO_TYPES, VideoPackets
from specvla_ros.settings.json_file import shown

_log = logging.getLogger(__name__)

BAG_SUFFIXES = (".mcap", ".db3")
_MAX_METADATA_BYTES = 16 << 20
_MAX_OVERLAP_NS = 1_000_000_000  # of two parts of a recording, from messages in transit when it was split
_MAX_RATIO = 200  # decompressed to compressed size of a file; more is an attack, or black images
_SQLITE_MAGIC = b"SQLite format 3\0"
_OF_URIS = re.compile(r"[#%?]")  # rosbags opens a database by a URI and does not quote them in its path


@dataclass(frozen=True)
class OfferedQos:
    """QoS offered by the recorded publishers; the weakest if there are several."""

    reliable: bool = True  # otherwise best effort
    transient_local: bool = False  # otherwise volatile
    depth: int = 10  # history depth


@dataclass(frozen=True)
class Topic:
    """One topic of a bag."""

    name: str  # with its leading slash
    msgtype: str  # for example sensor_msgs/msg/Image
    count: int  # number of readable messages
    qos: OfferedQos


@dataclass(frozen=True)
class BagMessage:
    """A recorded message, deserialised on demand."""

    topic: str
    msgtype: str
    time_ns: int  # time of recording, nanoseconds
    raw: bytes = field(repr=False)  # CDR bytes, encapsulation header included
    _types: MessageTypes = field(repr=False, compare=False)

    def message(self) -> Any:
        """Returns the deserialised message, with attributes named like its fields."""
        try:
            return self._types.deserialise(self.raw, self.msgtype)
        except UserError as error:
            raise UserError(f"topic {self.topic} at {self.time_ns * 1e-9:.3f} s: {error}") from error


class Bag:
    """An open bag, also a context manager. `topics` are the topics with messages, sorted by name."""

    def __init__(self, path: Path, files: tuple[Path, ...], storages: list["Storage"], opened: ExitStack) -> None:
        self.path, self.files = path, files
        self._storages, self._opened = storages, opened
        self._types = MessageTypes()
        self._packets = VideoPackets(self._types)
        self.topics = _topics(storages)
        if not self.topics:
            self.close()
            raise UserError(f"bag {path} is empty: no message can be read from it. {self.damage}".rstrip())
        filled = [storage for storage in storages if any(connection.msgcount for connection in storage.connections)]
        self.start_ns = min(storage.start_ns for storage in filled)
        self.end_ns = max(storage.end_ns for storage in filled)

    @property
    def damage(self) -> str:
        """Reason why parts of the bag could not be read, or empty. Some damage is only found at the end of reading."""
        return "; ".join(each.damage for each in (*self._storages, self._packets) if each.damage)

    def warn_of_damage(self) -> None:
        if self.damage:
            _log.warning("bag %s: %s", self.path, self.damage)

    def topic(self, name: str) -> Topic:
        for topic in self.topics:
            if topic.name == name:
                return topic
        held = "\n".join(f"  {topic.name}  {topic.msgtype}  {topic.count} messages" for topic in self.topics)
        raise UserError(f"bag {self.path} has no messages on topic '{name}'; it holds:\n{held}")

    def messages(self, topics: Collection[str] = ()) -> Iterator[BagMessage]:
        """The messages of some or all topics in time order, up to the first damage; see `damage`.

        Those of `VIDEO_TYPES` are decoded to images.
        """
        wanted = frozenset(self.topic(name).name for name in topics) or frozenset(topic.name for topic in self.topics)
        for storage in self._storages:
            for connection in storage.connections:
                if connection.topic in wanted:
                    _check_cdr(self.path, connection)
                    self._types.learn(connection.msgtype, connection.msgdef)
        merged = heapq.merge(*(storage.messages(wanted) for storage in self._storages), key=itemgetter(1))
        decoded = self._packets.decoded(merged)
        return (BagMessage(whose.topic, whose.msgtype, time_ns, raw, self._types) for whose, time_ns, raw in decoded)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "Bag":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_bag(path: str | Path) -> Bag:
    """Opens a bag: its directory, one .mcap or .db3 file, or an episode of a LeRobot dataset (DATASET/episode_000012).

    metadata.yaml only gives the list of files and the compression. A killed recorder may leave none, or a wrong one.
    """
    path = Path(path).expanduser()
    if as_episode(path) is not None:
        dataset, episode = open_episode(path)
        return Bag(path, episode_files(path), [EpisodeStorage(dataset, episode)], ExitStack())
    if not path.exists():
        raise UserError(f"bag {path} does not exist; give a bag's directory, or an .mcap or .db3 file")
    refuse_dataset(path)
    files, compression = _directory_files(path) if path.is_dir() else (_single_file(path), "")
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(TemporaryDirectory(prefix="specvla_bag_")))
        storages: list[Storage] = []
        storages += (opened.enter_context(closing(open_storage(file, scratch, compression))) for file in files)
        if not (path / "metadata.yaml").exists():
            _check_parts(path, storages)
        return Bag(path, files, storages, opened.pop_all())


def bag_files(path: Path) -> tuple[Path, ...]:
    """The data files that `open_bag` reads; raises the same UserErrors."""
    if as_episode(path) is not None:
        return episode_files(path)
    return _directory_files(path)[0] if path.is_dir() else _single_file(path)


def _check_parts(path: Path, storages: list["Storage"]) -> None:
    """Raises UserError if files not listed by metadata.yaml overlap in time: they are not parts of one recording."""
    spans = sorted((each.start_ns, each.end_ns) for each in storages if any(c.msgcount for c in each.connections))
    if any(later[0] < earlier[1] - _MAX_OVERLAP_NS for earlier, later in pairwise(spans)):
        raise UserError(
            f"the files of bag {path} overlap in time: they are several recordings; give each one separately"
        )


def _single_file(path: Path) -> tuple[Path, ...]:
    if path.suffix == ".bag":
        raise UserError(f"{path} is a ROS 1 bag; convert it first: rosbags-convert --src {path} --dst {path.stem}")
    if path.suffix == ".zstd":
        raise UserError(f"{path} is one file of a compressed bag; give the bag's directory instead: {path.parent}")
    if path.name == "metadata.yaml":
        raise UserError(f"{path} only describes a bag; give the bag's directory instead: {path.parent}")
    return (path,)


def _directory_files(directory: Path) -> tuple[tuple[Path, ...], str]:
    """The data files in recording order, and rosbag2's compression mode: `file`, `message` or empty for none."""
    information = _information(directory)
    names = information.get("relative_file_paths") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and _is_file_name(name) for name in names):
        raise UserError(
            f"{directory / 'metadata.yaml'}: relative_file_paths is {shown(names)}, but it must be a list of file "
            "names; fix it or remove metadata.yaml"
        )
    listed = tuple(directory / PurePath(name).name for name in names)
    files = listed or data_files(directory)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"bag {directory} lacks files that its metadata.yaml lists: {', '.join(missing)}; copy them there, or give "
            "a single data file"
        )
    if not files:
        bags = [child.name for child in sorted(directory.iterdir()) if (child / "metadata.yaml").exists()]
        hint = f"; it holds the bags {', '.join(bags)}: give one of them" if bags else ""
        raise UserError(f"directory {directory} is not a ROS 2 bag: no .mcap or .db3 file in it{hint}")
    if not listed and len(several := recordings(files)) > 1:
        raise UserError(f"directory {directory} holds several recordings, {', '.join(several)}: give one of its files")
    return files, _compression(directory, information)


def data_files(directory: Path) -> tuple[Path, ...]:
    """A directory's .mcap and .db3 files, bag_2 before bag_10; hidden files, as left by macOS, are ignored."""
    found = (file for file in directory.iterdir() if file.suffix in BAG_SUFFIXES and not file.name.startswith("."))
    return tuple(sorted(found, key=_natural))


def recordings(files: Iterable[Path]) -> tuple[str, ...]:
    """The names of data files' recordings, without the number that rosbag2 appends to each part."""
    return tuple(dict.fromkeys(re.sub(r"_\d+$", "", file.stem) + file.suffix for file in files))


def _is_file_name(name: str) -> bool:
    return 0 < len(PurePath(name).name.encode("utf-8", "replace")) < 256 and name.isprintable()


def _compression(directory: Path, information: dict[str, Any]) -> str:
    mode, form = str(information.get("compression_mode")).lower(), information.get("compression_format")
    if mode not in ("file", "message"):
        return ""
    if form != "zstd":
        raise UserError(
            f"{directory / 'metadata.yaml'}: compression_format is {shown(form)}, but only zstd can be read; "
            "decompress the bag first"
        )
    return mode


def _information(directory: Path) -> dict[str, Any]:
    """The content of metadata.yaml; empty if it is missing or unreadable."""
    path = directory / "metadata.yaml"
    try:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            return {}
        information = yaml.safe_load(path.read_text(encoding="utf-8"))["rosbag2_bagfile_information"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return {}
    return information if isinstance(information, dict) else {}


def _topics(storages: list["Storage"]) -> tuple[Topic, ...]:
    by_name: defaultdict[str, list[Connection]] = defaultdict(list)
    for connection in (connection for storage in storages for connection in storage.connections):
        if connection.msgcount:
            by_name[connection.topic].append(connection)
    return tuple(
        Topic(name, _presented(same[0].msgtype), sum(connection.msgcount for connection in same), _offered_qos(same))
        for name, same in sorted(by_name.items())
    )


def _presented(msgtype: str) -> str:
    return DECODED_TYPE if msgtype in VIDEO_TYPES else msgtype


def _offered_qos(connections: list[Connection]) -> OfferedQos:
    profiles: list[Qos] = []
    for connection in connections:
        if isinstance(connection.ext, ConnectionExtRosbag2):
            profiles += connection.ext.offered_qos_profiles
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
    """Sort key that puts bag_10 after bag_2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.name)]


class SqliteStorage:
    """A sqlite3 file, complete or as its recorder left it; damaged bytes raise any exception of the libraries.

    `settled` is the file to read in place of `path`, by which messages name it.
    """

    def __init__(self, path: Path, settled: Path) -> None:
        self._path, self._reader = path, Reader(settled)
        self._reader.open()
        self.connections = list(self._reader.connections)
        self.start_ns, self.end_ns = self._reader.start_time, self._reader.end_time - 1
        self.damage = ""
        texts = [text for each in self.connections for text in (each.topic, each.msgtype)]
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.start_ns + self.end_ns, int):
            raise ValueError("topics without a name or type, or invalid times")

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        wanted = [connection for connection in self.connections if connection.topic in topics]
        if not wanted:
            return
        try:
            for connection, time_ns, data in self._reader.messages(wanted):
                if not isinstance(data, bytes) or not isinstance(time_ns, int):
                    raise ValueError(f"a message of {connection.topic} is not bytes, or has an invalid time")
                yield connection, time_ns, data
        except Exception as error:  # damaged bytes raise any exception
            self.damage = f"{self._path} is damaged ({error}): the rest of it cannot be read"

    def close(self) -> None:
        self._reader.close()


class CompressedMessages:
    """A bag whose messages were compressed individually by rosbag2."""

    def __init__(self, inner: SqliteStorage | McapStorage) -> None:
        self._inner, self._damage = inner, ""
        self.connections = inner.connections
        self.start_ns, self.end_ns = inner.start_ns, inner.end_ns

    @property
    def damage(self) -> str:
        return self._inner.damage or self._damage

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        for connection, time_ns, data in self._inner.messages(topics):
            try:
                whole = decompress_zstd(data)
            except (zstandard.ZstdError, ValueError) as error:
                self._damage = f"a message of {connection.topic} is damaged ({error}): the rest cannot be read"
                return
            yield connection, time_ns, whole

    def close(self) -> None:
        self._inner.close()


Storage = SqliteStorage | McapStorage | CompressedMessages | EpisodeStorage


def open_storage(path: Path, scratch: Path, compression: str = "") -> Storage:
    """Opens a data file by its first bytes; raises UserError if it cannot be read or does not belong to a bag.

    Args:
        scratch: directory for a copy of a database that its recorder left open, or of a compressed file.
        compression: rosbag2's compression mode, `file` or `message`; empty: none.
    """
    if compression == "file":
        path = _decompressed_file(path, scratch)
    storage = _open_plain(path, scratch)
    return CompressedMessages(storage) if compression == "message" else storage


def _open_plain(path: Path, scratch: Path) -> SqliteStorage | McapStorage:
    try:
        with path.open("rb") as file:
            begin = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
    if begin.startswith(MCAP_MAGIC):
        return McapStorage(path)
    if begin == _SQLITE_MAGIC:
        try:
            return SqliteStorage(path, _named_for_uris(_settled(path, scratch), scratch))
        except Exception as error:
            # Not `.recover`: it fails in some distributions' sqlite3 (3.40 of Debian 12), even of an intact file.
            dump = f"sqlite3 {shlex.quote(str(path))} .dump | sed 's/^ROLLBACK.*/COMMIT;/' | sqlite3 saved.db3"
            raise UserError(
                f"bag file {path} is a damaged sqlite3 database ({error}), perhaps cut off; copy it again, or recover "
                f"what is left, whose last message may be incomplete, with: {dump}"
            ) from error
    size = path.stat().st_size
    raise UserError(
        f"bag file {path} ({size} bytes) is neither MCAP nor sqlite3: it is "
        f"{'empty' if not size else 'cut off near its start, or not a bag'}; copy or record it again"
    )


def _settled(path: Path, scratch: Path) -> Path:
    """The database with everything that its recorder committed.

    A killed recorder leaves its last messages in a log next to the database. They are merged in a copy, since a
    recording is evidence and must not be changed.
    """
    logs = [path.with_name(path.name + suffix) for suffix in ("-wal", "-journal")]
    logs = [log for log in logs if log.exists() and log.stat().st_size]
    if not logs:
        return path
    for file in (path, *logs):
        shutil.copy(file, scratch)
    copy = scratch / path.name
    connection = sqlite3.connect(copy)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.close()
    return copy


def _named_for_uris(path: Path, scratch: Path) -> Path:
    """The database by a name that means the same file in a URI."""
    if not _OF_URIS.search(str(path)):
        return path
    link = Path(mkdtemp(dir=scratch)) / "bag.db3"
    link.symlink_to(path.resolve())
    return link


def _decompressed_file(path: Path, scratch: Path) -> Path:
    copy = scratch / path.stem
    try:
        limit = max(MAX_BLOCK_BYTES, _MAX_RATIO * path.stat().st_size)
        with path.open("rb") as source, copy.open("wb") as target:
            for block in zstandard.ZstdDecompressor().read_to_iter(source, write_size=1 << 20):
                target.write(block)
                if target.tell() > limit:
                    raise ValueError(f"it holds more than {limit} bytes, {_MAX_RATIO} times its own size")
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise UserError(
            f"the compressed bag file {path} cannot be read ({error}); decompress it: zstd -d {path.name}"
        ) from None
    return copy
