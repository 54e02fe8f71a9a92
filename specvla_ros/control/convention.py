# SPDX-License-Identifier: Apache-2.0
"""Conventions of action values: known ones by training dataset, overridden by the user's settings."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from specvla_ros.control.joint_parts import repeated
from specvla_ros.control.motor_calibration import radians_per_percent
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter

AUTO, AS_PUBLISHED = "auto", "as_published"
NO_NAMES = ("",)
_GRIPPER_UNIT = 0.01  # of LeRobot's grippers, 0 to 100

# Columns of a tool action's values, in order; a robot without a gripper has the first six.
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
GRIPPER = ACTION_NAMES[-1]


def default_names(columns: int) -> tuple[str, ...]:
    """Names of an action's columns if nothing names them: of a tool action if there are seven, else dim_0 …."""
    return ACTION_NAMES if columns == len(ACTION_NAMES) else tuple(f"dim_{i}" for i in range(columns))


class Reference(str, Enum):
    """Reference of an action's pose."""

    DELTA = "delta"  # relative to the tool's pose, or the joints' positions, at the image's stamp
    ABSOLUTE = "absolute"  # relative to the origin of the base frame, or the joints' zeros


class ActionFrame(str, Enum):
    """Frame in which a displacement is given; or joints, whose positions are given in place of a tool's pose."""

    BASE = "base"
    TOOL = "tool"
    JOINTS = "joints"


class Rotation(str, Enum):
    """Encoding of a rotation as three numbers, in radians."""

    ROTATION_VECTOR = "rotation_vector"  # axis times angle
    RPY = "rpy"  # roll, pitch, yaw about the fixed axes x, y, z, in this order: Rz(yaw) Ry(pitch) Rx(roll)


class JointUnit(str, Enum):
    """Unit of joint positions in the training data; published positions are in radians, or metres."""

    RAD = "rad"  # or metres; a gripper among them is 0 to 1
    # As LeRobot's motors give them; a gripper among them is 0 to 100.
    DEG = "deg"  # with use_degrees
    PERCENT = "percent"  # without: -100 to 100 of the range in the calibration file


class GripperSign(str, Enum):
    """Meaning of the gripper value."""

    OPEN_HIGH = "open_high"  # larger values open: 1 open, 0 closed in OpenVLA's data
    CLOSE_HIGH = "close_high"  # larger values close
    NONE = "none"  # there is no gripper


@dataclass(frozen=True)
class ActionConvention:
    """Interpretation of an action's values.

    The displacements of a chunk of tool actions add up. Those of joints all count from the joints' positions at the
    image's stamp, as openpi's policies give them.
    """

    dt_s: float  # duration of a displacement, and time between two actions of a chunk: the data's period
    reference: Reference = Reference.DELTA  # of the pose
    frame: ActionFrame = ActionFrame.BASE  # of a displacement
    rotation: Rotation = Rotation.ROTATION_VECTOR  # encoding of rotations
    gripper: GripperSign = GripperSign.OPEN_HIGH  # meaning of the last value
    translation_unit_m: float = 1.0  # metres per unit of x, y, z; published values are in metres
    rotation_unit_rad: float = 1.0  # radians per unit of roll, pitch, yaw; published values are in radians
    joints: tuple[str, ...] = ()  # names of the columns, in the policy's order; empty: ACTION_NAMES
    joint_units: tuple[float, ...] = ()  # radians, or a gripper's openness, per unit of each of `joints`; empty: 1

    def scales(self, names: Sequence[str]) -> np.ndarray:
        """Metres or radians per unit of each column, float64 [columns]."""
        if self.joint_units:
            return np.array(self.joint_units)
        unit = dict.fromkeys(ACTION_NAMES[:3], self.translation_unit_m)
        unit |= dict.fromkeys(ACTION_NAMES[3:6], self.rotation_unit_rad)
        return np.array([1.0 if name in self.joints else unit.get(name, 1.0) for name in names])


