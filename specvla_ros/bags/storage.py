# SPDX-License-Identifier: Apache-2.0
"""The two storages of ROS 2 bags, sqlite3 and MCAP, read whatever state their recorder left them in."""

import heapq
import os
import shutil
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import lz4.frame
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import EndOfFile, McapError, UnsupportedCompressionError
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, McapRecord, Message, Schema
from mcap.stream_reader import StreamReader, breakup_chunk
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat
from rosbags.rosbag2 import Reader
from rosbags.rosbag2.metadata import parse_qos

from specvla_ros.errors import UserError

MCAP_MAGIC = b"\x89MCAP0\r\n"
_SQLITE_MAGIC = b"SQLite format 3\0"

_HEAD = struct.Struct("<BQ")  # of a record: opcode, length
_MESSAGE_FIELDS = 22  # bytes of a message before its data
_FORMATS = {"ros2msg": MessageDefinitionFormat.MSG, "ros2idl": MessageDefinitionFormat.IDL}

StoredMessage = tuple[Connection, int, bytes]  # whose, bag time [ns], CDR


class RecoveredMcap:
    """An MCAP file without a usable index, as a killed recorder leaves it: scanned once, then read block by block.

    A block is a chunk, or a message by itself. Of a cut-off chunk the messages that are there are read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: dict[int, Schema] = {}
        self._connections: dict[int, Connection] = {}
        self._counts: Counter[int] = Counter()
        self._blocks: list[tuple[int, int]] = []  # the earliest log time in it, where its record begins
        self.start_ns, self.end_ns = 2**63 - 1, 0  # bag time of the first and last message; of an empty file anything
        self.damage = ""  # why not all of it could be read, once that is known
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
        self._size = os.fstat(self._file.fileno()).st_size
        self._scan()
        self._blocks.sort()

    @property
    def connections(self) -> list[Connection]:
        """Its topics, each with the number of its readable messages."""
        return [channel._replace(msgcount=self._counts[key]) for key, channel in self._connections.items()]

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics, in time order; equal times in the order of the file."""
        wanted = {key: channel for key, channel in self._connections.items() if channel.topic in topics}
        read: list[tuple[int, int, int, bytes]] = []  # log time, order in the file, channel, data
        order = count()
        for start_ns, offset in [*self._blocks, (2**64, 0)]:
            while read and read[0][0] < start_ns:
                time_ns, _, key, data = heapq.heappop(read)
                yield wanted[key], time_ns, data
            for record in self._records(offset) if offset else ():
                if isinstance(record, Message) and record.channel_id in wanted:
                    heapq.heappush(read, (record.log_time, next(order), record.channel_id, record.data))

    def close(self) -> None:
        self._file.close()

    def _scan(self) -> None:
        """Walks over the records up to the end of the data, or of what there is."""
        offset = len(MCAP_MAGIC)
        while offset + _HEAD.size <= self._size:
            opcode, length = _HEAD.unpack(self._read(offset, _HEAD.size))
            if opcode in (Opcode.DATA_END, Opcode.FOOTER):
                return
            try:
                self._take(opcode, offset)
            except Exception as error:  # whatever the library makes of damaged bytes
                reason = str(error) or type(error).__name__
                self.damage = f"{self._path} is damaged at byte {offset} of {self._size}: {reason}. {self._saved()}"
                return
            offset += _HEAD.size + length
        self.damage = (
            f"{self._path} is cut off at byte {self._size}: the recorder was killed, or the file was not copied in "
            f"full. {self._saved()}"
        )

    def _saved(self) -> str:
        seconds = max(self.end_ns - self.start_ns, 0) * 1e-9
        return f"What is readable was read: {self._counts.total()} messages over {seconds:.1f} s"

    def _take(self, opcode: int, offset: int) -> None:
        if opcode == 0:
            raise ValueError("a record of no kind")
        messages = []
        for record in self._records(offset, message_bytes=_MESSAGE_FIELDS):
            if isinstance(record, Schema):
                self._schemas[record.id] = record
            elif isinstance(record, Channel):
                self._connections[record.id] = self._connection(record)
            elif isinstance(record, Message) and record.channel_id in self._connections:
                messages.append(record)
        if messages:
            times = [message.log_time for message in messages]
            self._blocks.append((min(times), offset))
            self._counts.update(message.channel_id for message in messages)
            self.start_ns, self.end_ns = min(self.start_ns, *times), max(self.end_ns, *times)

    def _records(self, offset: int, message_bytes: int | None = None) -> Iterable[McapRecord]:
        """The schemas, channels and messages of a record; `message_bytes` limits a message outside a chunk."""
        opcode, length = _HEAD.unpack(self._read(offset, _HEAD.size))
        body = offset + _HEAD.size
        whole = body + length <= self._size
        if opcode == Opcode.CHUNK:
            stream = ReadDataStream(BytesIO(self._read(body, length)))
            return _whole_chunk(stream) if whole else _cut_chunk(stream)
        if not whole or opcode not in (Opcode.SCHEMA, Opcode.CHANNEL, Opcode.MESSAGE):
            return ()
        if opcode == Opcode.MESSAGE and message_bytes is not None:
            length = min(length, message_bytes)
        record = _HEAD.pack(opcode, length) + self._read(body, length)
        return islice(StreamReader(BytesIO(record), skip_magic=True).records, 1)

    def _connection(self, channel: Channel) -> Connection:
        schema = self._schemas.get(channel.schema_id)
        definition = MessageDefinition(MessageDefinitionFormat.NONE, "")
        if schema is not None and schema.encoding in _FORMATS:
            definition = MessageDefinition(_FORMATS[schema.encoding], schema.data.decode("utf-8", "replace"))
        qos = parse_qos(channel.metadata.get("offered_qos_profiles", ""))
        return Connection(
            channel.id,
            channel.topic,
            schema.name if schema else "",
            definition,
            "",
            0,
            ConnectionExtRosbag2(channel.message_encoding, qos),
            self,
        )

    def _read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(min(length, self._size - offset))


