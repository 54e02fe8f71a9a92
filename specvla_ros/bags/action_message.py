# SPDX-License-Identifier: Apache-2.0
"""The fields of VlaAction and DecodeStats for an action: one mapping for the node and for recordings. Needs no ROS."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specvla_ros.engine.outcome import Action


def vla_action_fields(
    action: Action, *, seq: int, action_dt: float, publish_s: float, latency_s: float
) -> dict[str, Any]:
    """The fields of VlaAction.msg but its header, whose stamp and frame_id are the observation's.

    Args:
        seq: the action's number since activation.
        action_dt: duration of the displacements, seconds.
        publish_s: from the last token to publication, seconds.
        latency_s: from the image's stamp to publication, seconds.
    """
    return {
        "seq": seq,
        "epoch": action.observation.epoch,
        "instruction": action.observation.instruction,
        "names": list(action.names),
        "values": action.values.tolist(),
        "action_dt": action_dt,
        "tokens": list(action.tokens),
        "receive_s": action.observation.receive_s,
        **asdict(action.timings),
        "publish_s": publish_s,
        "latency_s": latency_s,
    }


def decode_stats_fields(action: Action, *, seq: int, drop_counts: Mapping[str, int]) -> dict[str, Any]:
    """The fields of DecodeStats.msg but its header, which is that of the VlaAction; drops count since activation."""
    record = action.record
    return {
        "seq": seq,
        "epoch": action.observation.epoch,
        "mode": record.mode,
        "acceptance": record.acceptance,
        "forwards": record.forwards,
        "tokens_per_forward": list(record.tokens_per_forward),
        "accept_lengths": list(record.accept_lengths),
        "tree_nodes": list(record.tree_nodes),
        "bins_off": list(record.bins_off),
        "why": list(record.why),
        "tau": record.tau,
        "tick_s": list(record.tick_s),
        "in_flight": record.in_flight,
        "drop_reasons": list(drop_counts),
        "drop_counts": list(drop_counts.values()),
    }
