# SPDX-License-Identifier: Apache-2.0
"""How the actions of a policy are meant: what its training dataset is known for, and what the user says instead."""

from dataclasses import dataclass
from typing import Any

from specvla_ros.control.convention import ActionConvention, ActionFrame, GripperSign, Reference, Rotation
from specvla_ros.control.datasets import known_dataset
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