def is_gripper(name: str) -> bool:
    """True for the name of a gripper's value: `gripper`, or an arm's, such as `left_gripper`."""
    return name == GRIPPER or name.endswith(f"_{GRIPPER}")


@dataclass(frozen=True)
class StampedAction:
    """An action or a chunk of actions, as received."""

    stamp_s: float  # stamp of the image, seconds on the robot's clock
    # float64 [horizon, 6 or 7]: translation in metres, rotation in radians, gripper; or [horizon, joints] by `names`
    values: np.ndarray
    convention: ActionConvention  # interpretation of the values
    partial: bool = False  # true if a longer chunk with the same stamp and first rows follows
    names: tuple[str, ...] = ACTION_NAMES  # of joint actions: the joints, and perhaps GRIPPER

    def of_arm(self, prefix: str, joints: Collection[str]) -> "StampedAction":
        """The values of one of several arms: those whose names begin with `prefix`, as LeRobot names them.

        A name of `joints` is kept; others lose the prefix. Raises ValueError if no name begins so.
        """
        columns = [column for column, name in enumerate(self.names) if name.startswith(prefix)]
        if not columns:
            given = ", ".join(self.names)
            raise ValueError(f"none of its values is of this arm: action_prefix is {prefix}, and it has {given}")
        mine = [self.names[column] for column in columns]
        names = tuple(name if name in joints else name.removeprefix(prefix) for name in mine)
        return replace(self, values=self.values[:, columns], names=names)


def _choices(kind: Any) -> tuple[str, ...]:
    return (AUTO, *(each.value for each in kind))


