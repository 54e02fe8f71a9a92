# SPDX-License-Identifier: Apache-2.0
"""The only way out for actions: nothing void, late or out of order gets past it."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rclpy.lifecycle import LifecycleNode
from rclpy.time import Time
from std_msgs.msg import Header
from tokenizers import Tokenizer

from specvla_ros.engine.outcome import Action, Drop, DropReason, Freshness
from specvla_ros.messages.action_message import ActionMeaning, decode_stats_fields, vla_action_fields
from specvla_ros.models.tokenizer import text_of
from specvla_ros.msg import DecodeStats, Reasoning, VlaAction
from specvla_ros.ros.qos import ACTION

_NS = 1e-9


@dataclass(frozen=True)
class Published:
    """An action that went out."""

    seq: int  # number since activation
    latency_s: float  # image's stamp to publication, on the node's clock
    action_dt: float  # seconds over which the displacements are meant


class ActionPublisher:
    """Publishes actions on `~/action` while the node is active, and beside them how and with which words they came.

    `~/decode_stats` has one message per action, `~/reasoning` one per action of a policy that writes before it acts.
    The publishers are managed: rclpy keeps them silent in every other state. What rclpy cannot know is which action
    is void. The lock makes that promise: once `new_epoch` has returned, no action from before it goes out.

    Args:
        node: the node of the topics and of the clock.
        meaning: of the actions' numbers, asked for at each action; None before a policy is loaded.
        tokenizer: of the policy, asked for at each answer with text.
        max_image_age_s: limit of the image's age at publication, read at each action; 0: none.
    """

    def __init__(
        self,
        node: LifecycleNode,
        meaning: Callable[[], ActionMeaning | None],
        tokenizer: Callable[[], Tokenizer | None],
        max_image_age_s: Callable[[], float],
    ) -> None:
        self._clock = node.get_clock()
        self._meaning, self._tokenizer = meaning, tokenizer
        self._max_image_age_s = max_image_age_s
        self._actions = node.create_lifecycle_publisher(VlaAction, "~/action", ACTION)
        self._stats = node.create_lifecycle_publisher(DecodeStats, "~/decode_stats", ACTION)
        self._reasoning = node.create_lifecycle_publisher(Reasoning, "~/reasoning", ACTION)
        self._lock = threading.Lock()
        self._epoch = 0
        self._next_seq = 0
        self._last_stamp_ns = 0

    @property
    def epoch(self) -> int:
        """The epoch whose actions may go out."""
        return self._epoch

    def start_over(self) -> None:
        """Counts actions from 0, as on activation."""
        with self._lock:
            self._next_seq, self._last_stamp_ns = 0, 0

    def new_epoch(self, *, forget_stamps: bool = False) -> int:
        """Makes what is in flight void; returns the new epoch.

        Args:
            forget_stamps: whether any stamp may come next, as after a clock jump.
        """
        with self._lock:
            self._epoch += 1
            if forget_stamps:
                self._last_stamp_ns = 0
            return self._epoch

    def publish(self, action: Action, drop_counts: Mapping[str, int]) -> Published | Drop:
        """Publishes an action, or says why it must not go out.

        The node's clock decides on the age once more, after everything that can hold a process up.

        Args:
            action: the engine's answer.
            drop_counts: frames dropped since activation, by reason.
        """
        observation = action.observation
        text = text_of(self._tokenizer(), action.text_tokens)
        with self._lock:
            meaning = self._meaning()
            if meaning is None or not self._actions.is_activated or observation.epoch != self._epoch:
                return Drop(observation, DropReason.EPOCH_CHANGED)
            if observation.stamp_ns <= self._last_stamp_ns:
                return Drop(observation, DropReason.OVERTAKEN)
            # In this order, so that the stages never sum to more than the latency.
            publish_s = (time.monotonic_ns() - action.finished_ns) * _NS
            now_ns = self._clock.now().nanoseconds
            latency_s = (now_ns - observation.stamp_ns) * _NS
            fresh = Freshness(self._max_image_age_s())
            problem = fresh.problem(observation.stamp_ns, now_ns, DropReason.TOO_OLD)
            if problem is not None:
                return Drop(observation, *problem)
            stamp, seq = Time(nanoseconds=observation.stamp_ns).to_msg(), self._next_seq
            seen = Header(stamp=stamp, frame_id=observation.frame_id)
            if action.text_tokens:
                n = len(action.text_tokens)
                self._reasoning.publish(Reasoning(header=seen, seq=seq, epoch=self._epoch, text=text, tokens=n))
            fields = vla_action_fields(action, meaning, seq=seq, publish_s=publish_s, latency_s=latency_s)
            self._actions.publish(VlaAction(header=Header(stamp=stamp, frame_id=meaning.base_frame), **fields))
            self._next_seq += 1
            self._last_stamp_ns = observation.stamp_ns
            stats = decode_stats_fields(action, seq=seq, drop_counts=drop_counts)
            self._stats.publish(DecodeStats(header=seen, **stats))
        return Published(seq, latency_s, fields["action_dt"])
