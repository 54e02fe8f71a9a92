"""The data files of a bag that are whole: indexed MCAP and sqlite3."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from rosbags.interfaces import Connection
from rosbags.rosbag2 import Reader

from specvla_ros.errors import UserError
from specvla_ros.evaluation.mcap_scan import MCAP_MAGIC, ScannedMcap

_SQLITE_MAGIC = b"SQLite format 3\0"

StoredMessage = tuple[Connection, int, bytes]  # whose, bag time [ns], CDR


class Storage(Protocol):
    """One data file.

    Attributes:
        start_ns: bag time of its first message; of an empty file anything.
        end_ns: bag time of its last message.
        damage: why not all of it could be read, once that is known; empty: all is well.
    """

    start_ns: int
    end_ns: int
    damage: str

    @property
    def connections(self) -> list[Connection]:
        """Its topics; `msgcount` counts their messages."""
        ...

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics, in time order, up to the first damage."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class IndexedStorage:
    """What rosbags can open: an MCAP file with an index, a sqlite3 file, or a compressed bag directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = Reader(path)
        self._reader.open()
        self.connections = list(self._reader.connections)
        self.start_ns = self._reader.start_time
        self.end_ns = self._reader.end_time - 1
        self.damage = ""

    @property
    def has_index(self) -> bool:
        """Whether an MCAP file has one; without it rosbags refuses messages that are out of order."""
        return bool(getattr(self._reader.storage, "chunks", True))

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics, in time order, up to the first damage."""
        wanted = [connection for connection in self.connections if connection.topic in topics]
        if not wanted:
            return
        messages = self._reader.messages(wanted)
        while True:
            try:
                message = next(messages)
            except StopIteration:
                return
            except Exception as error:  # whatever the libraries below make of damaged bytes
                self.damage = f"{self._path} is damaged ({error}): the rest of it cannot be read"
                return
            yield message

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()


def open_storage(path: Path, scratch: TemporaryDirectory[str]) -> Storage:
    """Opens a data file by what it holds.

    Args:
        path: an .mcap or .db3 file.
        scratch: where a copy may go of a database that its recorder left open.

    Raises:
        UserError: the file is neither, or too damaged to begin with.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
    if begin.startswith(MCAP_MAGIC):
        return _open_mcap(path)
    if begin == _SQLITE_MAGIC:
        return _open_sqlite(path, scratch)
    size = path.stat().st_size
    raise UserError(
        f"bag file {path} ({size} bytes) is neither MCAP nor sqlite3: it is "
        f"{'empty' if not size else 'cut off at its very beginning, or no bag'}; copy or record it again"
    )


def _open_mcap(path: Path) -> Storage:
    try:
        storage = IndexedStorage(path)
    except Exception:  # no footer, no valid summary: the data before it may be whole
        return ScannedMcap(path)
    if storage.has_index:
        return storage
    storage.close()
    return ScannedMcap(path)


def _open_sqlite(path: Path, scratch: TemporaryDirectory[str]) -> Storage:
    try:
        return IndexedStorage(_settled(path, scratch))
    except Exception as error:
        raise UserError(
            f"bag file {path} is a damaged sqlite3 database ({error}), it may be cut off; copy it again, or save what "
            f"is left with: sqlite3 {path.name} .recover | sqlite3 saved.db3"
        ) from error


def _settled(path: Path, scratch: TemporaryDirectory[str]) -> Path:
    """The database with all that its recorder committed.

    A killed recorder leaves its last messages in a log beside the database. They are merged in a copy: a recording is
    evidence and stays as it is.
    """
    logs = [path.with_name(path.name + suffix) for suffix in ("-wal", "-journal")]
    logs = [log for log in logs if log.exists() and log.stat().st_size]
    if not logs:
        return path
    for file in (path, *logs):
        shutil.copy(file, scratch.name)
    copy = Path(scratch.name, path.name)
    connection = sqlite3.connect(copy)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.close()
    return copy
