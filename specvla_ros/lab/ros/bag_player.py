# SPDX-License-Identifier: Apache-2.0
"""The node `bag_player`: plays a recorded bag as live topics, with /clock."""

import sys
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import rclpy
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.time import Time
from rosgraph_msgs.msg import Clock

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.finder import bags_in
from specvla_ros.lab.bags.reader import Bag, OfferedQos, open_bag
from specvla_ros.ros.node import run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters
from specvla_ros.ros.qos import CLOCK
from specvla_ros.settings.parameter import parameter

_NS = 1_000_000_000
_STOP_TIMEOUT_S = 5.0
_LINGER_S = 0.5  # the last messages must reach their subscribers before this process ends
_LOOP_GAP_NS = 200_000_000  # from a loop's last message to the next one's first, like a 5 Hz camera


@dataclass(frozen=True)
class BagPlayerParameters:
    """Every parameter of the bag player."""

    bag: str = parameter("", "The bag: a directory, or an .mcap or .db3 file.")
    rate: float = parameter(1.0, "Playback speed relative to real time.", minimum=0.01, maximum=100.0)
    loop: bool = parameter(False, "Restart at the end; the clock then jumps back.")
    clock_hz: float = parameter(100.0, "Publishing rate of /clock.", unit="Hz", minimum=1.0, maximum=1000.0)
    wait_for_subscriber: str = parameter(
        "", "Topic of the bag that must have a subscriber before playback starts; empty: start at once."
    )


class BagPlayer(Node):
    """Publishes every message as recorded, byte for byte, paced by the steady clock.

    Raises UserError if the bag cannot be read, a parameter is wrong, or wait_for_subscriber is not in the bag.
    """

    def __init__(self) -> None:
        super().__init__("bag_player")
        with parameters_declared(self, BagPlayerParameters):
            self._chosen = read_parameters(self, BagPlayerParameters)
            self._bag = _open(self._chosen)
            self._publishers_by_topic = self._make_publishers()
            self._check_publishers()
        self._clock_publisher = self.create_publisher(Clock, "/clock", CLOCK)
        self._stop = threading.Event()
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="player", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> bool:
        """Stops playing; returns False if the player hangs."""
        self._stop.set()
        self._thread.join(_STOP_TIMEOUT_S)
        self._bag.close()
        return self.finished

    def _make_publishers(self) -> dict[str, Publisher]:
        publishers: dict[str, Publisher] = {}
        for topic in self._bag.topics:
            if topic.name == "/clock":
                continue  # this node publishes its own clock
            kind = _message_class(topic.msgtype)
            if kind is None:
                self.get_logger().warning(f"{topic.name} is not played: message type {topic.msgtype} is not installed")
                continue
            publishers[topic.name] = self.create_publisher(kind, topic.name, _qos(topic.qos))
        return publishers

    def _check_publishers(self) -> None:
        """Raises UserError if nothing can be played, or not what playback would wait for."""
        awaited = self._chosen.wait_for_subscriber
        if not self._publishers_by_topic:
            raise UserError(f"no topic of bag {self._bag.path} can be played: install the packages of its messages")
        if awaited and awaited not in self._publishers_by_topic:
            raise UserError(f"wait_for_subscriber: {awaited} is not played, so that playback would never start")

    def _run(self) -> None:
        try:
            self._wait_for_subscriber()
            while not self._stop.is_set():
                self._play_once()
                if not self._chosen.loop:
                    break
            self._stop.wait(_LINGER_S)
        except UserError as error:
            self.failure = str(error)
        except Exception as error:
            if rclpy.ok():  # a signal that ends the context also ends its publishers
                self.failure = f"{type(error).__name__}: {error}"
        if self._bag.damage and not self.failure:
            self.failure = f"bag {self._bag.path}: {self._bag.damage}; the readable part was played"

    def _wait_for_subscriber(self) -> None:
        topic = self._chosen.wait_for_subscriber
        if not topic:
            return
        publisher = self._publishers_by_topic[topic]
        self.get_logger().info(f"waiting for a subscriber of {topic}")
        while publisher.get_subscription_count() == 0 and not self._stop.is_set():
            self._publish_clock(self._bag.start_ns)
            self._stop.wait(0.05)

    def _play_once(self) -> None:
        began_ns, count = time.monotonic_ns(), 0
        for message in self._bag.messages(tuple(self._publishers_by_topic)):
            self._keep_clock_until(message.time_ns, began_ns)
            if self._stop.is_set():
                return
            self._publishers_by_topic[message.topic].publish(message.raw)
            count += 1
        self._keep_clock_until(self._bag.end_ns + _LOOP_GAP_NS, began_ns)
        seconds = (self._bag.end_ns - self._bag.start_ns) / _NS
        self.get_logger().info(f"played {count} messages, {seconds:.1f} s of {self._bag.path}")

    def _keep_clock_until(self, bag_ns: int, began_ns: int) -> None:
        """Publishes /clock at its rate until the bag's time is due, and once more exactly at that time."""
        start_ns, rate = self._bag.start_ns, self._chosen.rate
        due_ns = began_ns + int((bag_ns - start_ns) / rate)
        period_ns = int(_NS / self._chosen.clock_hz)
        while (now_ns := time.monotonic_ns()) < due_ns and not self._stop.is_set():
            self._publish_clock(start_ns + int((now_ns - began_ns) * rate))
            self._stop.wait(min(period_ns, due_ns - now_ns) / _NS)
        self._publish_clock(bag_ns)

    def _publish_clock(self, bag_ns: int) -> None:
        self._clock_publisher.publish(Clock(clock=Time(nanoseconds=bag_ns).to_msg()))


def _open(parameters: BagPlayerParameters) -> Bag:
    if not parameters.bag:
        raise UserError("parameter 'bag' is empty; set it to a bag, for example bag:=/data/episode_0")
    bag = open_bag(parameters.bag)
    bags_in([Path(parameters.bag)])  # warns about files that are not played with it
    if parameters.wait_for_subscriber:
        bag.topic(parameters.wait_for_subscriber)
    return bag


def _message_class(msgtype: str) -> type | None:
    package, _, name = msgtype.split("/")
    try:
        kind: type = getattr(import_module(f"{package}.msg"), name)
    except (ImportError, AttributeError):
        return None
    return kind


def _qos(offered: OfferedQos) -> QoSProfile:
    return QoSProfile(
        history=HistoryPolicy.KEEP_LAST,
        depth=offered.depth,
        reliability=ReliabilityPolicy.RELIABLE if offered.reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if offered.transient_local else DurabilityPolicy.VOLATILE,
    )


def main() -> None:
    """Plays a bag; the exit code is 2 for an error in the bag or a parameter that the user can fix."""
    finished, failure = attrgetter("finished"), attrgetter("failure")
    sys.exit(run_node("bag_player", BagPlayer, close=BagPlayer.close, finished=finished, failure=failure))
