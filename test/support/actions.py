# SPDX-License-Identifier: Apache-2.0
"""Actions that no engine made."""

import numpy as np

from specvla_ros.control.convention import ActionConvention, ActionFrame, GripperSign, Reference, Rotation
from specvla_ros.engine.outcome import Action, DecodeRecord, StageTimings
from specvla_ros.messages.action_message import ActionMeaning
from specvla_ros.models.observation import Observation

NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")

# None of it is a default.
MEANING = ActionMeaning(
    ActionConvention(0.05, Reference.ABSOLUTE, ActionFrame.TOOL, Rotation.RPY, GripperSign.CLOSE_HIGH),
    unnorm_key="some_dataset",
    base_frame="arm_base",
)


def action(index: int = 0, *, stamp_ns: int = 1_700_000_000_123_456_789, horizon: int = 1) -> Action:
    actions = np.linspace(-0.5, 0.5, 7) + index + 10 * np.arange(horizon)[:, None]
    observation = Observation(
        np.zeros((2, 2, 3), np.uint8),
        "put carrot on plate",
        stamp_ns + index * 200_000_000,
        frame_id="camera_optical_frame",
        epoch=3,
        receive_s=0.001,
    )
    return Action(
        observation=observation,
        names=NAMES,
        actions=actions,
        tokens=tuple(range(31744, 31744 + 7 * horizon)),
        timings=StageTimings(wait_s=0.01, vision_s=0.02, prefill_s=0.03, decode_s=0.04),
        record=DecodeRecord(
            "ar",
            tokens_per_forward=(1,) * 7,
            accept_lengths=(0,) * 6,
            tree_nodes=(1,) * 6,
            bins_off=(0,) * 7,
            why=(0,) * 7,
            tick_s=(0.005,) * 7,
        ),
        finished_ns=1,
    )
