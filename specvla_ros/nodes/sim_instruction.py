"""The topic `/instruction` of the simulated robot, which tells the policy its task and hears what humans say."""

import time
from collections.abc import Callable

from rclpy.node import Node
from std_msgs.msg import String

from specvla_ros.nodes.qos import ACTION, LATCHED_INSTRUCTION

_ECHO_S = 2.0


class InstructionTopic:
    """Publishes instructions, and listens to those of others.

    What it published itself comes back to it. ROS does not say who sent a message, so it is known by its text: the echo
    comes within moments, in the order of publication.

    Args:
        node: whose topic it is.
        on_other: called with each text that somebody else sent and that differs from the one in force.
    """

    def __init__(self, node: Node, on_other: Callable[[str], None]) -> None:
        self._on_other = on_other
        self._echoes: list[tuple[str, float]] = []
        self.current = ""
        self._publisher = node.create_publisher(String, "/instruction", LATCHED_INSTRUCTION)
        # Volatile, so it hears latched publishers and others; what was said before this node's own is out of date.
        self._subscription = node.create_subscription(String, "/instruction", self._on_message, ACTION)

    def tell(self, text: str) -> None:
        """Puts an instruction in force, and publishes it."""
        self.current = text
        self._echoes.append((text, time.monotonic() + _ECHO_S))
        self._publisher.publish(String(data=text))

    def _on_message(self, message: String) -> None:
        now_s = time.monotonic()
        self._echoes = [(text, until_s) for text, until_s in self._echoes if now_s < until_s]
        texts = [text for text, _ in self._echoes]
        if message.data in texts:  # those before it were overwritten on their way
            del self._echoes[: texts.index(message.data) + 1]
            return
        if message.data == self.current:
            return
        self.current = message.data
        self._on_other(message.data)
