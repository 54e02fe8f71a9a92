# SPDX-License-Identifier: Apache-2.0
"""The nodes as processes: parity of live and in-process replay, exit codes, clean ends."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.client import Client
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rosbags.typesys import get_types_from_msg
from support.bags import START_NS, STORE, episode, write_bag, write_mcap
from support.nightly import nightly_but
from support.paths import BAGS, needs
from support.patience import PATIENCE_S, wait_until
from support.ros import robot, stamps

from specvla_ros.engine.engine import Engine
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.evaluation.replay import replay
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.models.checkpoint import load_target
from specvla_ros.ros.qos import DIAGNOSTICS


def command(node: str, **parameters: object) -> list[str]:
    arguments = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    module = "lab.ros.bag_player" if node == "bag_player" else f"ros.{node}.node"
    code = f"from specvla_ros.{module} import main; main()"
    return [sys.executable, "-c", code, "--ros-args", *arguments]


def run(node: str, **parameters: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(node, **parameters), capture_output=True, text=True, timeout=PATIENCE_S)


@contextmanager
def playing(**parameters: object) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(command("bag_player", **parameters), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def listening() -> Iterator[tuple[Node, Callable[[], None]]]:
    """A node, and what spins it once."""
    rclpy.init()
    node = rclpy.create_node("listener", enable_rosout=False)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        yield node, lambda: executor.spin_once(timeout_sec=0.05)
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()


REAL_EPISODES = ["bridge_carrot_on_plate_00", "bridge_carrot_on_plate_01", "bridge_flip_pot_03"]


@needs(BAGS)
@pytest.mark.parametrize("name", nightly_but(lambda name: name == REAL_EPISODES[0], REAL_EPISODES))
def test_real_episodes_give_the_same_actions_live_and_in_process(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Raw rgb8 in MCAP, JPEG in sqlite3, JPEG in MCAP."""
    with open_bag(BAGS / name) as bag:
        topic = next(t.name for t in bag.topics if t.name in ("/camera/image_raw", "/camera/image_raw/compressed"))
        frames = [stamp_ns(message.message().header) for message in bag.messages((topic,))]
    remaps = [f"image:={topic}" if topic.endswith("raw") else f"image/compressed:={topic}"]
    with robot(checkpoint, use_sim_time=True, remaps=remaps) as r:
        assert r.policy.trigger_configure().name == "SUCCESS"
        assert r.policy.trigger_activate().name == "SUCCESS"
        r.until(lambda: r.user.count_publishers("/policy/action"))
        with playing(bag=BAGS / name, wait_for_subscriber=topic, rate=0.5) as player:
            r.until(lambda: player.poll() is not None)
        r.spin(0.3)
        live = dict(zip(stamps(r.actions), r.actions, strict=True))

    replay(
        Engine(load_target(checkpoint, device="cpu"), EngineSettings("ar")),
        BAGS / name,
        tmp_path / "out",
        progress=False,
    )
    with open_bag(tmp_path / "out" / "actions_bag") as bag:
        replayed = {stamp_ns(m.message().header): m.message() for m in bag.messages(("/policy/action",))}

    assert list(replayed) == frames
    assert len(r.actions) == len(live), "a frame was answered twice"
    assert list(live) == sorted(live), "actions came out of order"
    # The first image may overtake the instruction; on a busy machine a best-effort image may get lost.
    assert set(live) <= set(frames)
    assert len(live) >= len(frames) - 3
    for stamp, action in live.items():
        assert list(action.tokens) == list(replayed[stamp].tokens)
        np.testing.assert_array_equal(action.values, replayed[stamp].values)
        assert action.instruction == replayed[stamp].instruction


