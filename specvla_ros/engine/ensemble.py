# SPDX-License-Identifier: Apache-2.0
"""Averages the chunks of actions that several answers give for the same time.

As VLA-0's evaluation does it (NVlabs/vla0, `--ensemble_prediction`): the newest answer counts fully, each of those
before it half, whatever their age; the gripper then goes to the nearer end of its range. There every answer is one
action after the one before; here the images' stamps say how many actions lie between them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.engine.outcome import Action, Outcome
from specvla_ros.errors import UserError
from specvla_ros.models.codecs.codec import Codec

_OLDER = 0.5
_GRIPPER = ACTION_NAMES[-1]


class ChunkEnsemble:
    """Remembers the newest answers of each robot's instruction epoch, as they were decoded.

    Args:
        answers: that are averaged, the newest included; 0 or 1: none.
        step_s: seconds that an action takes; 0: every answer is one action after the one before.

    Raises:
        UserError: the policy's answers hold one action each, which never overlap.
    """

    def __init__(self, codec: Codec, answers: int, step_s: float) -> None:
        if answers > 1 and codec.horizon < 2:
            raise UserError(
                "decode.ensemble is for policies that answer with several actions; this one gives a single one: set it "
                "to 0"
            )
        self._answers, self._step_s = answers, step_s
        self._gripper: tuple[int, float, float] | None = None
        if answers > 1 and _GRIPPER in codec.names:
            column, (low, high) = codec.names.index(_GRIPPER), codec.action_range
            self._gripper = column, float(low[column]), float(high[column])
        self._older: dict[str, list[Action]] = {}  # by stream

    def forget(self, stream: str | None = None) -> None:
        self._older = {} if stream is None else {name: each for name, each in self._older.items() if name != stream}

    def averaged(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes, oldest frame first; each action averaged with those before it."""
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
        """A gripper between open and closed holds nothing."""
        if self._gripper is not None:
            column, low, high = self._gripper
            actions[:, column] = np.where(actions[:, column] > (low + high) / 2, high, low)
        return actions
