"""The two storages of ROS 2 bags, sqlite3 and MCAP, read whatever state their recorder left them in."""

import heapq
import os
import shutil
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import lz4.frame
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import EndOfFile
from mcap.opcode import Opcode
from mcap.records import Channel, Schema
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat
from rosbags.rosbag2 import Reader
from rosbags.rosbag2.metadata import parse_qos

from specvla_ros.errors import UserError

MCAP_MAGIC = b"\x89MCAP0\r\n"

_RECORD_HEAD = struct.Struct("<BQ")  # opcode, length
_MESSAGE_HEAD = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_CHUNK_HEAD = struct.Struct("<QQQII")  # start, end, uncompressed size, checksum, length of the compression's name
_FORMATS = {"ros2msg": MessageDefinitionFormat.MSG, "ros2idl": MessageDefinitionFormat.IDL}


class _Damaged(Exception):
    """Bytes that are not what they should be."""


@dataclass(frozen=True, order=True)
class _Block:
    """Where messages lie: in a chunk, or one by itself.

    Args:
        start_ns: the earliest log time in it.
        offset: of the record's body in the file.
        length: of the body, as far as it is there.
        whole: whether the body is all there.
        opcode: CHUNK or MESSAGE.
    """

    start_ns: int
    offset: int
    length: int
    whole: bool
    opcode: int


