# SPDX-License-Identifier: Apache-2.0
"""Publishing on /diagnostics, as every node of this package does it."""

from collections.abc import Callable, Mapping

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from specvla_ros.ros.qos import DIAGNOSTICS


def make_status(level: bytes, message: str, values: Mapping[str, object] | None = None) -> DiagnosticStatus:
    """A status without the name, which the publisher fills in.

    Args:
        level: one of DiagnosticStatus's constants.
        message: cause in words.
        values: figures by name.
    """
    pairs = [KeyValue(key=key, value=str(value)) for key, value in (values or {}).items()]
    return DiagnosticStatus(level=level, message=message, values=pairs)


class DiagnosticsPublisher:
    """Publishes the status of every task at once, periodically.

    Args:
        node: the node whose name, with its namespace, begins each status's name, so that two policies differ.
        period_s: on the steady clock: a simulator that stands still must not silence the diagnostics.
        statuses: makes the status of each task, by the task's name.
    """

    def __init__(self, node: Node, period_s: float, statuses: Callable[[], Mapping[str, DiagnosticStatus]]) -> None:
        self._clock = node.get_clock()
        self._node_name = node.get_fully_qualified_name()
        self._statuses = statuses
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self._timer = node.create_timer(period_s, self._publish, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def set_period(self, period_s: float) -> None:
        """Publishes at another period from now on."""
        self._timer.timer_period_ns = round(period_s * 1e9)

    def _publish(self) -> None:
        array = DiagnosticArray()
        array.header.stamp = self._clock.now().to_msg()
        for task, status in self._statuses().items():
            # Without the leading slash, as diagnostic_updater writes it.
            status.name = f"{self._node_name.lstrip('/')}: {task}"
            status.hardware_id = self._node_name
            array.status.append(status)
        self._publisher.publish(array)
