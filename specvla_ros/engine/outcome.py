# SPDX-License-Identifier: Apache-2.0
"""The outcome of a frame, an action or a drop with its reason; and averaging of overlapping action chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.errors import UserError
from specvla_ros.models.observation import Observation

if TYPE_CHECKING:
    from specvla_ros.models.codecs.codec import Codec  # imports torch

_DAY_S = 86_400.0
_OLDER = 0.5
_GRIPPER = ACTION_NAMES[-1]


class DropReason(str, Enum):
    """Reasons why a frame ends without an action."""

    BAD_IMAGE = "bad_image"  # size 0, wrong step, unknown encoding, undecodable bytes
    BAD_STAMP = "bad_stamp"  # stamp 0, negative, nanoseconds out of range, too far in the future
    INCOMPLETE = "incomplete"  # another camera's image or the robot's state for that time is missing
    OUT_OF_ORDER = "out_of_order"  # not newer than the last accepted frame
    NO_INSTRUCTION = "no_instruction"  # no instruction given yet
    TOO_MANY_STREAMS = "too_many_streams"  # from more robots than the engine has slots for
    PAUSED = "paused"  # arrived while the policy was paused
    BAD_INSTRUCTION = "bad_instruction"  # empty, or longer than a slot holds
    STALE = "stale"  # older than the staleness limit before it was started
    TOO_OLD = "too_old"  # older than the staleness limit when its action was ready
    SUPERSEDED = "superseded"  # a newer frame arrived before this one was admitted
    OVERTAKEN = "overtaken"  # a newer request finished first or caught up
    EPOCH_CHANGED = "epoch_changed"  # new instruction, reset, deactivation or clock jump
    MODE_CHANGED = "mode_changed"  # in flight when the engine's settings changed
    NOT_AN_ACTION = "not_an_action"  # the policy emitted a token other than an action token
    BROKEN_OFF = "broken_off"  # as not_an_action, after the answer's first actions were published
    NOT_FINITE = "not_finite"  # NaN or infinity in logits or action
    ENGINE_FAULT = "engine_fault"  # an exception inside a tick


@dataclass(frozen=True)
class Freshness:
    """Checks image stamps: on arrival, at the start, when the action is ready and when it is published."""

    max_age_s: float  # max age; 0: no limit
    max_future_s: float = math.inf  # max lead of the stamp over the clock

    def problem(
        self, stamp_ns: int, now_ns: int, too_old: DropReason = DropReason.STALE
    ) -> tuple[DropReason, str] | None:
        """The reason to drop an image or its answer; None if there is none."""
        age_s = (now_ns - stamp_ns) * 1e-9
        if -age_s > self.max_future_s:
            return DropReason.BAD_STAMP, f"stamped {-age_s:.3f} s ahead of the node's clock{_other_clock(age_s)}"
        if self.max_age_s and age_s > self.max_age_s:
            return too_old, f"{age_s:.3f} s old, the limit is {self.max_age_s:g} s{_other_clock(age_s)}"
        return None


def _other_clock(age_s: float) -> str:
    if abs(age_s) < _DAY_S:
        return ""
    return (
        f": the clocks are {abs(age_s) / _DAY_S:.0f} days apart; for a recording or a simulator "
        "start the node with use_sim_time:=true and let the player publish /clock"
    )


@dataclass(frozen=True)
class StageTimings:
    """One request's time in seconds in each stage. A tick counts as a whole towards the stage it served."""

    wait_s: float = 0.0  # receipt to admission, including resizing and normalising the images
    vision_s: float = 0.0  # vision tower, projector, prompt embeddings
    prefill_s: float = 0.0  # forwards with this request's prompt
    decode_s: float = 0.0  # forwards with this request's action tokens


@dataclass(frozen=True)
class DecodeRecord:
    """Decoding statistics of one action, the engine's part of DecodeStats.msg, which documents the fields."""

    mode: str
    acceptance: str = "strict"
    tokens_per_forward: tuple[int, ...] = ()
    accept_lengths: tuple[int, ...] = ()
    tree_nodes: tuple[int, ...] = ()
    bins_off: tuple[int, ...] = ()
    why: tuple[int, ...] = ()
    tick_s: tuple[float, ...] = ()
    in_flight: int = 1

    @property
    def forwards(self) -> int:
        """Number of packed forwards with the request, including prefill."""
        return len(self.tokens_per_forward)

    @property
    def tau(self) -> float:
        """Tokens committed per verification forward; 0 without one."""
        if not self.accept_lengths:
            return 0.0
        verified = self.tokens_per_forward[-len(self.accept_lengths) :]
        return sum(verified) / len(verified)


@dataclass(frozen=True)
class Action:
    """The answer to one observation, with its stamp, or the first actions while the rest is decoded."""

    observation: Observation
    names: tuple[str, ...]  # one per dimension
    actions: np.ndarray  # float64 [horizon, dims], un-normalised; displacements per `dt_s` of the training data
    tokens: tuple[int, ...]  # the action tokens, one per value for bins
    timings: StageTimings
    record: DecodeRecord
    finished_ns: int  # `time.monotonic_ns()` when the last token was committed
    dt_s: float | None = None  # duration of one action in seconds; None if the checkpoint does not give it
    text_tokens: tuple[int, ...] = ()  # text before the action
    partial: bool = False  # True if more of the answer follows, unless its frame is dropped

    @property
    def values(self) -> np.ndarray:
        """The first action, float64 [dims]."""
        return self.actions[0]


@dataclass(frozen=True)
class Drop:
    """A frame that ended without an action."""

    observation: Observation
    reason: DropReason
    detail: str = ""


Outcome = Action | Drop


@dataclass
class DropCounter:
    """Numbers of dropped frames by reason. Every reason is always present, so that plots have no gaps."""

    counts: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DropReason, 0))

    def add(self, reason: DropReason) -> None:
        self.counts[reason] += 1

    def by_name(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.counts.items()}


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

    def __init__(self, codec: "Codec", answers: int, step_s: float) -> None:
        if answers > 1 and codec.horizon < 2:
            raise UserError(
                "decode.ensemble needs a policy that answers with several actions; this one gives a single action: set "
                "it to 0"
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
        """Sets the gripper to fully open or closed: between them it holds nothing."""
        if self._gripper is not None:
            column, low, high = self._gripper
            actions[:, column] = np.where(actions[:, column] > (low + high) / 2, high, low)
        return actions
