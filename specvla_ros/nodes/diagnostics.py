"""Health of a node on /diagnostics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from specvla_ros.nodes.qos import DIAGNOSTICS


class Level(IntEnum):
    """As in diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Status:
    """What one task has to say: how bad it is, why, and the figures."""

    level: Level
    message: str
    values: Mapping[str, object] = field(default_factory=dict)


class DiagnosticsPublisher:
    """Publishes the status of every task at once, periodically.

    Args:
        node: its name begins every task's name.
        period_s: on the steady clock: a simulator that stands still must not silence the diagnostics.
        tasks: by name.
    """

    def __init__(self, node: Node, period_s: float, tasks: Mapping[str, Callable[[], Status]]) -> None:
        self._node = node
        self._tasks = tasks
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self._timer = node.create_timer(period_s, self.publish, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def publish(self) -> None:
        """Publishes now."""
        array = DiagnosticArray()
        array.header.stamp = self._node.get_clock().now().to_msg()
        array.status = [self._message(name, task()) for name, task in self._tasks.items()]
        self._publisher.publish(array)

    def _message(self, name: str, status: Status) -> DiagnosticStatus:
        return DiagnosticStatus(
            level=bytes([status.level]),
            name=f"{self._node.get_name()}: {name}",
            message=status.message,
            hardware_id=self._node.get_fully_qualified_name(),
            values=[KeyValue(key=key, value=str(value)) for key, value in status.values.items()],
        )
