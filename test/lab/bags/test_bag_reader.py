# SPDX-License-Identifier: Apache-2.0
"""Bags of every kind read alike; bad ones say what is wrong; cut-off ones give what is left."""

import re
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import yaml
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.data_stream import RecordBuilder
from mcap.reader import make_reader
from mcap.records import Chunk
from mcap.writer import CompressionType
from rosbags.rosbag2.enums import CompressionMode
from support import bags
from support.nightly import examples, nightly_but
from support.paths import BAGS, needs

from specvla_ros.errors import UserError
from specvla_ros.lab.bags import mcap_storage, reader
from specvla_ros.lab.bags.reader import BagMessage, open_bag
from specvla_ros.messages.image_message import stamp_ns

Key = tuple[str, int, bytes]


def keys(messages: list[BagMessage]) -> list[Key]:
    return [(message.topic, message.time_ns, message.raw) for message in messages]


def read(path: Path) -> tuple[list[Key], str]:
    with open_bag(path) as bag:
        found = keys(list(bag.messages()))
        return found, bag.damage


def expected(entries: list[bags.Entry]) -> list[Key]:
    return [(topic, time, bytes(bags.STORE.serialize_cdr(message, kind))) for topic, kind, time, message in entries]


@pytest.mark.parametrize("sqlite", [False, True])
def test_messages_come_back_in_order_with_types_and_qos(tmp_path: Path, sqlite: bool) -> None:
    entries = bags.episode()
    with open_bag(bags.write_bag(tmp_path / "bag", entries, sqlite=sqlite)) as bag:
        messages = list(bag.messages())
        assert sorted(keys(messages)) == sorted(expected(entries))
        assert [each.time_ns for each in messages] == sorted(each.time_ns for each in messages)
        assert [(each.name, each.msgtype, each.count) for each in bag.topics] == [
            ("/camera/image_raw", bags.IMAGE, 5),
            ("/ground_truth/action", bags.NUMBERS, 5),
            ("/instruction", bags.TEXT, 1),
        ]
        latched = bag.topic("/instruction").qos
        assert (latched.reliable, latched.transient_local, latched.depth) == (True, True, 1)
        assert not bag.topic("/camera/image_raw").qos.transient_local
        assert (bag.start_ns, bag.end_ns) == (bags.START_NS, bags.START_NS + 4 * bags.PERIOD_NS + 10_000_000)
        assert bag.damage == ""


