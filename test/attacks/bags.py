# SPDX-License-Identifier: Apache-2.0
"""Recordings with damaged bytes, nonsense in metadata.yaml, databases of other types, and decompression bombs.

A case is right where the bag is refused, gives what it gave before, or gives less and says so. Bytes of a message that
no checksum covers may differ: nobody can know.
"""

import hashlib
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import yaml
import zstandard
from attacks.tally import Silent, Tally
from mcap.data_stream import RecordBuilder
from mcap.records import Channel, Chunk, Footer, Header, Schema
from mcap.writer import CompressionType, IndexType
from mcap.writer import Writer as McapWriter
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.rosbag2.enums import CompressionFormat, CompressionMode
from rosbags.typesys import Stores, get_typestore

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.demonstrations import DemonstrationRecord, write_demonstration
from specvla_ros.lab.bags.frames import TopicChoice, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.mcap_storage import MCAP_MAGIC
from specvla_ros.lab.bags.reader import open_bag

_STORE = get_typestore(Stores.ROS2_JAZZY)
_PAGE = 4096
_NASTY: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        10**30,
        1.5,
        float("inf"),
        float("nan"),
        "",
        "x" * 300,
        "../../../etc/passwd",
        "a\0b",
        "\ud800",
    ),
    *([], {}, [[]], [None], [1], {"x": 1}, "2001-99-99", "zstd", "file", "message"),
)
_RAW_YAML = (
    "2001-99-99",
    "9" * 5000,
    "[" * 5000,
    "!!python/object:os.system {}",
    "&a [*a, *a]",
    "{",
    "\t",
    "0o9",
    "1:99:99",
)
_SQL = (
    *("UPDATE messages SET data='text'", "UPDATE messages SET data=NULL", "UPDATE messages SET data=7"),
    *("UPDATE messages SET timestamp='soon'", "UPDATE messages SET timestamp=NULL", "UPDATE messages SET topic_id=99"),
    *(
        "UPDATE topics SET name=NULL",
        "UPDATE topics SET name=7",
        "UPDATE topics SET type=x'00ff'",
        "DELETE FROM topics",
    ),
    *("UPDATE topics SET serialization_format='json'", "UPDATE topics SET offered_qos_profiles=7"),
    *(
        "UPDATE topics SET offered_qos_profiles='[1'",
        "UPDATE topics SET offered_qos_profiles='- 1'",
        "DROP TABLE messages",
    ),
    *("DROP TABLE topics", "UPDATE topics SET id=id+100", "UPDATE schema SET schema_version='x'", "DELETE FROM schema"),
    *("UPDATE message_definitions SET encoding='x'", "UPDATE messages SET timestamp=timestamp*1000"),
)
_QOS = ("7", "[1", "- 1", "- {history: []}", "[" * 5000, "- depth: x", "!!python/name:os", "2001-99-99", "\0", "- [[]]")


def layouts(scratch: Path) -> dict[str, Path]:
    """One recording in every way that a bag may lie on a disk."""
    rng = np.random.default_rng(0)
    images = [np.repeat(np.repeat(rng.integers(0, 255, (8, 8, 3), np.uint8), 8, 0), 8, 1) for _ in range(10)]
    actions = [rng.normal(size=7) for _ in images]
    record = DemonstrationRecord(images, actions, "put carrot on plate", [0.2 * i for i in range(10)], {})
    write_demonstration(scratch / "rosbags", record)
    with open_bag(scratch / "rosbags") as bag:
        messages = [(each.topic, each.msgtype, each.time_ns, each.raw) for each in bag.messages()]
    found = {"rosbags": scratch / "rosbags"}
    written: dict[str, dict[str, Any]] = {
        "unchunked": dict(use_chunking=False),
        "plain": dict(compression=CompressionType.NONE),
        "lz4": dict(compression=CompressionType.LZ4),
        "zstd": dict(compression=CompressionType.ZSTD),
        "no checksums": dict(enable_crcs=False, compression=CompressionType.NONE),
        "no statistics": dict(use_statistics=False),
        "no index": dict(index_types=IndexType.NONE),
    }
    for name, options in written.items():
        found[name] = _write_mcap(scratch / name, messages, options)
    for name, mode in {"sqlite": "NONE", "zstd files": "FILE", "zstd messages": "MESSAGE"}.items():
        found[name] = scratch / name
        writer = Writer(scratch / name, version=8, storage_plugin=StoragePlugin.SQLITE3)
        writer.set_compression(CompressionMode[mode], CompressionFormat.ZSTD)
        with writer:
            connections: dict[str, Any] = {}
            for topic, msgtype, time_ns, raw in messages:
                if topic not in connections:
                    connections[topic] = writer.add_connection(topic, msgtype, typestore=_STORE)
                writer.write(connections[topic], time_ns, raw)
    return found


