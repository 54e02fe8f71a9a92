# SPDX-License-Identifier: Apache-2.0
"""The outcome of a frame, an action or a drop with its reason."""

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from specvla_ros.errors import SYNCHRONISE
from specvla_ros.models.observation import Observation

_DAY_S = 86_400.0


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


BROKEN = (DropReason.NOT_AN_ACTION, DropReason.BROKEN_OFF, DropReason.NOT_FINITE)
"""Reasons of answers that are not actions."""


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
            remedy = _other_clock(age_s) or f": {SYNCHRONISE}"
            return DropReason.BAD_STAMP, f"stamped {-age_s:.3f} s ahead of the node's clock{remedy}"
        if self.max_age_s and age_s > self.max_age_s:
            late = f"; images are delayed, or the clocks differ: {SYNCHRONISE}" if too_old is DropReason.STALE else ""
            return too_old, f"{age_s:.3f} s old, the limit is {self.max_age_s:g} s{_other_clock(age_s) or late}"
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
    text_ns: int = 0  # stamp of the image that the text was written from; older with decode.think_every_s
    partial: bool = False  # True if more of the answer follows, unless its frame is dropped
    given: int = 0  # number of its first actions that are those of the answer before, by decode.commit

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
