# SPDX-License-Identifier: Apache-2.0
"""A policy trained in degrees gets published radians in degrees; without a word on it, nothing is configured."""

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from sensor_msgs.msg import JointState
from support.ros import rgb_image, robot

from specvla_ros import Engine, EngineSettings, Observation
from specvla_ros.engine.outcome import Action
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.models.checkpoint import load_target

JOINTS = bundled_policy("joints")
INSTRUCTION = "lift the red cube"
VALUES = np.array([0.1, 0.3, -0.05, -2.2, 0.02, 2.6, 0.8])


def test_published_radians_become_the_degrees_that_the_policy_reads() -> None:
    engine = Engine(load_target(JOINTS, device="cpu"), EngineSettings("ar"))
    with robot(JOINTS, instruction=INSTRUCTION, **{"action.state_unit": "deg"}) as made:
        state = made.user.create_publisher(JointState, "state", 10)
        made.start()
        made.until(state.get_subscription_count)
        now = made.now_ns()
        message = JointState(name=engine.target.state_names, position=VALUES.tolist())
        message.header.stamp = Time(sec=now // 10**9, nanosec=now % 10**9)
        state.publish(message)
        image = rgb_image(now, seed=1)
        action = made.act(image)
    pixels = np.frombuffer(bytes(image.data), np.uint8).reshape(image.height, image.width, 3)
    outcomes = []
    for read in (np.degrees(VALUES), VALUES):
        engine.reset()
        outcome = engine.act(Observation({"image": pixels}, INSTRUCTION, stamp_ns=1, state=read))
        assert isinstance(outcome, Action)
        outcomes.append(outcome.actions.ravel())
    in_degrees, in_radians = outcomes
    np.testing.assert_allclose(action.values, in_degrees, atol=1e-6)
    assert np.abs(in_degrees - in_radians).max() > 1e-3, "the test would not tell the two apart"


def test_an_unclear_unit_stops_the_configuration(capfd: pytest.CaptureFixture[str]) -> None:
    with robot(JOINTS, instruction=INSTRUCTION, **{"action.joint_unit": "deg"}) as made:
        assert made.policy.trigger_configure().name == "FAILURE"
    assert "set action.state_unit to deg" in capfd.readouterr().err
