# SPDX-License-Identifier: Apache-2.0
"""The QoS profiles of every topic of the package, and who publishes one."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

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
_RECENT_S = 0.5  # within which two publishers of a topic take turns


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


class Senders:
    """Tells at once when two take turns on a topic: the graph tells later, and only of those it has found."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, float]] = {}
        self._heard: dict[str, tuple[str, int]] = {}

    def again(self, topic: str, info: Any) -> bool:
        """If the topic's last message comes once more, by a second subscription of other QoS."""
        sent_ns = info.get("source_timestamp", 0) if isinstance(info, dict) else 0
        sent = str(info.get("publisher_gid")) if sent_ns else "", sent_ns
        last, self._heard[topic] = self._heard.get(topic), sent
        return bool(sent_ns) and last == sent

    def another(self, topic: str, info: Any, steady_s: float) -> bool:
        """Whether another publisher than this message's was heard on the topic a moment ago."""
        identity = info.get("publisher_gid") if isinstance(info, dict) else None
        gid = bytes(identity["data"]) if isinstance(identity, dict) else b""
        last, self._last[topic] = self._last.get(topic), (gid, steady_s)
        return last is not None and gid != last[0] and steady_s - last[1] < _RECENT_S


def sources_problem(node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """What is wrong with who publishes, in words: inputs have one publisher at most, outputs the guard alone."""
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
    return f"there are {counts[twins[0]]} nodes named {twins[0]}" if twins else ""


def override_name(node: Node, topic: str, kind: QoSPolicyKind) -> str:
    """The parameter that overrides a subscription's QoS, as rclpy names it."""
    return f"qos_overrides.{node.resolve_topic_name(topic)}.subscription.{kind.name.lower()}"
