"""The only way out for actions: nothing void, late or out of order gets past it."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rclpy.node import Node
from rclpy.time import Time
from std_msgs.msg import Header

from specvla_ros.bags.action_message import decode_stats_fields, vla_action_fields
from specvla_ros.engine.outcome import Action, DropReason
from specvla_ros.msg import DecodeStats, VlaAction
from specvla_ros.ros.qos import ACTION

_NS = 1e-9


@dataclass(frozen=True)
class Published:
    """An action that went out.

    Args:
        seq: its number since activation.
        latency_s: from the image's stamp to publication, on the node's clock.
    """

    seq: int
    latency_s: float


class ActionPublisher:
    """Publishes actions on `~/action` and how they were decoded on `~/decode_stats`, while it is open.

    Its lock makes the promise: once `close` or `new_epoch` has returned, no action from before it goes out.

    Args:
        node: whose topics and clock they are.
        action_dt: seconds over which the displacements are meant, asked at each action.
    """

    def __init__(self, node: Node, action_dt: Callable[[], float]) -> None:
        self._clock = node.get_clock()
        self._action_dt = action_dt
        self._actions = node.create_publisher(VlaAction, "~/action", ACTION)
        self._stats = node.create_publisher(DecodeStats, "~/decode_stats", ACTION)
        self._lock = threading.Lock()
        self._open = False
        self._epoch = 0
        self._next_seq = 0
        self._last_stamp_ns = 0

    @property
    def epoch(self) -> int:
        """The epoch whose actions may go out."""
        return self._epoch

    def open(self) -> None:
        """Lets actions out, counted from 0."""
        with self._lock:
            self._open, self._next_seq, self._last_stamp_ns = True, 0, 0

    def close(self) -> None:
        """Lets nothing out any more; what is in flight is void, also after the next `open`."""
        with self._lock:
            self._open = False
            self._epoch += 1

    def new_epoch(self, *, forget_stamps: bool = False) -> int:
        """Makes what is in flight void.

        Args:
            forget_stamps: also takes any stamp next, as after a clock jump.
        """
        with self._lock:
            self._epoch += 1
            if forget_stamps:
                self._last_stamp_ns = 0
            return self._epoch

    def publish(self, action: Action, drop_counts: Mapping[str, int]) -> Published | DropReason:
        """Publishes an action, or says why it must not go out."""
        with self._lock:
            if not self._open or action.observation.epoch != self._epoch:
                return DropReason.EPOCH_CHANGED
            if action.observation.stamp_ns <= self._last_stamp_ns:
                return DropReason.OVERTAKEN
            header = _header(action)
            seq = self._next_seq
            latency_s = (self._clock.now().nanoseconds - action.observation.stamp_ns) * _NS
            publish_s = (time.monotonic_ns() - action.finished_ns) * _NS
            fields = vla_action_fields(
                action, seq=seq, action_dt=self._action_dt(), publish_s=publish_s, latency_s=latency_s
            )
            self._actions.publish(VlaAction(header=header, **fields))
            self._next_seq += 1
            self._last_stamp_ns = action.observation.stamp_ns
            stats = decode_stats_fields(action, seq=seq, drop_counts=drop_counts)
            self._stats.publish(DecodeStats(header=header, **stats))
        return Published(seq, latency_s)


def _header(action: Action) -> Header:
    stamp = Time(nanoseconds=action.observation.stamp_ns).to_msg()
    return Header(stamp=stamp, frame_id=action.observation.frame_id)
