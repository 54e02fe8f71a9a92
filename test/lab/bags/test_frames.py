# SPDX-License-Identifier: Apache-2.0
"""What a replay reads is found, or asked for with the choices named."""

from pathlib import Path
from typing import Any

import pytest
from support import bags

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import ReplayTopics, TopicChoice, bag_frames, choose_topics
from specvla_ros.lab.bags.reader import open_bag


def choose(path: Path, entries: list[bags.Entry], **names: Any) -> ReplayTopics:
    with open_bag(bags.write_bag(path / "bag", entries)) as bag:
        return choose_topics(bag, TopicChoice(**names))


def picture(topic: str, kind: str = bags.IMAGE) -> bags.Entry:
    make = bags.image if kind == bags.IMAGE else bags.compressed_image
    return (topic, kind, bags.START_NS, make(bags.START_NS))


def words(topic: str) -> bags.Entry:
    return (topic, bags.TEXT, bags.START_NS, bags.text("go"))


def test_the_usual_topics_are_found(tmp_path: Path) -> None:
    other = [picture("/wrist/image_raw"), words("/chatter")]
    topics = choose(tmp_path, bags.episode(2) + other)
    assert topics.names == ("/camera/image_raw", "/instruction", "/ground_truth/action")


def test_the_only_camera_is_taken_whatever_its_name(tmp_path: Path) -> None:
    depth = picture("/head/depth/compressedDepth", bags.COMPRESSED)
    topics = choose(tmp_path, [words("/instruction"), picture("/head/color/compressed", bags.COMPRESSED), depth])
    assert topics.names == ("/head/color/compressed", "/instruction")
    assert topics.action is None


def test_several_cameras_must_be_told_apart(tmp_path: Path) -> None:
    entries = [words("/instruction"), picture("/left"), picture("/right")]
    with pytest.raises(UserError, match="several cameras; pick one with --image-topic: /left, /right"):
        choose(tmp_path, entries)
    assert choose(tmp_path / "named", entries, image_topic="/right").image.name == "/right"


def test_a_camera_that_the_bag_holds_only_compressed_is_read_and_noted(tmp_path: Path) -> None:
    compressed = picture("/wrist/image_raw/compressed", bags.COMPRESSED)
    topics = choose(tmp_path, [words("/instruction"), picture("/other"), compressed], image_topic="/wrist/image_raw")
    assert topics.image.name == "/wrist/image_raw/compressed"
    assert "holds /wrist/image_raw only compressed: reading /wrist/image_raw/compressed" in topics.note


def test_a_camera_that_the_bag_holds_raw_is_read_raw(tmp_path: Path) -> None:
    entries = [words("/instruction"), picture("/wrist"), picture("/wrist/compressed", bags.COMPRESSED)]
    topics = choose(tmp_path, entries, image_topic="/wrist")
    assert (topics.image.name, topics.note) == ("/wrist", "")


def test_a_topic_named_like_a_compressed_camera_is_no_camera(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no messages on topic '/wrist'; it holds:"):
        choose(tmp_path, [words("/instruction"), words("/wrist/compressed")], image_topic="/wrist")


def test_a_bag_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no images.*it holds: /instruction \(std_msgs/msg/String\)"):
        choose(tmp_path, [words("/instruction")])


def test_a_missing_instruction_must_be_given(tmp_path: Path) -> None:
    entries = [picture("/camera/image_raw"), words("/task")]
    with pytest.raises(UserError, match="--instruction 'TEXT', or pick a topic with --instruction-topic: /task"):
        choose(tmp_path, entries)
    assert choose(tmp_path / "given", entries, instruction="go").instruction is None
    named = choose(tmp_path / "named", entries, instruction_topic="/task").instruction
    assert named is not None
    assert named.name == "/task"


@pytest.mark.parametrize(
    ("argument", "needed"),
    [
        ("image_topic", "sensor_msgs/msg/Image or sensor_msgs/msg/CompressedImage"),
        ("action_topic", "Float32MultiArray, std_msgs/msg/Float64MultiArray, specvla_ros/msg/VlaAction or .*"),
    ],
)
def test_a_topic_of_the_wrong_type_is_refused(tmp_path: Path, argument: str, needed: str) -> None:
    with pytest.raises(UserError, match=f"/instruction is of type std_msgs/msg/String, but .*{needed} is needed"):
        choose(tmp_path, bags.episode(1), **{argument: "/instruction"})


@pytest.mark.parametrize("argument", ["image_topic", "instruction_topic", "action_topic"])
def test_a_named_topic_that_is_missing_is_refused(tmp_path: Path, argument: str) -> None:
    with pytest.raises(UserError, match="has no messages on topic '/nowhere'; it holds:"):
        choose(tmp_path, bags.episode(1), **{argument: "/nowhere"})


def test_depth_is_no_camera_to_choose_among(tmp_path: Path) -> None:
    """Both of a depth camera's topics are sensor_msgs/Image."""
    depth = [
        ("/head/depth/" + form, bags.IMAGE, bags.START_NS, bags.image(bags.START_NS, encoding=form))
        for form in ("16UC1", "32FC1")
    ]
    packed = picture("/head/color/compressed", bags.COMPRESSED)
    topics = choose(tmp_path, [words("/instruction"), *depth, picture("/head/color"), packed])
    assert topics.image.name == "/head/color"


def test_a_policys_answers_are_matched_with_the_images_of_their_stamps(tmp_path: Path) -> None:
    """They arrive after further images; of a chunk the first action counts, and of a partial answer the first."""
    answers = [
        ("/policy/action", bags.ANSWER, bags.START_NS + late, bags.answer(bags.START_NS + stamp, values, ("x", "y")))
        for stamp, late, values in (
            (0, int(2.5 * bags.PERIOD_NS), [1.0, 2.0]),
            (0, int(2.6 * bags.PERIOD_NS), [1.0, 2.0, 5.0, 6.0]),
            (2 * bags.PERIOD_NS, 9 * bags.PERIOD_NS, [3.0, 4.0, 7.0, 8.0]),
        )
    ]
    path = bags.write_bag(tmp_path / "bag", sorted(bags.episode(4) + answers, key=lambda entry: entry[2]))
    with open_bag(path) as bag:
        topics = choose_topics(bag, TopicChoice(action_topic="/policy/action"))
        frames = [*bag_frames(bag, topics)]
    assert [frame.recorded for frame in frames] == [(1.0, 2.0), None, (3.0, 4.0), None]
    assert all(frame.instruction for frame in frames)