@pytest.mark.parametrize("sqlite", [False, True])
def test_messages_deserialise(tmp_path: Path, sqlite: bool) -> None:
    with open_bag(bags.write_bag(tmp_path / "bag", bags.episode(1), sqlite=sqlite)) as bag:
        image, text, action = (
            next(bag.messages([name])).message()
            for name in ("/camera/image_raw", "/instruction", "/ground_truth/action")
        )
    assert np.array_equal(image.data.reshape(48, 64, 3), bags.pixels(0))
    assert (image.header.stamp.sec, image.header.frame_id) == (bags.START_NS // 10**9, "camera_optical_frame")
    assert text.data == "put carrot on plate"
    assert action.data.tolist() == pytest.approx([0.0, 0.0, -0.001, 0.01, 0.0, 0.02, 0.0])


@pytest.mark.parametrize("mode", [CompressionMode.FILE, CompressionMode.MESSAGE])
def test_compressed_bags_read_as_plain_ones(tmp_path: Path, mode: CompressionMode) -> None:
    entries = bags.episode()
    compressed = bags.write_bag(tmp_path / "zstd", entries, sqlite=True, compression=mode)
    assert sorted(read(compressed)[0]) == sorted(expected(entries))


@needs(BAGS)
@pytest.mark.parametrize("name", [path.name for path in sorted(BAGS.glob("bridge_*"))])
def test_real_bags(name: str) -> None:
    with open_bag(BAGS / name) as bag:
        messages = list(bag.messages())
        assert len(messages) == 51
        stamps = [stamp_ns(each.message().header) for each in messages if each.topic.startswith("/camera/")]
        assert stamps == [each.time_ns for each in messages if each.topic.startswith("/camera/")]
        assert len(set(stamps)) == 10
        assert bag.damage == ""


@pytest.mark.parametrize("sqlite", [False, True])
@pytest.mark.parametrize("compression", [CompressionMode.NONE, CompressionMode.FILE])
@pytest.mark.parametrize("name", ["take #1", "50%", "what?", "a%20b", "a&b=c", "Übung 1"])
def test_a_bag_is_read_whatever_its_name(tmp_path: Path, name: str, compression: CompressionMode, sqlite: bool) -> None:
    bags.write_bag(tmp_path / "a b", bags.episode(1), sqlite=sqlite)
    entries = bags.episode(3)
    written = bags.write_bag(tmp_path / "written", entries, sqlite=sqlite, compression=compression)
    found, damage = read(written.rename(tmp_path / name))
    assert sorted(found) == sorted(expected(entries)) and damage == ""


def test_metadata_may_be_missing_wrong_or_broken(tmp_path: Path) -> None:
    whole = bags.write_bag(tmp_path / "whole", bags.episode())
    want = read(whole)
    (data_file,) = whole.glob("*.mcap")
    for number, change in enumerate((lambda text: None, lambda text: ":\n\t{", _counts_of_zero)):
        bag = tmp_path / f"bag_{number}"
        shutil.copytree(whole, bag)
        changed = change((bag / "metadata.yaml").read_text())
        (bag / "metadata.yaml").unlink()
        if changed is not None:
            (bag / "metadata.yaml").write_text(changed)
        assert read(bag) == want
    assert read(data_file) == want


def _counts_of_zero(text: str) -> str:
    data = yaml.safe_load(text)
    information = data["rosbag2_bagfile_information"]
    information["message_count"] = 0
    for topic in information["topics_with_message_count"]:
        topic["message_count"] = 0
    return yaml.safe_dump(data)


def test_a_split_bag_is_read_in_time_order_also_without_metadata(tmp_path: Path) -> None:
    entries = bags.episode(24, actions=False)
    directory = tmp_path / "split"
    directory.mkdir()
    for part in range(12):
        bags.write_mcap(directory / f"split_{part}.mcap", entries[1:][2 * part : 2 * part + 2])
    with open_bag(directory) as bag:
        assert [file.name for file in bag.files][-2:] == ["split_10.mcap", "split_11.mcap"]
        assert keys(list(bag.messages())) == expected(entries[1:])


@pytest.mark.parametrize("chunked", [True, False])
def test_an_mcap_file_out_of_order_is_sorted(tmp_path: Path, chunked: bool) -> None:
    entries = bags.episode()
    path = bags.write_mcap(tmp_path / "mixed.mcap", entries[::-1], chunked=chunked)
    found, damage = read(path)
    assert [time for _, time, _ in found] == sorted(time for _, _, time, _ in entries)
    assert sorted(found) == sorted(expected(entries))
    assert damage == ""


# Bad bags


def test_what_is_no_bag_is_refused(tmp_path: Path) -> None:
    empty_file = tmp_path / "empty.mcap"
    empty_file.touch()
    prose = tmp_path / "prose.db3"
    prose.write_text("not a database at all")
    parent = tmp_path / "many"
    bags.write_bag(parent / "one", bags.episode(1))
    lacking = bags.write_bag(tmp_path / "lacking", bags.episode(1))
    next(lacking.glob("*.mcap")).unlink()
    (tmp_path / "old.bag").write_bytes(b"#ROSBAG V2.0\n")
    for path, words in {
        tmp_path / "nowhere": "does not exist",
        empty_file: r"\(0 bytes\) is neither MCAP nor sqlite3: it is empty",
        prose: "neither MCAP nor sqlite3",
        tmp_path / "old.bag": "ROS 1 bag; convert it first",
        parent: "no .mcap or .db3 file in it; it holds the bags one",
        lacking: "lacks files that its metadata.yaml lists: lacking.mcap",
        parent / "one" / "metadata.yaml": "give the bag's directory instead",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            open_bag(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("sqlite", [False, True])
def test_an_empty_bag_is_refused(tmp_path: Path, sqlite: bool) -> None:
    path = bags.write_bag(tmp_path / "bag", [], sqlite=sqlite, topics=[("/camera/image_raw", bags.IMAGE)])
    with pytest.raises(UserError, match="is empty: no message can be read"):
        open_bag(path)


def test_a_missing_topic_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with open_bag(bags.write_bag(tmp_path / "bag", bags.episode())) as bag, pytest.raises(UserError) as caught:
        bag.messages(["/wrist/image_raw"])
    assert "no messages on topic '/wrist/image_raw'" in str(caught.value)
    assert "/camera/image_raw  sensor_msgs/msg/Image  5 messages" in str(caught.value)


def test_another_serialisation_is_refused(tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "foreign.mcap", bags.episode(), encoding="json")
    with open_bag(path) as bag, pytest.raises(UserError, match="encoded as 'json', but only cdr"):
        bag.messages()


def test_an_unknown_type_is_read_raw_and_refused_as_a_message(tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "bag.mcap", bags.episode(1, actions=False), chunked=False)
    data = path.read_bytes().replace(b"std_msgs/msg/String", b"own_msgs/msg/Sentry")
    path.write_bytes(data.replace(b"string data", b"strung data"))
    with open_bag(path) as bag:
        (message,) = bag.messages(["/instruction"])
        assert message.msgtype == "own_msgs/msg/Sentry"
        assert message.raw == expected(bags.episode(1))[0][2]
        with pytest.raises(UserError, match=r"topic /instruction at 17\d+.*own_msgs/msg/Sentry"):
            message.message()


def test_a_type_that_the_bag_defines_itself_is_read(tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "bag.mcap", bags.episode(1, actions=False), chunked=False)
    path.write_bytes(path.read_bytes().replace(b"std_msgs/msg/String", b"own_msgs/msg/Sentry"))
    with open_bag(path) as bag:
        (message,) = bag.messages(["/instruction"])
        assert message.message().data == "put carrot on plate"


def test_damaged_bytes_of_a_message_are_refused(tmp_path: Path) -> None:
    path = bags.write_mcap(tmp_path / "bag.mcap", bags.episode(1, actions=False), chunked=False)
    data = bytearray(path.read_bytes())
    at = data.index(b"put carrot on plate") - 4
    data[at : at + 4] = b"\xff\xff\xff\x7f"  # the string's length
    path.write_bytes(data)
    with open_bag(path) as bag:
        (message,) = bag.messages(["/instruction"])
        with pytest.raises(UserError, match="cannot be read as std_msgs/msg/String"):
            message.message()


# Cut-off and damaged files


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_database_that_is_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    path = bags.write_bag(tmp_path / "bag", bags.episode(40), sqlite=True)
    (file,) = path.glob("*.db3")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(UserError, match=r"damaged sqlite3 database.*cut off; copy it again, or recover what is left"):
        open_bag(path)


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the command sqlite3 is not installed")
def test_what_is_left_of_a_cut_off_database_is_recovered_by_the_commands_shown(tmp_path: Path) -> None:
    path = bags.write_bag(tmp_path / "a bag", bags.episode(40), sqlite=True)
    whole = read(path)[0]
    (file,) = path.glob("*.db3")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * 0.6)])
    with pytest.raises(UserError) as refused:
        open_bag(path)
    commands = str(refused.value).partition("last message may be incomplete, with: ")[2]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(commands, shell=True, cwd=elsewhere, check=True)
    assert [each.name for each in elsewhere.iterdir()] == ["saved.db3"]
    found = read(elsewhere / "saved.db3")[0]
    assert len(whole) / 4 < len(found) < len(whole)
    assert len({*map(str, found)} - {*map(str, whole)}) <= 1, "only the last message may be incomplete"