@dataclass(frozen=True)
class ConventionSettings:
    """The user's action conventions; unset ones are looked up by the dataset's name."""

    ROS_PREFIX = "action."

    dt: float = parameter(
        0.0,
        "Duration of a displacement: the training data's period; 0: from the checkpoint or the known dataset.",
        unit="s",
        minimum=0.0,
        maximum=10.0,
    )
    reference: str = parameter(
        AUTO,
        "Reference of an action's pose: the pose of tool or joints at the image's stamp (delta), or the base frame or "
        "the joints' zeros (absolute); auto: as in the known dataset.",
        choices=_choices(Reference),
    )
    frame: str = parameter(
        AUTO,
        "Frame in which a displacement is given, or joints for positions of action.joints; auto: as in the known "
        "dataset.",
        choices=_choices(ActionFrame),
    )
    rotation: str = parameter(
        AUTO,
        "Encoding of rotations: axis times angle, or roll, pitch, yaw about the fixed axes; auto: as in the known "
        "dataset.",
        choices=_choices(Rotation),
    )
    gripper: str = parameter(
        AUTO,
        "Whether a larger value opens or closes the gripper; auto: as in the known dataset.",
        choices=_choices(GripperSign),
    )
    translation_unit: float = parameter(
        0.0,
        "Metres per unit of x, y, z in the checkpoint's statistics; 0: as in the known dataset.",
        unit="m",
        minimum=0.0,
        maximum=100.0,
    )
    rotation_unit: float = parameter(
        0.0,
        "Radians per unit of roll, pitch, yaw in the checkpoint's statistics; 0: as in the known dataset.",
        unit="rad",
        minimum=0.0,
        maximum=100.0,
    )

    joints: tuple[str, ...] = parameter(
        NO_NAMES,
        "Names of the joints that an action positions, in the order of its values, as the driver's joints.names call "
        "them; gripper, or left_gripper and right_gripper of two arms, opens and closes a gripper. Empty: from the "
        "checkpoint, else actions are of the tool.",
    )
    joint_unit: str = parameter(
        AUTO,
        "Unit of joint positions in the training data: rad (or metres), with a gripper from 0 to 1; or, as LeRobot's "
        "motors give them, deg or percent (-100 to 100 of the calibrated range), with a gripper from 0 to 100. Without "
        "a known dataset it must be given.",
        choices=_choices(JointUnit),
    )
    calibration: str = parameter("", "Calibration file of LeRobot's motors, for a unit of percent.")
    state_unit: str = parameter(
        AUTO,
        "Unit of the joints in the state that the policy was trained with; those on topic `state`, in radians, are "
        "converted to it: deg or percent, as in action.joint_unit. as_published: the topic has the right unit. Must be "
        "given for a policy that reads a state and whose actions are in deg or percent.",
        choices=(AUTO, AS_PUBLISHED, JointUnit.DEG.value, JointUnit.PERCENT.value),
    )
    state_gripper: tuple[float, ...] = parameter(
        (0.0, 0.0),
        "Positions of the joint called gripper on topic `state`, closed and open, which become 0 and 100 with "
        "action.state_unit.",
    )

    def __post_init__(self) -> None:
        check(self)
        if twice := repeated(self.joints):
            raise UserError(f"action.joints names {twice} more than once: give each joint once, in order")

    def convention(
        self, unnorm_key: str, dt_s: float | None = None, columns: Sequence[str] | None = None
    ) -> ActionConvention:
        """The action convention of a policy trained on a dataset.

        Args:
            dt_s: the period given by its checkpoint.
            columns: the policy's own names of its action's values, which say how many there are.

        Raises:
            UserError: neither the settings nor a source give every value; names the parameters to set.
        """
        dataset, known_joints = known_dataset(unnorm_key), positions_joints(unnorm_key) and self.frame == AUTO
        if known_joints or self.frame == ActionFrame.JOINTS.value or self.joints != NO_NAMES:
            return self._of_joints(unnorm_key, dt_s, columns)
        said: dict[str, Any] = {
            "dt_s": self.dt or dt_s,
            "reference": _said(Reference, self.reference),
            "frame": _said(ActionFrame, self.frame),
            "rotation": _said(Rotation, self.rotation),
            "gripper": _said(GripperSign, self.gripper),
            "translation_unit_m": self.translation_unit,
            "rotation_unit_rad": self.rotation_unit,
        }
        found: dict[str, Any] = {name: value or getattr(dataset, name, None) for name, value in said.items()}
        _require(found, unnorm_key)
        return ActionConvention(**found)

    def _of_joints(self, unnorm_key: str, dt_s: float | None, columns: Sequence[str] | None) -> ActionConvention:
        joints = self.joints
        if joints == NO_NAMES:
            joints = () if columns is None or tuple(columns) == default_names(len(columns)) else tuple(columns)
        found: dict[str, Any] = {
            "dt_s": self.dt or dt_s,
            "reference": _said(Reference, self.reference),
            "frame": _said(ActionFrame, self.frame),
            "gripper": _said(GripperSign, self.gripper) if any(map(is_gripper, joints)) else GripperSign.NONE,
            "joints": joints or None,
            "joint_unit": _said(JointUnit, self.joint_unit),
        }
        if positions_joints(unnorm_key):
            found = {name: value or getattr(known_dataset(unnorm_key), name, None) for name, value in found.items()}
        _require(found, unnorm_key)
        if found["frame"] is not ActionFrame.JOINTS:
            raise UserError(f"action.frame is {self.frame}, but action.joints names joints: set action.frame to joints")
        if columns is not None and len(columns) != len(joints):
            raise UserError(
                f"action.joints has {len(joints)} names, but the policy's actions have {len(columns)} values: "
                "name each, in the order of the training data"
            )
        return ActionConvention(joint_units=self._scales(found.pop("joint_unit"), joints), **found)

    def _scales(self, unit: JointUnit, joints: Sequence[str]) -> tuple[float, ...]:
        return () if unit is JointUnit.RAD else self.units(unit, joints, "action.joint_unit")

    def units(self, unit: JointUnit, joints: Sequence[str], what: str) -> tuple[float, ...]:
        """Radians, or a gripper's openness, per unit of each joint as LeRobot gives it.

        `what` names the parameter of the unit. Raises UserError for percent without a calibration.
        """
        turning = [name for name in joints if not is_gripper(name)]
        if unit is JointUnit.PERCENT and not self.calibration:
            raise UserError(
                f"{what} is percent, whose angle depends on each motor's calibration: set action.calibration "
                "to the robot's calibration file of LeRobot"
            )
        found = np.full(len(turning), math.pi / 180)
        if unit is JointUnit.PERCENT:
            found = radians_per_percent(Path(self.calibration).expanduser(), turning)
        units = dict(zip(turning, found.tolist(), strict=True))
        return tuple(units.get(name, _GRIPPER_UNIT) for name in joints)


