# SPDX-License-Identifier: Apache-2.0
"""The plans of the laboratory's commands; their parameters are the commands' options. Needs no torch."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.settings.parameter import parameter
from specvla_ros.speculation.settings import Tolerance

CODEC_CHOICES = ("bins", "digits", "fast")
_TASKS = "A task's name; again for more. Default: all."
_SEED = "Of the first episode's start; the others follow."
ROBOTS = "table, our own; panda or ur5e: pip install --no-deps -r requirements/robots.txt"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where jobs run; see `run_jobs`."""

    workers: int = parameter(0, "Worker processes; 0: this one alone.", minimum=0)
    ray: str = parameter(
        "",
        "Work on a Ray cluster: its HOST:PORT; auto: that of this machine; local: one is started here. --workers is "
        "then the number of actors, 0: as many as there is room for.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineSpread(Spread):
    """Where jobs run that decode."""

    per_engine: int = parameter(
        0,
        "Workers whose frames one engine packs into its forwards, with the model once in memory; 0: each worker has "
        "its own.",
        minimum=0,
    )


THIS_PROCESS = EngineSpread()


@dataclass(frozen=True)
class SimulatePlan(EngineSpread):
    """The episodes to run, and where."""

    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    episodes: int = parameter(20, "Per task.", minimum=1)
    first_seed: int = parameter(0, _SEED, minimum=0, name="seed")  # the same makes two settings comparable in pairs
    films: int = parameter(1, "Episodes per task that are filmed.", minimum=0)


@dataclass(frozen=True)
class QualifyPlan(Spread):
    """The pairs to draw, and where they run."""

    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    pairs: int = parameter(400, "Pairs of episodes at most, per candidate.", minimum=1)
    first_seed: int = parameter(0, _SEED, minimum=0, name="seed")  # of the drawing of tasks too
    batch: int = 20  # pairs between two looks at the evidence; with several workers it is their work


@dataclass(frozen=True)
class Criterion:
    """The criterion by which a candidate qualifies.

    `success` is there so that a policy that never works does not qualify. `alpha` holds whenever one stops: it bounds
    both qualifying a candidate that does not meet the other two, and refusing one that does.
    """

    margin: float = parameter(0.1, "Share by which success may be below lockstep's.", minimum=0.01, maximum=0.99)
    success: float = parameter(0.5, "And must be above this share of all starts.", minimum=0.01, maximum=0.99)
    alpha: float = parameter(0.05, "Probability of a wrong verdict.", minimum=1e-6, maximum=0.5)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 1:
                raise UserError(f"{name} is {value:g}, but it must lie between 0 and 1")


@dataclass(frozen=True)
class Limits:
    """What a calibrated setting may lose against plain decoding."""

    # by the lower end of the paired interval
    loss_points: float = parameter(2.0, "Success that may be lost, in points, at 95 % confidence.", name="max_loss")
    p95_mm: float = parameter(5.0, "Deviation from plain decoding, 95th percentile, in mm.", name="max_mm")
    p95_deg: float = parameter(3.0, "The same of the rotation, in degrees.", name="max_deg")
    gripper_share: float = 0.01  # share of actions with another gripper command

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0:
                raise UserError(f"the limit {name} must be 0 or more, got {value}")


@dataclass(frozen=True)
class CalibratePlan:
    """The settings to try, and what decides between them."""

    tolerances: tuple[Tolerance, ...]  # to try beside strict acceptance
    nodes: tuple[int, ...]  # sizes of the draft tree to try
    limits: Limits = field(default_factory=Limits)
    episodes: SimulatePlan | None = None  # that success is judged by; None: deviation alone decides
    emulate: str = ""  # the device whose stage times are taken in place of those measured; empty: none


@dataclass(frozen=True)
class Thresholds:
    """Limits of a replay; None: not checked."""

    max_p95_latency_s: float | None = parameter(None, "Limit: 95 % of the frames answer in time.")
    max_drop_fraction: float | None = parameter(None, "Limit: frames without an action, 0 to 1.")
    # mean over frames and dimensions, so that metres, radians and gripper weigh the same
    max_bin_distance: float | None = parameter(
        None, "Limit: mean distance to the recorded action, in bins: 255 to a dimension."
    )
    min_action_rate_hz: float | None = parameter(None, "Limit: actions per second of decoding.")

    def __post_init__(self) -> None:
        for each in fields(self):
            limit = getattr(self, each.name)
            if limit is not None and not (math.isfinite(limit) and limit >= 0):
                raise UserError(f"the limit {each.name} must be a number from 0 on, got {limit}")
        if self.max_drop_fraction is not None and self.max_drop_fraction > 1:
            raise UserError(f"the limit max_drop_fraction is a fraction from 0 to 1, got {self.max_drop_fraction}")


@dataclass(frozen=True)
class CollectPlan(Spread):
    """The demonstrations to record, and where."""

    episodes: int = parameter(100, "Per task and robot.", minimum=1)
    robots: tuple[str, ...] = parameter((), f"An arm; again for more. {ROBOTS}. Default: table.", name="robot")
    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    # 1 as the shipped policy was trained with
    noise: float = parameter(1.0, "Injected into what the expert does (DART); 0: none.", minimum=0.0)
    policy: Path | None = parameter(
        None, "Checkpoint that acts while the expert says what it should have done (DAgger)."
    )
    first_seed: int | None = parameter(None, "Of the first start; default: far from those of `simulate`.", name="seed")
    all_sensors: bool = parameter(False, "Record the wrist camera and the joints' state too.")


@dataclass(frozen=True)
class NanoShape:
    """Sizes of the nano policy; the defaults are those of the one that is shipped."""

    image_size: int = 112  # pixels, a multiple of the patch size
    patch_size: int = 14  # pixels
    vision_dim: int = 128  # channels of the SigLIP-like tower
    vision_depth: int = 5  # blocks of the tower; as in OpenVLA the last one is not computed
    hidden_size: int = 192  # of the Llama decoder
    layers: int = 4  # of the Llama decoder
    head_dim: int = 32  # of the tower's and the decoder's attention


@dataclass(frozen=True)
class PolicyTraining:
    """How to train a policy."""

    steps: int = parameter(10000, "Optimiser steps.", minimum=1)
    batch_size: int = parameter(32, "Images, over all processes.", minimum=1)
    learning_rate: float = parameter(1.5e-3, "At its peak.")  # after a warm-up; it falls to 0 along a cosine
    seed: int = parameter(0, "Of weights, order and augmentation.")
    # each validation also saves the state to resume from
    validate_every: int = parameter(500, "Steps between validations.", minimum=1)
    unnorm_key: str = parameter("specvla_table", "Name of the action statistics.")
    init: str = parameter("", "Checkpoint to go on from, with its words and statistics.")
    codec: str = parameter("bins", "How it writes its actions: bins (a single action), digits or fast (chunks).")
    horizon: int = parameter(8, "Actions of a chunk.", minimum=1)
    topics: TopicChoice = field(default_factory=TopicChoice)  # of the bags
    shape: NanoShape = field(default_factory=NanoShape)

    def __post_init__(self) -> None:
        check_settings(self, ("steps", "batch_size", "validate_every", "horizon"))
        if self.codec not in CODEC_CHOICES:
            raise UserError(f"codec '{self.codec}' cannot be trained; choose one of {', '.join(CODEC_CHOICES)}")


@dataclass(frozen=True)
class DraftTraining:
    """How to train a draft head."""

    epochs: int = parameter(20, "Passes over the features.", minimum=1)
    batch_size: int = parameter(16, "Answers, over all processes.", minimum=1)
    learning_rate: float = parameter(5e-5, "At its peak; 5e-5 suits 7 B targets.")  # after a warm-up; it falls to 0
    # training-time test; 1 as in EAGLE and Spec-VLA
    own_steps: int = parameter(
        1, "Tokens deep that the head learns from its own features; 1: from the target's.", minimum=1
    )
    parallel_depth: int = parameter(
        1, "Tokens drafted in one forward (P-EAGLE); 1: a tree grows level by level.", minimum=1
    )
    seed: int = parameter(0, "Of weights, order, noise and what is held out.", minimum=0)

    def __post_init__(self) -> None:
        from specvla_kernels.layout import MAX_TREE_NODES

        check_settings(self, ("epochs", "batch_size", "own_steps", "parallel_depth"))
        if self.own_steps > 1 and self.parallel_depth > 1:
            raise UserError("--own-steps is for heads that grow trees level by level: leave it out for a parallel one")
        if self.parallel_depth >= MAX_TREE_NODES:
            raise UserError(f"--parallel-depth {self.parallel_depth}: a tree is {MAX_TREE_NODES - 1} deep at most")


def check_settings(settings: Any, positive: tuple[str, ...]) -> None:
    """Raises a UserError for a setting out of range; those named in `positive` must be at least 1."""
    for name in positive:
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    if not 0 < settings.learning_rate < 1:
        raise UserError(f"--learning-rate must lie between 0 and 1, got {settings.learning_rate}")


@dataclass(frozen=True)
class FleetPlan:
    """How a new draft head is made, and what it must give."""

    training: DraftTraining = field(default_factory=DraftTraining)
    frames: int = parameter(20000, "Images at most that the target is asked about.", minimum=1)
    max_bytes: float = 20e9  # of their features on disk, while the head is trained
    held_out: float = parameter(0.2, "Share of the bags that heads are judged by.")  # at least one
    # losslessness is judged by all held-out frames, forwards and calibration by these
    judged_frames: int = parameter(300, "Held-out images at most that forwards are counted on.", minimum=1)
    min_gain: float = parameter(0.01, "Share of the forwards per action that it must save against the one in use.")
    calibrate: CalibratePlan | None = None  # what is tried with the new head; None: nothing

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1 or not 0 <= self.min_gain < 1:
            raise UserError("--held-out and --min-gain are shares: more than 0, or 0 on, and less than 1")