def test_a_database_keeps_what_a_killed_recorder_left_in_its_log(tmp_path: Path) -> None:
    live = bags.write_bag(tmp_path / "live", bags.episode(5), sqlite=True)
    (file,) = live.glob("*.db3")
    want = read(live)[0]
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA journal_mode=WAL")
    topic_id, data = connection.execute("SELECT topic_id, data FROM messages ORDER BY timestamp LIMIT 1").fetchone()
    late = max(time for _, time, _ in want) + 1
    connection.execute("INSERT INTO messages (topic_id, timestamp, data) VALUES (?, ?, ?)", (topic_id, late, data))
    connection.commit()
    killed = Path(shutil.copytree(live, tmp_path / "killed"))
    connection.close()
    assert any(each.stat().st_size for each in killed.glob("*.db3-wal"))
    before = {each.name: each.read_bytes() for each in killed.iterdir()}
    found, damage = read(killed)
    assert len(found) == len(want) + 1
    assert found[-1][1:] == (late, bytes(data))
    assert damage == ""
    assert {each.name: each.read_bytes() for each in killed.iterdir()} == before, "a recording was changed"


LAYOUTS: dict[str, dict[str, Any]] = {
    "unchunked": dict(chunked=False),
    "plain": dict(compression=CompressionType.NONE),
    "lz4": dict(compression=CompressionType.LZ4),
    "zstd": dict(compression=CompressionType.ZSTD),
}


