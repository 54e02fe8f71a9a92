# SPDX-License-Identifier: Apache-2.0
"""How the actions of a policy are meant: what its training dataset is known for, and what the user says instead."""

from dataclasses import dataclass
from typing import Any

from specvla_ros.control.convention import ActionConvention, ActionFrame, GripperSign, Reference, Rotation
from specvla_ros.errors import UserError
from specvla_ros.settings.parameter import check, parameter

_AUTO = "auto"


def _choices(kind: Any) -> tuple[str, ...]:
    return (_AUTO, *(each.value for each in kind))


@dataclass(frozen=True)
class ConventionSettings:
    """What the user says of the actions; the rest is looked up by the dataset's name."""

    ROS_PREFIX = "action."

    dt: float = parameter(
        0.0,
        "Time over which a displacement is meant, the period of the training data; 0: that of the known dataset.",
        unit="s",
        minimum=0.0,
        maximum=10.0,
    )
    reference: str = parameter(
        _AUTO,
        "What an action's pose is counted from: the tool's pose at the image's stamp (delta) or the base frame; auto: "
        "as the known dataset.",
        choices=_choices(Reference),
    )
    frame: str = parameter(
        _AUTO, "Frame in which a displacement is written; auto: as the known dataset.", choices=_choices(ActionFrame)
    )
    rotation: str = parameter(
        _AUTO,
        "How three numbers say a rotation: axis times angle, or roll, pitch, yaw about the fixed axes; auto: as the "
        "known dataset.",
        choices=_choices(Rotation),
    )
    gripper: str = parameter(
        _AUTO,
        "Whether a larger number opens or closes the gripper; auto: as the known dataset.",
        choices=_choices(GripperSign),
    )
    translation_unit: float = parameter(
        0.0,
        "Metres that 1 of x, y, z stands for in the checkpoint's statistics; 0: as the known dataset.",
        unit="m",
        minimum=0.0,
        maximum=100.0,
    )
    rotation_unit: float = parameter(
        0.0,
        "Radians that 1 of roll, pitch, yaw stands for in the checkpoint's statistics; 0: as the known dataset.",
        unit="rad",
        minimum=0.0,
        maximum=100.0,
    )

    def __post_init__(self) -> None:
        check(self)

    def convention(self, unnorm_key: str, dt_s: float | None = None) -> ActionConvention:
        """What a policy's actions mean.

        Args:
            unnorm_key: dataset whose statistics scale them; empty: the policy has no choice.
            dt_s: the action's time where the checkpoint says it; None: it does not.

        Raises:
            UserError: neither the user nor a source says all of it; with the parameters that are to be set.
        """
        dataset = known_dataset(unnorm_key)
        found = {
            "dt": self.dt or dt_s or (dataset and dataset.dt_s),
            "reference": _said(Reference, self.reference) or (dataset and dataset.reference),
            "frame": _said(ActionFrame, self.frame) or (dataset and dataset.frame),
            "rotation": _said(Rotation, self.rotation) or (dataset and dataset.rotation),
            "gripper": _said(GripperSign, self.gripper) or (dataset and dataset.gripper),
            "translation_unit": self.translation_unit or (dataset and dataset.translation_unit_m),
            "rotation_unit": self.rotation_unit or (dataset and dataset.rotation_unit_rad),
        }
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise UserError(
                f"how the actions of dataset '{unnorm_key}' are meant is not known here, and a wrong guess moves the "
                f"robot wrongly; set {', '.join(_WHAT[name] for name in missing)}; see docs/reference/conventions.md"
            )
        values: dict[str, Any] = {_FIELDS.get(name, name): value for name, value in found.items()}
        return ActionConvention(**values, source=dataset.source if dataset else "")


_FIELDS = {"dt": "dt_s", "translation_unit": "translation_unit_m", "rotation_unit": "rotation_unit_rad"}
_WHAT = {
    "dt": "action.dt (seconds from one action of the training data to the next)",
    "reference": "action.reference (delta or absolute)",
    "frame": "action.frame (base or tool)",
    "rotation": "action.rotation (rotation_vector or rpy)",
    "gripper": "action.gripper (open_high, close_high or none)",
    "translation_unit": "action.translation_unit (1.0 if x, y, z are metres)",
    "rotation_unit": "action.rotation_unit (1.0 if the rotation is in radians)",
}