def attack_bytes(bags: dict[str, Path], scratch: Path, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Zeroes pages, flips, cuts, doubles and swaps bytes of data files.

    Args:
        bags: by name, as `layouts` makes them.
        scratch: directory for copies.
        limit: number of cases, drawn at random; None: 250 for each bag.
        seed: of the damage.
    """
    rng = random.Random(seed)
    cases = [(name, kind, rng.random()) for name in bags for kind in [*_DAMAGES] * 50]
    if limit is not None:
        cases = rng.sample(cases, min(limit, len(cases)))
    tally = Tally()
    usual = {name: _read(path)[0] for name, path in bags.items()}
    for i, (name, kind, share) in enumerate(cases):
        victim = Path(shutil.copytree(bags[name], scratch / "victim"))
        (file,) = (path for path in victim.iterdir() if path.name != "metadata.yaml")
        content = file.read_bytes()
        file.write_bytes(_DAMAGES[kind](content, int(share * len(content)), random.Random(seed + i)))
        tally.judge(f"{name}: {kind} at {share:.4f}", partial(_compare, victim, usual[name], sure=name in _CHECKED))
        shutil.rmtree(victim)
    return tally


def attack_descriptions(bags: dict[str, Path], scratch: Path, *, limit: int | None = None, seed: int = 0) -> Tally:
    """Nonsense in metadata.yaml, in QoS profiles and in databases; arguments as of `attack_bytes`."""
    cases: list[tuple[str, str, Callable[[Path], None]]] = []
    for name in ("zstd", "sqlite", "zstd files", "zstd messages"):
        text = (bags[name] / "metadata.yaml").read_text()
        cases += [
            (name, f"metadata {path} = {value!r:.40}", _metadata(path, value))
            for path in _paths(yaml.safe_load(text))
            for value in _NASTY
        ]
        cases += [
            (name, f"metadata with {raw:.20}", _raw_metadata(raw, at))
            for raw in _RAW_YAML
            for at in range(0, len(text), 400)
        ]
    cases += [("sqlite", sql, partial(_execute, sql=sql)) for sql in _SQL]
    cases += [
        ("sqlite", f"QoS {qos:.20}", partial(_execute, sql="UPDATE topics SET offered_qos_profiles=?", values=(qos,)))
        for qos in _QOS
    ]
    cases += [("zstd", f"QoS {qos:.20}", partial(_rewrite, qos=qos)) for qos in _QOS]
    if limit is not None:
        cases = random.Random(seed).sample(cases, min(limit, len(cases)))
    tally = Tally()
    usual = {name: _read(path)[0] for name, path in bags.items()}
    for name, what, change in cases:
        victim = Path(shutil.copytree(bags[name], scratch / "victim"))
        change(victim)
        tally.judge(f"{name}: {what}", partial(_compare, victim, usual[name], sure="UPDATE messages" not in what))
        shutil.rmtree(victim)
    return tally


def attack_bombs(scratch: Path) -> Tally:
    """Some kB that would be gigabytes: chunks, messages and files, whatever they claim to be."""
    tally = Tally()
    bomb = bytes(1 << 20)
    many = {
        "zstd": zstandard.ZstdCompressor().compress(bomb * 3000),
        "lz4": lz4.frame.compress(bomb * 1000, store_size=False),
        "zstd of unknown size": _without_size(bomb, 3000),
    }
    for name, data in many.items():
        compression = name.split()[0]
        for claim in (10, 10**6, 200 << 20, 3000 << 20, 2**63):
            for indexed in (True, False):
                path = scratch / "bomb.mcap"
                path.write_bytes(_chunk_file(data, compression, claim, repeated=1, indexed=indexed))
                tally.judge(f"{name} claims {claim} {indexed}", lambda path=path: _told(path))  # type: ignore[misc]
    data = zstandard.ZstdCompressor().compress(bomb * 200)
    path.write_bytes(_chunk_file(data, "zstd", 200 << 20, repeated=50, indexed=False))
    tally.judge("many chunks of 200 MiB", lambda: _told(path))
    for kind in ("zstd files", "zstd messages"):
        bag = layouts(scratch / kind)[kind]
        if kind == "zstd files":
            next(bag.glob("*.zstd")).write_bytes(many["zstd"])
        else:
            _execute(bag, sql="UPDATE messages SET data=?", values=(many["zstd"],))
        tally.judge(f"bomb in {kind}", lambda bag=bag: _told(bag))  # type: ignore[misc]
    return tally


_CHECKED = ("plain", "lz4", "zstd", "no statistics", "no index")  # every message lies in a chunk with a checksum


def _read(path: Path) -> tuple[list[Any], str]:
    """What a replay sees of each frame, and what the reader says of the bag."""
    frames: list[Any] = []
    with open_bag(path) as bag:
        for frame in bag_frames(bag, choose_topics(bag, TopicChoice())):
            try:
                shown = hashlib.sha256(rgb_from_message(frame.image.message()).tobytes()).hexdigest()
            except UserError:
                shown = "refused"
            frames.append((frame.image.time_ns, shown, frame.instruction, frame.recorded))
        return frames, bag.damage


def _compare(victim: Path, usual: list[Any], *, sure: bool) -> str:
    frames, damage = _read(victim)
    if damage:
        return "damage told"
    if frames == usual:
        return "same frames"
    if len(frames) != len(usual):
        raise Silent(f"{len(frames)} of {len(usual)} frames")
    if any(shown == "refused" for _, shown, _, _ in frames):
        return "frames refused"
    if sure:
        raise Silent("other content")
    return "other content, no checksum"


def _told(path: Path) -> str:
    with open_bag(path) as bag:
        total = sum(len(message.raw) for message in bag.messages())
        if not bag.damage:
            raise Silent(f"read {total} bytes")
        return "damage told"


# Damage


def _zero_page(content: bytes, at: int, _: random.Random) -> bytes:
    return content[:at] + bytes(min(_PAGE, len(content) - at)) + content[at + _PAGE :]


def _flip(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _noise(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + rng.randbytes(32)[: len(content) - at] + content[at + 32 :]


def _drop(content: bytes, at: int, rng: random.Random) -> bytes:
    return content[:at] + content[at + rng.randrange(1, 64) :]


_DAMAGES: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "zeroed page": _zero_page,
    "flipped bit": _flip,
    "noise": _noise,
    "dropped bytes": _drop,
    "cut": lambda content, at, _: content[:at],
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys: list[Any] = (
        [*value] if isinstance(value, dict) else [*range(min(1, len(value)))] if isinstance(value, list) else []
    )
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _metadata(path: tuple[Any, ...], nasty: Any) -> Callable[[Path], None]:
    def change(bag: Path) -> None:
        file = bag / "metadata.yaml"
        value = {"": yaml.safe_load(file.read_text())}
        holder: Any = value
        for step in ("", *path)[:-1]:
            holder = holder[step]
        holder[("", *path)[-1]] = nasty
        file.write_text(yaml.safe_dump(value[""], allow_unicode=False))

    return change


def _raw_metadata(raw: str, at: int) -> Callable[[Path], None]:
    def change(bag: Path) -> None:
        file = bag / "metadata.yaml"
        text = file.read_text()
        begin = text.find(": ", at)
        file.write_text(f"{text[: begin + 2]}{raw}{text[text.find(chr(10), begin) :]}" if begin >= 0 else raw)

    return change


def _execute(bag: Path, *, sql: str, values: tuple[Any, ...] = ()) -> None:
    (file,) = bag.glob("*.db3")
    with sqlite3.connect(file) as connection, suppress(sqlite3.Error):  # what the schema does not take
        connection.execute(sql, values)
    connection.close()


# Files


def _write_mcap(directory: Path, messages: list[Any], options: dict[str, Any], qos: str = "") -> Path:
    directory.mkdir(parents=True)
    file = directory / "bag_0.mcap"
    with file.open("wb") as stream:
        writer = McapWriter(stream, chunk_size=6000, **options)
        writer.start(profile="ros2", library="attack")
        channels: dict[str, int] = {}
        for topic, msgtype, time_ns, raw in messages:
            if topic not in channels:
                schema = writer.register_schema(
                    msgtype, "ros2msg", _STORE.generate_msgdef(msgtype, ros_version=2)[0].encode()
                )
                channels[topic] = writer.register_channel(topic, "cdr", schema, {"offered_qos_profiles": qos})
            writer.add_message(channels[topic], log_time=time_ns, data=raw, publish_time=time_ns)
        writer.finish()
    described = {"version": 8, "storage_identifier": "mcap", "relative_file_paths": [file.name], "compression_mode": ""}
    (directory / "metadata.yaml").write_text(yaml.safe_dump({"rosbag2_bagfile_information": described}))
    return directory


def _rewrite(bag: Path, *, qos: str) -> None:
    with open_bag(bag) as opened:
        messages = [(each.topic, each.msgtype, each.time_ns, each.raw) for each in opened.messages()]
    shutil.rmtree(bag)
    _write_mcap(bag, messages, {}, qos)


def _without_size(block: bytes, times: int) -> bytes:
    stream = BytesIO()
    with zstandard.ZstdCompressor().stream_writer(stream, closefd=False) as writer:
        for _ in range(times):
            writer.write(block)
    return stream.getvalue()


def _chunk_file(data: bytes, compression: str, claim: int, *, repeated: int, indexed: bool) -> bytes:
    """An MCAP file of chunks that claim to be something."""
    builder = RecordBuilder()
    builder.write(MCAP_MAGIC)
    Header("ros2", "attack").write(builder)
    Schema(data=b"string data", encoding="ros2msg", id=1, name="std_msgs/msg/String").write(builder)
    Channel(id=1, topic="/instruction", message_encoding="cdr", metadata={}, schema_id=1).write(builder)
    for _ in range(repeated):
        Chunk(compression, data, 0, 1, 0, claim).write(builder)
    if indexed:  # a footer without a summary
        builder.write(struct.pack("<BQI", 15, 4, 0))
        Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(builder)
        builder.write(MCAP_MAGIC)
    return bytes(builder.end())