@pytest.fixture(scope="module")
def mcap_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("layouts")
    return {
        name: bags.write_mcap(directory / f"{name}.mcap", bags.episode(8), **layout) for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_an_mcap_file_cut_anywhere_gives_its_beginning_and_says_so(
    tmp_path: Path, mcap_files: dict[str, Path], layout: str, share: float
) -> None:
    whole = mcap_files[layout].read_bytes()
    end = int(share * (len(whole) - 1))
    path = tmp_path / "cut.mcap"
    path.write_bytes(whole[:end])
    want = expected(bags.episode(8))
    try:
        found, damage = read(path)
    except UserError as error:
        assert re.search(r"is empty: no message can be read|is neither MCAP", str(error))
        # One image without compression; compressed, the beginning of a block of the compressor cannot be read either.
        assert end < (12_000 if layout in ("unchunked", "plain") else 32_000)
        return
    assert found == want[: len(found)]
    data_end = whole.index(b"\x0f\x04\x00\x00\x00\x00\x00\x00\x00") + 9
    if end < data_end:
        assert f"cut off at byte {end}" in damage
        assert f"{len(found)} messages" in damage
    else:
        assert found == want


@pytest.mark.parametrize("layout", ["plain", "lz4", "zstd"])
def test_an_mcap_file_cut_at_any_byte_of_a_chunk_s_head_is_cut_off(
    tmp_path: Path, mcap_files: dict[str, Path], layout: str
) -> None:
    whole = mcap_files[layout].read_bytes()
    summary = make_reader(BytesIO(whole)).get_summary()
    assert summary is not None
    begin = summary.chunk_indexes[1].chunk_start_offset
    compression = summary.chunk_indexes[1].compression
    data_begin = begin + 9 + 32 + len(compression) + 8  # opcode and length; times, sizes, checksum; name; size
    assert whole[data_begin - 8 - len(compression) : data_begin - 8] == compression.encode()
    want = expected(bags.episode(8))
    path = tmp_path / "cut.mcap"
    for end in range(begin, data_begin + 1):
        path.write_bytes(whole[:end])
        found, damage = read(path)
        assert f"cut off at byte {end}" in damage
        assert found == want[: len(found)]
        assert len(found) >= 4, "the first chunk is whole"


@pytest.mark.parametrize("layout", ["unchunked", "plain"])
def test_all_complete_messages_before_a_cut_are_saved(tmp_path: Path, mcap_files: dict[str, Path], layout: str) -> None:
    want = expected(bags.episode(8))
    whole = mcap_files[layout].read_bytes()
    end = whole.index(want[9][2]) + len(want[9][2])  # right after the tenth message
    path = tmp_path / "cut.mcap"
    path.write_bytes(whole[:end])
    assert read(path)[0] == want[:10]


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("layout", ["plain", "lz4", "zstd"])
def test_a_damaged_chunk_ends_the_reading_but_never_gives_wrong_messages(
    tmp_path: Path, mcap_files: dict[str, Path], layout: str, indexed: bool
) -> None:
    whole = mcap_files[layout].read_bytes()
    damaged = bytearray(whole if indexed else whole[:-100])
    middle = len(damaged) // 2
    damaged[middle : middle + 8] = b"\x55\xaa" * 4
    path = tmp_path / "damaged.mcap"
    path.write_bytes(damaged)
    found, damage = read(path)
    want = expected(bags.episode(8))
    assert 0 < len(found) < len(want)
    assert found == want[: len(found)]
    assert "damaged" in damage


def test_a_file_padded_with_zeros_is_read_up_to_them(tmp_path: Path, mcap_files: dict[str, Path]) -> None:
    path = tmp_path / "padded.mcap"
    path.write_bytes(mcap_files["plain"].read_bytes()[:50_000] + bytes(20_000))
    found, damage = read(path)
    assert 0 < len(found) < 17
    assert found == expected(bags.episode(8))[: len(found)]
    assert damage


@pytest.mark.parametrize("name", ["qos", "metadata"])
@pytest.mark.parametrize(
    "nonsense",
    nightly_but(lambda text: len(text) < 5000, ["[1", "7", "2001-99-99", "[" * 5000, "- depth: x", "9" * 5000]),
)
def test_nonsense_in_descriptions_costs_no_message(tmp_path: Path, name: str, nonsense: str) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(3))
    if name == "metadata":
        (bag / "metadata.yaml").write_text(f"rosbag2_bagfile_information: {nonsense}")
    else:
        (path,) = bag.glob("*.mcap")
        bags.write_mcap(path, bags.episode(3), metadata={"offered_qos_profiles": nonsense})
    found, damage = read(bag)
    assert sorted(found) == sorted(expected(bags.episode(3)))
    assert name == "metadata" or "offered_qos_profiles" in damage or nonsense.startswith("- ")


