# SPDX-License-Identifier: Apache-2.0
"""Converts actions to the fields of VlaAction and DecodeStats and back. Needs no ROS: only field names matter."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specvla_ros.control.convention import (
    ACTION_NAMES,
    ActionConvention,
    ActionFrame,
    GripperSign,
    Reference,
    Rotation,
    StampedAction,
)
from specvla_ros.engine.outcome import Action


@dataclass(frozen=True)
class ActionMeaning:
    """The meaning of a policy's action values, identical in all of its messages."""

    convention: ActionConvention  # its units scale published values to metres and radians
    unnorm_key: str  # dataset whose statistics scaled them; empty: the policy has only one
    base_frame: str  # the header's frame_id

    def metric(self, action: Action) -> np.ndarray:
        """The action, float64 [horizon, dims]: translations in metres, rotations in radians, other values unchanged."""
        scaled: np.ndarray = action.actions * self.convention.scales(self.names(action))
        return scaled

    def names(self, action: Action) -> tuple[str, ...]:
        """The names of the action's columns: the robot's joints, or the policy's own."""
        return self.convention.joints or action.names


def vla_action_fields(
    action: Action, meaning: ActionMeaning, *, seq: int, publish_s: float, latency_s: float
) -> dict[str, Any]:
    """The fields of VlaAction.msg without its header, which has the observation's stamp and the base frame's id."""
    convention = meaning.convention
    return {
        "seq": seq,
        "epoch": action.observation.epoch,
        "instruction": action.observation.instruction,
        "mode": action.record.mode,
        "names": list(meaning.names(action)),
        "values": meaning.metric(action).ravel().tolist(),
        "horizon": len(action.actions),
        "partial": action.partial,
        "action_dt": convention.dt_s,
        "tokens": list(action.tokens),
        "reference": convention.reference.value,
        "action_frame": convention.frame.value,
        "rotation": convention.rotation.value,
        "gripper": convention.gripper.value,
        "unnorm_key": meaning.unnorm_key,
        "receive_s": action.observation.receive_s,
        **asdict(action.timings),
        "publish_s": publish_s,
        "latency_s": latency_s,
    }


def stamped_action(message: Any, stamp_s: float) -> StampedAction:
    """The action in a VlaAction; its values are metric, as `vla_action_fields` wrote them.

    Raises ValueError if the message holds no valid action or uses an unknown convention.
    """
    convention = ActionConvention(
        message.action_dt,
        Reference(message.reference),
        ActionFrame(message.action_frame),
        Rotation(message.rotation),
        GripperSign(message.gripper),
    )
    if not (math.isfinite(convention.dt_s) and convention.dt_s > 0):
        raise ValueError(f"its action_dt is {convention.dt_s} s")
    horizon, columns = message.horizon, len(message.names)
    if not columns or horizon * columns != len(message.values):
        raise ValueError(f"it has {len(message.values)} values for {horizon} rows of {columns} names")
    joints = convention.frame is ActionFrame.JOINTS
    if not joints and tuple(message.names) != ACTION_NAMES[:columns]:
        raise ValueError(f"its columns are {', '.join(message.names)[:80]}, not {', '.join(ACTION_NAMES)}")
    values = np.array(message.values).reshape(horizon, columns)
    return StampedAction(stamp_s, values, convention, partial=message.partial, names=tuple(message.names))


def decode_stats_fields(action: Action, *, seq: int, drop_counts: Mapping[str, int]) -> dict[str, Any]:
    """The fields of DecodeStats.msg without its header, which has the observation's stamp and frame_id."""
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
