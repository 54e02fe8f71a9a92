# SPDX-License-Identifier: Apache-2.0
"""Bags become LeRobot datasets frame by frame: nothing is resampled, and what is left out is said."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from pyarrow import parquet
from support import bags
from typer.testing import CliRunner

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import BagFrame, TopicChoice, bag_frames, choose_topics, rgb_from_message
from specvla_ros.lab.bags.lerobot import writer as lerobot_writer
from specvla_ros.lab.bags.lerobot.export import ExportResult, export
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.cli.app import app

ORACLE = Path(__file__).with_name("lerobot") / "v30"
LEROBOT_PYTHON = os.environ.get("LEROBOT_PYTHON", "")  # of an environment with LeRobot, see support/lerobot_oracle
JOINTS = ["pan", "lift", "elbow"]
TWO = TopicChoice(cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states")


def joints(time_ns: int, values: Iterable[float]) -> Any:
    empty = np.empty(0)
    return bags.TYPES["sensor_msgs/msg/JointState"](
        header=bags.header(time_ns, "base"), name=JOINTS, position=np.array(values), velocity=empty, effort=empty
    )


def smooth(time_ns: int, camera: int) -> Any:
    """A slope that moves with time, as H.264 can show it."""
    rows, columns = np.mgrid[:48, :64]
    shift = time_ns // bags.PERIOD_NS % 50
    pixels = np.stack([rows * 4, columns * 3, np.full_like(rows, 40 + 60 * camera + shift)], axis=2).astype(np.uint8)
    return bags.image(time_ns, data=pixels.reshape(-1))


def recording(path: Path, frames: int = 6, *, start_ns: int = bags.START_NS, task: str = "stack the cups") -> Path:
    """A bag of two cameras, a state and actions, at 5 Hz."""
    entries: list[bags.Entry] = [("/instruction", bags.TEXT, start_ns, bags.text(task))]
    for i in range(frames):
        now = start_ns + i * bags.PERIOD_NS
        entries.append(("/joint_states", "sensor_msgs/msg/JointState", now, joints(now, [0.1 * i, 0.2, -0.3 * i])))
        entries.append(("/camera/image_raw", bags.IMAGE, now, smooth(now, 0)))
        entries.append(("/wrist/image_raw", bags.IMAGE, now, smooth(now, 1)))
        entries.append(("/ground_truth/action", bags.NUMBERS, now + 10**7, bags.numbers([0.01 * i] * 6 + [1.0])))
    return bags.write_bag(path, entries)


@pytest.fixture
def recorded(tmp_path: Path) -> list[Path]:
    first = recording(tmp_path / "bags" / "a")
    return [first, recording(tmp_path / "bags" / "b", 4, start_ns=bags.START_NS + 10**11, task="close the drawer")]


def frames_of(path: Path, topics: TopicChoice = TWO) -> list[BagFrame]:
    with open_bag(path) as bag:
        return list(bag_frames(bag, choose_topics(bag, topics)))


def pixels_of(frame: BagFrame) -> np.ndarray:
    return np.stack([rgb_from_message(each.message()) for each in (frame.image, frame.others["wrist"])]).astype(int)


def exported(recorded: list[Path], out: Path, topics: TopicChoice = TWO, **options: Any) -> ExportResult:
    return export(recorded, out, ExportPlan(**options), topics)


@pytest.mark.parametrize("images", [True, False])
def test_a_dataset_gives_back_the_frames_of_its_bags(recorded: list[Path], tmp_path: Path, images: bool) -> None:
    result = exported(recorded, tmp_path / "set", images=images)
    assert (result.episodes, result.frames, result.fps, result.dropped, result.notes) == (2, 10, 5, {}, [])
    episodes = find_bags([tmp_path / "set"]).bags
    assert len(episodes) == 2
    for bag, episode in zip(recorded, episodes, strict=True):
        for before, after in zip(frames_of(bag), frames_of(episode), strict=True):
            apart = np.abs(pixels_of(before) - pixels_of(after))
            assert apart.max() == 0 if images else apart.mean() < 3
            assert before.state is not None and after.state is not None
            assert after.state.tolist() == before.state.astype(np.float32).tolist()
            assert after.recorded == before.recorded, "float32 in the bag"
            assert (after.instruction, after.epoch) == (before.instruction, before.epoch)
            assert after.image.message().header.stamp == before.image.message().header.stamp


def test_the_tables_have_the_columns_and_types_of_lerobots_own(recorded: list[Path], tmp_path: Path) -> None:
    exported(recorded, tmp_path / "set")
    for name in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"):
        own, theirs = (parquet.read_schema(root / name) for root in (tmp_path / "set", ORACLE))
        types = {field.name.replace("front", "camera"): field.type for field in theirs}
        extra = {field.name: field.type for field in own if types.get(field.name) != field.type}
        assert {key for key in extra if "stamp_ns" not in key} <= {"observation.state", "action"}, "other lengths"
        assert not types.keys() - set(own.names)
    own, theirs = (json.loads((root / "meta/info.json").read_text()) for root in (tmp_path / "set", ORACLE))
    assert own.keys() == theirs.keys()
    video, oracle = (each["features"]["observation.images.wrist"] for each in (own, theirs))
    assert (video.keys(), video["info"].keys()) == (oracle.keys(), oracle["info"].keys())
    own, theirs = (json.loads((root / "meta/stats.json").read_text()) for root in (tmp_path / "set", ORACLE))
    assert own["action"].keys() == theirs["action"].keys()
    shapes = [np.shape(each["observation.images.wrist"]["mean"]) for each in (own, theirs)]
    assert shapes == [(3, 1, 1)] * 2


def test_timestamps_are_multiples_of_the_period_and_videos_follow_one_another(
    recorded: list[Path], tmp_path: Path
) -> None:
    exported(recorded, tmp_path / "set")
    table = parquet.read_table(tmp_path / "set/data/chunk-000/file-000.parquet").to_pydict()
    assert table["timestamp"] == pytest.approx([i / 5 for i in (*range(6), *range(4))])
    assert (table["index"], table["task_index"]) == ([*range(10)], [0] * 6 + [1] * 4)
    rows = parquet.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    spans = [[row[f"videos/observation.images.wrist/{name}_timestamp"] for name in ("from", "to")] for row in rows]
    assert spans == [[0.0, 1.2], [1.2, 2.0]]
    with av.open(str(tmp_path / "set/videos/observation.images.wrist/chunk-000/file-000.mp4")) as video:
        times = [round(frame.time, 6) for frame in video.decode(video=0)]
    assert times == [round(i / 5, 6) for i in range(10)]


def test_statistics_are_those_of_all_frames(recorded: list[Path], tmp_path: Path) -> None:
    exported(recorded, tmp_path / "set")
    states = np.array([frame.state for bag in recorded for frame in frames_of(bag)]).astype(np.float32)
    found = json.loads((tmp_path / "set/meta/stats.json").read_text())["observation.state"]
    assert found["count"] == [10]
    for name, value in {
        "min": states.min(0),
        "max": states.max(0),
        "mean": states.mean(0),
        "std": states.std(0),
    }.items():
        assert found[name] == pytest.approx(value.tolist(), abs=1e-6)


# What is told or refused


def test_a_gap_is_refused_before_anything_is_written_and_kept_if_asked_for(tmp_path: Path) -> None:
    entries = [each for each in bags.episode(8) if each[2] // 10**8 % 10 != 6 or each[1] == bags.TEXT]
    path = bags.write_bag(tmp_path / "gap", entries)
    with pytest.raises(UserError, match=r"not 200 ms apart.*\n.*gap: 1 of 6 periods are off, from 0\.400 to 0\.400 s"):
        exported([path], tmp_path / "set", TopicChoice())
    assert [each.name for each in tmp_path.iterdir()] == ["gap"]
    result = exported([path], tmp_path / "set", TopicChoice(), uneven=True)
    assert "1 of 6 periods are off" in result.notes[0]
    stamps = [frame.image.time_ns for frame in frames_of(tmp_path / "set" / "episode_000000", TopicChoice())]
    assert stamps == [frame.image.time_ns for frame in frames_of(path, TopicChoice())]


def test_another_rate_is_refused_and_never_resampled(recorded: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"of 10 fps .they come at 5\.00 Hz"):
        exported(recorded, tmp_path / "set", fps=10)
    with pytest.raises(UserError, match=r"no bag has two images.*--fps"):
        exported([recording(tmp_path / "single", 1)], tmp_path / "set")


def test_images_without_an_action_or_instruction_are_counted_by_reason(tmp_path: Path) -> None:
    late = bags.episode(5, actions=True)[:-1]  # the last image has no action
    late[0] = ("/instruction", bags.TEXT, bags.START_NS + bags.PERIOD_NS, late[0][3])
    result = exported(
        [bags.write_bag(tmp_path / "late", sorted(late, key=lambda each: each[2]))], tmp_path / "set", TopicChoice()
    )
    assert result.frames == 3
    assert result.dropped == {"recorded before any instruction": 1, "no recorded action before the next image": 1}


def test_bags_that_differ_are_refused_before_anything_is_written(recorded: list[Path], tmp_path: Path) -> None:
    entries = [each for each in bags.episode(4) if each[0] != "/ground_truth/action"]
    entries += [("/ground_truth/action", bags.NUMBERS, each[2] + 1, bags.numbers([0.0] * 6)) for each in entries[1:]]
    entries.sort(key=lambda each: each[2])
    other = bags.write_bag(tmp_path / "other", entries)
    with pytest.raises(UserError, match="differ in action: 7 and 6; export them separately"):
        exported([bags.write_bag(tmp_path / "first", bags.episode(4)), other], tmp_path / "set", TopicChoice())
    with pytest.raises(UserError, match=r"differ in state: \('pan', 'lift', 'elbow'\) and \(\);"):
        exported([recorded[0], other], tmp_path / "set", TopicChoice())
    assert not [each for each in tmp_path.iterdir() if "set" in each.name]


def test_what_went_wrong_in_the_middle_leaves_no_dataset(recorded: list[Path], tmp_path: Path) -> None:
    entries = bags.episode(4)
    small = bags.image(entries[5][2], height=24, data=bags.pixels(0)[:24].reshape(-1))
    entries[5] = (*entries[5][:3], small)
    with pytest.raises(UserError, match=r"image 2: observation.images.camera is \(24, 64\), not \(48, 64\)"):
        exported([bags.write_bag(tmp_path / "sizes", entries)], tmp_path / "set", TopicChoice())
    assert not [each for each in tmp_path.iterdir() if "set" in each.name]
    (tmp_path / "set").mkdir()
    with pytest.raises(UserError, match="exists; give a new directory"):
        exported(recorded, tmp_path / "set")


def test_a_further_camera_does_not_take_the_first_ones_place(recorded: list[Path], tmp_path: Path) -> None:
    topics = TopicChoice(cameras={"camera": "/wrist/image_raw"})
    with pytest.raises(UserError, match=r"--camera camera=…: the first camera, /camera/image_raw, has this name"):
        export(recorded, tmp_path / "out", ExportPlan(), topics)
    assert not (tmp_path / "out").exists()


def test_bags_without_actions_or_answers_are_refused(tmp_path: Path) -> None:
    path = bags.write_bag(tmp_path / "bag", bags.episode(4, actions=False))
    with pytest.raises(UserError, match="has no actions: name their topic with --action-topic, or give a replay"):
        exported([path], tmp_path / "set", TopicChoice())


def test_the_command_says_what_it_wrote_and_what_it_left_out(recorded: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(recorded[0].parent), "--out", str(tmp_path / "set")])
    assert done.exit_code == 0, done.output
    assert "wrote 10 frames of 2 episodes at 5 fps" in done.output
    assert "not exported: /wrist/image_raw; add a camera with --camera NAME=TOPIC" in done.output


# As LeRobot reads it


@pytest.mark.nightly
@pytest.mark.skipif(not LEROBOT_PYTHON, reason="LEROBOT_PYTHON names no environment with LeRobot")
@pytest.mark.parametrize("images", [True, False])
def test_lerobot_reads_the_frames_that_were_exported(recorded: list[Path], tmp_path: Path, images: bool) -> None:
    exported(recorded, tmp_path / "set", images=images)
    script = Path(__file__).parents[2] / "support" / "lerobot_oracle" / "make_datasets.py"
    command = [LEROBOT_PYTHON, str(script), "--read", str(tmp_path / "set"), str(tmp_path / "read.npz")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout, file=sys.stderr)
    read = np.load(tmp_path / "read.npz")
    found = [frame for episode in find_bags([tmp_path / "set"]).bags for frame in frames_of(episode)]
    assert len(found) == len(read["index"])
    for i, frame in enumerate(found):
        theirs = np.stack([read[f"observation.images.{name}"][i] for name in ("camera", "wrist")])
        assert np.abs(pixels_of(frame) - theirs).max() <= 2
        assert frame.state is not None
        assert frame.state.tolist() == read["observation.state"][i].tolist()
        assert frame.recorded == tuple(read["action"][i].tolist())
        assert frame.instruction == read["tasks"][i]
        assert frame.image.time_ns == read["stamp_ns"][i]


def test_a_full_file_is_followed_by_another(
    recorded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_DATA_MB", "_VIDEO_MB"):
        monkeypatch.setattr(lerobot_writer, limit, 0)
    monkeypatch.setattr(lerobot_writer, "_CHUNKS_SIZE", 2)
    third = recording(tmp_path / "bags" / "c", 5, start_ns=bags.START_NS + 10**12)
    exported([*recorded, third], tmp_path / "set")
    names = sorted(str(path.relative_to(tmp_path / "set/data")) for path in (tmp_path / "set/data").rglob("*.parquet"))
    assert names == ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    videos = tmp_path / "set/videos/observation.images.wrist"
    assert len([*videos.rglob("*.mp4")]) == 3
    for bag, episode in zip([*recorded, third], find_bags([tmp_path / "set"]).bags, strict=True):
        frames = frames_of(episode)
        assert len(frames) == len(frames_of(bag))
        for before, after in zip(frames_of(bag), frames, strict=True):
            assert np.abs(pixels_of(before) - pixels_of(after)).mean() < 3
            assert after.recorded == before.recorded
