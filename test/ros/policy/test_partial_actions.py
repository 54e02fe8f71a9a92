# SPDX-License-Identifier: Apache-2.0
"""The first actions of an answer on the topic, while the rest is decoded."""

from typing import Any

import numpy as np
from sensor_msgs.msg import Image
from support.ros import Robot, robot

from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation.simulate import make_robot, tasks_of

TASK = tasks_of("table", ())[0]


def seen(r: Robot) -> Image:
    table = make_robot("table")
    table.reset(TASK, 1)
    pixels = table.look()
    image = Image(height=len(pixels), width=len(pixels[0]), encoding="rgb8", step=3 * len(pixels[0]))
    image.data = pixels.tobytes()
    image.header.stamp = r.policy.get_clock().now().to_msg()
    return image


def test_first_actions_go_out_before_the_answers_end() -> None:
    with robot(bundled_policy("digits"), instruction="lift the red cube") as r:
        r.start()
        image = seen(r)
        r.images.publish(image)
        r.until(lambda: any(not action.partial for action in r.actions))
        *begun, whole = r.actions
        assert begun and all(action.partial for action in begun)
        horizons = [action.horizon for action in r.actions]
        assert horizons == sorted(set(horizons))
        for action in begun:
            np.testing.assert_array_equal(action.values, whole.values[: len(action.values)])
        assert {(action.header.stamp.sec, action.header.stamp.nanosec, action.epoch) for action in r.actions} == {
            (image.header.stamp.sec, image.header.stamp.nanosec, whole.epoch)
        }
        assert [action.seq for action in r.actions] == [*range(len(r.actions))]
        assert all(before.latency_s < after.latency_s for before, after in zip(r.actions, r.actions[1:], strict=False))
        r.until(lambda: r.stats)
        assert [stats.seq for stats in r.stats] == [whole.seq] and not r.drops()


def test_nothing_of_an_answer_goes_out_once_another_instruction_came() -> None:
    with robot(bundled_policy("digits"), instruction="lift the red cube") as r:
        r.start()
        r.images.publish(seen(r))
        r.until(lambda: r.actions)
        assert r.actions[0].partial
        r.instruct("lift the green cube")
        r.until(lambda: r.policy.parts[""].epoch > r.actions[0].epoch)
        count = len(r.actions)
        r.until(lambda: r.drops())
        r.spin(0.5)
        assert r.drops() == {"epoch_changed": 1} and len(r.actions) <= count + 1
        assert all(action.partial for action in r.actions)
        r.images.publish(seen(r))
        r.until(lambda: any(not action.partial for action in r.actions))
        assert r.actions[-1].instruction == "lift the green cube"


def test_nothing_of_an_answer_goes_out_once_the_policy_is_deactivated() -> None:
    with robot(bundled_policy("digits"), instruction="lift the red cube") as r:
        r.start()
        r.images.publish(seen(r))
        r.until(lambda: r.actions)
        assert r.actions[0].partial
        assert r.policy.trigger_deactivate().name == "SUCCESS"
        r.spin(0.2)  # one may have been on its way
        count = len(r.actions)
        r.spin(0.5)
        assert len(r.actions) == count and all(action.partial for action in r.actions)


def test_an_answer_goes_out_whole_where_that_is_asked_for() -> None:
    chosen: dict[str, Any] = {"decode.partial_actions": False}
    with robot(bundled_policy("digits"), instruction="lift the red cube", **chosen) as r:
        r.start()
        assert not r.act(seen(r)).partial and len(r.actions) == 1