def test_a_looping_bag_begins_a_new_epoch_each_time(checkpoint: Path, tmp_path: Path) -> None:
    bag = write_bag(tmp_path / "bag", episode(3))
    with robot(checkpoint, use_sim_time=True, remaps=["image:=/camera/image_raw"]) as r:
        assert r.policy.trigger_configure().name == "SUCCESS"
        assert r.policy.trigger_activate().name == "SUCCESS"
        with playing(bag=bag, wait_for_subscriber="/camera/image_raw", loop="true"):
            r.until(lambda: len({action.epoch for action in r.actions}) >= 2 and len(r.actions) >= 5)
    by_stamp: dict[int, set[tuple[int, ...]]] = {}
    for stamp, action in zip(stamps(r.actions), r.actions, strict=True):
        by_stamp.setdefault(stamp, set()).add(tuple(action.tokens))
    assert all(len(answers) == 1 for answers in by_stamp.values())
    assert [action.seq for action in r.actions] == list(range(len(r.actions)))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"action.dt": "-1.0"}, "parameter 'action.dt' is -1.0, but it must be a float"),
        ({"action.dt": "fast"}, "parameter 'action.dt' is 'fast', but it must be a float"),
        (dict(image_transport="carrier_pigeon"), "must be one of: auto, raw, compressed"),
        ({"decode.mode": "psychic"}, "parameter 'decode.mode' is 'psychic', but it must be one of: ar"),
        ({"decode.max_text_tokens": 0}, "'decode.max_text_tokens' is 0"),
    ],
)
def test_a_bad_parameter_ends_the_policy_with_one_clear_message(parameters: dict, text: str) -> None:
    done = run("policy", **parameters)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_a_node_tells_how_it_is_run(asked: str) -> None:
    done = subprocess.run([*command("policy")[:3], asked], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.startswith("usage: policy [--ros-args ") and not done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_policy_cleanly(sent: signal.Signals, checkpoint: Path) -> None:
    process = subprocess.Popen(
        command("policy", checkpoint=checkpoint, diagnostics_period_s=0.1), stderr=subprocess.PIPE, text=True
    )
    with listening() as (listener, spin):
        heard: list[DiagnosticArray] = []
        listener.create_subscription(DiagnosticArray, "/diagnostics", heard.append, DIAGNOSTICS)
        wait_until(lambda: heard or process.poll() is not None, meanwhile=spin)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "terminate called" not in errors
    assert "unconfigured: waiting for configure, for example `ros2 lifecycle set /policy configure`" in errors


def test_the_process_ends_after_shutdown(checkpoint: Path) -> None:
    process = subprocess.Popen(command("policy", checkpoint=checkpoint), stderr=subprocess.PIPE, text=True)
    with listening() as (client, spin):
        change: Client[Any, Any] = client.create_client(ChangeState, "/policy/change_state")
        request = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_UNCONFIGURED_SHUTDOWN))

        def ask() -> None:
            if change.service_is_ready():
                change.call_async(request)  # again and again: the first may come before both have found each other
            for _ in range(20):
                spin()

        wait_until(lambda: process.poll() is not None, meanwhile=ask)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def cut_off(directory: Path) -> Path:
    whole = write_mcap(directory / "whole.mcap", episode(5), chunked=False)
    cut = directory / "cut.mcap"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return cut


def test_bags_that_cannot_be_played(tmp_path: Path) -> None:
    (tmp_path / "empty.mcap").touch()
    good = write_bag(tmp_path / "good", episode(2))
    kind = "nowhere_msgs/msg/Plane"
    STORE.register(get_types_from_msg("float64 height", kind))
    uninstalled = ("/plane", kind, START_NS, STORE.types[kind](height=1.0))
    foreign = write_bag(tmp_path / "foreign", [uninstalled])
    partly = write_bag(tmp_path / "partly", [uninstalled, *episode(1)])
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "parameter 'bag' is empty"),
        (dict(bag=tmp_path / "nope"), "nope does not exist"),
        (dict(bag=tmp_path / "empty.mcap"), "empty.mcap"),
        (dict(bag=good, wait_for_subscriber="/nope"), "no messages on topic '/nope'"),
        (dict(bag=good, rate=0.0), "'rate' is 0.0"),
        (dict(bag=foreign), "no topic of bag"),
        (dict(bag=partly, wait_for_subscriber="/plane"), "/plane is not played, so that playback would never start"),
        (dict(bag=cut_off(tmp_path), rate=50.0), "the readable part was played"),
    ]
    for parameters, text in cases:
        done = run("bag_player", **parameters)
        assert done.returncode == 2, (parameters, done.stderr)
        assert text in done.stderr
        assert "Traceback" not in done.stderr
