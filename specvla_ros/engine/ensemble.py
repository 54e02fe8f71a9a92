# SPDX-License-Identifier: Apache-2.0
"""Averaging of overlapping action chunks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specvla_ros.control.convention import is_gripper
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec

_OLDER = 0.5


class ChunkEnsemble:
    """Averages overlapping action chunks of a robot's answers within one instruction epoch.

    As in VLA-0's evaluation (NVlabs/vla0, `--ensemble_prediction`): the newest answer has weight 1, each earlier one
    0.5 regardless of age, and the gripper is then set to the nearer end of its range. VLA-0 assumes that successive
    answers are one action apart; here the images' stamps give the number of actions between them.

    Args:
        answers: number of answers to average, including the newest; 0 or 1: no averaging.
        step_s: duration of an action in seconds; 0: successive answers are one action apart.

    Raises UserError if the policy's answers hold a single action, since these never overlap.
    """

    def __init__(self, codec: Codec, answers: int, step_s: float) -> None:
        if answers > 1 and codec.horizon < 2:
            raise UserError(
                "decode.ensemble needs a policy that answers with several actions; this one gives a single action: set "
                "it to 0"
            )
        self._answers, self._step_s = answers, step_s
        self._grippers = [column for column, name in enumerate(codec.names) if is_gripper(name)]
        if answers > 1 and self._grippers:
            self._ends = [np.asarray(end, float)[self._grippers] for end in codec.action_range]
        self._older: dict[str, list[Action]] = {}  # by stream

    def forget(self, stream: str | None = None) -> None:
        self._older = {} if stream is None else {name: each for name, each in self._older.items() if name != stream}

    def averaged(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Averages each action with earlier ones; outcomes are ordered oldest frame first."""
        if self._answers < 2:
            return list(outcomes)
        return [self._average(outcome) if isinstance(outcome, Action) else outcome for outcome in outcomes]

    def _average(self, action: Action) -> Action:
        epoch, stamp_ns = action.observation.epoch, action.observation.stamp_ns
        stream = action.observation.stream
        older = [each for each in self._older.get(stream, ()) if each.observation.epoch == epoch]
        total, weight = action.actions.copy(), np.ones(len(action.actions))
        for back, before in enumerate(reversed(older), start=1):
            rest = before.actions[self._passed(stamp_ns - before.observation.stamp_ns, back) :][: len(total)]
            total[: len(rest)] += _OLDER * rest
            weight[: len(rest)] += _OLDER
        self._older[stream] = [*older, action][-(self._answers - 1) :]
        return replace(action, actions=self._grasping(total / weight[:, None]))

    def _passed(self, ns: int, back: int) -> int:
        return round(ns * 1e-9 / self._step_s) if self._step_s else back

    def _grasping(self, actions: np.ndarray) -> np.ndarray:
        """Sets each gripper to one end of its range: between them it holds nothing."""
        if self._grippers:
            low, high = self._ends
            upper = actions[:, self._grippers] > (low + high) / 2
            actions[:, self._grippers] = np.where(upper, high, low)
        return actions
