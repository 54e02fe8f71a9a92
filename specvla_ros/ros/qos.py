# SPDX-License-Identifier: Apache-2.0
"""QoS profiles of all topics of the package, and checks of a topic's publishers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSPolicyKind, QoSProfile, ReliabilityPolicy


def _profile(reliability: ReliabilityPolicy, durability: DurabilityPolicy, depth: int) -> QoSProfile:
    return QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=depth, reliability=reliability, durability=durability)


# Camera images: only the newest one, without retransmission.
NEWEST_IMAGE = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# Instructions from publishers that do not latch, the default of `ros2 topic pub`.
INSTRUCTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=1)
# Instructions from latched publishers: one sent before this node started arrives too.
LATCHED_INSTRUCTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=1)
ACTION = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=10)
# A node's state, also for late subscribers.
LATCHED_STATE = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.TRANSIENT_LOCAL, depth=1)
DIAGNOSTICS = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=10)
CLOCK = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# Motion commands: only the newest one counts.
COMMAND = _profile(ReliabilityPolicy.RELIABLE, DurabilityPolicy.VOLATILE, depth=1)
# Switches held by a person, from reliable or best-effort publishers; a lost message counts as silence.
HEARTBEAT = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=1)
# A robot's measured state, from reliable or best-effort broadcasters and sensors.
STATE = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=10)

# QoS policies of an image subscription that `qos_overrides.<topic>.subscription.*` may change.
IMAGE_OVERRIDES = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY)
_RECENT_S = 0.5  # two publishers heard within this time take turns


def newest_image(reliability: ReliabilityPolicy) -> QoSProfile:
    """Like NEWEST_IMAGE, but a new profile at each call, as rclpy writes overrides into it."""
    return _profile(reliability, DurabilityPolicy.VOLATILE, depth=1)


def offered_reliability(node: Node, topic: str) -> ReliabilityPolicy | None:
    """The best reliability that all publishers of a topic offer; None if it has no publisher.

    With one lost packet a best-effort subscriber loses a large image. A reliable subscriber gets the packet again, but
    receives nothing at all from a best-effort publisher.
    """
    offers = [each.qos_profile.reliability for each in node.get_publishers_info_by_topic(topic)]
    if not offers:
        return None
    reliable = all(offer == ReliabilityPolicy.RELIABLE for offer in offers)
    return ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT


def publishers(node: Node, topic: str) -> list[str]:
    """The full names of the nodes that publish a topic, one for each publisher."""
    return [f"{info.node_namespace.rstrip('/')}/{info.node_name}" for info in node.get_publishers_info_by_topic(topic)]


class Senders:
    """Detects at once that two publishers take turns on a topic. The ROS graph shows it only after discovery."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, float]] = {}
        self._heard: dict[str, tuple[str, int]] = {}

    def is_repeat(self, topic: str, info: Any) -> bool:
        """True if this is the topic's last message again, from a second subscription with another QoS."""
        sent_ns = info.get("source_timestamp", 0) if isinstance(info, dict) else 0
        sent = str(info.get("publisher_gid")) if sent_ns else "", sent_ns
        last, self._heard[topic] = self._heard.get(topic), sent
        return bool(sent_ns) and last == sent

    def is_second_publisher(self, topic: str, info: Any, steady_s: float) -> bool:
        """True if another publisher than this message's was heard on the topic a moment ago."""
        identity = info.get("publisher_gid") if isinstance(info, dict) else None
        gid = bytes(identity["data"]) if isinstance(identity, dict) else b""
        last, self._last[topic] = self._last.get(topic), (gid, steady_s)
        return last is not None and gid != last[0] and steady_s - last[1] < _RECENT_S


def sources_problem(node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Describes wrong publishers; empty if all are right. Inputs have at most one publisher, outputs only the guard."""
    found = {topic: publishers(node, topic) for topic in (*inputs, *outputs)}
    for topic in inputs:
        if len(found[topic]) > 1:
            return f"{topic} has {len(found[topic])} publishers: {', '.join(sorted(found[topic]))}"
    me = node.get_fully_qualified_name()
    for topic in outputs:
        others = [name for name in found[topic] if name != me]
        if others:
            return f"{topic} is also published by {', '.join(sorted(others))}, past the guard"
    counts = Counter(f"{namespace.rstrip('/')}/{name}" for name, namespace in node.get_node_names_and_namespaces())
    matter = {me, *(name for topic in inputs for name in found[topic])}
    twins = sorted(name for name in matter if counts[name] > 1)
    return f"there are {counts[twins[0]]} nodes named {twins[0]}: give each a name of its own" if twins else ""


def override_name(node: Node, topic: str, kind: QoSPolicyKind) -> str:
    """The parameter that overrides a subscription's QoS, as rclpy names it."""
    return f"qos_overrides.{node.resolve_topic_name(topic)}.subscription.{kind.name.lower()}"
