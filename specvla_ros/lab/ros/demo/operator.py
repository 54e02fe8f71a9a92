# SPDX-License-Identifier: Apache-2.0
"""The demo's own node: it watches, passes on what is typed, and holds the dead-man's switch of a commanded arm."""

from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.client import Client
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.task import Future
from sensor_msgs.msg import Image
from std_msgs.msg import Bool, Empty, String
from std_srvs.srv import Trigger

from specvla_ros.lab.ros.demo.record import DemoRecord
from specvla_ros.lab.ros.sim_robot.outputs import IMAGE_TOPIC
from specvla_ros.messages.image_message import rgb_from_image
from specvla_ros.msg import DecodeStats, Reasoning, SimEpisode, VlaAction
from specvla_ros.ros.qos import ACTION, DIAGNOSTICS, INSTRUCTION, LATCHED_INSTRUCTION, NEWEST_IMAGE

_HEARTBEAT_S = 0.1
_GUARD, _DRIVER = "guard: gate", "driver: motion"
_REFUSED = {_GUARD: "refused_", _DRIVER: "refused: "}
_STOPPED = "stopped: "
_PRESSED = f"{_STOPPED}stop: "


@dataclass
class Motion:
    """What driver and guard last said of themselves.

    Args:
        guard: passing, holding or stopped, and why; empty: not heard yet.
        driver: likewise.
        refused: how many of what was refused, by kind; by who refused it.
    """

    guard: str = ""
    driver: str = ""
    refused: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def latched(self) -> bool:
        """Whether the guard stopped by itself, and stays so until it is cleared."""
        return self.guard.startswith(_STOPPED) and not self.guard.startswith(_PRESSED)

    def hear(self, status: DiagnosticStatus, *, count: bool) -> None:
        """Takes a status of /diagnostics, if it is one of theirs.

        Args:
            status: of any node.
            count: whether what was refused counts: once the robot has ended, everything is refused.
        """
        if status.name not in _REFUSED:
            return
        if status.name == _GUARD:
            self.guard = status.message
        else:
            self.driver = status.message
        who, prefix = status.name.partition(":")[0], _REFUSED[status.name]
        counts = {
            each.key.removeprefix(prefix): int(each.value) for each in status.values if each.key.startswith(prefix)
        }
        if count:
            self.refused[who] = {kind: times for kind, times in counts.items() if times}


class Operator(Node):
    """Who stands beside the robot.

    Args:
        record: is told of actions, episodes and pictures.
        commanded: whether there are a driver and a guard; motion is then enabled from `enable` on.
    """

    def __init__(self, record: DemoRecord, commanded: bool) -> None:
        super().__init__("demo")
        self.motion = Motion()
        self.answer = ""
        self._record = record
        self._enabled = False
        self._clears = False
        self._instruction = self.create_publisher(String, "/instruction", LATCHED_INSTRUCTION)
        self.create_subscription(VlaAction, "/policy/action", record.on_action, ACTION)
        self.create_subscription(DecodeStats, "/policy/decode_stats", record.on_stats, ACTION)
        self.create_subscription(Reasoning, "/policy/reasoning", record.on_reasoning, ACTION)
        self.create_subscription(SimEpisode, "/sim_robot/episode", record.on_episode, LATCHED_INSTRUCTION)
        self.create_subscription(Image, IMAGE_TOPIC, self._on_image, NEWEST_IMAGE)
        if not commanded:
            return
        self._enable = self.create_publisher(Bool, "/guard/enable", INSTRUCTION)
        self._stop = self.create_publisher(Empty, "/guard/stop", DIAGNOSTICS)
        self._clear: Client = self.create_client(Trigger, "/guard/clear_stop")
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        self.create_timer(_HEARTBEAT_S, self._beat, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def instruct(self, instruction: str) -> None:
        """Publishes an instruction."""
        self._instruction.publish(String(data=instruction))

    def enable(self, held: bool) -> None:
        """Presses the dead-man's switch, or lets it go. It beats where the screen is drawn: who hangs lets go."""
        self._enabled = held
        self._enable.publish(Bool(data=held))

    def stop(self) -> None:
        """Presses stop."""
        self._stop.publish(Empty())
        self.answer = ""

    def clear_stop(self) -> None:
        """Asks for the end of a stop; `answer` says what came of it."""
        self._clear.call_async(Trigger.Request()).add_done_callback(self._on_cleared)

    def begin_episode(self) -> str:
        """Clears a stop that the guard latched by itself before this start; one that was pressed stays.

        Returns:
            What stopped it, in words; empty: nothing that is cleared now.
        """
        self._clears = self.motion.latched
        if not self._clears:
            return ""
        self.clear_stop()
        return self.motion.guard.removeprefix(_STOPPED)

    def _beat(self) -> None:
        if self._enabled:
            self._enable.publish(Bool(data=True))

    def _on_cleared(self, future: Future) -> None:
        result = future.result()
        self.answer = "" if result is None or result.success else f"the stop is not cleared: {result.message}"

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        episode = self._record.episode
        running = episode is not None and episode.state == SimEpisode.RUNNING
        for status in message.status:
            self.motion.hear(status, count=running)
        self._clears = self._clears and self.motion.latched
        if self._clears:  # the guard refuses it while the cause lasts
            self.clear_stop()

    def _on_image(self, message: Image) -> None:
        self._record.on_image(rgb_from_image(message))