def _require(found: Mapping[str, Any], unnorm_key: str) -> None:
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise UserError(
            f"the action convention of dataset '{unnorm_key}' is unknown, and a wrong guess moves the robot "
            f"wrongly; set {', '.join(_WHAT[name] for name in missing)}, each as -p action.dt:=0.2 or in a "
            "parameter file; see docs/reference/conventions.md"
        )


_WHAT = {
    "dt_s": "action.dt (seconds from one action of the training data to the next)",
    "reference": "action.reference (delta or absolute)",
    "frame": "action.frame (base or tool; joints for joint positions)",
    "rotation": "action.rotation (rotation_vector or rpy)",
    "gripper": "action.gripper (open_high, close_high or none)",
    "translation_unit_m": "action.translation_unit (1.0 if x, y, z are metres)",
    "joints": "action.joints (names of the joints, in the order of the action's values)",
    "joint_unit": "action.joint_unit (rad, deg or percent)",
    "rotation_unit_rad": "action.rotation_unit (1.0 if the rotation is in radians)",
}


def _said(kind: Any, value: str) -> Any:
    return None if value == AUTO else kind(value)


# Facts with their sources. A value without a source is None, and the user must set it.


@dataclass(frozen=True)
class Dataset:
    """Convention of a training dataset's actions, as OpenVLA's loader passes them on; see `ActionConvention`."""

    source: str  # references for these facts
    dt_s: float
    # OpenVLA accepts only datasets whose poses are displacements (oxe/materialize.py).
    reference: Reference = Reference.DELTA
    frame: ActionFrame | None = None
    rotation: Rotation | None = None
    gripper: GripperSign | None = None
    translation_unit_m: float | None = None
    rotation_unit_rad: float | None = None
    joint_unit: JointUnit | None = None  # of joint positions, whose names the checkpoint gives


def positions_joints(unnorm_key: str) -> bool:
    """True for a dataset whose actions are known to be positions of joints."""
    dataset = known_dataset(unnorm_key)
    return dataset is not None and dataset.frame is ActionFrame.JOINTS


def known_dataset(unnorm_key: str) -> Dataset | None:
    """The dataset of a norm_stats key; None if no source for it is known."""
    return DATASETS.get(unnorm_key.removesuffix("_no_noops"))


_BASE, _OPEN = ActionFrame.BASE, GripperSign.OPEN_HIGH
_TRANSFORMS = "openvla prismatic/vla/datasets/rlds/oxe/transforms.py"
_RATES = "RDT-1B configs/dataset_control_freq.json"
_SIMPLER = "SimplerEnv simpler_env/policies/openvla/openvla_model.py (fixed-axis angles, base-aligned)"


def _scaled(source: str, rate_hz: float, rotation: Rotation, unit_m: float = 1.0, unit_rad: float = 1.0) -> Dataset:
    """A dataset in the base frame; `unit_m`, `unit_rad`: metres and radians per unit."""
    return Dataset(source, 1 / rate_hz, Reference.DELTA, _BASE, rotation, _OPEN, unit_m, unit_rad)


def _rate(rate_hz: float, gripper: GripperSign | None = None, source: str = _RATES) -> Dataset:
    """A dataset with a known rate only, and the gripper sign of OpenVLA's loader."""
    return Dataset(f"{source}; {_TRANSFORMS}" if gripper else source, 1 / rate_hz, gripper=gripper)


