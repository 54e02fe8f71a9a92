# SPDX-License-Identifier: Apache-2.0
"""Bags of two cameras and a state, replayed with OpenVLA-OFT, whose every answer is an action."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bags
from support.paths import ORACLES, needs
from support.replays import warm_engine
from typer.testing import CliRunner

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.bags.frames import JOINT_STATE, TopicChoice
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation.frame_sources import frame_source
from specvla_ros.lab.evaluation.replay import replay
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.target import Target

CHECKPOINT = ORACLES / "oft_tiny_a" / "checkpoint"
FRAMES, MISSING = 5, 3
TOPICS = TopicChoice(
    image_topic="/camera/image_raw", cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states"
)
UNITS = ConventionSettings(translation_unit=1.0, rotation_unit=1.0)
MS = 1_000_000
NAMES = [f"joint_{i}" for i in range(8)]
pytestmark = needs(CHECKPOINT)


@pytest.fixture(scope="module")
def policy() -> Target:
    return load_target(CHECKPOINT, device="cpu")


def state_of(time_ns: int) -> list[float]:
    return [1e-9 * (time_ns - bags.START_NS) + 0.1 * i for i in range(8)]


def state(time_ns: int, part: slice = slice(None)) -> Any:
    empty = np.empty(0)
    return bags.TYPES[JOINT_STATE](
        header=bags.header(time_ns, "base"),
        name=NAMES[part],
        position=np.array(state_of(time_ns)[part]),
        velocity=empty,
        effort=empty,
    )


def episode(parts: tuple[slice, ...] = (slice(None),)) -> list[bags.Entry]:
    """The wrist's picture, compressed, is taken 20 ms after the first camera's, and comes 40 ms later; one is lost.

    `parts`: of the state, each with a publisher of its own.
    """
    entries = bags.episode(FRAMES, actions=False)
    for index in range(FRAMES):
        taken = bags.START_NS + index * bags.PERIOD_NS
        if index != MISSING:
            picture = bags.compressed_image(taken + 20 * MS, seed=100 + index)
            entries.append(("/wrist/image_raw/compressed", bags.COMPRESSED, taken + 60 * MS, picture))
        entries += [
            ("/joint_states", JOINT_STATE, taken + offset * MS, state(taken + offset * MS, part))
            for offset in (-30, 4, 30)
            for part in parts
        ]
    return sorted(entries, key=lambda entry: entry[2])


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "frames.jsonl").read_text().splitlines()]


def test_frames_are_put_together_and_answered_as_in_process(policy: Target, tmp_path: Path) -> None:
    bag, out = bags.write_bag(tmp_path / "bag", episode()), tmp_path / "out"
    summary = replay(warm_engine(policy), bag, out, topics=TOPICS, action=UNITS, progress=False)
    assert (summary.frames, summary.actions) == (FRAMES, FRAMES - 1)
    engine = Engine(policy, EngineSettings("ar"))
    for index, line in enumerate(lines(out)):
        if index == MISSING:
            assert line["drop"]["reason"] == "incomplete"
            assert "no 'wrist' sample within 0.05 s" in line["drop"]["detail"]
            continue
        taken = bags.START_NS + index * bags.PERIOD_NS
        images = {"image": bags.pixels(index), "wrist": bags.pixels(100 + index)}
        seen = Observation(images, "put carrot on plate", taken, state=np.array(state_of(taken + 4 * MS)))
        outcome = engine.act(seen)
        assert isinstance(outcome, Action) and line["stamp_ns"] == taken
        np.testing.assert_allclose(line["values"], outcome.values, atol=1e-9)


def test_frames_to_ask_about_are_those_of_a_replay(
    policy: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bag = bags.write_bag(tmp_path / "bag", episode())
    sensors = replace(TOPICS, state_names=tuple(f"joint_{i}" for i in range(8)))
    frames = [*frame_source(policy, [bag], 0, sensors)]
    assert f"bag {bag}: 1 images are skipped, the first: no 'wrist' sample" in caplog.text
    for index, frame in zip((i for i in range(FRAMES) if i != MISSING), frames, strict=True):
        taken = bags.START_NS + index * bags.PERIOD_NS
        assert list(frame.images) == ["image", "wrist"] and frame.state is not None
        np.testing.assert_array_equal(frame.images["image"], bags.pixels(index))
        np.testing.assert_array_equal(frame.images["wrist"], bags.pixels(100 + index))
        np.testing.assert_allclose(frame.state, state_of(taken + 4 * MS), atol=1e-12)
    with pytest.raises(UserError, match="uses the robot's state: give its topic, as in --state-topic"):
        frame_source(policy, [bag], 0, TopicChoice(cameras=TOPICS.cameras))
    with pytest.raises(UserError, match="omit them with --data sim"):
        frame_source(policy, None, 0, sensors)


def test_the_state_is_read_by_its_names(policy: Target, tmp_path: Path) -> None:
    bag = bags.write_bag(tmp_path / "bag", episode())
    names = [f"joint_{i}" for i in (7, 0, 1, 2, 3, 4, 5, 6)]
    found = []
    for folder, order in (("plain", ()), ("named", names)):
        replay(
            warm_engine(policy),
            bag,
            tmp_path / folder,
            topics=replace(TOPICS, state_names=tuple(order)),
            action=UNITS,
            progress=False,
        )
        found.append(lines(tmp_path / folder)[0]["values"])
    assert found[0] != found[1]


def test_a_state_in_parts_is_answered_as_the_whole_one(policy: Target, tmp_path: Path) -> None:
    found = []
    for folder, parts in (("whole", (slice(None),)), ("parts", (slice(6), slice(6, 8)))):
        bag, topics = bags.write_bag(tmp_path / folder, episode(parts)), replace(TOPICS, state_names=tuple(NAMES))
        replay(warm_engine(policy), bag, tmp_path / f"{folder}-out", topics=topics, action=UNITS, progress=False)
        found.append([line.get("values") for line in lines(tmp_path / f"{folder}-out")])
    assert found[0] == found[1] and found[0][0] is not None


def test_a_refused_state_is_told_though_another_is_near_enough(policy: Target, tmp_path: Path) -> None:
    entries = episode()
    _, _, taken, message = next(entry for entry in entries if entry[0] == "/joint_states")
    message.position[2] = np.nan
    assert taken == bags.START_NS - 30 * MS
    bag, out = bags.write_bag(tmp_path / "bag", entries), tmp_path / "out"
    summary = replay(warm_engine(policy), bag, out, topics=TOPICS, action=UNITS, progress=False)
    assert summary.actions == FRAMES - 1
    told = summary.context["refused_states"]
    assert told.startswith("refused states: 1,") and "not finite" in told
    assert told[1:] in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("topics", "message"),
    [
        (TopicChoice(state_topic="/joint_states"), "give the topic of 'wrist': --camera wrist=TOPIC"),
        (
            TopicChoice(cameras=TOPICS.cameras),
            "uses the robot's state: give its topic, as in --state-topic /joint_states",
        ),
        (TopicChoice(cameras={"wrist": "/w", "head": "/h"}, state_topic="/j"), "has no other camera 'head'"),
    ],
)
def test_topics_that_are_not_the_policys(policy: Target, tmp_path: Path, topics: TopicChoice, message: str) -> None:
    bag = bags.write_bag(tmp_path / "bag", episode())
    with pytest.raises(UserError, match=message):
        replay(warm_engine(policy), bag, tmp_path / "out", topics=topics, action=UNITS, progress=False)


def test_the_command_takes_cameras_and_a_state(tmp_path: Path) -> None:
    bag, out = bags.write_bag(tmp_path / "bag", episode()), tmp_path / "out"
    given = ["replay", str(bag), "--policy", str(CHECKPOINT), "--device", "cpu", "--out", str(out), "--no-progress"]
    given += ["--image-topic", "/camera/image_raw", "--state-topic", "/joint_states"]
    given += ["-p", "action.translation_unit:=1.0", "-p", "action.rotation_unit:=1.0"]
    refused = CliRunner().invoke(app, [*given, "--camera", "wrist"])
    assert refused.exit_code != 0 and "--camera must be NAME=TOPIC" in str(refused.exception)
    done = CliRunner().invoke(app, [*given, "--camera", "wrist=/wrist/image_raw"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert sum("values" in line and line["values"] is not None for line in lines(out)) == FRAMES - 1
