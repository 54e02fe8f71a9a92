# SPDX-License-Identifier: Apache-2.0
"""A policy of two cameras and the robot's state, over real DDS: OpenVLA-OFT, whose every answer is an action."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from support.paths import ORACLES, needs
from support.ros import Robot, rgb_image, robot

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.outcome import Action
from specvla_ros.models.checkpoint import load_target
from specvla_ros.ros.qos import CLOCK

CHECKPOINT = ORACLES / "oft_tiny_a" / "checkpoint"
INSTRUCTION = "put the bowl on the plate"
NAMES = ("x", "y", "z", "rx", "ry", "rz", "left", "right")
pytestmark = needs(CHECKPOINT)


def state_message(stamp: int, values: list[float], names: tuple[str, ...] = NAMES) -> JointState:
    message = JointState(name=names, position=values)
    message.header.stamp = Time(sec=stamp // 10**9, nanosec=stamp % 10**9)
    return message


def pixels(message: Image) -> np.ndarray:
    return np.frombuffer(bytes(message.data), np.uint8).reshape(message.height, message.width, 3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_target(CHECKPOINT, device="cpu"), EngineSettings("ar"))


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Robot, Any, Any]]:
    """The robot, and what publishes the wrist's images and the state."""
    parameters = getattr(request, "param", {})
    units: dict[str, Any] = {"action.translation_unit": 1.0, "action.rotation_unit": 1.0}  # as they are decoded
    with robot(CHECKPOINT, instruction=INSTRUCTION, **units, **parameters) as made:
        wrist = made.user.create_publisher(Image, "wrist/image", 1)
        state = made.user.create_publisher(JointState, "state", 10)
        made.start()
        made.until(lambda: wrist.get_subscription_count() and state.get_subscription_count())
        yield made, wrist, state


def has_acted(made: Robot, times: int) -> bool:
    return len(made.actions) == times


def answered(engine: Engine, front: Image, wrist: Image, state: list[float]) -> np.ndarray:
    engine.reset()
    images = {"image": pixels(front), "wrist": pixels(wrist)}
    outcome = engine.act(Observation(images, INSTRUCTION, stamp_ns=1, state=np.array(state)))
    assert isinstance(outcome, Action)
    return outcome.actions


@pytest.mark.parametrize("first", ["lead", "others"])
def test_what_belongs_together_is_answered_as_in_process(
    running: tuple[Robot, Any, Any], engine: Engine, first: str
) -> None:
    made, wrist, state = running
    for seed in (1, 2):
        now, values = made.now_ns(), np.random.default_rng(seed).normal(size=8).tolist()
        front = rgb_image(now, seed=seed)
        beside, measured = rgb_image(now - 20_000_000, seed=10 + seed), state_message(now + 10_000_000, values)
        if first == "lead":
            made.images.publish(front)
            made.spin(0.1)
        wrist.publish(beside)
        state.publish(measured)
        if first == "others":
            made.spin(0.1)
            made.images.publish(front)
        made.until(partial(has_acted, made, seed))
        action = made.actions[-1]
        assert action.header.stamp == front.header.stamp and action.horizon == 8
        found = np.array(action.values).reshape(8, 7)
        np.testing.assert_allclose(found, answered(engine, front, beside, values), atol=1e-6)
    assert not made.drops()


def test_a_camera_that_is_missing_or_late_costs_the_frame_and_is_said(running: tuple[Robot, Any, Any]) -> None:
    made, wrist, state = running
    values = [0.0] * 8
    for number in range(3):
        now = made.now_ns()
        state.publish(state_message(now, values))
        if number == 1:
            wrist.publish(rgb_image(now - 400_000_000, seed=3))
        made.images.publish(rgb_image(now, seed=number))
        made.spin(0.2)
    made.until(lambda: made.drops().get("incomplete") == 2)
    assert not made.actions, "no action without the wrist's picture"
    made.until(lambda: made.diagnostics and "'wrist'" in made.diagnosis("inputs").message)
    said = {value.key: value.value for value in made.diagnosis("inputs").values}
    assert "wrist_raw_hz" in said and "image_raw_hz" in said


def test_a_camera_that_cannot_be_subscribed_to_leaves_none_of_the_others() -> None:
    override = {"qos_overrides./wrist/image.subscription.reliability": "often"}
    with robot(CHECKPOINT, **override) as made:
        assert made.policy.trigger_configure().name == "SUCCESS"
        assert made.policy.trigger_activate().name == "FAILURE"
        assert not [each.topic_name for each in made.policy.subscriptions if "image" in each.topic_name]