_BRIDGE = _scaled(f"BridgeData V2, arXiv 2308.12952 (5 Hz); {_TRANSFORMS}; {_SIMPLER}", 5, Rotation.RPY)
_FRACTAL = _scaled(f"RT-1, arXiv 2212.06817 (3 Hz); {_TRANSFORMS}; {_SIMPLER}", 3, Rotation.RPY)
# Inputs of robosuite's OSC_POSE controller: 1 is 0.05 m or 0.5 rad.
_LIBERO = _scaled(
    f"LIBERO libero/envs/env_wrapper.py (20 Hz); robosuite controllers/config/osc_pose.json; {_TRANSFORMS}",
    20,
    Rotation.ROTATION_VECTOR,
    0.05,
    0.5,
)
# Fractions of the maximum step: 1 is 0.075 m or 0.15 rad.
_DROID = _scaled(
    "DROID, arXiv 2403.12945 (15 Hz); droid/robot_ik/robot_ik_solver.py, droid/misc/transformations.py; "
    "openvla prismatic/vla/datasets/rlds/oxe/utils/droid_utils.py",
    15,
    Rotation.RPY,
    0.075,
    0.15,
)
_TDROID = _rate(5, source="openvla prismatic/vla/datasets/rlds/oxe/configs.py")

DATASETS: dict[str, Dataset] = {
    "specvla_table": _scaled("this package, specvla_ros/lab/simulation", 5, Rotation.ROTATION_VECTOR),
    "specvla_joints": Dataset(
        "this package, specvla collect --joints",
        1 / 5,
        frame=ActionFrame.JOINTS,
        gripper=_OPEN,
        joint_unit=JointUnit.RAD,
    ),
    "bridge_orig": _BRIDGE,
    "bridge_dataset": _BRIDGE,
    "bridge_oxe": _BRIDGE,
    "oxe_bridge": _BRIDGE,  # StarVLA's name
    "fractal20220817_data": _FRACTAL,
    "oxe_rt1": _FRACTAL,
    "libero_spatial": _LIBERO,
    "libero_object": _LIBERO,
    "libero_goal": _LIBERO,
    "libero_10": _LIBERO,
    "libero_90": _LIBERO,
    "droid": _DROID,
    "droid_wipe": _DROID,
    "tdroid_carrot_in_bowl": _TDROID,
    "tdroid_pour_corn_in_pot": _TDROID,
    "tdroid_flip_pot_upright": _TDROID,
    "tdroid_move_object_onto_plate": _TDROID,
    "tdroid_knock_object_over": _TDROID,
    "tdroid_cover_object_with_towel": _TDROID,
    "kuka": _rate(10, _OPEN),
    "taco_play": _rate(15, _OPEN),
    "jaco_play": _rate(10, _OPEN),
    "berkeley_cable_routing": _rate(10, GripperSign.NONE),
    "roboturk": _rate(10, _OPEN),
    "viola": _rate(20, _OPEN),
    "berkeley_autolab_ur5": _rate(5, _OPEN),
    "toto": _rate(30, _OPEN),
    "language_table": _rate(10, GripperSign.NONE),
    "stanford_hydra_dataset_converted_externally_to_rlds": _rate(10, _OPEN),
    "austin_buds_dataset_converted_externally_to_rlds": _rate(20, _OPEN),
    "austin_sailor_dataset_converted_externally_to_rlds": _rate(20, _OPEN),
    "austin_sirius_dataset_converted_externally_to_rlds": _rate(20, _OPEN),
    "nyu_franka_play_dataset_converted_externally_to_rlds": _rate(3, _OPEN),
    "furniture_bench_dataset_converted_externally_to_rlds": _rate(10, _OPEN),
    "ucsd_kitchen_dataset_converted_externally_to_rlds": _rate(2),
    "dlr_edan_shared_control_converted_externally_to_rlds": _rate(5, _OPEN),
    "iamlab_cmu_pickup_insert_converted_externally_to_rlds": _rate(20),
    "utaustin_mutex": _rate(20, _OPEN),
    "berkeley_fanuc_manipulation": _rate(10, _OPEN),
    "cmu_stretch": _rate(10),
    "bc_z": _rate(10, _OPEN),
    "fmb_dataset": _rate(10),
    "dobbe": _rate(30),
}
