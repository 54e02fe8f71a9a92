# SPDX-License-Identifier: Apache-2.0
"""A policy's inputs: camera images and the robot's state of one moment, and an instruction."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from builtin_interfaces.msg import Time
from rclpy.exceptions import ParameterException
from rclpy.node import Node
from rclpy.qos import QoSPolicyKind, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import QoSOverridingOptions
from rclpy.subscription import Subscription
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from specvla_ros.control.joint_parts import STAMPED_BY
from specvla_ros.control.state_units import StateConvention
from specvla_ros.engine.outcome import DropReason
from specvla_ros.errors import UserError
from specvla_ros.messages.image_message import is_grey, rgb_from_compressed, rgb_from_image, stamp_ns
from specvla_ros.messages.state_message import StateReader
from specvla_ros.messages.synchronizer import Matched, Synchronizer, Unmatched
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.policy_parameters import ALL_NUMBERS, RobotParameters
from specvla_ros.ros import qos
from specvla_ros.ros.parameters import is_given

if TYPE_CHECKING:  # it imports torch, which is loaded with the policy
    from specvla_ros.models.target import PolicyFacts

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import SubscriptionEventCallbacks

_NS = 1e-9
STATE_TOPIC = "state"
_LOG_PERIOD_S = 5.0

# Per transport: message type, suffix of the topic, decoder.
_TRANSPORTS: dict[str, tuple[type, str, Callable[[Any], np.ndarray]]] = {
    "raw": (Image, "", rgb_from_image),
    "compressed": (CompressedImage, "/compressed", rgb_from_compressed),
}

_GREY = "grey, but policies are trained on colour: check the topic"
# One transport may run ahead of the other by some frames.
_REMEMBERED = 8


@dataclass(frozen=True)
class Frame:
    """A decoded image."""

    rgb: np.ndarray  # uint8 [height, width, 3]
    stamp_ns: int  # the image's stamp, in ROS time
    frame_id: str  # the camera's frame
    arrived_ns: int  # the message's arrival on the node's clock
    received_ns: int  # the same moment as `time.monotonic_ns()`

    @property
    def age_s(self) -> float:
        return (self.arrived_ns - self.stamp_ns) * _NS


class ImageInput:
    """Subscribes to a camera's raw topic, the compressed one below it or both, until `destroy`.

    A camera that publishes both sends each image twice: the second copy is ignored.

    Args:
        transport: raw, compressed or auto (both).
        reliability: best_effort, reliable or auto (as the publishers offer); `qos_overrides` of a topic win.
        topic: topic of the raw images.
        on_message: called first, with the transport.
        on_frame: called with each decoded image.
        on_bad: called with reason and detail for each image that cannot be decoded.
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
        self.grey = self._warned_grey = False  # the last image; any
        transports = tuple(_TRANSPORTS) if transport == "auto" else (transport,)
        self._taken: dict[str, deque[Time]] = {name: deque(maxlen=_REMEMBERED) for name in transports}
        self._subscriptions: dict[str, Subscription] = {}
        try:
            for name in transports:
                self._subscribe(name, self._wanted(name, ReliabilityPolicy.BEST_EFFORT))
        except UserError:
            self.destroy()  # it would still receive some of the topics
            raise

    def destroy(self) -> None:
        for subscription in self._subscriptions.values():
            self._node.destroy_subscription(subscription)
        self._subscriptions = {}

    def start_over(self) -> None:
        """Forgets which images were taken, as after a clock jump: their stamps may come again."""
        for taken in self._taken.values():
            taken.clear()

    def follow_publishers(self) -> None:
        """Subscribes again where the publishers' reliability has changed; to be called periodically."""
        for transport, subscription in list(self._subscriptions.items()):
            current = subscription.qos_profile.reliability
            wanted = self._wanted(transport, current)
            if wanted != current and not is_given(self._node, self._override(transport)):
                topic, offer = subscription.topic_name, wanted.name.lower()
                self._node.get_logger().info(f"the publishers of '{topic}' offer {offer} images: subscribing again")
                self._node.destroy_subscription(subscription)
                self._subscribe(transport, wanted)

    @property
    def publishers(self) -> list[str]:
        """The nodes that publish this camera's images, one per publisher; the transport that has the most of them."""
        return max(self.publishers_by_topic().values(), key=len, default=[])

    def publishers_by_topic(self) -> dict[str, list[str]]:
        topics = (each.topic_name for each in self._subscriptions.values())
        return {topic: qos.publishers(self._node, topic) for topic in topics}

    def _wanted(self, transport: str, current: ReliabilityPolicy) -> ReliabilityPolicy:
        if self._reliability != "auto":
            return ReliabilityPolicy[self._reliability.upper()]
        return qos.offered_reliability(self._node, self._topic_of(transport)) or current

    def _override(self, transport: str) -> str:
        return qos.override_name(self._node, self._topic_of(transport), QoSPolicyKind.RELIABILITY)

    def _topic_of(self, transport: str) -> str:
        return self._topic + _TRANSPORTS[transport][1]

    def _subscribe(self, transport: str, reliability: ReliabilityPolicy) -> None:
        kind, _, to_rgb = _TRANSPORTS[transport]
        topic = self._topic_of(transport)

        def on_image(message: Any) -> None:
            self._receive(message, transport, to_rgb)

        # If it were always declared, the first subscription's reliability would hold for all later ones.
        given = is_given(self._node, self._override(transport))
        kinds = [each for each in qos.IMAGE_OVERRIDES if given or each is not QoSPolicyKind.RELIABILITY]
        try:
            self._subscriptions[transport] = self._node.create_subscription(
                kind, topic, on_image, qos.newest_image(reliability), qos_overriding_options=QoSOverridingOptions(kinds)
            )
        except (RuntimeError, ValueError, ParameterException) as error:
            raise UserError(f"invalid QoS for '{self._node.resolve_topic_name(topic)}': {error}") from None

    def _receive(self, message: Any, transport: str, to_rgb: Callable[[Any], np.ndarray]) -> None:
        # Before decoding and in this order: decoding the image counts as waiting, and no stage may count it twice.
        arrived_ns, received_ns = self._clock.now().nanoseconds, time.monotonic_ns()
        if any(message.header.stamp in taken for other, taken in self._taken.items() if other != transport):
            return
        self._on_message(transport)
        try:
            rgb = to_rgb(message)
        except Exception as error:  # a decoder's bug costs one image, which is counted
            known = isinstance(error, UserError)
            self._on_bad(DropReason.BAD_IMAGE, str(error) if known else f"{type(error).__name__}: {error}")
            return
        self.grey = is_grey(message)
        if self.grey and not self._warned_grey:
            self._warned_grey = True
            self._node.get_logger().warning(f"the images are {_GREY}")
        try:
            stamp = stamp_ns(message.header)
        except UserError as error:
            self._on_bad(DropReason.BAD_STAMP, str(error))
            return
        self._on_frame(Frame(rgb, stamp, message.header.frame_id, arrived_ns, received_ns))
        self._taken[transport].append(message.header.stamp)  # last: the image may show a clock jump, see `start_over`


