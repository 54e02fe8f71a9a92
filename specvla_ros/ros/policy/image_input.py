# SPDX-License-Identifier: Apache-2.0
"""Images in: both transports, each message checked, its stamp and age included."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from rclpy.exceptions import ParameterException
from rclpy.node import Node
from rclpy.qos import QoSPolicyKind, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.subscription import Subscription
from sensor_msgs.msg import CompressedImage, Image

from specvla_ros.engine.outcome import DropReason
from specvla_ros.errors import UserError
from specvla_ros.messages.image_message import is_grey, rgb_from_compressed, rgb_from_image, stamp_ns
from specvla_ros.ros.parameters import is_given
from specvla_ros.ros.qos import IMAGE_OVERRIDES, newest_image, offered_reliability, override_name

_NS = 1e-9
_DAY_S = 86_400.0


def stamp_problem(
    stamp_ns: int, now_ns: int, *, max_age_s: float, max_future_s: float
) -> tuple[DropReason, str] | None:
    """Why an image of this stamp must not be answered; None when it may.

    The engine checks the age again at admission, since a frame grows older while it waits for a slot. Here the age is
    checked because this is where a wrong clock shows, which needs another message than a slow policy does.

    Args:
        stamp_ns: the image's stamp.
        now_ns: time of its arrival on the node's clock; 0 before the first /clock.
        max_age_s: limit of the age; 0: none.
        max_future_s: limit of how far the stamp may lie ahead.
    """
    if now_ns == 0:
        return (
            DropReason.BAD_STAMP,
            "use_sim_time is set, but nothing came on /clock yet: is a bag or simulator running?",
        )
    age_s = (now_ns - stamp_ns) * _NS
    if -age_s > max_future_s:
        return DropReason.BAD_STAMP, f"stamped {-age_s:.3f} s ahead of the node's clock{_other_clock(age_s)}"
    if max_age_s and age_s > max_age_s:
        return DropReason.STALE, f"{age_s:.3f} s old, the limit is {max_age_s:g} s{_other_clock(age_s)}"
    return None


def _other_clock(age_s: float) -> str:
    if abs(age_s) < _DAY_S:
        return ""
    return (
        f": {abs(age_s) / _DAY_S:.0f} days apart are two different clocks; for a recording or a simulator "
        "start the node with use_sim_time:=true and let the player publish /clock"
    )


# Per transport: message type, what the topic ends in, decoder.
_TRANSPORTS: dict[str, tuple[type, str, Callable[[Any], np.ndarray]]] = {
    "raw": (Image, "", rgb_from_image),
    "compressed": (CompressedImage, "/compressed", rgb_from_compressed),
}

# One transport may run ahead of the other by some frames.
_REMEMBERED = 8


@dataclass(frozen=True)
class Frame:
    """An image that could be read.

    Args:
        rgb: uint8 [height, width, 3].
        stamp_ns: the image's stamp, in ROS time.
        frame_id: the camera's frame.
        arrived_ns: the message's arrival on the node's clock.
        received_ns: the same moment as `time.monotonic_ns()`.
    """

    rgb: np.ndarray
    stamp_ns: int
    frame_id: str
    arrived_ns: int
    received_ns: int

    @property
    def age_s(self) -> float:
        """Age of the image at its arrival [s]."""
        return (self.arrived_ns - self.stamp_ns) * _NS


class ImageInput:
    """Subscribes to a camera's raw topic, the compressed one below it or both, for as long as it lives.

    A camera that publishes both sends each image twice: the second one is passed over.

    Args:
        node: the node that subscribes.
        transport: raw, compressed or auto (both).
        reliability: best_effort, reliable or auto (what the publishers offer); `qos_overrides` of a topic win.
        topic: of the raw images.
        on_message: called first, with the transport.
        on_frame: called with each image that could be read.
        on_bad: called with reason and detail for each one that could not.

    Raises:
        UserError: an override is none.
    """

    def __init__(
        self,
        node: Node,
        transport: str,
        reliability: str,
        *,
        topic: str,
        on_message: Callable[[str], None],
        on_frame: Callable[[Frame], None],
        on_bad: Callable[[DropReason, str], None],
    ) -> None:
        self._node, self._topic = node, topic
        self._clock = node.get_clock()
        self._on_message = on_message
        self._on_frame = on_frame
        self._on_bad = on_bad
        self._reliability = reliability
        self._told_grey = False
        transports = tuple(_TRANSPORTS) if transport == "auto" else (transport,)
        self._taken: dict[str, deque[Time]] = {name: deque(maxlen=_REMEMBERED) for name in transports}
        self._subscriptions: dict[str, Subscription] = {}
        for name in transports:
            self._subscribe(name, self._wanted(name, ReliabilityPolicy.BEST_EFFORT))

    def destroy(self) -> None:
        """Stops listening."""
        for subscription in self._subscriptions.values():
            self._node.destroy_subscription(subscription)
        self._subscriptions = {}

    def follow_publishers(self) -> None:
        """Subscribes anew where publishers offer something else than those before; to be called now and then."""
        for transport, subscription in list(self._subscriptions.items()):
            current = subscription.qos_profile.reliability
            wanted = self._wanted(transport, current)
            if wanted != current and not is_given(self._node, self._override(transport)):
                topic, offer = subscription.topic_name, wanted.name.lower()
                self._node.get_logger().info(f"the publishers of '{topic}' offer {offer} images: asking for them")
                self._node.destroy_subscription(subscription)
                self._subscribe(transport, wanted)

    def _wanted(self, transport: str, current: ReliabilityPolicy) -> ReliabilityPolicy:
        if self._reliability != "auto":
            return ReliabilityPolicy[self._reliability.upper()]
        return offered_reliability(self._node, self._topic_of(transport)) or current

    def _override(self, transport: str) -> str:
        return override_name(self._node, self._topic_of(transport), QoSPolicyKind.RELIABILITY)

    def _topic_of(self, transport: str) -> str:
        return self._topic + _TRANSPORTS[transport][1]

    def _subscribe(self, transport: str, reliability: ReliabilityPolicy) -> None:
        kind, _, to_rgb = _TRANSPORTS[transport]
        topic = self._topic_of(transport)

        def on_image(message: Any) -> None:
            self._receive(message, transport, to_rgb)

        # Declared without need, the reliability of the first subscription would hold for all that follow.
        given = is_given(self._node, self._override(transport))
        kinds = [each for each in IMAGE_OVERRIDES if given or each is not QoSPolicyKind.RELIABILITY]
        try:
            self._subscriptions[transport] = self._node.create_subscription(
                kind, topic, on_image, newest_image(reliability), qos_overriding_options=QoSOverridingOptions(kinds)
            )
        except (RuntimeError, ValueError, ParameterException) as error:
            raise UserError(f"the QoS of '{self._node.resolve_topic_name(topic)}' cannot be had: {error}") from None

    def _receive(self, message: Any, transport: str, to_rgb: Callable[[Any], np.ndarray]) -> None:
        # At once and in this order: decoding the image belongs to the wait, and no stage may count it a second time.
        arrived_ns, received_ns = self._clock.now().nanoseconds, time.monotonic_ns()
        if any(message.header.stamp in taken for other, taken in self._taken.items() if other != transport):
            return
        self._on_message(transport)
        try:
            rgb = to_rgb(message)
        except Exception as error:  # a decoder's bug costs one image, and is counted
            known = isinstance(error, UserError)
            self._on_bad(DropReason.BAD_IMAGE, str(error) if known else f"{type(error).__name__}: {error}")
            return
        if not self._told_grey and is_grey(message):
            self._told_grey = True
            self._node.get_logger().warning("the images are grey, but policies are trained on colour: check the topic")
        try:
            stamp = stamp_ns(message.header)
        except UserError as error:
            self._on_bad(DropReason.BAD_STAMP, str(error))
            return
        self._taken[transport].append(message.header.stamp)
        self._on_frame(Frame(rgb, stamp, message.header.frame_id, arrived_ns, received_ns))


def declared_overrides(node: Node, topic: str = "image") -> list[str]:
    """The `qos_overrides` that the subscriptions of a camera heed."""
    ends = (end for _, end, _ in _TRANSPORTS.values())
    return [override_name(node, topic + end, kind) for end in ends for kind in IMAGE_OVERRIDES]
