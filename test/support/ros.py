# SPDX-License-Identifier: Apache-2.0
"""A policy node and its user, over real DDS, in one process and on one thread."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import Image
from std_msgs.msg import String
from support.patience import wait_until

from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.msg import DecodeStats, Reasoning, VlaAction
from specvla_ros.ros.policy.node import PolicyNode
from specvla_ros.ros.qos import ACTION, DIAGNOSTICS

ANY_MACHINE = {"max_image_age_s": 60.0}  # a busy one takes its time
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def rgb_image(stamp: int, *, seed: int = 0, **changes: Any) -> Image:
    """A random 48 x 64 rgb8 image with a stamp in nanoseconds; `changes` make it a bad one."""
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    message = Image(height=48, width=64, encoding="rgb8", step=192, data=pixels.tobytes())
    message.header.stamp = Time(sec=stamp // 10**9, nanosec=stamp % 10**9)
    message.header.frame_id = "camera"
    for name, value in changes.items():
        setattr(message, name, value)
    return message


@dataclass
class Robot:
    """The policy under test, and what its user sends and sees."""

    policy: PolicyNode
    user: Node
    executor: SingleThreadedExecutor
    actions: list[VlaAction] = field(default_factory=list)
    stats: list[DecodeStats] = field(default_factory=list)
    reasoning: list[Reasoning] = field(default_factory=list)
    diagnostics: list[DiagnosticArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.user.create_subscription(VlaAction, "/policy/action", self.actions.append, ACTION)
        self.user.create_subscription(DecodeStats, "/policy/decode_stats", self.stats.append, ACTION)
        self.user.create_subscription(Reasoning, "/policy/reasoning", self.reasoning.append, ACTION)
        self.user.create_subscription(DiagnosticArray, "/diagnostics", self.diagnostics.append, DIAGNOSTICS)
        self.images = self.user.create_publisher(Image, "image", 1)

    def until(self, condition: Callable[[], object]) -> None:
        """Spins until the condition holds; fails after a while."""
        wait_until(
            condition,
            meanwhile=lambda: self.executor.spin_once(timeout_sec=0.05),
            failed=lambda: f"still waiting; {self.drops()}; {len(self.actions)} actions",
        )

    def spin(self, seconds: float) -> None:
        """Spins on, to see that something does not happen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.02)

    def start(self) -> None:
        """Configures, activates and waits until user and policy have found each other."""
        assert self.policy.trigger_configure().name == "SUCCESS"
        self.activate()

    def activate(self) -> None:
        """Activates and waits until both have found each other."""
        assert self.policy.trigger_activate().name == "SUCCESS"
        self.until(lambda: self.images.get_subscription_count() and self.user.count_publishers("/policy/action"))

    def instruct(self, text: str, *, latched: bool = False) -> None:
        """Publishes an instruction as `ros2 topic pub` does, or latched, and waits until it is in force."""
        publisher = self.user.create_publisher(String, "instruction", LATCHED if latched else 1)
        self.until(lambda: publisher.get_subscription_count() >= (2 if latched else 1))
        publisher.publish(String(data=text))
        self.until(lambda: self.policy.parts[""].instruction.text == text)

    def set(self, name: str, value: object) -> tuple[bool, str]:
        """Sets a parameter, as a client of the service does: whether it was taken, and why not."""
        result = self.policy.set_parameters_atomically([Parameter(name, value=value)])
        return result.successful, result.reason

    def now_ns(self) -> int:
        """The policy's clock."""
        return self.policy.get_clock().now().nanoseconds

    def act(self, image: Image) -> VlaAction:
        """Sends an image and waits for its action."""
        self.images.publish(image)
        self.until(lambda: any(action.header.stamp == image.header.stamp for action in self.actions))
        return next(action for action in self.actions if action.header.stamp == image.header.stamp)

    def drops(self) -> dict[str, int]:
        """Frames dropped since activation, by reason, where there were any."""
        return {reason: count for reason, count in self.policy.parts[""].dropped.items() if count}

    def diagnosis(self, task: str) -> Any:
        """The newest status of a task on /diagnostics."""
        return next(status for status in self.diagnostics[-1].status if status.name == f"policy: {task}")


@contextmanager
def robot(checkpoint: Path | str, *, remaps: Sequence[str] = (), **parameters: Any) -> Iterator[Robot]:
    """A policy node with parameters and remapped topics, unconfigured, and its user."""
    overrides = [
        Parameter(name, value=value)
        for name, value in {"checkpoint": str(checkpoint), "device": "cpu", **ANY_MACHINE, **parameters}.items()
    ]
    rclpy.init()
    executor = SingleThreadedExecutor()
    arguments = ["--ros-args", *(part for remap in remaps for part in ("-r", remap))] if remaps else []
    policy = PolicyNode(parameter_overrides=overrides, cli_args=arguments)
    user = rclpy.create_node("user", enable_rosout=False)
    for node in (policy, user):
        executor.add_node(node)
    try:
        yield Robot(policy, user, executor)
    finally:
        assert policy.close(), "the inference thread did not end"
        executor.shutdown()
        for node in (policy, user):
            node.destroy_node()
        rclpy.try_shutdown()


def stamps(messages: list[Any]) -> list[int]:
    """Stamps of messages in nanoseconds."""
    return [stamp_ns(message.header) for message in messages]
