# SPDX-License-Identifier: Apache-2.0
"""How a frame ends: in an action, or dropped for a reason; and the average of actions for the same time."""

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
    from specvla_ros.models.codecs.codec import Codec  # torch comes with it

_DAY_S = 86_400.0
_OLDER = 0.5
_GRIPPER = ACTION_NAMES[-1]


class DropReason(str, Enum):
    """Every reason for which a frame can end without an action."""

    BAD_IMAGE = "bad_image"  # size 0, wrong step, unknown encoding, undecodable bytes
    BAD_STAMP = "bad_stamp"  # stamp 0, negative, nanoseconds out of range, too far in the future
    INCOMPLETE = "incomplete"  # another camera's image or the robot's state of that moment did not come
    OUT_OF_ORDER = "out_of_order"  # not newer than the last frame taken
    NO_INSTRUCTION = "no_instruction"  # nothing asked for yet
    TOO_MANY_STREAMS = "too_many_streams"  # of another robot than those that the engine has slots for
    PAUSED = "paused"  # it came while the policy was told to pause
    BAD_INSTRUCTION = "bad_instruction"  # empty, or longer than a slot holds
    STALE = "stale"  # older than the staleness limit before it was begun
    TOO_OLD = "too_old"  # older than that limit when its action was ready
    SUPERSEDED = "superseded"  # a newer frame came before this one was admitted
    OVERTAKEN = "overtaken"  # a newer request finished first, or is as far
    EPOCH_CHANGED = "epoch_changed"  # new instruction, reset, deactivation or clock jump
    MODE_CHANGED = "mode_changed"  # in flight when the engine was told to decode otherwise
    NOT_AN_ACTION = "not_an_action"  # the policy emitted a token that is no action token
    BROKEN_OFF = "broken_off"  # likewise, after the first actions of the answer were handed out
    NOT_FINITE = "not_finite"  # NaN or infinity in logits or action
    ENGINE_FAULT = "engine_fault"  # an exception inside a tick


@dataclass(frozen=True)
class Freshness:
    """Which stamps an image may have: as it comes, when it begins, when its action is ready and when that goes out."""

    max_age_s: float  # limits the age; 0: not
    max_future_s: float = math.inf  # how far the stamp may lie ahead of the clock

    def problem(
        self, stamp_ns: int, now_ns: int, too_old: DropReason = DropReason.STALE
    ) -> tuple[DropReason, str] | None:
        """Why an image must not be answered, or an answer must not go out; None: it may."""
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
        f": {abs(age_s) / _DAY_S:.0f} days apart are two different clocks; for a recording or a simulator "
        "start the node with use_sim_time:=true and let the player publish /clock"
    )


@dataclass(frozen=True)
class StageTimings:
    """Seconds that one request spent in each stage. Every tick is booked whole to the stage it served."""

    wait_s: float = 0.0  # receipt to admission; images are resized and normalised meanwhile
    vision_s: float = 0.0  # vision tower, projector, prompt embeddings
    prefill_s: float = 0.0  # forwards with this request's prompt
    decode_s: float = 0.0  # forwards with this request's action tokens


@dataclass(frozen=True)
class DecodeRecord:
    """How one action was decoded; the engine-side half of DecodeStats.msg, which explains the fields."""

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
        """Packed forwards that carried the request, prefill included."""
        return len(self.tokens_per_forward)

    @property
    def tau(self) -> float:
        """Tokens committed per verification forward; 0 when there was none."""
        if not self.accept_lengths:
            return 0.0
        verified = self.tokens_per_forward[-len(self.accept_lengths) :]
        return sum(verified) / len(verified)


@dataclass(frozen=True)
class Action:
    """The answer to one observation, whose stamp travels with it, or its first actions while the rest is decoded."""

    observation: Observation
    names: tuple[str, ...]  # one per dimension
    actions: np.ndarray  # float64 [horizon, dims], un-normalised; displacements per `dt_s` of the training data
    tokens: tuple[int, ...]  # the action tokens, one per value for bins
    timings: StageTimings
    record: DecodeRecord
    finished_ns: int  # `time.monotonic_ns()` when the last token was committed
    dt_s: float | None = None  # seconds that one action takes; None where the checkpoint does not say
    text_tokens: tuple[int, ...] = ()  # the text that the policy wrote before its action
    partial: bool = False  # whether more of the answer is to come, or nothing where its frame is dropped

    @property
    def values(self) -> np.ndarray:
        """float64 [dims], the first action."""
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
    """Frames dropped, by reason. Every reason is always there, so that a plot of the counts has no gaps."""

    counts: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DropReason, 0))

    def add(self, reason: DropReason) -> None:
        self.counts[reason] += 1

    def by_name(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.counts.items()}


class ChunkEnsemble:
    """Averages the chunks of actions that several answers of a robot's instruction epoch give for the same time.

    As VLA-0's evaluation does it (NVlabs/vla0, `--ensemble_prediction`): the newest answer counts fully, each of those
    before it half, whatever their age; the gripper then goes to the nearer end of its range. There every answer is one
    action after the one before; here the images' stamps say how many actions lie between them.

    Args:
        answers: that are averaged, the newest included; 0 or 1: none.
        step_s: seconds that an action takes; 0: every answer is one action after the one before.

    Raises UserError: the policy's answers hold one action each, which never overlap.
    """

    def __init__(self, codec: "Codec", answers: int, step_s: float) -> None:
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
