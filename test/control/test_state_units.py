# SPDX-License-Identifier: Apache-2.0
"""A state in radians becomes what LeRobot's motors would have given, and an unclear unit is refused."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.control.state_units import StateConvention
from specvla_ros.errors import UserError

NAMES = ("shoulder_pan", "gripper")
DEGREES = ConventionSettings(joints=NAMES, joint_unit="deg", state_unit="deg", state_gripper=(0.2, 1.2))


def units(settings: ConventionSettings = DEGREES, names: tuple[str, ...] = NAMES, key: str = "") -> Any:
    return StateConvention(settings, key, ("dim_0", "dim_1")).units(names)


@given(st.integers(0, 4095), st.floats(0, 1))
def test_a_state_becomes_what_the_motors_give(tmp_path_factory: Any, raw: int, openness: float) -> None:
    low, high = 1000, 3000
    file = tmp_path_factory.mktemp("calibration") / "arm.json"
    motor = {"drive_mode": 1, "range_min": low, "range_max": high}
    file.write_text(json.dumps({"shoulder_pan": motor, "gripper": motor}))
    degrees = (raw - (low + high) / 2) * 360 / 4095
    percent = -((raw - low) / (high - low) * 200 - 100)  # as motors_bus.py normalises, with an inverted drive mode
    published = np.array([np.radians(degrees), 0.2 + openness])
    assert units().converted(published) == pytest.approx([degrees, 100 * openness])
    in_percent = replace(DEGREES, state_unit="percent", calibration=str(file))
    assert units(in_percent).converted(published) == pytest.approx([percent, 100 * openness])
    # Another order of the state than of the actions.
    assert units(names=NAMES[::-1]).converted(published[::-1]) == pytest.approx([100 * openness, degrees])


def test_each_gripper_of_two_arms_is_converted() -> None:
    names = ("left_pan", "left_gripper", "right_pan", "right_gripper")
    found = units(replace(DEGREES, joints=names), names)
    assert found.converted(np.array([np.pi, 0.2, 0.0, 1.2])) == pytest.approx([180.0, 0.0, 0.0, 100.0])


def test_a_gripper_that_closes_towards_larger_positions_is_0_there() -> None:
    found = units(replace(DEGREES, state_gripper=(0.8, 0.0)))
    assert found.converted(np.array([0.0, 0.8])).tolist() == [0.0, 0.0]
    assert found.converted(np.array([0.0, 0.0])) == pytest.approx([0.0, 100.0])


@pytest.mark.parametrize(
    "settings, key",
    [
        (ConventionSettings(), ""),
        (ConventionSettings(), "specvla_joints"),
        (replace(DEGREES, joint_unit="rad", state_unit="auto"), ""),
        (replace(DEGREES, state_unit="as_published"), ""),
    ],
)
def test_a_state_is_read_as_published_where_the_unit_is_the_same(settings: ConventionSettings, key: str) -> None:
    assert units(settings, key=key) is None and units(settings, (), key) is None


@pytest.mark.parametrize(
    "changes, names, why",
    [
        ({"state_unit": "auto"}, NAMES, r"actions are in deg, .* set action\.state_unit to deg, .* or to as_published"),
        ({"joint_unit": "percent", "state_unit": "auto"}, NAMES, r"set action\.state_unit to percent"),
        ({}, (), r"action\.state_unit is deg, but the state's values have no names: set state_names"),
        ({}, ("shoulder_pan", "left_finger"), "action.joints has no entry for the state's value left_finger"),
        ({"joints": ("",)}, NAMES, "action.joints has no entry for the state's value shoulder_pan"),
        ({"state_gripper": (0.0, 0.0)}, NAMES, r"set action\.state_gripper to its positions in joint_states there"),
        ({"state_gripper": (0.0,)}, NAMES, r"set action\.state_gripper"),
        ({"state_unit": "percent"}, NAMES, r"action\.state_unit is percent, .* set action\.calibration"),
    ],
)
def test_an_unclear_unit_is_refused(changes: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why):
        units(replace(DEGREES, **changes), names)
