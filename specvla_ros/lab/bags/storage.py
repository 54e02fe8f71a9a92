# SPDX-License-Identifier: Apache-2.0
"""What a bag's data lie in, opened by what the file holds: sqlite3, MCAP, or a bag that rosbag2 compressed."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import zstandard
from rosbags.rosbag2 import Reader

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.mcap_storage import MAX_BLOCK_BYTES, MCAP_MAGIC, McapStorage, StoredMessage, decompress_zstd

_MAX_RATIO = 200  # of a file to what it is compressed to; more is an attack, or black pictures
_SQLITE_MAGIC = b"SQLite format 3\0"


class SqliteStorage:
    """A sqlite3 file, whole or as its recorder left it.

    Args:
        path: of the file.

    Raises:
        Exception: whatever the libraries below make of damaged bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = Reader(path)
        self._reader.open()
        self.connections = list(self._reader.connections)
        self.start_ns = self._reader.start_time
        self.end_ns = self._reader.end_time - 1
        self.damage = ""
        texts = [text for each in self.connections for text in (each.topic, each.msgtype)]
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.start_ns + self.end_ns, int):
            raise ValueError("topics without a name or type, or times that are none")

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics, in time order."""
        wanted = [connection for connection in self.connections if connection.topic in topics]
        if not wanted:
            return
        try:
            for connection, time_ns, data in self._reader.messages(wanted):
                if not isinstance(data, bytes) or not isinstance(time_ns, int):
                    raise ValueError(f"a message of {connection.topic} is no bytes, or at no time")
                yield connection, time_ns, data
        except Exception as error:  # whatever the libraries below make of damaged bytes
            self.damage = f"{self._path} is damaged ({error}): the rest of it cannot be read"

    def close(self) -> None:
        self._reader.close()


class CompressedMessages:
    """A bag whose messages rosbag2 has compressed one by one.

    Args:
        inner: what holds them.
    """

    def __init__(self, inner: SqliteStorage | McapStorage) -> None:
        self._inner = inner
        self._damage = ""
        self.connections = inner.connections
        self.start_ns, self.end_ns = inner.start_ns, inner.end_ns

    @property
    def damage(self) -> str:
        """Why not all of it could be read, once that is known."""
        return self._inner.damage or self._damage

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics, in time order."""
        for connection, time_ns, data in self._inner.messages(topics):
            try:
                whole = decompress_zstd(data)
            except (zstandard.ZstdError, ValueError) as error:
                self._damage = f"a message of {connection.topic} is damaged ({error}): the rest cannot be read"
                return
            yield connection, time_ns, whole

    def close(self) -> None:
        self._inner.close()


Storage = SqliteStorage | McapStorage | CompressedMessages


def open_storage(path: Path, scratch: Path, compression: str = "") -> Storage:
    """Opens a data file by what it holds.

    Args:
        path: of the file.
        scratch: directory for a copy of a database that its recorder left open, or of a compressed file.
        compression: `file` or `message`, as rosbag2 compresses bags; empty: not at all.

    Raises:
        UserError: it cannot be read, or is no bag's.
    """
    if compression == "file":
        path = _decompressed_file(path, scratch)
    storage = _open(path, scratch)
    return CompressedMessages(storage) if compression == "message" else storage


def _open(path: Path, scratch: Path) -> SqliteStorage | McapStorage:
    try:
        with path.open("rb") as file:
            begin = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
    if begin.startswith(MCAP_MAGIC):
        return McapStorage(path)
    if begin == _SQLITE_MAGIC:
        try:
            return SqliteStorage(_settled(path, scratch))
        except Exception as error:
            raise UserError(
                f"bag file {path} is a damaged sqlite3 database ({error}), it may be cut off; copy it again, or save "
                f"what is left with: sqlite3 {path.name} .recover | sqlite3 saved.db3"
            ) from error
    size = path.stat().st_size
    raise UserError(
        f"bag file {path} ({size} bytes) is neither MCAP nor sqlite3: it is "
        f"{'empty' if not size else 'cut off at its very beginning, or no bag'}; copy or record it again"
    )


def _settled(path: Path, scratch: Path) -> Path:
    """The database with all that its recorder committed.

    A killed recorder leaves its last messages in a log beside the database. They are merged in a copy: a recording is
    evidence and stays as it is.
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


def _decompressed_file(path: Path, scratch: Path) -> Path:
    """The data file that a `.zstd` file holds."""
    copy = scratch / path.stem
    try:
        limit = max(MAX_BLOCK_BYTES, _MAX_RATIO * path.stat().st_size)
        with path.open("rb") as source, copy.open("wb") as target:
            for block in zstandard.ZstdDecompressor().read_to_iter(source, write_size=1 << 20):
                target.write(block)
                if target.tell() > limit:
                    raise ValueError(f"it holds more than {limit} bytes, {_MAX_RATIO} times its own")
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise UserError(
            f"the compressed bag file {path} cannot be read ({error}); decompress it: zstd -d {path.name}"
        ) from None
    return copy
