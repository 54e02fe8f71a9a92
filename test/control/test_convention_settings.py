# SPDX-License-Identifier: Apache-2.0
"""What an action means comes from a source or from the user, and never from a guess."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.actions import MEANING, action

from specvla_ros.control.convention import (
    DATASETS,
    ActionConvention,
    ActionFrame,
    ConventionSettings,
    GripperSign,
    Reference,
    Rotation,
    default_names,
    known_dataset,
)
from specvla_ros.errors import UserError
from specvla_ros.lab.simulation.libero import CONTROL_HZ
from specvla_ros.lab.simulation.robot import ACTION_DT_S
from specvla_ros.lab.simulation.world import POSITION_SCALE_M, ROTATION_SCALE_RAD

OWN = ConventionSettings(
    dt=0.1,
    reference="absolute",
    frame="tool",
    rotation="rpy",
    gripper="close_high",
    translation_unit=0.01,
    rotation_unit=1.0,
)
WORDS = {
    "dt": "action.dt",
    "reference": "action.reference",
    "frame": "action.frame",
    "rotation": "action.rotation",
    "gripper": "action.gripper",
    "translation_unit": "action.translation_unit",
    "rotation_unit": "action.rotation_unit",
}


@pytest.mark.parametrize("key", [*DATASETS, "libero_goal_no_noops"])
def test_every_known_dataset_has_a_source_and_sensible_numbers(key: str) -> None:
    dataset = known_dataset(key)
    assert dataset is not None and dataset.source
    assert 1 / 30 <= dataset.dt_s <= 0.5
    for unit in (dataset.translation_unit_m, dataset.rotation_unit_rad):
        assert unit is None or 0 < unit <= 1
    if dataset.frame is ActionFrame.JOINTS:
        assert dataset.joint_unit and dataset.gripper
        return
    told = [dataset.frame, dataset.rotation, dataset.translation_unit_m, dataset.rotation_unit_rad]
    assert all(part is not None for part in told) or all(part is None for part in told), "half a pose is of no use"


def test_a_libero_checkpoint_acts_at_20_hz_in_the_units_of_its_controller() -> None:
    for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
        for key in (suite, f"{suite}_no_noops"):
            convention = ConventionSettings().convention(key)
            assert convention.dt_s == 1 / CONTROL_HZ == 0.05
            units = (convention.translation_unit_m, convention.rotation_unit_rad)
            assert units == (POSITION_SCALE_M, ROTATION_SCALE_RAD)


def test_the_policy_of_this_package_means_what_its_simulated_arm_takes() -> None:
    convention = ConventionSettings().convention("specvla_table")
    assert convention == ActionConvention(ACTION_DT_S)


def test_a_checkpoint_of_a_known_dataset_names_its_joints_itself() -> None:
    convention = ConventionSettings().convention("specvla_joints", 0.2, ("a", "b", "gripper"))
    assert convention == ActionConvention(0.2, frame=ActionFrame.JOINTS, joints=("a", "b", "gripper"))
    renamed = replace(ConventionSettings(), joints=("c", "d", "gripper")).convention("specvla_joints", 0.2, ("a",) * 3)
    assert renamed.joints == ("c", "d", "gripper")
    for unnamed in (default_names(7), default_names(3), None):
        with pytest.raises(UserError, match=r"set action\.joints \(names"):
            ConventionSettings().convention("specvla_joints", 0.2, unnamed)


def test_a_joint_that_is_named_twice_is_refused_before_anything_else() -> None:
    with pytest.raises(UserError, match=r"action\.joints names a more than once"):
        ConventionSettings(joints=("a", "b", "a"))


def test_the_user_says_everything_of_an_own_dataset() -> None:
    assert OWN.convention("my_robot") == ActionConvention(
        0.1, Reference.ABSOLUTE, ActionFrame.TOOL, Rotation.RPY, GripperSign.CLOSE_HIGH, 0.01, 1.0
    )


@given(st.sets(st.sampled_from(sorted(WORDS)), min_size=1))
def test_what_is_missing_is_asked_for_and_nothing_else(missing: set[str]) -> None:
    settings = replace(OWN, **{name: getattr(ConventionSettings(), name) for name in missing})
    with pytest.raises(UserError, match="dataset 'my_robot'") as refused:
        settings.convention("my_robot")
    asked = {name for name, word in WORDS.items() if f"{word} (" in str(refused.value)}
    assert asked == missing


@given(st.sampled_from(sorted(WORDS)))
def test_what_the_user_says_is_stronger_than_the_table(name: str) -> None:
    said = replace(ConventionSettings(), **{name: getattr(OWN, name)}).convention("bridge_orig")
    usual, own = ConventionSettings().convention("bridge_orig"), OWN.convention("bridge_orig")
    field = {"dt": "dt_s", "translation_unit": "translation_unit_m", "rotation_unit": "rotation_unit_rad"}.get(
        name, name
    )
    assert said == replace(usual, **{field: getattr(own, field)})


def test_the_checkpoint_is_stronger_than_the_table_and_weaker_than_the_user() -> None:
    assert ConventionSettings().convention("bridge_orig", 0.1).dt_s == 0.1
    assert ConventionSettings(dt=0.3).convention("bridge_orig", 0.1).dt_s == 0.3
    assert ConventionSettings().convention("bridge_orig").dt_s == 0.2


def test_published_values_are_metres_and_radians_whatever_the_statistics_units() -> None:
    convention = ConventionSettings().convention("libero_spatial")
    sent = replace(MEANING, convention=convention).metric(action(horizon=2))
    scale = np.array([0.05] * 3 + [0.5] * 3 + [1.0])
    np.testing.assert_array_equal(sent, action(horizon=2).actions * scale)


@pytest.mark.parametrize("key", [*DATASETS])
def test_the_page_says_what_the_table_says(key: str) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conventions.md"
    (row,) = (line for line in page.read_text(encoding="utf-8").splitlines() if f"`{key}`" in line)
    cells = [cell.strip() for cell in row.split("|")]
    dataset = DATASETS[key]
    assert cells[2] == f"{1 / dataset.dt_s:g}"
    if dataset.frame and dataset.rotation and dataset.gripper:
        units = f"{dataset.translation_unit_m:g} m, {dataset.rotation_unit_rad:g} rad"
        assert cells[3:7] == [dataset.frame.value, dataset.rotation.value, dataset.gripper.value, units]
    elif dataset.frame is ActionFrame.JOINTS and dataset.gripper:
        assert cells[3:7] == ["joints", "-", dataset.gripper.value, "1 rad"]
    else:
        assert cells[3] == (dataset.gripper.value if dataset.gripper else "not known")
