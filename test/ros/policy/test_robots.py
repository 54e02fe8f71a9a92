# SPDX-License-Identifier: Apache-2.0
"""Several robots at one policy node, over real DDS: each has its topics, lifecycle, pauses and diagnostics."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import State
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image
from std_msgs.msg import String
from std_srvs.srv import SetBool
from support.patience import PATIENCE_S, wait_until
from support.ros import ANY_MACHINE, rgb_image

from specvla_ros import Engine, EngineSettings, Observation, UserError
from specvla_ros.engine.batch import Batch
from specvla_ros.engine.outcome import Action
from specvla_ros.engine.verifier import Commit
from specvla_ros.messages.image_message import rgb_from_image
from specvla_ros.models.checkpoint import load_target
from specvla_ros.msg import VlaAction
from specvla_ros.ros.policy.node import PolicyNode, RobotNode
from specvla_ros.ros.qos import ACTION, DIAGNOSTICS

ROBOTS = ("left", "right")


class Fleet:
    """A policy node of two robots, and their user."""

    def __init__(self, node: PolicyNode) -> None:
        self.node = node
        self.left, self.right = node.robots
        self.executor = SingleThreadedExecutor()
        self.user = rclpy.create_node("user", enable_rosout=False)
        for each in (node, *node.robots, self.user):
            self.executor.add_node(each)
        self.actions: dict[str, list[VlaAction]] = {robot: [] for robot in ROBOTS}
        self.statuses: dict[str, Any] = {}
        self.images = {robot: self.user.create_publisher(Image, f"/{robot}/image", 1) for robot in ROBOTS}
        self.words = {robot: self.user.create_publisher(String, f"/{robot}/instruction", 1) for robot in ROBOTS}
        for robot in ROBOTS:
            self.user.create_subscription(VlaAction, f"/{robot}/policy/action", self.actions[robot].append, ACTION)
        self.user.create_subscription(DiagnosticArray, "/diagnostics", self._diagnose, DIAGNOSTICS)

    def _diagnose(self, message: DiagnosticArray) -> None:
        self.statuses.update({status.name: status for status in message.status})

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, meanwhile=lambda: self.executor.spin_once(timeout_sec=0.05), failed=self.statuses)

    def start(self) -> None:
        assert self.node.trigger_configure().name == "SUCCESS"
        assert self.node.trigger_activate().name == "SUCCESS"
        self.until(lambda: all(each.get_subscription_count() for each in self.images.values()))
        self.until(lambda: all(self.user.count_publishers(f"/{robot}/policy/action") for robot in ROBOTS))

    def instruct(self, robot: RobotNode, text: str) -> None:
        name = robot.get_namespace().strip("/")
        self.until(self.words[name].get_subscription_count)
        self.words[name].publish(String(data=text))
        self.until(lambda: robot.part.instruction.text == text)

    def send(self, robot: str, seed: int) -> Image:
        image = rgb_image(self.node.get_clock().now().nanoseconds, seed=seed)
        self.images[robot].publish(image)
        return image

    def answer(self, robot: str, image: Image) -> VlaAction:
        of_image = lambda: [each for each in self.actions[robot] if each.header.stamp == image.header.stamp]  # noqa: E731
        self.until(of_image)
        return of_image()[0]

    def spin(self, turns: int) -> None:
        for _ in range(turns):
            self.executor.spin_once(timeout_sec=0.02)

    def state(self, node: Any) -> int:
        return int(node._state_machine.current_state[0])


@contextmanager
def fleet(checkpoint: Path, *arguments: str, **parameters: Any) -> Iterator[Fleet]:
    chosen = {"checkpoint": str(checkpoint), "device": "cpu", "robots": [*ROBOTS], "diagnostics_period_s": 0.1}
    chosen |= ANY_MACHINE | parameters
    rclpy.init()
    overrides = [Parameter(name, value=value) for name, value in chosen.items()]
    cli = ["--ros-args", *arguments] if arguments else []
    made = Fleet(PolicyNode(parameter_overrides=overrides, cli_args=cli))
    try:
        yield made
    finally:
        assert made.node.close(), "the inference thread did not end"
        made.executor.shutdown()
        made.node.destroy_node()
        made.user.destroy_node()
        rclpy.try_shutdown()


def plain(checkpoint: Path, image: Image, instruction: str) -> list[int]:
    """The tokens of plain decoding."""
    outcome = Engine(load_target(checkpoint, device="cpu"), EngineSettings("ar")).act(
        Observation(rgb_from_image(image), instruction, stamp_ns=1)
    )
    assert isinstance(outcome, Action)
    return list(outcome.tokens)


@pytest.mark.parametrize("mode", ["ar", "specpipe"])
def test_each_robot_gets_the_plain_decoders_actions_for_its_own_pictures_and_words(checkpoint: Path, mode: str) -> None:
    with fleet(checkpoint, **{"decode.mode": mode, "draft.temporal": True}) as f:
        f.start()
        assert {name: f.state(node) for name, node in zip(ROBOTS, f.node.robots, strict=True)} == dict.fromkeys(
            ROBOTS, State.PRIMARY_STATE_ACTIVE
        )
        words = {"left": "lift the cube", "right": "turn the lever left"}
        for node in f.node.robots:
            f.instruct(node, words[node.get_namespace().strip("/")])
        for seed in range(3):
            sent = {robot: f.send(robot, seed=2 * seed + (robot == "left")) for robot in ROBOTS}
            for robot, image in sent.items():
                action = f.answer(robot, image)
                assert list(action.tokens) == plain(checkpoint, image, words[robot])
                assert action.seq == seed
        assert {len(each) for each in f.actions.values()} == {3}


def test_a_robot_that_is_paused_told_otherwise_or_deactivated_leaves_the_others_alone(checkpoint: Path) -> None:
    with fleet(checkpoint, instruction="lift the cube") as f:
        f.start()
        pause: Any = f.user.create_client(SetBool, "/left/policy/pause")
        f.until(pause.service_is_ready)
        paused = pause.call_async(SetBool.Request(data=True))
        f.until(paused.done)
        right_epoch = f.right.part.epoch
        f.send("left", 1)
        f.answer("right", f.send("right", 1))
        f.until(lambda: f.left.part.dropped["paused"] == 1)
        assert not f.actions["left"] and f.right.part.epoch == right_epoch

        f.until(pause.call_async(SetBool.Request(data=False)).done)
        f.instruct(f.left, "turn the lever")
        assert f.right.part.epoch == right_epoch and f.right.part.instruction.text == "lift the cube"
        f.answer("left", f.send("left", 2))

        assert f.left.trigger_deactivate().name == "SUCCESS"
        f.send("left", 3)
        f.answer("right", f.send("right", 3))
        f.spin(10)
        assert len(f.actions["left"]) == 1
        assert f.left.trigger_cleanup().name == "SUCCESS"
        assert f.left.trigger_configure().name == "SUCCESS" and f.left.trigger_activate().name == "SUCCESS"
        f.until(f.images["left"].get_subscription_count)
        f.until(lambda: f.user.count_publishers("/left/policy/action"))
        again = f.answer("left", f.send("left", 4))
        assert again.seq == 0
        f.answer("right", f.send("right", 4))
        assert [each.seq for each in f.actions["right"]] == [0, 1, 2]


def test_a_robot_that_is_back_before_the_engine_has_let_it_go_loses_no_image(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    forward = Engine._forward

    def held_up(engine: Engine, batch: Batch) -> list[Commit]:
        began.set()
        assert go_on.wait(PATIENCE_S)
        return forward(engine, batch)

    with fleet(checkpoint, instruction="lift the cube") as f:
        f.start()
        f.answer("left", f.send("left", 1))
        monkeypatch.setattr(Engine, "_forward", held_up)
        slow = f.send("right", 1)
        f.until(began.is_set)
        for transition in ("deactivate", "cleanup", "configure", "activate"):
            assert getattr(f.left, f"trigger_{transition}")().name == "SUCCESS"
        f.until(f.images["left"].get_subscription_count)
        image = f.send("left", 2)
        mailbox = f.node._thread._engine.mailbox  # type: ignore[union-attr]
        f.until(lambda: mailbox.waiting)
        go_on.set()
        assert f.answer("left", image).seq == 0
        f.answer("right", slow)


def test_the_nodes_own_transitions_are_every_robots(checkpoint: Path) -> None:
    with fleet(checkpoint, instruction="lift the cube") as f:
        assert f.left.trigger_configure().name == "FAILURE", "the policy is not loaded"
        f.start()
        f.answer("left", f.send("left", 1))
        assert f.node.trigger_deactivate().name == "SUCCESS"
        assert {f.state(robot) for robot in f.node.robots} == {State.PRIMARY_STATE_INACTIVE}
        assert f.node.trigger_cleanup().name == "SUCCESS"
        assert {f.state(robot) for robot in f.node.robots} == {State.PRIMARY_STATE_UNCONFIGURED}
        f.start()
        f.answer("right", f.send("right", 2))


def test_the_diagnostics_of_each_robot_come_as_often_as_was_set_before_it_was_configured(checkpoint: Path) -> None:
    with fleet(checkpoint, instruction="lift the cube") as f:
        assert f.node.set_parameters_atomically([Parameter("diagnostics_period_s", value=7.0)]).successful
        assert f.node.trigger_configure().name == "SUCCESS"
        periods = [vars(each)["_diagnostics"]._timer.timer_period_ns for each in (f.node, *f.node.robots)]
        assert periods == [7_000_000_000] * 3


def test_diagnostics_and_parameters_of_each(checkpoint: Path) -> None:
    with fleet(checkpoint, "-r", "__ns:=/hall", "-p", "unheard_of:=3", instruction="lift the cube") as f:
        names = [node.get_fully_qualified_name() for node in (f.node, *f.node.robots)]
        assert names == ["/hall/policy", "/hall/left/policy", "/hall/right/policy"]
        wanted = ["hall/policy: model"] + [
            f"hall/{robot}/policy: {task}" for robot in ROBOTS for task in ("inputs", "inference")
        ]
        f.until(lambda: set(wanted) <= f.statuses.keys())
        assert "hall/policy: inputs" not in f.statuses
        assert f.node.trigger_configure().name == "SUCCESS"
        assert f.left.get_parameter("instruction").value == "lift the cube", "as the node's own is"

        def change(node: Any, name: str, value: Any) -> str:
            result = node.set_parameters_atomically([Parameter(name, value=value)])
            return "" if result.successful else str(result.reason)

        assert not change(f.left, "priority", 3) and not change(f.left, "budget_s", 0.5)
        assert f.left.get_parameter("priority").value == 3 and f.right.get_parameter("priority").value == 0
        assert "out of range" in change(f.left, "budget_s", -1.0)
        assert "is read when the node is configured" in change(f.left, "base_frame", "other")
        assert "belongs to each robot: set it on the robot's node, such as /hall/left/policy" in change(
            f.node, "max_future_s", 0.5
        )
        assert "restart it" in change(f.node, "robots", ["left"])
        assert not change(f.node, "decode.mode", "pipeline"), "what is the engine's stays the node's"


@pytest.mark.parametrize("robots", [["left", "left"], ["left", ""], ["2nd"], ["a b"]])
def test_names_that_cannot_be(robots: list[str]) -> None:
    rclpy.init()
    try:
        with pytest.raises(UserError, match="give each robot a unique name"):
            PolicyNode(parameter_overrides=[Parameter("robots", value=robots)])
    finally:
        rclpy.try_shutdown()