def declared_overrides(node: Node) -> list[str]:
    """Names of the `qos_overrides` parameters of a single camera's subscriptions."""
    ends = (end for _, end, _ in _TRANSPORTS.values())
    return [qos.override_name(node, f"image{end}", kind) for end in ends for kind in qos.IMAGE_OVERRIDES]


@dataclass(frozen=True)
class Frames:
    """Synchronized images and state."""

    lead: Frame  # from the first camera; its stamp is the observation's
    images: Mapping[str, np.ndarray]  # uint8 [height, width, 3] by camera
    state: np.ndarray | None = None  # float64 [dims]; None: the policy reads none


def image_topic(camera: str, cameras: Sequence[str]) -> str:
    """The topic of a camera, before remapping; a policy with a single camera subscribes to `image`."""
    return "image" if len(cameras) == 1 or camera == ONLY_CAMERA else f"{camera}/image"


def state_reader(policy: "PolicyFacts", chosen: RobotParameters) -> StateReader:
    """Reads the policy's state from messages; raises UserError if its names or its unit do not follow."""
    names = policy.state_names if chosen.state_names == ALL_NUMBERS else chosen.state_names
    units = None
    if policy.state_dims:
        units = StateConvention(chosen.action, policy.unnorm_key, policy.codec.names).units(names)
    return StateReader(names, policy.state_dims, chosen.sync_tolerance_s, units)