@pytest.mark.parametrize("names", ["x", 7, [7], [None], [["x"]], ["x" * 300], ["a\0b"], [""]])
def test_file_names_that_are_none_are_refused(tmp_path: Path, names: Any) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(1))
    (bag / "metadata.yaml").write_text(yaml.safe_dump({"rosbag2_bagfile_information": {"relative_file_paths": names}}))
    with pytest.raises(
        UserError, match=r"metadata\.yaml: relative_file_paths is .*, but it must be a list of file names"
    ):
        open_bag(bag)


@pytest.mark.parametrize("change", ["data = 'text'", "data = 7", "timestamp = 'soon'"])
def test_a_database_with_values_of_other_types_is_told(tmp_path: Path, change: str) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(3), sqlite=True)
    with sqlite3.connect(next(bag.glob("*.db3"))) as connection:
        connection.execute(f"UPDATE messages SET {change} WHERE id = 4")
    connection.close()
    try:
        found, damage = read(bag)
    except UserError as error:
        assert "invalid times" in str(error)
    else:
        assert len(found) < 7
        assert "is not bytes, or has an invalid time" in damage


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("claim", [10, 10**6, 2**40])
def test_a_chunk_never_takes_more_memory_than_it_claims_or_any_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, claim: int
) -> None:
    monkeypatch.setattr(mcap_storage, "MAX_BLOCK_BYTES", 2 << 20)
    packed = {"zstd": zstandard.ZstdCompressor().compress, "lz4": lz4.frame.compress}[compression](bytes(64 << 20))
    path = tmp_path / "bomb.mcap"
    builder = RecordBuilder()
    builder.write(mcap_storage.MCAP_MAGIC)
    Chunk(compression, packed, 0, 1, 0, claim).write(builder)
    path.write_bytes(builder.end())
    tracemalloc.start()
    with pytest.raises(UserError, match=r"is damaged at byte 8 .*(bytes it claims|hold more than|a chunk that claims)"):
        open_bag(path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("mode", [CompressionMode.FILE, CompressionMode.MESSAGE])
def test_compressed_bags_are_no_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: CompressionMode) -> None:
    monkeypatch.setattr(reader, "MAX_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(mcap_storage.decompress_zstd, "__defaults__", (1 << 20,))
    bag = bags.write_bag(tmp_path / "bag", bags.episode(2), sqlite=True, compression=mode)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    if mode is CompressionMode.FILE:
        next(bag.glob("*.zstd")).write_bytes(bomb)
        with pytest.raises(UserError, match=r"cannot be read .it holds more than .* decompress it: zstd -d"):
            open_bag(bag)
        return
    with sqlite3.connect(next(bag.glob("*.db3"))) as connection:
        connection.execute("UPDATE messages SET data = ? WHERE id = 3", (bomb,))
    connection.close()
    found, damage = read(bag)
    assert len(found) < 5
    assert "hold more than 1048576 when decompressed" in damage


def test_reading_needs_neither_torch_nor_ros() -> None:
    code = "import sys, specvla_ros.lab.bags.reader; print([m for m in ('torch', 'rclpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