def _whole_chunk(stream: ReadDataStream) -> list[McapRecord]:
    chunk = Chunk.read(stream)
    if chunk.compression not in ("", "lz4", "zstd"):
        raise UnsupportedCompressionError(chunk.compression)
    return breakup_chunk(chunk, validate_crc=True)


def _cut_chunk(stream: ReadDataStream) -> Iterator[McapRecord]:
    """The complete records in what is there of a chunk."""
    try:
        chunk = Chunk.read(stream)
    except (EndOfFile, struct.error):  # cut before its data
        return
    data = chunk.data
    if chunk.compression == "zstd":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    elif chunk.compression == "lz4":
        data = lz4.frame.LZ4FrameDecompressor().decompress(data)
    elif chunk.compression:
        raise UnsupportedCompressionError(chunk.compression)
    with suppress(McapError, ValueError, struct.error):
        yield from StreamReader(BytesIO(data), skip_magic=True).records


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
        wanted = [connection for connection in self.connections if connection.topic in topics]
        if not wanted:
            return
        try:
            yield from self._reader.messages(wanted)
        except Exception as error:  # whatever the libraries below make of damaged bytes
            self.damage = f"{self._path} is damaged ({error}): the rest of it cannot be read"

    def close(self) -> None:
        self._reader.close()


Storage = IndexedStorage | RecoveredMcap


def open_storage(path: Path, scratch: TemporaryDirectory[str]) -> Storage:
    """Opens a data file by what it holds; a copy of a database that its recorder left open goes to `scratch`."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
    if begin.startswith(MCAP_MAGIC):
        return _open_mcap(path)
    if begin == _SQLITE_MAGIC:
        try:
            return IndexedStorage(_settled(path, scratch))
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


def _open_mcap(path: Path) -> Storage:
    try:
        storage = IndexedStorage(path)
    except Exception:  # no footer, no valid summary: the data before it may be whole
        return RecoveredMcap(path)
    if storage.has_index:
        return storage
    storage.close()
    return RecoveredMcap(path)


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
