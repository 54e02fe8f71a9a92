# SPDX-License-Identifier: Apache-2.0
"""The instruction in force, from the parameter or the topic."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.subscription import Subscription
from std_msgs.msg import String

from specvla_ros.ros.qos import INSTRUCTION, LATCHED_INSTRUCTION

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import SubscriptionEventCallbacks


@dataclass(frozen=True)
class Instruction:
    """What the robot shall do.

    Args:
        text: the user's words; empty: none came yet.
        problem: why the policy cannot follow it; empty: it can.
    """

    text: str = ""
    problem: str = ""


class InstructionInput:
    """Listens on the topic `instruction`.

    A refused instruction stands: the policy then has none to follow, which is safer than going on with the old one.

    Args:
        node: the node that subscribes.
        initial: instruction in force until a message comes; empty: none.
        on_new: called with each instruction that differs from the one before.
    """

    def __init__(self, node: Node, initial: str, on_new: Callable[[str], None]) -> None:
        self._node = node
        self._on_new = on_new
        self._lock = threading.Lock()
        self._current, self._heard = Instruction(), False
        # A volatile publisher only matches a volatile subscription, and only a latched one brings what was sent before.
        self._subscriptions = [
            self._subscribe(INSTRUCTION, SubscriptionEventCallbacks()),
            self._subscribe(LATCHED_INSTRUCTION, SubscriptionEventCallbacks(use_default_callbacks=False)),
        ]
        if initial:
            self.set(initial)

    @property
    def current(self) -> Instruction:
        """The newest instruction."""
        return self._current

    def set(self, text: str) -> None:
        """Takes an instruction; the same again changes nothing."""
        with self._lock:
            if self._heard and text == self._current.text:
                return
            self._current, self._heard = Instruction(text), True
        self._on_new(text)

    def refuse(self, text: str, problem: str) -> bool:
        """Marks an instruction as one that cannot be followed; False when a newer one came meanwhile."""
        with self._lock:
            if text != self._current.text:
                return False
            self._current = Instruction(text, problem)
            return True

    def destroy(self) -> None:
        """Stops listening."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _subscribe(self, qos: QoSProfile, events: SubscriptionEventCallbacks) -> Subscription:
        return self._node.create_subscription(
            String, "instruction", lambda message: self.set(message.data), qos, event_callbacks=events
        )
