# SPDX-License-Identifier: Apache-2.0
"""Reads MCAP files by their index if it is valid, otherwise record by record, and reports missing and damaged parts.

mcap's own readers are not used: they raise at the first damage without its position, decompress chunks of any claimed
size, and read a page of zeros as millions of records.
"""

import heapq
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import NamedTuple

import lz4.frame
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.exceptions import McapError
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, ChunkIndex, Footer, Schema, Statistics
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat, Qos
from rosbags.rosbag2.metadata import parse_qos

from specvla_ros.errors import UserError

MCAP_MAGIC = b"\x89MCAP0\r\n"

_HEAD = struct.Struct("<BQ")  # of a record: opcode, length
_MESSAGE = struct.Struct("<HIQQ")  # of a message: channel, sequence, log time, publish time; then its data
_FOOTER_BYTES = _HEAD.size + 20 + len(MCAP_MAGIC)
_FORMATS = {"ros2msg": MessageDefinitionFormat.MSG, "ros2idl": MessageDefinitionFormat.IDL}

# Maximum size of a decompressed chunk or message; without it a file of a few kB could take all of a robot's memory.
# rosbag2's chunks have 0.8 MB, others a few MB; a larger message gets a chunk of its own.
MAX_BLOCK_BYTES = 256 << 20
_MAX_PENDING = 256 << 20  # bytes of messages buffered while chunks overlap in time

StoredMessage = tuple[Connection, int, bytes]  # connection, bag time [ns], CDR


class _Damage(Exception):
    """Raised for an unreadable part of the file; the message says why."""


class _Record(NamedTuple):
    channel: int
    time_ns: int
    data: bytes


@dataclass(frozen=True)
class _Block:
    """A chunk, or a message outside of chunks."""

    start_ns: int  # the earliest log time in it
    offset: int  # offset of its record
    channels: frozenset[int] = frozenset()  # channels of its messages; empty: unknown


