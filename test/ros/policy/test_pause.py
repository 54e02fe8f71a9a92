# SPDX-License-Identifier: Apache-2.0
"""A policy that is paused publishes nothing, whatever was on its way."""

from pathlib import Path
from typing import Any

import pytest
from std_msgs.msg import Bool
from std_srvs.srv import SetBool
from support.ros import Robot, rgb_image, robot

from specvla_ros.ros.qos import LATCHED_STATE

INSTRUCTION = "put carrot on plate"


def pause(r: Robot, wanted: bool) -> SetBool.Response:
    client: Any = r.user.create_client(SetBool, "/policy/pause")
    r.until(client.service_is_ready)
    future = client.call_async(SetBool.Request(data=wanted))
    r.until(future.done)
    r.user.destroy_client(client)
    answer = future.result()
    assert answer is not None and answer.success
    return answer


def test_frames_that_come_during_a_pause_are_counted_and_not_answered(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        before = r.act(rgb_image(r.now_ns()))
        assert pause(r, True).message == "paused"
        for _ in range(3):
            paused = r.drops().get("paused", 0)
            r.images.publish(rgb_image(r.now_ns()))
            r.until(lambda: r.drops().get("paused", 0) > paused)  # noqa: B023 - it is called at once
        assert r.actions == [before]
        pause(r, False)
        after = r.act(rgb_image(r.now_ns()))
        assert (after.seq, after.epoch) == (1, before.epoch + 2)


def test_each_change_begins_one_epoch_and_the_same_again_none(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        epochs = []
        for wanted in (False, True, True, False, False):
            pause(r, wanted)
            epochs.append(r.policy.parts[""].epoch)
        assert [epoch - epochs[0] for epoch in epochs] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("mode", ["ar", "pipeline"])
def test_what_is_in_flight_does_not_leave_once_the_pause_is_confirmed(checkpoint: Path, mode: str) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, **{"decode.mode": mode}) as r:
        r.start()
        for seed in range(20):
            r.images.publish(rgb_image(r.now_ns(), seed=seed))
            r.executor.spin_once(timeout_sec=0.02)
        pause(r, True)
        r.spin(0.3)  # what had left before is delivered
        known = len(r.actions)
        r.spin(1.0)
        assert len(r.actions) == known


def test_a_pause_outlives_deactivation_and_whoever_comes_later_learns_of_it(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        pause(r, True)
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        r.activate()
        r.images.publish(rgb_image(r.now_ns()))
        r.until(lambda: r.drops() == {"paused": 1})
        seen: list[Bool] = []
        r.user.create_subscription(Bool, "/policy/paused", seen.append, LATCHED_STATE)
        r.until(lambda: seen)
        assert [message.data for message in seen] == [True]
