# SPDX-License-Identifier: Apache-2.0
"""The unit of the joints in a policy's state: published ones are in radians, those of the training data perhaps not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specvla_ros.control.convention import (
    AS_PUBLISHED,
    AUTO,
    NO_NAMES,
    ConventionSettings,
    JointUnit,
    is_gripper,
    known_dataset,
)
from specvla_ros.errors import UserError


@dataclass(frozen=True)
class StateUnits:
    """Converts published joint positions to the unit of the training data."""

    zeros: np.ndarray  # float64 [dims], published positions at which the training data's are 0
    per_unit: np.ndarray  # float64 [dims], published units per unit of the training data

    def converted(self, state: np.ndarray) -> np.ndarray:
        """The state in the unit of the training data, float64 [dims]."""
        return (state - self.zeros) / self.per_unit


@dataclass(frozen=True)
class StateConvention:
    """The sources of the unit of a policy's state."""

    settings: ConventionSettings
    unnorm_key: str
    columns: tuple[str, ...]  # the policy's own names of its action's values

    def units(self, names: Sequence[str]) -> StateUnits | None:
        """The conversion of a state; None: it is read as published.

        `names` of its values are in the policy's order; empty: unknown. Raises UserError if the unit is not given,
        though the actions' is not radians, or if a value's unit does not follow from it.
        """
        settings, unit = self.settings, self.settings.state_unit
        if unit == AUTO:
            _require_radians(settings, self.unnorm_key)
        if unit in (AUTO, AS_PUBLISHED):
            return None
        joints = self.columns if settings.joints == NO_NAMES else settings.joints
        unknown = [name for name in names if name not in joints]
        if unknown or not names:
            nameless = "the state's values have no names"
            lacks = f"action.joints has no entry for the state's value {unknown[0]}" if unknown else nameless
            raise UserError(
                f"action.state_unit is {unit}, but {lacks}: set state_names to the joints that the policy "
                "reads, in its order and as action.joints calls them, or action.state_unit to as_published"
            )
        zeros, per_unit = np.zeros(len(names)), np.array(settings.units(JointUnit(unit), names, "action.state_unit"))
        grippers = [column for column, name in enumerate(names) if is_gripper(name)]
        if grippers:
            closed, opened = _ends(settings)
            zeros[grippers], per_unit[grippers] = closed, per_unit[grippers] * (opened - closed)
        return StateUnits(zeros, per_unit)


def _require_radians(settings: ConventionSettings, unnorm_key: str) -> None:
    """Raises UserError if the actions are in another unit: the state probably is, too."""
    unit, dataset = settings.joint_unit, known_dataset(unnorm_key)
    if unit == AUTO:
        unit = JointUnit.RAD if dataset is None or dataset.joint_unit is None else dataset.joint_unit.value
    if unit != JointUnit.RAD:
        raise UserError(
            f"the policy's actions are in {unit}, so the state that it reads probably is too, but joint_states are in "
            f"radians: set action.state_unit to {unit}, which converts them, or to as_published if the topic state "
            "has the unit of the training data"
        )


def _ends(settings: ConventionSettings) -> tuple[float, float]:
    """Published positions of the closed and the open gripper."""
    if len(settings.state_gripper) != 2 or settings.state_gripper[0] == settings.state_gripper[1]:
        raise UserError(
            f"action.state_unit is {settings.state_unit}, which gives the gripper from 0, closed, to 100, open: set "
            "action.state_gripper to its positions in joint_states there, such as [0.0, 1.2]"
        )
    closed, opened = settings.state_gripper
    return closed, opened
