# SPDX-License-Identifier: Apache-2.0
"""Which images are asked for, and what is said where they get lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from support.ros import Robot, rgb_image, robot

from specvla_ros.engine.outcome import DropCounter, DropReason
from specvla_ros.ros.policy.diagnostics import InputHealth, RecentDrops, images_lost
from specvla_ros.ros.policy.inputs import Instruction

INSTRUCTION = "put carrot on plate"


def reliability(r: Robot, topic: str = "/image") -> ReliabilityPolicy:
    """Of the policy's subscription, as others see it."""
    [info] = r.user.get_subscriptions_info_by_topic(topic)
    return info.qos_profile.reliability


def camera(r: Robot, offered: ReliabilityPolicy, topic: str = "image") -> Any:
    return r.user.create_publisher(Image, topic, QoSProfile(depth=1, reliability=offered))


def test_auto_asks_for_what_every_publisher_offers_and_follows_them(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        r.until(lambda: reliability(r) == ReliabilityPolicy.RELIABLE)  # the user's own publisher
        r.act(rgb_image(r.now_ns()))
        second = camera(r, ReliabilityPolicy.BEST_EFFORT)
        r.until(lambda: reliability(r) == ReliabilityPolicy.BEST_EFFORT)
        r.act(rgb_image(r.now_ns()))
        r.user.destroy_publisher(second)
        r.until(lambda: reliability(r) == ReliabilityPolicy.RELIABLE)
        r.act(rgb_image(r.now_ns()))


@pytest.mark.parametrize("chosen", ["best_effort", "reliable"])
def test_a_reliability_that_was_chosen_stays(checkpoint: Path, chosen: str) -> None:
    other = {"best_effort": ReliabilityPolicy.RELIABLE, "reliable": ReliabilityPolicy.BEST_EFFORT}[chosen]
    with robot(checkpoint, instruction=INSTRUCTION, image_reliability=chosen) as r:
        publisher = camera(r, other)
        r.start()
        assert r.policy.parts[""]._inputs is not None
        r.policy.parts[""]._inputs.follow_publishers()
        assert reliability(r) == ReliabilityPolicy[chosen.upper()]
        r.user.destroy_publisher(publisher)
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        for name, value, successful in (
            ("image_reliability", "auto", True),
            ("image_reliability", "sometimes", False),
            ("image_transport", "raw", True),
        ):
            assert r.set(name, value)[0] == successful
        r.activate()
        r.until(lambda: reliability(r) == ReliabilityPolicy.RELIABLE)
        successful, reason = r.set("image_reliability", "reliable")
        assert not successful and "`ros2 lifecycle set /policy deactivate` first" in reason


def test_overrides_of_the_qos_are_heeded_and_others_told(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = {
        "qos_overrides./camera/image_raw.subscription.reliability": "best_effort",
        "qos_overrides./camera/image_raw.subscription.depth": 3,
        "qos_overrides./image.subscription.reliability": "best_effort",  # before the remapping
    }
    with robot(checkpoint, instruction=INSTRUCTION, remaps=["image:=/camera/image_raw"], **overrides) as r:
        publisher = camera(r, ReliabilityPolicy.RELIABLE, "/camera/image_raw")
        assert r.policy.trigger_configure().name == "SUCCESS"
        assert r.policy.trigger_activate().name == "SUCCESS"
        r.until(lambda: publisher.get_subscription_count())
        assert r.policy.parts[""]._inputs is not None
        r.policy.parts[""]._inputs.follow_publishers()
        assert reliability(r, "/camera/image_raw") == ReliabilityPolicy.BEST_EFFORT
        assert r.policy.parts[""]._inputs._cameras["image"]._subscriptions["raw"].qos_profile.depth == 3
    said = capfd.readouterr().err
    assert "there is no parameter 'qos_overrides./image.subscription.reliability'; did you mean" in said
    assert said.count("there is no parameter") == 1


@pytest.mark.parametrize("topic", ["/image", "/image/compressed"])
def test_an_override_that_is_none_refuses_the_transition(
    checkpoint: Path, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with robot(checkpoint, **{f"qos_overrides.{topic}.subscription.reliability": "often"}) as r:
        assert r.policy.trigger_configure().name == "SUCCESS"
        assert r.policy.trigger_activate().name == "FAILURE"
        assert not [each.topic_name for each in r.policy.subscriptions if "image" in each.topic_name]
    said = capfd.readouterr().err
    assert f"not activated: invalid QoS for '{topic}': " in said and "often" in said
    assert "Traceback" not in said


def test_a_grey_picture_is_answered_and_warned_of_once(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()
        grey = np.random.default_rng(0).integers(0, 256, 48 * 64, dtype=np.uint8).tobytes()
        for _ in range(3):
            r.act(rgb_image(r.now_ns(), encoding="mono8", step=64, data=grey))

        def told(words: str, level: bytes, **changes: Any) -> bool:
            r.images.publish(rgb_image(r.now_ns(), **changes))
            found = r.diagnosis("inputs") if r.diagnostics else None
            return found is not None and words in found.message and found.level == level

        r.until(lambda: told("the images of image are grey", b"\x01", encoding="mono8", step=64, data=grey))
        r.until(lambda: told("images arrive", b"\x00"))
    assert capfd.readouterr().err.count("the images are grey") == 1


def test_where_no_image_comes_from_is_told_with_the_topics(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()
        topics = "topics: /image (1 publisher), /image/compressed (no publisher)"
        r.until(lambda: r.diagnostics and topics in r.diagnosis("inputs").message)


def test_images_before_a_pause_are_not_taken_for_lost_ones() -> None:
    health, nobody = InputHealth(), RecentDrops(DropCounter().counts, {})
    for begun_s in (0, 7, 14):
        for index in range(6):
            health.add_image("raw")
            health.add_frame(round((1 + begun_s + 0.1 * index) * 1e9), 0.0)
    assert health.status(True, Instruction("lift"), nobody).message == "images arrive"


@pytest.mark.parametrize(("lost", "level"), [(1, b"\x01"), (2, b"\x02")])
def test_another_cameras_bad_images_are_no_lost_frames(lost: int, level: bytes) -> None:
    health, drops = InputHealth(("front", "wrist")), RecentDrops(DropCounter().counts, {DropReason.BAD_IMAGE: "torn"})
    for _ in range(2):
        for transport in ("front_raw", "wrist_raw"):
            health.add_image(transport)
        health.add_bad_beside()
    drops.counts[DropReason.BAD_IMAGE] = 2 + lost
    assert health.status(True, Instruction("lift"), drops).level == level


def test_whatever_a_decoder_raises_costs_one_image(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specvla_ros.ros.policy import inputs

    kind, topic, _ = inputs._TRANSPORTS["raw"]

    def fail(_: Image) -> np.ndarray:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setitem(inputs._TRANSPORTS, "raw", (kind, topic, fail))
        with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
            r.start()
            r.images.publish(rgb_image(r.now_ns()))
            r.until(lambda: r.drops() == {"bad_image": 1})
            r.until(lambda: any("RuntimeError: broken" in s.message for d in r.diagnostics for s in d.status))


def told_of(period_s: float, kept: float, jitter: float, pause_s: float, seed: int) -> tuple[str, int]:
    """What is told of images of which a share arrives, with a pause in the middle; and how many were looked at."""
    random = np.random.default_rng(seed)
    taken_s = np.arange(500) * period_s
    taken_s[250:] += pause_s
    arrived = random.random(500) < kept
    stamps = (taken_s + random.uniform(0, jitter, 500) * period_s)[arrived][-51:]
    return images_lost((stamps * 1e9).astype(np.int64).tolist()), len(stamps)


@given(
    period_ms=st.integers(5, 500),
    kept=st.floats(0.0, 1.0),
    jitter=st.floats(0.0, 0.1),
    pause_s=st.floats(0.0, 100.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_told_of_a_camera_that_loses_little_or_has_sent_little(
    period_ms: int, kept: float, jitter: float, pause_s: float, seed: int
) -> None:
    told, images = told_of(period_ms * 1e-3, kept, jitter, pause_s, seed)
    if kept > 0.9 or images < 10:
        assert told == ""


def test_losses_are_told_by_the_stamps_alone() -> None:
    """Of 50 gaps chance may leave too few at the camera's own period, so that one case in a hundred stays untold."""
    cases = np.random.default_rng(0).uniform([5e-3, 0.15, 0, 0], [0.5, 0.3, 0.05, 100], (1000, 4))
    told = [
        told_of(period_s, kept, jitter, pause_s, seed)[0]
        for seed, (period_s, kept, jitter, pause_s) in enumerate(cases.tolist())
    ]
    assert np.mean(["show a camera rate of" in each for each in told]) > 0.97


def test_two_publishers_of_a_camera_are_told_with_their_names(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with robot(checkpoint) as r:
        r.start()
        second = camera(r, ReliabilityPolicy.BEST_EFFORT)
        words = "the images of 'image' have 2 publishers, and actions alternate between them"
        r.until(lambda: r.diagnostics and words in r.diagnosis("inputs").message)
        assert r.user.get_fully_qualified_name() in r.diagnosis("inputs").message
        r.user.destroy_publisher(second)
        r.until(lambda: words not in r.diagnosis("inputs").message)
    assert words in capfd.readouterr().err
