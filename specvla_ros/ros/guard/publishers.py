# SPDX-License-Identifier: Apache-2.0
"""Who publishes what the guard reads and sends: two of one kind are one too many."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rclpy.node import Node

from specvla_ros.ros import qos

_RECENT_S = 0.5  # within which two publishers of a topic take turns


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
    publishers = {topic: qos.publishers(node, topic) for topic in (*inputs, *outputs)}
    for topic in inputs:
        if len(publishers[topic]) > 1:
            return f"{topic} has {len(publishers[topic])} publishers: {', '.join(sorted(publishers[topic]))}"
    me = node.get_fully_qualified_name()
    for topic in outputs:
        others = [name for name in publishers[topic] if name != me]
        if others:
            return f"{topic} is also published by {', '.join(sorted(others))}, past the guard"
    counts = Counter(f"{namespace.rstrip('/')}/{name}" for name, namespace in node.get_node_names_and_namespaces())
    matter = {me, *(name for topic in inputs for name in publishers[topic])}
    twins = sorted(name for name in matter if counts[name] > 1)
    return f"there are {counts[twins[0]]} nodes named {twins[0]}" if twins else ""
