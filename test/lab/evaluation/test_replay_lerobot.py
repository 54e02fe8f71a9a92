# SPDX-License-Identifier: Apache-2.0
"""A replay of a dataset's episode gives the answers that the same images give as a bag."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import bags
from support.replays import Run

from specvla_ros.lab.bags.finder import find_bags
from specvla_ros.lab.bags.frames import TopicChoice, rgb_from_message
from specvla_ros.lab.bags.reader import Bag, open_bag
from specvla_ros.lab.bags.recorder import ACTION_TOPIC
from specvla_ros.lab.evaluation.replay_bags import named_bags

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
        same = ("frame", "time_ns", "stamp_ns", "instruction", "epoch", "tokens", "values", "recorded", "error")
        answers.append((told, [[frame[name] for name in same] for frame in frames]))
    assert answers[0] == answers[1]


def test_the_episodes_of_two_datasets_have_names_of_their_own() -> None:
    named = named_bags(find_bags([DATASETS / "v30", DATASETS / "v21"]).bags)
    assert [*named] == [f"{each}_episode_00000{i}" for each in ("v21", "v30") for i in (0, 1)]