class ObservationInput:
    """Subscribes to the images of each camera and to the state, until `destroy`.

    Args:
        on_message: called for each arriving image with its transport, after the camera's name if there are several.
        on_frames: called with each synchronized set.
        on_bad: called with reason and detail for each image that cannot be decoded, and for each image of the first
            camera that finds no match.
        on_bad_beside: called in addition if the image is not the first camera's.
    """

    def __init__(
        self,
        node: Node,
        policy: "PolicyFacts",
        chosen: RobotParameters,
        *,
        on_message: Callable[[str], None],
        on_frames: Callable[[Frames], None],
        on_bad: Callable[[DropReason, str], None],
        on_bad_beside: Callable[[], None],
    ) -> None:
        self._node, self._camera_names = node, policy.cameras
        self._states = state_reader(policy, chosen)
        self._refused_state = ""  # why the last state was refused; empty: it was not
        self._on_frames, self._on_bad, self._on_bad_beside = on_frames, on_bad, on_bad_beside
        lead, *others = policy.cameras
        state = [STATE_TOPIC] if policy.state_dims else []
        self._together = Synchronizer(lead, [*others, *state], chosen.sync_tolerance_s)
        self._cameras: dict[str, ImageInput] = {}
        self._state: Subscription | None = None
        try:
            for camera in policy.cameras:
                self._cameras[camera] = ImageInput(
                    node,
                    chosen.image_transport,
                    chosen.image_reliability,
                    topic=image_topic(camera, policy.cameras),
                    on_message=partial(self._count, on_message, camera),
                    on_frame=partial(self._add_frame, camera),
                    on_bad=partial(self._refuse, camera),
                )
        except UserError:
            self.destroy()
            raise
        if state:
            self._state = node.create_subscription(JointState, STATE_TOPIC, self._add_state, qos.STATE)

    def destroy(self) -> None:
        """Unsubscribes. An image that still waits for the others is dropped."""
        for camera in self._cameras.values():
            camera.destroy()
        if self._state is not None:
            self._node.destroy_subscription(self._state)
        self._end(self._together.give_up())

    def start_over(self) -> None:
        """Forgets all images and states, as after a clock jump. An image that still waits for the others is dropped."""
        for camera in self._cameras.values():
            camera.start_over()
        self._states.start_over()
        self._end(self._together.start_over())

    def follow_publishers(self) -> str:
        """Follows the publishers' QoS; returns the cameras that have several publishers, in words; empty: none."""
        problems = []
        for name, camera in self._cameras.items():
            camera.follow_publishers()
            nodes = camera.publishers
            if len(nodes) > 1:
                problems.append(
                    f"the images of '{name}' have {len(nodes)} publishers, and actions alternate between them: "
                    f"{', '.join(sorted(nodes))}; keep one, or remap the others"
                )
        return "; ".join(problems)

    @property
    def sources(self) -> str:
        """Each subscribed topic of images with the number of its publishers, in words."""
        found = [each for camera in self._cameras.values() for each in camera.publishers_by_topic().items()]
        return ", ".join(f"{topic} ({len(nodes) or 'no'} publisher{'s' * (len(nodes) > 1)})" for topic, nodes in found)

    @property
    def grey(self) -> str:
        """The cameras whose last image was grey, in words; empty: none."""
        grey = [name for name, camera in self._cameras.items() if camera.grey]
        return f"the images of {', '.join(grey)} are {_GREY}" if grey else ""

    def _count(self, on_message: Callable[[str], None], camera: str, transport: str) -> None:
        on_message(transport if len(self._camera_names) == 1 else f"{camera}_{transport}")

    def _refuse(self, camera: str, reason: DropReason, detail: str) -> None:
        if camera != self._camera_names[0]:
            self._on_bad_beside()
        self._on_bad(reason, detail if len(self._camera_names) == 1 else f"{camera}: {detail}")

    def _add_frame(self, camera: str, frame: Frame) -> None:
        self._end(self._together.add(camera, frame.stamp_ns, (camera, frame)))

    def _add_state(self, message: JointState) -> None:
        try:
            stamp = stamp_ns(message.header, STAMPED_BY)
            state = self._states.read(message, stamp)
        except UserError as error:
            self._refused_state = f"a state was refused: {error}"
            self._node.get_logger().warning(self._refused_state, throttle_duration_sec=_LOG_PERIOD_S)
            return
        self._refused_state = ""
        if state is not None:
            self._end(self._together.add(STATE_TOPIC, self._states.stamp_ns, state))

    def _end(self, ended: Sequence[Matched | Unmatched]) -> None:
        for each in ended:
            camera, lead = each.lead
            if isinstance(each, Unmatched):
                lacking = self._refused_state or self._states.lacking
                self._on_bad(DropReason.INCOMPLETE, f"{each.why}; {lacking}" if lacking else each.why)
                continue
            others: dict[str, Any] = dict(each.others)
            state = others.pop(STATE_TOPIC, None)
            images = {camera: lead.rgb, **{name: frame.rgb for name, (_, frame) in others.items()}}
            self._on_frames(Frames(lead, {name: images[name] for name in self._camera_names}, state))


