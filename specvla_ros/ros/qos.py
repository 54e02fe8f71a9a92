# SPDX-License-Identifier: Apache-2.0
"""The QoS profiles of every topic of the package."""

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSPolicyKind, QoSProfile, ReliabilityPolicy


def _profile(reliability: ReliabilityPolicy, durability: DurabilityPolicy, depth: int) -> QoSProfile:
    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth, reliability=reliability, durability=durability)


# A camera's images: the newest one only, and never one sent again.
NEWEST_IMAGE = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# Instructions of publishers that do not latch, as `ros2 topic pub` is by default.
INSTRUCTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=1)
# Instructions of publishers that latch, so that one sent before this node started arrives too.
LATCHED_INSTRUCTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=1)
ACTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=10)
# What a node is, for whoever comes later.
LATCHED_STATE = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=1)
DIAGNOSTICS = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=10)
CLOCK = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# Motion commands: an old one is worth nothing.
COMMAND = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=1)
# Of a hand on a switch, reliable or not: what is lost counts as silence.
HEARTBEAT = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# A robot's measured state, as broadcasters and sensors offer it: reliable or not.
STATE = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=10)

# What `qos_overrides.<topic>.subscription.*` may change of an image subscription.
IMAGE_OVERRIDES = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY)


def newest_image(reliability: ReliabilityPolicy) -> QoSProfile:
    """As NEWEST_IMAGE; a profile of its own each time, as rclpy writes overrides into it."""
    return _profile(reliability, DurabilityPolicy.VOLATILE, depth=1)


def offered_reliability(node: Node, topic: str) -> ReliabilityPolicy | None:
    """The best that all of a topic's publishers offer; None while there is none.

    A lost packet of a large image costs a best-effort subscriber the image. A reliable subscriber gets it again, but
    nothing at all from a best-effort publisher.
    """
    offers = [each.qos_profile.reliability for each in node.get_publishers_info_by_topic(topic)]
    if not offers:
        return None
    reliable = all(offer == ReliabilityPolicy.RELIABLE for offer in offers)
    return ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT


def publishers(node: Node, topic: str) -> list[str]:
    """The full names of the nodes that publish a topic, one for each publisher."""
    return [f"{info.node_namespace.rstrip('/')}/{info.node_name}" for info in node.get_publishers_info_by_topic(topic)]


def override_name(node: Node, topic: str, kind: QoSPolicyKind) -> str:
    """The parameter that overrides a subscription's QoS, as rclpy names it."""
    return f"qos_overrides.{node.resolve_topic_name(topic)}.subscription.{kind.name.lower()}"
