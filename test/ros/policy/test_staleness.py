# SPDX-License-Identifier: Apache-2.0
"""No action is published whose image has grown too old meanwhile, and the diagnostics say so."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import rclpy
from builtin_interfaces.msg import Time
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from support.patience import PATIENCE_S, wait_until
from support.ros import rgb_image, robot

from specvla_ros.engine.batch import Batch
from specvla_ros.engine.engine import Engine
from specvla_ros.engine.outcome import Drop, DropReason, Outcome
from specvla_ros.engine.verifier import Commit
from specvla_ros.lab.ros.demo.processes import LifecycleClient
from specvla_ros.msg import VlaAction
from specvla_ros.ros.policy.robot import ActionPublisher, Published
from specvla_ros.ros.qos import ACTION, CLOCK

INSTRUCTION = "put carrot on plate"


def test_a_policy_slower_than_the_limit_publishes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = Engine.tick

    def tick_of_a_large_policy(engine: Engine) -> list[Outcome]:
        time.sleep(0.1)
        return tick(engine)

    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:
        r.start()
        monkeypatch.setattr(Engine, "tick", tick_of_a_large_policy)
        assert r.policy.set_parameters([Parameter("max_image_age_s", value=0.5)])[0].successful
        sent = 0
        while r.drops().get("too_old", 0) < 2:
            r.images.publish(rgb_image(r.now_ns(), seed=sent))
            sent += 1
            r.spin(0.2)
        r.until(lambda: r.diagnostics and "too_old" in r.diagnosis("inference").message)
        assert "the limit is 0.5 s" in r.diagnosis("inference").message
        assert r.actions == []


def test_a_clock_that_jumps_ahead_ages_what_is_in_flight(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    forward = Engine._forward

    def held_up(engine: Engine, batch: Batch) -> list[Commit]:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return forward(engine, batch)

    with robot(checkpoint, instruction=INSTRUCTION, use_sim_time=True) as r:
        clock = r.user.create_publisher(Clock, "/clock", CLOCK)
        r.start()
        r.until(clock.get_subscription_count)

        def set_clock(seconds: int) -> None:
            def arrived() -> bool:
                clock.publish(Clock(clock=Time(sec=seconds)))
                return r.now_ns() == seconds * 10**9

            r.until(arrived)

        set_clock(100)
        monkeypatch.setattr(Engine, "_forward", held_up)
        r.images.publish(rgb_image(100 * 10**9))
        r.until(began.is_set)
        set_clock(200)
        go_on.set()
        r.until(lambda: r.drops() == {"too_old": 1})
        assert r.actions == []
        assert r.act(rgb_image(200 * 10**9)).latency_s == 0.0


def test_the_publisher_looks_at_the_nodes_clock_itself(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be stopped after the engine has let an action go."""
    published: list[Published | Drop] = []
    publish = ActionPublisher.publish

    def late(publisher: ActionPublisher, action, drop_counts):
        observation = replace(action.observation, stamp_ns=action.observation.stamp_ns - 61 * 10**9)
        published.append(publish(publisher, replace(action, observation=observation), drop_counts))
        return published[-1]

    with robot(checkpoint, instruction=INSTRUCTION) as r:
        r.start()
        monkeypatch.setattr(ActionPublisher, "publish", late)
        r.images.publish(rgb_image(r.now_ns()))
        r.until(lambda: r.drops() == {"too_old": 1})
        assert r.actions == []
    [drop] = published
    assert isinstance(drop, Drop) and drop.reason is DropReason.TOO_OLD and "the limit is 60 s" in drop.detail


def test_a_latency_longer_than_the_actions_time_is_a_warning(checkpoint: Path) -> None:
    with robot(checkpoint, instruction=INSTRUCTION, diagnostics_period_s=0.1) as r:  # BridgeData's 5 Hz
        r.start()
        r.act(rgb_image(r.now_ns() - 700_000_000))
        r.until(
            lambda: any(
                "is longer than action_dt, 0.2 s" in status.message and status.level == b"\x01"
                for array in r.diagnostics
                for status in array.status
            )
        )


def test_a_stopped_and_continued_policy_publishes_nothing_old(checkpoint: Path) -> None:
    """SIGSTOP and SIGCONT, as a debugger, a paused container or a starved core do."""
    limit_s = 1.5  # in which a busy machine answers a frame
    parameters = dict(
        checkpoint=checkpoint, instruction=INSTRUCTION, device="cpu", max_image_age_s=limit_s, image_transport="raw"
    )
    arguments = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    code = "from specvla_ros.ros.policy.node import main; main()"
    rclpy.init()
    user, client = (rclpy.create_node(name, enable_rosout=False) for name in ("user", "lifecycle_client"))
    executor = SingleThreadedExecutor()
    executor.add_node(user)
    actions: list[VlaAction] = []
    user.create_subscription(VlaAction, "/policy/action", actions.append, ACTION)
    images = user.create_publisher(Image, "image", 1)
    policy = subprocess.Popen([sys.executable, "-c", code, "--ros-args", *arguments])

    def send() -> None:
        images.publish(rgb_image(user.get_clock().now().nanoseconds))
        executor.spin_once(timeout_sec=0.01)

    def more_than(count: int) -> bool:
        return len(actions) > count

    try:
        LifecycleClient(client, "/policy").activate(lambda: policy.poll() is None, PATIENCE_S)
        for _ in range(2):
            before = len(actions)
            wait_until(partial(more_than, before), meanwhile=send)
            send()
            policy.send_signal(signal.SIGSTOP)
            time.sleep(limit_s + 0.5)
            policy.send_signal(signal.SIGCONT)
        before = len(actions)
        wait_until(partial(more_than, before + 1), meanwhile=send)
    finally:
        policy.kill()
        policy.wait()
        executor.shutdown()
        for node in (user, client):
            node.destroy_node()
        rclpy.try_shutdown()
    assert max(action.latency_s for action in actions) <= limit_s
