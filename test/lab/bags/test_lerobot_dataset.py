# SPDX-License-Identifier: Apache-2.0
"""Episodes of LeRobot datasets are read as LeRobot reads them, and what is wrong with one is said."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from support import bags

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.control.state_units import StateConvention
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import (
    JOINT_STATE,
    BagFrame,
    TopicChoice,
    bag_frames,
    choose_topics,
    rgb_from_message,
)
from specvla_ros.lab.bags.lerobot.dataset import _opened
from specvla_ros.lab.bags.reader import bag_files, open_bag
from specvla_ros.lab.evaluation.run_directory import bag_hashes
from specvla_ros.messages.image_message import stamp_ns

DATASETS = Path(__file__).with_name("lerobot")
BOTH = TopicChoice(image_topic="/front/image_raw", cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states")
# Decoders agree bit by bit; the conversion to RGB may round differently with another build of FFmpeg.
ROUNDING = 2


@pytest.fixture(params=["v30", "v21"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATASETS / "v30", tmp_path / "dataset"))


def frames_of(path: Path, topics: TopicChoice = BOTH) -> tuple[list[BagFrame], str]:
    with open_bag(path) as bag:
        return list(bag_frames(bag, choose_topics(bag, topics))), bag.damage


def change_info(dataset: Path, **changes: Any) -> None:
    path = dataset / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    parquet.write_table(change(parquet.read_table(path)), path)


def put(name: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    """Replaces one value of a table."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        column = table.schema.get_field_index(name)
        return table.set_column(column, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


# As LeRobot reads them


def test_each_frame_has_the_pixels_state_action_task_and_time_that_lerobot_reads(version: str) -> None:
    wanted = np.load(DATASETS / f"{version}_read.npz")
    found = [each for path in find_bags([DATASETS / version]).bags for each in frames_of(path)[0]]
    assert len(found) == len(wanted["index"]) == 15
    for i, frame in enumerate(found):
        seen = {"front": frame.image, "wrist": frame.others["wrist"]}
        for name, message in seen.items():
            pixels = rgb_from_message(message.message())
            apart = np.abs(pixels.astype(int) - wanted[f"observation.images.{name}"][i]).max()
            assert apart <= ROUNDING, (i, name)
        assert frame.state is not None
        assert frame.state.tolist() == wanted["observation.state"][i].tolist()
        assert frame.recorded == tuple(wanted["action"][i].tolist())
        assert frame.instruction == wanted["tasks"][i]
        start_ns = 10**18 + int(wanted["episode_index"][i]) * 3600 * 10**9
        assert stamp_ns(frame.image.message().header) == start_ns + round(float(wanted["timestamp"][i]) * 1e9)
        assert frame.image.time_ns == stamp_ns(frame.image.message().header)


def test_a_new_task_within_an_episode_is_a_new_instruction(version: str) -> None:
    frames, damage = frames_of(DATASETS / version / "episode_000001")
    assert [(frame.instruction, frame.epoch) for frame in frames] == [("open the drawer", 1)] * 3 + [
        ("close the drawer", 2)
    ] * 3
    assert damage == ""


def test_a_state_is_read_by_the_names_of_its_joints(version: str) -> None:
    topics = TopicChoice("/front/image_raw", state_topic="/joint_states", state_names=("gripper.pos", "elbow_flex.pos"))
    wanted = np.load(DATASETS / f"{version}_read.npz")["observation.state"]
    frames, _ = frames_of(DATASETS / version / "episode_000000", topics)
    assert np.array([frame.state for frame in frames]).tolist() == wanted[:9, [2, 1]].tolist()


def test_a_state_without_names_gets_numbered_ones(dataset: Path) -> None:
    features = json.loads((dataset / "meta/info.json").read_text())["features"]
    features["observation.state"]["names"] = None
    change_info(dataset, features=features)
    frames, _ = frames_of(dataset / "episode_000000", TopicChoice("/front/image_raw", state_topic="/joint_states"))
    with open_bag(dataset / "episode_000000") as bag:
        state = next(bag.messages(["/joint_states"])).message()
    assert [*state.name] == ["state_0", "state_1", "state_2"]
    assert frames[0].state is not None


# Found as bags are


def test_a_dataset_stands_for_its_episodes_and_one_episode_for_itself(tmp_path: Path) -> None:
    names = ["episode_000000", "episode_000001"]
    assert [bag.name for bag in find_bags([DATASETS / "v30"]).bags] == names
    assert find_bags([DATASETS / "v30" / names[1]]).bags == (DATASETS / "v30" / names[1],)
    shutil.copytree(DATASETS / "v21", tmp_path / "data" / "one")
    shutil.copytree(DATASETS / "v30", tmp_path / "data" / "two")
    assert [bag.parent.name for bag in find_bags([tmp_path / "data"]).bags] == ["one", "one", "two", "two"]
    with pytest.raises(UserError, match=r"is a LeRobot dataset with 2 episodes: give one of them, such as .*000000"):
        open_bag(DATASETS / "v30")
    with pytest.raises(UserError, match="has no episode 2; it has 0 to 1"):
        open_bag(DATASETS / "v30" / "episode_000002")


def test_the_files_of_an_episode_are_hashed_under_different_names(version: str) -> None:
    episode = DATASETS / version / "episode_000001"
    assert len(bag_hashes(episode)) == len(bag_files(episode)) == (5 if version == "v30" else 4)


# What is wrong, before anything runs


@pytest.mark.parametrize("codebase", ["v2.0", "v4.1", None])
def test_another_version_is_refused_with_those_that_are_read(dataset: Path, codebase: str | None) -> None:
    change_info(dataset, codebase_version=codebase)
    with pytest.raises(UserError, match=r"codebase_version is .*, but only v2\.1 and v3\.0 are read"):
        find_bags([dataset])


def test_an_empty_dataset_is_refused(dataset: Path) -> None:
    episodes = dataset / "meta/episodes/chunk-000/file-000.parquet"
    change_table(episodes, lambda table: table.slice(0, 0))
    change_info(dataset, total_episodes=0)
    with pytest.raises(UserError, match="is empty: it has no episodes"):
        find_bags([dataset])


def test_a_path_that_leaves_the_dataset_is_refused(dataset: Path) -> None:
    change_info(dataset, data_path="../../{chunk_index}/secret.parquet")
    with pytest.raises(UserError, match="is outside the dataset"):
        find_bags([dataset])


@pytest.mark.parametrize("name", ["meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"])
def test_a_damaged_description_is_named(dataset: Path, name: str) -> None:
    (dataset / name).write_bytes((dataset / name).read_bytes()[:-40])
    with pytest.raises(UserError, match=f"{name} is damaged .*copy or download"):
        find_bags([dataset])


def refused(dataset: Path, match: str, episode: int = 0) -> None:
    find_bags([dataset])
    with pytest.raises(UserError, match=match):
        open_bag(dataset / f"episode_{episode:06d}")


DATA = "data/chunk-000/file-000.parquet"
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"


def test_a_missing_or_damaged_file_is_named(dataset: Path) -> None:
    (dataset / VIDEO).rename(dataset / "kept.mp4")
    refused(dataset, f"video .*{VIDEO} is missing; copy or download")
    (dataset / VIDEO).write_bytes(b"no video")
    refused(dataset, f"video .*{VIDEO} is damaged")
    (dataset / "kept.mp4").replace(dataset / VIDEO)
    whole = (dataset / DATA).read_bytes()
    (dataset / DATA).write_bytes(whole[: len(whole) // 2])
    refused(dataset, f"{DATA} is damaged")
    (dataset / DATA).unlink()
    refused(dataset, f"lacks .*{DATA}")


def test_a_missing_column_is_named(dataset: Path) -> None:
    change_table(dataset / DATA, lambda table: table.drop_columns(["action", "timestamp"]))
    refused(dataset, f"{DATA} lacks the column timestamp, action")


def test_a_task_out_of_range_is_named_with_its_frame(dataset: Path) -> None:
    change_table(dataset / DATA, put("task_index", 11, 7))
    with open_bag(dataset / "episode_000000"):
        pass
    refused(dataset, r"frame 2 of episode 1 has task_index 7, but the dataset has the tasks \[0, 1, 2\]", episode=1)


def test_rows_that_are_missing_or_out_of_order_are_named(dataset: Path) -> None:
    whole = (dataset / DATA).read_bytes()
    change_table(dataset / DATA, lambda table: table.slice(0, 12))
    refused(dataset, "holds 3 frames of episode 1, but its dataset lists 6 frames", episode=1)
    (dataset / DATA).write_bytes(whole)
    change_table(dataset / DATA, put("timestamp", 4, 0.1))
    refused(dataset, "the timestamps of episode 0 do not increase")
    change_table(dataset / DATA, put("timestamp", 4, None))
    refused(dataset, "the timestamps of episode 0 do not increase")


# What is wrong in the middle: counted


def test_a_state_that_is_not_finite_costs_its_frame_and_is_said(dataset: Path) -> None:
    change_table(dataset / DATA, put("observation.state", 3, [0.0, float("nan"), 1.0]))
    frames, _ = frames_of(dataset / "episode_000000")
    assert [i for i, frame in enumerate(frames) if frame.missing] == [3]
    assert "not finite" in frames[3].missing


def test_a_video_shorter_than_its_table_costs_the_images_at_the_end(dataset: Path) -> None:
    with av.open(str(dataset / VIDEO)) as source:
        kept = [*source.decode(video=0)][:12]
    with av.open(str(dataset / VIDEO), "w") as target:
        stream = target.add_stream("libx264", rate=10, options={"bf": "0"})
        stream.width, stream.height = 64, 48
        for frame in kept:
            target.mux(stream.encode(frame))
        target.mux(stream.encode())
    assert frames_of(dataset / "episode_000000")[1] == ""
    frames, damage = frames_of(dataset / "episode_000001", TopicChoice("/front/image_raw"))
    assert len(frames) == 3
    assert damage.startswith("3 images of /front/image_raw are missing: ")
    assert damage.endswith("it ends before 1.200 s")


def test_a_video_with_damaged_bytes_never_raises_another_error(dataset: Path) -> None:
    whole = (dataset / VIDEO).read_bytes()
    random = np.random.default_rng(0)
    for _ in range(40):
        broken = bytearray(whole)
        for at in random.integers(0, len(whole), 6):
            broken[at] = random.integers(256)
        (dataset / VIDEO).write_bytes(broken)
        try:
            frames, damage = frames_of(dataset / "episode_000000", TopicChoice("/front/image_raw"))
            assert len(frames) == 9 or damage
        except UserError:
            pass


def test_an_image_that_is_missing_in_the_table_is_counted(tmp_path: Path) -> None:
    dataset = Path(shutil.copytree(DATASETS / "v21", tmp_path / "dataset"))
    table = dataset / "data/chunk-000/episode_000000.parquet"
    change_table(table, put("observation.images.wrist", 5, None))
    frames, damage = frames_of(dataset / "episode_000000")
    assert [i for i, frame in enumerate(frames) if frame.missing] == [5]
    assert damage.startswith("1 images of /wrist/image_raw/compressed are missing")


PARTS = {
    "v30": (DATA, "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "meta/info.json"),
    "v21": ("data/chunk-000/episode_000000.parquet", "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/info.json"),
}


@pytest.mark.parametrize(("version", "name"), [(version, name) for version in PARTS for name in PARTS[version]])
def test_damaged_bytes_never_raise_another_error(tmp_path: Path, version: str, name: str) -> None:
    dataset = Path(shutil.copytree(DATASETS / version, tmp_path / "dataset"))
    whole = (dataset / name).read_bytes()
    random = np.random.default_rng(2)
    for turn in range(40):
        broken = bytearray(whole)
        for at in random.integers(0, len(whole), 1 + turn % 5):
            broken[at] = random.integers(256)
        (dataset / name).write_bytes(broken if turn % 3 else broken[: random.integers(len(whole))])
        _opened.cache_clear()
        try:
            for path in find_bags([dataset]).bags:
                frames_of(path)
        except UserError:
            pass


def test_a_state_of_a_dataset_keeps_its_unit_and_one_of_a_bag_becomes_the_policys(tmp_path: Path) -> None:
    convention = StateConvention(ConventionSettings(joints=("a", "b"), state_unit="deg"), "", ())
    joints = TopicChoice(state_topic="/joint_states", state_names=("b", "a"), convention=convention)
    stamp = bags.START_NS
    values, nothing = np.array([np.pi, np.pi / 2]), np.empty(0)
    state = bags.TYPES[JOINT_STATE](
        header=bags.header(stamp), name=["a", "b"], position=values, velocity=nothing, effort=nothing
    )
    entry: bags.Entry = ("/joint_states", JOINT_STATE, stamp, state)
    (frame,), _ = frames_of(bags.write_bag(tmp_path / "bag", [*bags.episode(1), entry]), joints)
    assert frame.state is not None and frame.state == pytest.approx([90, 180])
    wanted = np.load(DATASETS / "v30_read.npz")["observation.state"]
    frames, _ = frames_of(DATASETS / "v30" / "episode_000000", replace(BOTH, convention=convention))
    assert np.array([frame.state for frame in frames]).tolist() == wanted[:9].tolist()
