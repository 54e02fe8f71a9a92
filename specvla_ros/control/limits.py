# SPDX-License-Identifier: Apache-2.0
"""Limits of tool and joint motion, and the source of the measured tool pose; shared by driver and guard."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from specvla_ros.control.convention import NO_NAMES
from specvla_ros.control.joint_parts import repeated
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError, together
from specvla_ros.settings.parameter import check, parameter

_SIZES = tuple(f"{axes}_{what}" for what in ("speed", "acceleration", "jerk") for axes in ("linear", "angular"))
_NO_CORNER = (0.0, 0.0, 0.0)
_NO_NUMBERS = (0.0,)
_START_OUTSIDE_M = 0.005  # of the workspace, that a tool may be at the start
_RAMP_S = 0.04  # to a joint's max acceleration if its jerk is not given; as long as with a tool's limits


def _largest(what: str, unit: str, maximum: float) -> float:
    size: float = parameter(0.0, f"Maximum {what}; 0: not set.", unit=unit, minimum=0.0, maximum=maximum, basic=True)
    return size


@dataclass(frozen=True)
class Limits:
    """Limits of the tool's motion in the base frame. None has a default: the user must choose each one."""

    ROS_PREFIX = "limits."

    linear_speed: float = _largest("speed of the tool", "m/s", 10.0)
    angular_speed: float = _largest("speed of rotation of the tool", "rad/s", 30.0)
    linear_acceleration: float = _largest("acceleration of the tool", "m/s²", 100.0)
    angular_acceleration: float = _largest("acceleration of the tool's rotation", "rad/s²", 300.0)
    linear_jerk: float = _largest("jerk of the tool", "m/s³", 10_000.0)
    angular_jerk: float = _largest("jerk of the tool's rotation", "rad/s³", 30_000.0)
    workspace_min: tuple[float, ...] = parameter(
        _NO_CORNER, "Minimum x y z of the tool in the base frame; both corners zero: not set.", unit="m", basic=True
    )
    workspace_max: tuple[float, ...] = parameter(
        _NO_CORNER, "Maximum x y z of the tool in the base frame.", unit="m", basic=True
    )

    def __post_init__(self) -> None:
        check(self)
        together(*(partial(self._check_corner, name) for name in ("workspace_min", "workspace_max")))
        if self._has_workspace and not (np.array(self.workspace_min) < np.array(self.workspace_max)).all():
            raise UserError(
                f"limits.workspace_min {list(self.workspace_min)} must be smaller than limits.workspace_max "
                f"{list(self.workspace_max)} in x, y and z"
            )

    def _check_corner(self, name: str) -> None:
        if len(getattr(self, name)) != 3:
            raise UserError(f"limits.{name} must have 3 numbers, x y z in metres, got {len(getattr(self, name))}")

    @property
    def missing(self) -> tuple[str, ...]:
        """Full names of the limits that are not set."""
        unset = [f"limits.{name}" for name in _SIZES if getattr(self, name) == 0.0]
        return (*unset, *(() if self._has_workspace else ("limits.workspace_min", "limits.workspace_max")))

    @property
    def stop_s(self) -> float:
        """Maximum time in seconds to stop from full speed within these limits, over translation and rotation."""
        return max(
            braking_s(self.linear_speed, self.linear_acceleration, self.linear_jerk),
            braking_s(self.angular_speed, self.angular_acceleration, self.angular_jerk),
        )

    def require(self, what_for: str) -> None:
        """Raises UserError with the names of missing limits; `what_for`: what needs them, such as "output: twist"."""
        if self.missing:
            raise UserError(f"{what_for} needs limits, which have no defaults; set {', '.join(self.missing)}")

    def clamped(self, pose: Pose) -> Pose:
        """The nearest pose within the workspace, with the same rotation."""
        return Pose(np.clip(pose.position, self.workspace_min, self.workspace_max), pose.rotation)

    def outside_m(self, position: np.ndarray) -> float:
        """Distance of a position, float64 [3], outside the workspace on its worst axis; 0 inside, infinite for NaN."""
        low, high = np.array(self.workspace_min) - position, position - np.array(self.workspace_max)
        worst = float(np.max([low, high]))
        return np.inf if np.isnan(worst) else max(0.0, worst)

    def start_problem(self, position: np.ndarray, source: str = "") -> str:
        """Describes why no motion may start with the tool at a position, float64 [3]; empty: it may.

        `source`: how the position is known, as an addition to the sentence.
        """
        if self.outside_m(position) <= _START_OUTSIDE_M:
            return ""
        return (
            f"the tool is at {position.round(3).tolist()}{source}, outside the workspace {list(self.workspace_min)} to "
            f"{list(self.workspace_max)}; bring it inside by other means"
        )

    def widened(self, here: np.ndarray, edge_m: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """The workspace's corners, float64 [3] each, widened to the tool: it may move back, but not further out."""
        low, high = np.array(self.workspace_min) - edge_m, np.array(self.workspace_max) + edge_m
        return np.minimum(low, here), np.maximum(high, here)

    @property
    def _has_workspace(self) -> bool:
        return self.workspace_min != _NO_CORNER or self.workspace_max != _NO_CORNER


def braking_s(speed: float, acceleration: float, jerk: float) -> float:
    """Time in seconds to stop from full speed during full acceleration, along one axis of a plan; 0: not limited."""
    if not (speed and acceleration and jerk):
        return 0.0
    ramp_s = acceleration / jerk
    # The acceleration falls to zero first; then a trapezoid, or a triangle if the speed is too small for one.
    braking_s = speed / acceleration + ramp_s if speed * jerk > acceleration**2 else 2 * (speed / jerk) ** 0.5
    return ramp_s + braking_s


@dataclass(frozen=True)
class Joints:
    """An arm's joints and their limits, in the order of the commands, for outputs that command them."""

    ROS_PREFIX = "joints."

    names: tuple[str, ...] = parameter(NO_NAMES, "Names of the arm's joints, in the order of the commands.")
    model: str = parameter("", "The robot's MJCF or URDF file, whose world frame is base_frame; for joint outputs.")
    model_names: tuple[str, ...] = parameter(
        NO_NAMES, "Names of the same joints in the model, if they differ; empty: joints.names."
    )
    tool: str = parameter("", "Name of the tool's site or body in the model: the point whose pose is measured.")
    position_min: tuple[float, ...] = parameter(
        _NO_NUMBERS,
        "Minimum position of each joint; if neither position_min nor position_max is given, the model's ranges apply.",
        unit="rad or m",
    )
    position_max: tuple[float, ...] = parameter(_NO_NUMBERS, "Maximum position of each joint.", unit="rad or m")
    max_speed: tuple[float, ...] = parameter(
        _NO_NUMBERS,
        "Maximum speed of each joint, or one value for all; 0: the URDF's <limit velocity>.",
        unit="rad/s or m/s",
        minimum=0.0,
    )
    max_acceleration: tuple[float, ...] = parameter(
        _NO_NUMBERS,
        "Maximum acceleration of each joint, or one value for all; 0: not set, and the driver then has no limit.",
        unit="rad/s² or m/s²",
        minimum=0.0,
    )
    max_jerk: tuple[float, ...] = parameter(
        _NO_NUMBERS,
        "Maximum jerk of each joint in the driver, or one value for all; 0: reaches max_acceleration in 0.04 s.",
        unit="rad/s³ or m/s³",
        minimum=0.0,
    )
    chunk_s: float = parameter(
        0.5,
        "output joint_trajectory_chunk: the longest motion that is sent ahead, its end at rest included. The arm "
        "finishes it if everything else dies.",
        unit="s",
        minimum=0.1,
        maximum=2.0,
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("names", "model_names"):
            if twice := repeated(getattr(self, name)):
                raise UserError(f"joints.{name} has {twice} more than once: give each joint of the arm once")
        if self.model_names != NO_NAMES and len(self.model_names) != len(self.names):
            raise UserError(
                f"joints.model_names has {len(self.model_names)} names for the {len(self.names)} of joints.names; "
                "give the model's name of each, in the same order, or none"
            )

    @property
    def in_model(self) -> tuple[str, ...]:
        """The joints' names in the model."""
        return self.names if self.model_names == NO_NAMES else self.model_names

    @property
    def has_positions(self) -> bool:
        return self.position_min != _NO_NUMBERS or self.position_max != _NO_NUMBERS

    def require_positions(self, what_for: str) -> None:
        """Raises UserError if the positions are missing or invalid."""
        self._require_one_each(what_for, ("position_min", "position_max"))
        wrong = np.array(self.position_min) >= np.array(self.position_max)
        if wrong.any():
            names = ", ".join(np.array(self.names)[wrong])
            raise UserError(
                f"joints.position_min must be smaller than joints.position_max for every joint, but is not for {names}"
                "; if neither is given, the ranges of joints.model are used"
            )

    def require_bounds(self, what_for: str) -> None:
        """Raises UserError if given accelerations or jerks are neither one per joint nor one for all."""
        self._require_one_each(what_for, ("max_acceleration", "max_jerk"), one_for_all=True)
        if any(self.max_acceleration) and min(self.max_acceleration) <= 0:
            raise UserError("joints.max_acceleration must be larger than 0 for every joint, or 0 for all")

    def _require_one_each(self, what_for: str, names: Sequence[str], *, one_for_all: bool = False) -> None:
        count = len(self.names)
        for name in names:
            given = len(getattr(self, name))
            if given != count and not (one_for_all and given == 1):
                words = f"{count} numbers, one for each of joints.names" + (", or one for all" if one_for_all else "")
                instead = "" if one_for_all else "; or set joints.model to an MJCF or URDF, whose ranges are then used"
                raise UserError(f"{what_for} needs joints.{name}: {words}; got {given}{instead}")

    @property
    def speeds(self) -> np.ndarray:  # float64 [joints]
        return np.broadcast_to(self.max_speed, len(self.names)).astype(float)

    @property
    def accelerations(self) -> np.ndarray:  # float64 [joints]
        return np.broadcast_to(self.max_acceleration, len(self.names)).astype(float)

    @property
    def jerks(self) -> np.ndarray:  # float64 [joints]
        given = np.broadcast_to(self.max_jerk, len(self.names)).astype(float)
        return np.where(given > 0, given, self.accelerations / _RAMP_S)


@dataclass(frozen=True)
class JointLimits(Joints):
    """Joint limits that the guard enforces; required if joints are commanded."""

    def require(self, what_for: str) -> None:
        """Raises UserError for missing or invalid settings."""
        if not all(self.names):
            raise UserError(f"{what_for} needs joints.names: the arm's joints, as in joint_states")
        speed = "has no default; a URDF in joints.model with <limit velocity> for every joint gives it"
        acceleration = "no robot description contains: take it from the arm's data sheet or MoveIt's joint_limits.yaml"
        together(
            partial(self.require_positions, what_for),
            partial(self._require_positive, what_for, "max_speed", speed),
            partial(self._require_positive, what_for, "max_acceleration", acceleration),
        )

    def _require_positive(self, what_for: str, name: str, words: str) -> None:
        self._require_one_each(what_for, (name,), one_for_all=True)
        if min(getattr(self, name)) <= 0:
            raise UserError(f"{what_for} needs joints.{name}, which {words}")


@dataclass(frozen=True)
class ToolSource:
    """Source of the tool's measured pose."""

    ROS_PREFIX = "tool_"

    pose_source: str = parameter(
        "topic",
        "Source of the tool's measured pose: the topic tool_pose, tf, or joint_states by forward kinematics.",
        choices=("topic", "tf", "joint_states"),
        basic=True,
    )
    frame: str = parameter("tool0", "The tool's frame, for tool_pose_source: tf.", basic=True)

    def __post_init__(self) -> None:
        check(self)

    @property
    def from_joints(self) -> bool:
        return self.pose_source == "joint_states"

    def require(self, joints: Joints) -> None:
        """Raises UserError if it needs kinematics that are not set."""
        if self.from_joints and not (joints.model and joints.tool):
            raise UserError(
                "tool_pose_source: joint_states needs the robot's kinematics; set joints.model, joints.names and "
                "joints.tool"
            )