@dataclass(frozen=True)
class Instruction:
    """The user's instruction to the robot."""

    text: str = ""  # the user's words; empty: none received yet
    problem: str = ""  # why the policy cannot follow it; empty: it can


class InstructionInput:
    """Subscribes to the topic `instruction`.

    A refused instruction replaces the old one: the policy then follows none, which is safer than following the old one.

    Args:
        on_new: called with each instruction that differs from the one before.
    """

    def __init__(self, node: Node, on_new: Callable[[str], None]) -> None:
        self._node = node
        self._on_new = on_new
        self._lock = threading.Lock()
        self._current, self._heard = Instruction(), False
        # A volatile publisher only matches a volatile subscription, and only a latched one gets earlier messages.
        self._subscriptions = [
            self._subscribe(qos.INSTRUCTION, SubscriptionEventCallbacks()),
            self._subscribe(qos.LATCHED_INSTRUCTION, SubscriptionEventCallbacks(use_default_callbacks=False)),
        ]

    @property
    def current(self) -> Instruction:
        return self._current

    def set(self, text: str) -> None:
        """Sets the instruction; repeating it changes nothing."""
        with self._lock:
            if self._heard and text == self._current.text:
                return
            self._current, self._heard = Instruction(text), True
        self._on_new(text)

    def refuse(self, text: str, problem: str) -> bool:
        """Marks an instruction as refused; returns False if a newer one arrived meanwhile."""
        with self._lock:
            if text != self._current.text:
                return False
            self._current = Instruction(text, problem)
            return True

    def destroy(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _subscribe(self, profile: QoSProfile, events: SubscriptionEventCallbacks) -> Subscription:
        return self._node.create_subscription(
            String, "instruction", lambda message: self.set(message.data), profile, event_callbacks=events
        )