class McapStorage:
    """An MCAP file; raises UserError if it cannot be opened.

    A valid summary gives the chunks' positions and message counts. A file without one, as left by a killed recorder, is
    scanned once; the complete messages of a cut-off chunk are read. Reading ends at the first damage.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schemas: dict[int, Schema] = {}
        self._channels: dict[int, Connection] = {}
        self._counts: Counter[int] = Counter()
        self._blocks: list[_Block] = []
        self.start_ns, self.end_ns = 2**63 - 1, 0  # bag time of the first and last message, if any
        self.damage = ""  # why parts of it could not be read, once known
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UserError(f"bag file {path} cannot be read: {error.strerror}") from error
        self._size = os.fstat(self._file.fileno()).st_size
        statistics = self._read_summary()
        if not self._blocks:
            self._scan()
            if statistics is not None and not self.damage:
                self._compare(self._counts, statistics.channel_message_counts, frozenset(self._counts))
        self._blocks.sort(key=lambda block: (block.start_ns, block.offset))

    @property
    def connections(self) -> list[Connection]:
        return [channel._replace(msgcount=self._counts[key]) for key, channel in self._channels.items()]

    def messages(self, topics: frozenset[str]) -> Iterator[StoredMessage]:
        """The messages of some topics in time order; at equal times in the order of the file."""
        wanted = frozenset(key for key, channel in self._channels.items() if channel.topic in topics)
        waiting: list[tuple[int, int, _Record]] = []  # log time, order in the file
        order = count()
        found: Counter[int] = Counter()
        damage = ""
        for block in self._blocks:
            if block.channels and not block.channels & wanted:
                continue
            yield from self._due(waiting, block.start_ns)
            try:
                for record in self._messages_at(block.offset):
                    if record.time_ns < block.start_ns:
                        raise _Damage("a message earlier than the start time of its chunk")
                    if record.channel in wanted:
                        found[record.channel] += 1
                        heapq.heappush(waiting, (record.time_ns, next(order), record))
                if sum(len(record.data) for *_, record in waiting) > _MAX_PENDING:
                    raise _Damage(f"chunks with more than {_MAX_PENDING} bytes of messages overlap in time")
            except _Damage as error:
                damage = f"{self._path} is damaged at byte {block.offset}: {error}; the rest of it cannot be read"
                break
        yield from self._due(waiting, 2**64)
        if damage:
            self.damage = self.damage or damage
        else:
            self._compare(found, self._counts, wanted)

    def _due(self, waiting: list[tuple[int, int, _Record]], before_ns: int) -> Iterator[StoredMessage]:
        while waiting and waiting[0][0] < before_ns:
            time_ns, _, record = heapq.heappop(waiting)
            yield self._channels[record.channel], time_ns, record.data

    def close(self) -> None:
        self._file.close()

    def _compare(self, found: Mapping[int, int], promised: Mapping[int, int], channels: frozenset[int]) -> None:
        """Reports messages that the file's statistics count but that are missing."""
        counts = {key: (found.get(key, 0), promised.get(key, 0)) for key in channels}
        parts = [f"{n} of {m} messages of {self._channels[key].topic}" for key, (n, m) in counts.items() if n != m]
        if parts and not self.damage:
            self.damage = f"{self._path} is damaged: it holds {', '.join(parts)} counted in its statistics"

    # The summary

    def _read_summary(self) -> Statistics | None:
        """Reads topics, counts and chunks from the end of the file; discards them if they do not match the file."""
        try:
            return self._checked_summary()
        except (_Damage, McapError, OSError, ValueError, struct.error, KeyError):
            self._schemas, self._channels, self._counts, self._blocks = {}, {}, Counter(), []
            return None

    def _checked_summary(self) -> Statistics:
        end = self._read(max(0, self._size - _FOOTER_BYTES), _FOOTER_BYTES)
        if len(end) < _FOOTER_BYTES or end[-len(MCAP_MAGIC) :] != MCAP_MAGIC or end[0] != Opcode.FOOTER:
            raise _Damage("no footer")
        footer = Footer.read(ReadDataStream(BytesIO(end[_HEAD.size :])))
        begin, stop = footer.summary_start, self._size - _FOOTER_BYTES
        if not len(MCAP_MAGIC) < begin < stop:
            raise _Damage("no summary")
        summary = self._read(begin, stop - begin)
        if footer.summary_crc and zlib.crc32(summary + end[: _HEAD.size + 16]) != footer.summary_crc:
            raise _Damage("wrong checksum of the summary")
        statistics: Statistics | None = None
        chunks: list[ChunkIndex] = []
        for opcode, body in _records(memoryview(summary)):
            stream = ReadDataStream(BytesIO(body))
            if opcode == Opcode.STATISTICS:
                statistics = Statistics.read(stream)
            elif opcode == Opcode.CHUNK_INDEX:
                chunks.append(ChunkIndex.read(stream))
            else:
                self._learn(opcode, stream)
        if statistics is None:
            raise _Damage("no statistics")
        if chunks:
            self._take_chunks(statistics, chunks)
        return statistics

    def _take_chunks(self, statistics: Statistics, chunks: list[ChunkIndex]) -> None:
        if len(chunks) != statistics.chunk_count:
            raise _Damage("chunks that are not listed")
        self._counts.update(statistics.channel_message_counts)
        if not self._counts.keys() <= self._channels.keys() or not all(c.msgtype for c in self._channels.values()):
            raise _Damage("topics that are not listed, or without a type")
        for chunk in chunks:
            opcode, length = _HEAD.unpack(self._read(chunk.chunk_start_offset, _HEAD.size))
            if opcode != Opcode.CHUNK or _HEAD.size + length != chunk.chunk_length:
                raise _Damage("no chunk where one is listed")
            channels = frozenset(chunk.message_index_offsets)
            self._blocks.append(_Block(chunk.message_start_time, chunk.chunk_start_offset, channels))
        self.start_ns, self.end_ns = statistics.message_start_time, statistics.message_end_time

    # The scan

    def _scan(self) -> None:
        """Walks over the records to the end of the data or of the file."""
        offset = len(MCAP_MAGIC)
        while offset + _HEAD.size <= self._size:
            opcode, length = _HEAD.unpack(self._read(offset, _HEAD.size))
            if opcode in (Opcode.DATA_END, Opcode.FOOTER):
                return
            try:
                self._take(opcode, offset)
            except _Damage as error:
                self.damage = f"{self._path} is damaged at byte {offset} of {self._size}: {error}. {self._saved()}"
                return
            offset += _HEAD.size + length
        self.damage = (
            f"{self._path} is cut off at byte {self._size}: the recorder was killed, or the file was not copied in "
            f"full. {self._saved()}"
        )

    def _saved(self) -> str:
        seconds = max(self.end_ns - self.start_ns, 0) * 1e-9
        return f"The readable part was read: {self._counts.total()} messages over {seconds:.1f} s"

    def _take(self, opcode: int, offset: int) -> None:
        if not opcode:
            raise _Damage("a record with opcode 0")
        times: list[int] = []
        try:
            for record in self._messages_at(offset, scanning=True):
                self._counts[record.channel] += 1
                times.append(record.time_ns)
        finally:  # messages before the damage in a chunk are kept
            if times:
                self._blocks.append(_Block(min(times), offset))
                self.start_ns, self.end_ns = min(self.start_ns, *times), max(self.end_ns, *times)

    # Records

    def _messages_at(self, offset: int, *, scanning: bool = False) -> Iterator[_Record]:
        """The messages of the record at an offset; while scanning, skips their data and learns topics."""
        opcode, length = _HEAD.unpack(self._read(offset, _HEAD.size))
        body = offset + _HEAD.size
        whole = body + length <= self._size
        if opcode == Opcode.CHUNK:
            for inner, view in _chunk_records(self._read(body, length), whole=whole):
                if inner == Opcode.MESSAGE:
                    yield self._message(bytes(view[: _MESSAGE.size] if scanning else view))
                elif scanning:
                    self._learn(inner, ReadDataStream(BytesIO(view)))
        elif whole and opcode == Opcode.MESSAGE:
            yield self._message(self._read(body, min(length, _MESSAGE.size) if scanning else length))
        elif whole and scanning and opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
            self._learn(opcode, ReadDataStream(BytesIO(self._read(body, length))))

    def _message(self, raw: bytes) -> _Record:
        if len(raw) < _MESSAGE.size:
            raise _Damage("a message without its header")
        channel, _, time_ns, _ = _MESSAGE.unpack_from(raw)
        if channel not in self._channels:
            raise _Damage("a message of an undescribed topic")
        return _Record(channel, time_ns, raw[_MESSAGE.size :])

    def _learn(self, opcode: int, stream: ReadDataStream) -> None:
        try:
            if opcode == Opcode.SCHEMA:
                schema = Schema.read(stream)
                self._schemas[schema.id] = schema
            elif opcode == Opcode.CHANNEL:
                channel = Channel.read(stream)
                self._channels[channel.id] = self._connection(channel)
        except (McapError, ValueError, struct.error) as error:
            raise _Damage(f"an invalid description of a topic ({error})") from None

    def _connection(self, channel: Channel) -> Connection:
        schema = self._schemas.get(channel.schema_id)
        msgtype = schema.name if schema else ""
        definition = MessageDefinition(MessageDefinitionFormat.NONE, "")
        if schema is not None and schema.encoding in _FORMATS:
            definition = MessageDefinition(_FORMATS[schema.encoding], schema.data.decode("utf-8", "replace"))
        qos = ConnectionExtRosbag2(channel.message_encoding, self._profiles(channel))
        return Connection(channel.id, channel.topic, msgtype, definition, "", 0, qos, self)

    def _profiles(self, channel: Channel) -> list[Qos]:
        """The QoS profiles that its publishers offered; empty, which means the default, if they cannot be read."""
        try:
            return parse_qos(channel.metadata.get("offered_qos_profiles", ""))
        except Exception:  # a YAML reader at damaged text raises anything, RecursionError included
            self.damage = f"{self._path}: offered_qos_profiles of {channel.topic} cannot be read; using the default QoS"
            return []

    def _read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset <= self._size:
            raise _Damage("it points outside the file")
        self._file.seek(offset)
        return self._file.read(min(length, self._size - offset))