class ScannedMcap:
    """An MCAP file, scanned once for its topics and then read block by block, sorted by log time.

    Attributes: those of `Storage`.

    Raises:
        UserError: the file cannot be read or is no MCAP file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: dict[int, Schema] = {}
        self._connections: dict[int, Connection] = {}
        self._counts: Counter[int] = Counter()
        self._blocks: list[_Block] = []
        self.start_ns, self.end_ns = 2**63 - 1, 0
        self.damage = ""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
        self._scan()
        self._blocks.sort()

    @property
    def connections(self) -> list[Connection]:
        """Its topics, each with the number of its readable messages."""
        return [channel._replace(msgcount=self._counts[key]) for key, channel in self._connections.items()]

    def messages(self, topics: frozenset[str]) -> Iterator[tuple[Connection, int, bytes]]:
        """The messages of some topics, in time order; equal times in the order of the file."""
        wanted = {key: channel for key, channel in self._connections.items() if channel.topic in topics}
        read: list[tuple[int, int, int, bytes]] = []  # log time, order in the file, channel, data
        order = 0
        for block in self._blocks:
            while read and read[0][0] < block.start_ns:
                time_ns, _, key, data = heapq.heappop(read)
                yield wanted[key], time_ns, data
            for key, time_ns, data in self._messages_in(block):
                if key in wanted:
                    heapq.heappush(read, (time_ns, order, key, data))
                    order += 1
        while read:
            time_ns, _, key, data = heapq.heappop(read)
            yield wanted[key], time_ns, data

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _scan(self) -> None:
        """Walks over the records up to the end of the data, or of what there is."""
        size = os.fstat(self._file.fileno()).st_size
        offset = len(MCAP_MAGIC)
        while True:
            self._file.seek(offset)
            head = self._file.read(_RECORD_HEAD.size)
            if len(head) < _RECORD_HEAD.size:
                break
            opcode, length = _RECORD_HEAD.unpack(head)
            if opcode in (Opcode.DATA_END, Opcode.FOOTER):
                return
            body = offset + _RECORD_HEAD.size
            present = min(length, size - body)
            try:
                self._take(opcode, body, present, whole=present == length)
            except _Damaged as error:
                self.damage = f"{self._path} is damaged at byte {offset} of {size}: {error}. {self._saved()}"
                return
            if present < length:
                break
            offset = body + length
        self.damage = (
            f"{self._path} is cut off at byte {size}: the recorder was killed, or the file was not copied in full. "
            + self._saved()
        )

    def _saved(self) -> str:
        count = sum(self._counts.values())
        seconds = max(self.end_ns - self.start_ns, 0) * 1e-9
        return f"What is readable was read: {count} messages over {seconds:.1f} s"

    def _take(self, opcode: int, offset: int, length: int, *, whole: bool) -> None:
        """Notes what one record holds."""
        if opcode == 0:
            raise _Damaged("a record of no kind")
        if opcode == Opcode.CHUNK:
            self._take_chunk(_Block(0, offset, length, whole, opcode))
        elif opcode == Opcode.MESSAGE and whole:
            start = self._take_message(self._read(offset, min(length, _MESSAGE_HEAD.size)))
            if start is not None:
                self._blocks.append(_Block(start, offset, length, whole, opcode))
        elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL) and whole:
            self._take_definition(opcode, self._read(offset, length))

    def _take_chunk(self, block: _Block) -> None:
        starts = []
        for opcode, body in _records(self._chunk(block)):
            if opcode == Opcode.MESSAGE:
                starts.append(self._take_message(body))
            elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                self._take_definition(opcode, bytes(body))
        known = [start for start in starts if start is not None]
        if known:
            self._blocks.append(replace(block, start_ns=min(known)))

    def _take_message(self, body: bytes | memoryview) -> int | None:
        """Counts a message and returns its log time; None when its channel is unknown."""
        key, _, time_ns, _ = _unpack(_MESSAGE_HEAD, body)
        if key not in self._connections:
            return None
        self._counts[key] += 1
        self.start_ns, self.end_ns = min(self.start_ns, time_ns), max(self.end_ns, time_ns)
        return int(time_ns)

    def _take_definition(self, opcode: int, body: bytes) -> None:
        stream = ReadDataStream(BytesIO(body))
        try:
            if opcode == Opcode.SCHEMA:
                schema = Schema.read(stream)
                self._schemas[schema.id] = schema
                return
            channel = Channel.read(stream)
            qos = parse_qos(channel.metadata.get("offered_qos_profiles", ""))
        except (struct.error, EndOfFile, UnicodeDecodeError, KeyError, TypeError) as error:
            raise _Damaged(f"a definition that cannot be read ({type(error).__name__})") from error
        known = self._schemas.get(channel.schema_id)
        self._connections[channel.id] = Connection(
            channel.id,
            channel.topic,
            known.name if known else "",
            _definition(known),
            "",
            0,
            ConnectionExtRosbag2(channel.message_encoding, qos),
            self,
        )

    def _messages_in(self, block: _Block) -> Iterator[tuple[int, int, bytes]]:
        """Channel, log time and data of each message of a block."""
        if block.opcode == Opcode.MESSAGE:
            yield _message(self._read(block.offset, block.length))
            return
        for opcode, body in _records(self._chunk(block)):
            if opcode == Opcode.MESSAGE:
                yield _message(body)

    def _chunk(self, block: _Block) -> bytes:
        """The records of a chunk; of a cut-off one those that are there."""
        body = self._read(block.offset, block.length)
        if len(body) < _CHUNK_HEAD.size:
            return b""
        _, _, _, checksum, name_length = _CHUNK_HEAD.unpack_from(body)
        begin = _CHUNK_HEAD.size + name_length
        name = body[_CHUNK_HEAD.size : begin].decode("ascii", "replace")
        data = _decompressed(name, body[begin + 8 :])
        if block.whole and checksum and zlib.crc32(data) != checksum:
            raise _Damaged("a chunk that does not match its checksum")
        return data

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)


def _records(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """Opcode and body of each complete record."""
    view = memoryview(data)
    offset = 0
    while offset + _RECORD_HEAD.size <= len(data):
        opcode, length = _RECORD_HEAD.unpack_from(data, offset)
        begin = offset + _RECORD_HEAD.size
        offset = begin + length
        if offset <= len(data):
            yield opcode, view[begin:offset]


def _message(body: bytes | memoryview) -> tuple[int, int, bytes]:
    key, _, time_ns, _ = _unpack(_MESSAGE_HEAD, body)
    return key, time_ns, bytes(body[_MESSAGE_HEAD.size :])


def _unpack(layout: struct.Struct, body: bytes | memoryview) -> tuple[int, ...]:
    if len(body) < layout.size:
        raise _Damaged(f"a record of {len(body)} bytes where {layout.size} are needed")
    return layout.unpack_from(body)


def _definition(schema: Schema | None) -> MessageDefinition:
    if schema is None or schema.encoding not in _FORMATS:
        return MessageDefinition(MessageDefinitionFormat.NONE, "")
    return MessageDefinition(_FORMATS[schema.encoding], schema.data.decode("utf-8", "replace"))


def _decompressed(compression: str, data: bytes) -> bytes:
    """A chunk's records; of cut-off data as much as can be had."""
    try:
        if compression == "":
            return data
        if compression == "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress(data)
        if compression == "lz4":
            return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data))
    except (RuntimeError, zstandard.ZstdError) as error:
        raise _Damaged(f"a chunk that cannot be decompressed ({error})") from error
    raise _Damaged(f"a chunk with the unknown compression '{compression}'")


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