def _said(kind: Any, value: str) -> Any:
    return None if value == _AUTO else kind(value)


# Facts with their sources; what no source says is None, and then the user has to say it.


@dataclass(frozen=True)
class Dataset:
    """The actions of a training dataset, as OpenVLA's loader hands them to the policy.

    Args:
        source: where this is written.
        dt_s: seconds between two actions.
        reference: what the pose is counted from.
        frame: in which a displacement is written.
        rotation: how its rotation is written.
        gripper: what the last number says.
        translation_unit_m: metres that 1 of x, y, z stands for.
        rotation_unit_rad: radians that 1 of roll, pitch, yaw stands for.
    """

    source: str
    dt_s: float
    # OpenVLA takes datasets whose poses are displacements, and no others (oxe/materialize.py).
    reference: Reference = Reference.DELTA
    frame: ActionFrame | None = None
    rotation: Rotation | None = None
    gripper: GripperSign | None = None
    translation_unit_m: float | None = None
    rotation_unit_rad: float | None = None


def known_dataset(unnorm_key: str) -> Dataset | None:
    """The dataset of a key of norm_stats; None: there is no source for it here."""
    return DATASETS.get(unnorm_key.removesuffix("_no_noops"))


_BASE, _OPEN = ActionFrame.BASE, GripperSign.OPEN_HIGH
_TRANSFORMS = "openvla prismatic/vla/datasets/rlds/oxe/transforms.py"
_RATES = "RDT-1B configs/dataset_control_freq.json"
_SIMPLER = "SimplerEnv simpler_env/policies/openvla/openvla_model.py (fixed-axis angles, base-aligned)"


def _metric(source: str, rate_hz: float, rotation: Rotation) -> Dataset:
    """Metres and radians in the base frame."""
    return Dataset(
        source, 1 / rate_hz, Reference.DELTA, _BASE, rotation, _OPEN, translation_unit_m=1.0, rotation_unit_rad=1.0
    )


def _rate(rate_hz: float, gripper: GripperSign | None = None, source: str = _RATES) -> Dataset:
    """The rate alone, and what OpenVLA's loader makes of the gripper."""
    return Dataset(f"{source}; {_TRANSFORMS}" if gripper else source, 1 / rate_hz, gripper=gripper)


_BRIDGE = _metric(f"BridgeData V2, arXiv 2308.12952 (5 Hz); {_TRANSFORMS}; {_SIMPLER}", 5, Rotation.RPY)
_FRACTAL = _metric(f"RT-1, arXiv 2212.06817 (3 Hz); {_TRANSFORMS}; {_SIMPLER}", 3, Rotation.RPY)
# Inputs of robosuite's OSC_POSE controller: 1 is 0.05 m or 0.5 rad.
_LIBERO = Dataset(
    f"LIBERO libero/envs/env_wrapper.py (20 Hz); robosuite controllers/config/osc_pose.json; {_TRANSFORMS}",
    1 / 20,
    Reference.DELTA,
    _BASE,
    Rotation.ROTATION_VECTOR,
    _OPEN,
    translation_unit_m=0.05,
    rotation_unit_rad=0.5,
)
# Shares of the largest step: 1 is 0.075 m or 0.15 rad.
_DROID = Dataset(
    "DROID, arXiv 2403.12945 (15 Hz); droid/robot_ik/robot_ik_solver.py, droid/misc/transformations.py; "
    "openvla prismatic/vla/datasets/rlds/oxe/utils/droid_utils.py",
    1 / 15,
    Reference.DELTA,
    _BASE,
    Rotation.RPY,
    _OPEN,
    translation_unit_m=0.075,
    rotation_unit_rad=0.15,
)
_TDROID = _rate(5, source="openvla prismatic/vla/datasets/rlds/oxe/configs.py")

DATASETS: dict[str, Dataset] = {
    "specvla_table": _metric("this package, specvla_ros/lab/simulation", 5, Rotation.ROTATION_VECTOR),
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