def _records(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Opcode and body of each record."""
    while data:
        if len(data) < _HEAD.size:
            raise _Damage("a truncated record")
        opcode, length = _HEAD.unpack_from(data)
        if not opcode:
            raise _Damage("a record with opcode 0")
        end = _HEAD.size + length
        if end > len(data):
            raise _Damage("a truncated record")
        yield opcode, data[_HEAD.size : end]
        data = data[end:]


def _chunk_records(content: bytes, *, whole: bool) -> Iterator[tuple[int, memoryview]]:
    """The records in a chunk; only the complete ones if it is cut off."""
    try:
        chunk = Chunk.read(ReadDataStream(BytesIO(content)))
    except (McapError, ValueError, OverflowError, struct.error):
        if whole:
            raise _Damage("a chunk without its header") from None
        return
    data = _decompressed(chunk)
    if whole and len(data) != chunk.uncompressed_size:
        raise _Damage(f"a chunk of {len(data)} bytes that claims {chunk.uncompressed_size}")
    if whole and chunk.uncompressed_crc and zlib.crc32(data) != chunk.uncompressed_crc:
        raise _Damage("wrong checksum of a chunk")
    with nullcontext() if whole else suppress(_Damage):
        yield from _records(memoryview(data))


def _decompressed(chunk: Chunk) -> bytes:
    """The records of a chunk as far as they exist, limited to its claimed size and to MAX_BLOCK_BYTES."""
    data, size = chunk.data, chunk.uncompressed_size
    if size > MAX_BLOCK_BYTES:
        raise _Damage(f"a chunk that claims {size} bytes, more than the {MAX_BLOCK_BYTES} that are read at once")
    try:
        if chunk.compression == "zstd":
            return decompress_zstd(data, size)
        if chunk.compression == "lz4":
            data = lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=size + 1)
        elif chunk.compression:
            raise _Damage(f"compression {chunk.compression!r} is unknown")
    except (zstandard.ZstdError, RuntimeError, EOFError, ValueError) as error:
        raise _Damage(str(error)) from None
    if len(data) > size:
        raise _Damage(f"a chunk that holds more than the {size} bytes it claims")
    return data


def decompress_zstd(data: bytes, limit: int = MAX_BLOCK_BYTES) -> bytes:
    """Decompresses Zstandard frames; if the last one is truncated, returns what it holds.

    Raises ValueError, before allocating the memory, if they hold more than the limit; ZstdError if they are damaged.
    """
    with zstandard.ZstdDecompressor().stream_reader(BytesIO(data), read_across_frames=True) as stream:
        found: bytes = stream.read(limit + 1)
    if len(found) > limit:
        raise ValueError(f"{len(data)} bytes hold more than {limit} when decompressed")
    return found