@pytest.mark.parametrize("running", [{"use_sim_time": True, "state_names": [*NAMES]}], indirect=True)
def test_nothing_from_before_a_clock_jump_is_matched_after_it(running: tuple[Robot, Any, Any], engine: Engine) -> None:
    made, wrist, state = running
    clock = made.user.create_publisher(Clock, "/clock", CLOCK)
    made.until(clock.get_subscription_count)
    now = 10 * 10**9
    for seed in (1, 2):  # the second episode has the stamps of the first
        for seconds in (5, 10):

            def arrived(seconds: int = seconds) -> bool:
                clock.publish(Clock(clock=Time(sec=seconds)))
                return made.now_ns() == seconds * 10**9

            made.until(arrived)
        front, beside, values = rgb_image(now, seed=seed), rgb_image(now, seed=10 + seed), [0.1 * seed] * 8
        made.images.publish(front)
        made.spin(0.2)
        wrist.publish(beside)
        for first, end in ((0, 4), (4, 8)):  # of two publishers
            state.publish(state_message(now, values[first:end], NAMES[first:end]))
            made.spin(0.2)
        made.until(partial(has_acted, made, seed))
        found = np.array(made.actions[-1].values).reshape(8, 7)
        np.testing.assert_allclose(found, answered(engine, front, beside, values), atol=1e-6)


@pytest.mark.parametrize("running", [{"diagnostics_period_s": 0.1}], indirect=True)
def test_the_first_cameras_silence_is_told_though_the_others_send(running: tuple[Robot, Any, Any]) -> None:
    made, wrist, _ = running

    def told() -> bool:
        wrist.publish(rgb_image(made.now_ns()))
        found = made.diagnosis("inputs") if made.diagnostics else None
        return found is not None and found.level == b"\x03" and "no image of 'image' since" in found.message

    made.until(told)
    said = {value.key: float(value.value) for value in made.diagnosis("inputs").values if value.key.endswith("_hz")}
    assert said.keys() == {"image_raw_hz", "image_compressed_hz", "wrist_raw_hz", "wrist_compressed_hz"}


@pytest.mark.parametrize("running", [{"diagnostics_period_s": 0.5}], indirect=True)
def test_frames_that_are_all_lost_are_an_error_with_several_cameras_too(running: tuple[Robot, Any, Any]) -> None:
    made, wrist, _ = running

    def told() -> bool:
        wrist.publish(rgb_image(made.now_ns()))
        made.images.publish(rgb_image(made.now_ns()))
        made.spin(0.05)
        found = made.diagnosis("inputs") if made.diagnostics else None
        return found is not None and found.level == b"\x02" and "no 'state' sample was received" in found.message

    made.until(told)


@pytest.mark.parametrize("running", [{"state_names": ["right", *NAMES[:-1]]}], indirect=True)
def test_the_state_is_read_by_its_names(running: tuple[Robot, Any, Any], engine: Engine) -> None:
    made, wrist, state = running
    now, values = made.now_ns(), [0.1 * i for i in range(8)]
    front, beside = rgb_image(now, seed=1), rgb_image(now, seed=2)
    wrist.publish(beside)
    state.publish(state_message(now, values))
    made.act(front)
    found = np.array(made.actions[-1].values).reshape(8, 7)
    np.testing.assert_allclose(found, answered(engine, front, beside, [values[-1], *values[:-1]]), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [([0.0] * 7, "it has 7 values, but the policy reads 8"), ([0.0] * 7 + [float("nan")], "that is not finite")],
)
def test_a_state_of_another_length_or_not_finite_is_no_state(
    running: tuple[Robot, Any, Any], capfd: pytest.CaptureFixture[str], values: list[float], message: str
) -> None:
    made, wrist, state = running
    for number in range(2):
        now = made.now_ns()
        wrist.publish(rgb_image(now, seed=2))
        state.publish(state_message(now, values, NAMES[: len(values)]))
        made.images.publish(rgb_image(now, seed=number))
        made.spin(0.2)
    made.until(lambda: made.drops().get("incomplete") == 1)
    assert not made.actions
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("running", [{"diagnostics_period_s": 0.1}], indirect=True)
def test_a_state_without_a_stamp_is_told_as_such(running: tuple[Robot, Any, Any], capfd: Any) -> None:
    made, wrist, state = running
    words = "a state was refused: header.stamp is 0; its publisher must fill in the time of the measurement"

    def told() -> bool:
        state.publish(state_message(0, [0.0] * 8))
        wrist.publish(rgb_image(made.now_ns()))
        made.images.publish(rgb_image(made.now_ns()))
        made.spin(0.1)
        return bool(made.diagnostics) and words in made.diagnosis("inputs").message

    made.until(told)
    assert words in capfd.readouterr().err
