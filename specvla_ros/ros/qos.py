# SPDX-License-Identifier: Apache-2.0
"""The QoS profiles of every topic of the package."""

from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy


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
# A robot's measured state, as broadcasters and sensors offer it: reliable or not.
STATE = _profile(ReliabilityPolicy.BEST_EFFORT, DurabilityPolicy.VOLATILE, depth=10)
