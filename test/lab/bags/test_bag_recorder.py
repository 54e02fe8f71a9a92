# SPDX-License-Identifier: Apache-2.0
"""Recorded actions are a bag that ROS 2 tools read, also after the recorder was killed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from mcap.exceptions import EndOfFile
from mcap.reader import make_reader
from mcap.records import Message
from mcap.stream_reader import StreamReader
from mcap.writer import Writer
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from support.actions import MEANING, NAMES, action

from specvla_ros.engine.outcome import DropCounter
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC, DECODE_STATS_TOPIC, BagRecorder

START_NS = 1_700_000_000_500_000_000
PERIOD_NS = 200_000_000
SOURCES = os.pathsep.join(str(path) for path in (Path(__file__).parents[3], Path(__file__).parents[2]))

ENDLESS_RECORDER = f"""
import sys
from pathlib import Path
from support.actions import MEANING, action
from specvla_ros.lab.bags.recorder import BagRecorder
recorder = BagRecorder(Path(sys.argv[1]), {{}}, MEANING)
for index in range(10**9):
    recorder.record(action(index), seq=index, time_ns={START_NS} + index * {PERIOD_NS}, publish_s=0.0,
                    latency_s=0.1, drop_counts={{}})
    print(index, flush=True)
"""


def record(directory: Path, count: int = 3) -> Path:
    with closing(BagRecorder(directory, {"checkpoint": "somewhere"}, MEANING)) as recorder:
        for index in range(count):
            recorder.record(
                action(index),
                seq=index,
                time_ns=START_NS + index * PERIOD_NS,
                publish_s=0.05,
                latency_s=0.15,
                drop_counts=DropCounter().by_name(),
            )
    return directory


def read(path: Path, topic: str = ACTION_TOPIC) -> list[Any]:
    with open_bag(path) as bag:
        return [(message.time_ns, message.message()) for message in bag.messages([topic])]


def test_actions_come_back_with_the_stamps_of_their_images(tmp_path: Path) -> None:
    messages = read(record(tmp_path / "actions"))
    assert [time for time, _ in messages] == [START_NS + index * PERIOD_NS for index in range(3)]
    for index, (_, message) in enumerate(messages):
        observation = action(index).observation
        assert message.header.stamp.sec * 10**9 + message.header.stamp.nanosec == observation.stamp_ns
        assert message.header.frame_id == "arm_base"
        assert (message.seq, message.epoch, message.names) == (index, 3, list(NAMES))
        assert message.values.tolist() == action(index).values.tolist()
        assert message.tokens.tolist() == list(action(index).tokens)
        assert (message.action_dt, message.publish_s, message.latency_s) == (0.05, 0.05, 0.15)


def test_decode_stats_come_back(tmp_path: Path) -> None:
    (_, message), *_ = read(record(tmp_path / "actions"), DECODE_STATS_TOPIC)
    assert message.header.frame_id == "camera_optical_frame"
    assert (message.mode, message.forwards, message.tau) == ("ar", 7, 1.0)
    assert message.tokens_per_forward.tolist() == [1] * 7
    assert dict(zip(message.drop_reasons, message.drop_counts.tolist(), strict=True)) == DropCounter().by_name()


def test_the_schemas_are_complete_for_tools_that_know_none_of_our_types(tmp_path: Path) -> None:
    path = record(tmp_path / "actions")
    with next(path.glob("*.mcap")).open("rb") as file:
        found = list(make_reader(file).iter_messages())
    names = {schema and schema.name for schema, _, _ in found}
    assert names == {"specvla_ros/msg/VlaAction", "specvla_ros/msg/DecodeStats"}
    schema, channel, message = next(each for each in found if each[1].topic == ACTION_TOPIC)
    assert schema is not None
    assert (schema.encoding, channel.message_encoding) == ("ros2msg", "cdr")
    store = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(schema.data.decode(), schema.name))
    read: Any = store.deserialize_cdr(message.data, schema.name)
    assert read.values.tolist() == action(0).values.tolist()


def test_rosbag2_metadata_describes_the_bag(tmp_path: Path) -> None:
    path = record(tmp_path / "actions")
    information = yaml.safe_load((path / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
    assert (information["message_count"], information["duration"]["nanoseconds"]) == (6, 2 * PERIOD_NS)
    assert information["relative_file_paths"] == ["actions_0.mcap"]
    with Reader(path) as reader:
        assert (reader.message_count, reader.start_time, reader.duration) == (6, START_NS, 2 * PERIOD_NS + 1)
        assert {each.topic: each.msgcount for each in reader.connections} == {ACTION_TOPIC: 3, DECODE_STATS_TOPIC: 3}
        assert len(list(reader.messages())) == 6


def test_ros_itself_reads_the_messages(tmp_path: Path) -> None:
    serialization = pytest.importorskip("rclpy.serialization", reason="there is no ROS 2 here")
    pytest.importorskip("specvla_ros.msg._vla_action", reason="the messages are not built: make build")
    messages = import_module("specvla_ros.msg")
    with open_bag(record(tmp_path / "actions")) as bag:
        raw = {message.topic: message.raw for message in bag.messages()}
    vla_action = serialization.deserialize_message(raw[ACTION_TOPIC], messages.VlaAction)
    stats = serialization.deserialize_message(raw[DECODE_STATS_TOPIC], messages.DecodeStats)
    assert list(vla_action.values) == action(2).values.tolist()
    assert vla_action.instruction == "put carrot on plate"
    assert stats.drop_reasons == list(DropCounter().by_name())
    assert list(stats.tick_s) == [0.005] * 7


def test_the_type_hashes_are_those_of_the_message_generator(tmp_path: Path) -> None:
    prefixes = os.environ.get("AMENT_PREFIX_PATH", sys.prefix).split(os.pathsep)
    generated = [path for prefix in prefixes for path in Path(prefix).glob("share/specvla_ros/msg/*.json")]
    if not generated:
        pytest.skip("no type descriptions here: the messages are not built, or ROS 2 is older than Iron")
    wanted = {
        each["type_name"]: each["hash_string"]
        for path in generated
        for each in json.loads(path.read_text())["type_hashes"]
    }
    information = yaml.safe_load((record(tmp_path / "actions") / "metadata.yaml").read_text())
    for topic in information["rosbag2_bagfile_information"]["topics_with_message_count"]:
        metadata = topic["topic_metadata"]
        assert metadata["type_description_hash"] == wanted[metadata["type"]]


def test_recordings_under_the_type_name_of_earlier_versions_are_read(tmp_path: Path) -> None:
    name, definition = "specvla_ros/msg/VlaAction", "uint64 seq\nfloat64[] values\nfloat64 action_dt\n"
    store = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(definition, name))
    values = np.array([0.25, -0.5])
    raw = bytes(store.serialize_cdr(store.types[name](seq=7, values=values, action_dt=0.2), name))
    with (tmp_path / "old.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2")
        schema = writer.register_schema(name, "ros2msg", definition.encode())
        channel = writer.register_channel(ACTION_TOPIC, "cdr", schema)
        writer.add_message(channel, log_time=START_NS, data=raw, publish_time=START_NS)
        writer.finish()
    ((_, message),) = read(tmp_path / "old.mcap")
    assert (message.seq, message.values.tolist(), message.action_dt) == (7, values.tolist(), 0.2)


def test_a_killed_recorder_leaves_all_that_it_wrote(tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS_RECORDER, str(directory)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        written = 0
        while written < 200:
            written = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        written = int((process.stdout.read().split() or [str(written)])[-1])
    with open_bag(directory) as bag:
        found = [message.message() for message in bag.messages([ACTION_TOPIC])]
        assert "cut off" in bag.damage
    assert len(found) >= written + 1
    assert [message.seq for message in found] == list(range(len(found)))
    assert found[-1].values.tolist() == action(len(found) - 1).values.tolist()
    assert _streamed(next(directory.glob("*.mcap"))) >= 2 * (written + 1)


def _streamed(path: Path) -> int:
    """Messages that the mcap library reads in a file without a footer."""
    count = 0
    with path.open("rb") as file:
        try:
            for record in StreamReader(file).records:
                count += isinstance(record, Message)
        except EndOfFile:
            pass
    return count


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    path = record(tmp_path / "actions")
    before = next(path.glob("*.mcap")).read_bytes()
    with pytest.raises(UserError, match="cannot be recorded: File exists; choose a new, writable directory"):
        BagRecorder(path, {}, MEANING)
    assert next(path.glob("*.mcap")).read_bytes() == before


@pytest.mark.parametrize("defined", [True, False])
def test_recordings_with_the_messages_former_type_name_are_read(tmp_path: Path, defined: bool) -> None:
    (path,) = record(tmp_path / "actions").glob("*.mcap")
    former = tmp_path / "former.mcap"
    with path.open("rb") as file, former.open("wb") as out:
        reader, writer = make_reader(file), Writer(out)
        writer.start(profile="ros2")
        channels: dict[str, int] = {}
        for schema, channel, message in reader.iter_messages():
            assert schema is not None
            if channel.topic not in channels:
                name = schema.name.replace("specvla_ros/", "specvla_msgs/")
                known = writer.register_schema(name, schema.encoding, schema.data if defined else b"")
                channels[channel.topic] = writer.register_channel(channel.topic, channel.message_encoding, known)
            writer.add_message(channels[channel.topic], message.log_time, message.data, message.publish_time)
        writer.finish()
    with open_bag(former) as bag:
        assert {topic.msgtype for topic in bag.topics} == {"specvla_msgs/msg/VlaAction", "specvla_msgs/msg/DecodeStats"}
    assert [message.values.tolist() for _, message in read(former)] == [action(i).values.tolist() for i in range(3)]
