# SPDX-License-Identifier: Apache-2.0
"""A replay of a dataset's episode gives the answers that the same images give as a bag."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from support import bags
from support.paths import BAGS, needs
from support.replays import Run

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import TopicChoice, rgb_from_message
from specvla_ros.lab.bags.lerobot.export import export
from specvla_ros.lab.bags.lerobot.export_plan import ExportPlan
from specvla_ros.lab.bags.reader import Bag, open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC
from specvla_ros.lab.evaluation.certificate import certify
from specvla_ros.lab.evaluation.replay_bags import answer_bags, named_bags
from specvla_ros.lab.training.dataset import load_demonstrations
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.speculation.settings import NO_HEAD, DraftSettings, adjusted

ANSWERS = ("frame", "time_ns", "stamp_ns", "instruction", "epoch", "tokens", "values", "recorded", "error")
DATASETS = Path(__file__).parents[1] / "bags" / "lerobot"
FRONT = TopicChoice("/front/image_raw")


def as_entries(bag: Bag) -> Iterator[bags.Entry]:
    """An episode's messages, its images uncompressed."""
    for each in bag.messages():
        message, msgtype = each.message(), each.msgtype
        if msgtype in (bags.IMAGE, bags.COMPRESSED):
            pixels = rgb_from_message(message)
            shape = dict(height=pixels.shape[0], width=pixels.shape[1], step=3 * pixels.shape[1])
            message = bags.image(each.time_ns, data=pixels.reshape(-1), **shape)
            yield each.topic.removesuffix("/compressed"), bags.IMAGE, each.time_ns, message
        else:
            yield each.topic, msgtype, each.time_ns, message


@pytest.mark.parametrize("version", ["v30", "v21"])
@pytest.mark.parametrize("episode", [0, 1])
def test_the_answers_to_an_episode_are_those_to_the_same_episode_as_mcap(
    run: Run, tmp_path: Path, version: str, episode: int
) -> None:
    path = DATASETS / version / f"episode_{episode:06d}"
    with open_bag(path) as bag:
        copy = bags.write_bag(tmp_path / "copy", as_entries(bag))
    answers = []
    for source in (path, copy):
        summary, frames, out = run(source, topics=FRONT)
        assert summary.actions == summary.compared == len(frames) == (9, 6)[episode]
        assert summary.failures == ()
        with open_bag(out / "actions_bag") as bag:
            said = [message.message() for message in bag.messages([ACTION_TOPIC])]
        told = [(each.values.tobytes(), each.tokens.tobytes(), each.instruction, each.epoch) for each in said]
        answers.append((told, [[frame[name] for name in ANSWERS] for frame in frames]))
    assert answers[0] == answers[1]


def test_the_episodes_of_two_datasets_have_names_of_their_own() -> None:
    named = named_bags(find_bags([DATASETS / "v30", DATASETS / "v21"]).bags)
    assert [*named] == [f"{each}_episode_00000{i}" for each in ("v21", "v30") for i in (0, 1)]


@needs(BAGS)
def test_the_answers_to_an_exported_bag_are_those_to_the_bag(run: Run, tmp_path: Path) -> None:
    bag = BAGS / "bridge_carrot_on_plate_00"
    export([bag], tmp_path / "set", ExportPlan(images=True), TopicChoice())
    _, (first, second) = zip(*(run(path)[:2] for path in (bag, tmp_path / "set" / "episode_000000")), strict=True)
    assert [[frame[name] for name in ANSWERS[3:7]] for frame in first] == [
        [frame[name] for name in ANSWERS[3:7]] for frame in second
    ]
    assert [frame["stamp_ns"] for frame in first] == [frame["stamp_ns"] for frame in second]


def test_a_replays_answers_go_with_the_bag_and_are_its_actions_if_it_has_none(run: Run, tmp_path: Path) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.episode(5, actions=False))
    _, frames, out = run(bag)
    result = export([bag], tmp_path / "set", ExportPlan(), TopicChoice(), answer_bags(out, [bag]))
    assert (result.frames, result.answered) == (5, 5)
    assert result.notes == ["no bag has recorded actions: the feature action holds the policy's answers"]
    table = parquet.read_table(tmp_path / "set/data/chunk-000/file-000.parquet").to_pydict()
    wanted = np.array([frame["values"] for frame in frames], dtype=np.float32).tolist()
    assert table["policy.action"] == table["action"] == wanted
    assert all(latency > 0 for latency in table["policy.latency_s"])
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert info["features"]["action"]["names"] == ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]


def test_frames_without_an_answer_have_none(run: Run, tmp_path: Path) -> None:
    entries = bags.episode(5)
    bag = bags.write_bag(tmp_path / "bag", entries)
    answered = bags.write_bag(tmp_path / "part" / "bag", entries[:-4])
    _, frames, out = run(answered)
    result = export([bag], tmp_path / "set", ExportPlan(), TopicChoice(), answer_bags(out, [bag]))
    assert (result.frames, result.answered) == (5, len(frames)) == (5, 3)
    with open_bag(tmp_path / "set" / "episode_000000") as episode:
        assert (episode.topic("/policy/action").count, episode.topic("/ground_truth/action").count) == (3, 5)
    with pytest.raises(UserError, match="is not a replay of bag"):
        answer_bags(tmp_path / "part", [bag])


def test_training_reads_a_dataset_as_it_reads_bags(tmp_path: Path) -> None:
    episodes = find_bags([DATASETS / "v30"]).bags
    topics = TopicChoice("/front/image_raw", cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states")
    data = load_demonstrations(episodes, tmp_path / "cache", 28, topics)
    read = np.load(DATASETS / "v30_read.npz")
    assert data.images.shape == (15, 2, 28, 28, 3)
    assert data.actions[:, 0].tolist() == read["action"].tolist()
    assert data.states.tolist() == read["observation.state"].tolist()
    assert data.state_names == ("shoulder_pan.pos", "elbow_flex.pos", "gripper.pos")
    assert [data.instructions[i] for i in data.instruction_of[:, 0]] == read["tasks"].tolist()


def test_a_policy_is_certified_on_datasets_that_are_named_with_the_hashes_of_their_files(
    policy: OpenVLATarget, tmp_path: Path
) -> None:
    snapshot = shutil.copytree(DATASETS / "v30", tmp_path / "datasets--somebody--pick_cubes" / "snapshots" / "0b5c")
    folder = shutil.copytree(DATASETS / "v21", tmp_path / "mine")
    left = folder / ".cache/huggingface/download/meta/info.json.metadata"
    left.parent.mkdir(parents=True)
    left.write_text("77aa\n1234etag\n1700000000.0\n")
    episodes = find_bags([DATASETS / "v21", folder, snapshot]).bags
    settings = EngineSettings(mode="spec", draft=adjusted(DraftSettings(head=NO_HEAD), temporal=True))
    found = certify(policy, settings, episodes, FRONT).content
    assert (found["result"]["frames"], found["result"]["differing"]) == (45, 0)
    assert sorted(found["bags"]) == sorted(f"{of}_episode_00000{i}" for of in ("v21", "mine", "0b5c") for i in (0, 1))
    assert all(len(each["files"]) == 4 for name, each in found["bags"].items() if name.startswith("v21"))
    assert sorted(found["datasets"], key=lambda each: each["name"]) == [
        {"name": "mine", "codebase_version": "v2.1", "revision": "77aa"},
        {"name": "somebody/pick_cubes", "codebase_version": "v3.0", "revision": "0b5c"},
        {"name": "v21", "codebase_version": "v2.1", "revision": None},
    ]
