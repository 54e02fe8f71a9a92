# SPDX-License-Identifier: Apache-2.0
"""Positions in percent of LeRobot's calibrated ranges: the same angles as LeRobot's degrees."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.control.motor_calibration import radians_per_percent
from specvla_ros.errors import UserError

NAMES = ("shoulder_pan", "elbow_flex", "gripper")
SETTINGS = ConventionSettings(
    dt=0.1, reference="absolute", frame="joints", joints=NAMES, joint_unit="percent", gripper="open_high"
)


def motor(range_min=823, range_max=3273, drive_mode=0, **other):
    return {
        "id": 1,
        "drive_mode": drive_mode,
        "homing_offset": -120,
        "range_min": range_min,
        "range_max": range_max,
    } | other


def percent(raw, low, high, drive_mode):
    """As LeRobot's motors_bus.py normalises."""
    share = (raw - low) / (high - low) * 200 - 100
    return -share if drive_mode else share


@given(st.integers(0, 2000), st.integers(10, 2000), st.floats(0, 1), st.integers(0, 1))
def test_percent_are_the_angles_of_lerobots_degrees(tmp_path_factory, low, width, share, drive_mode):
    file = tmp_path_factory.mktemp("calibration") / "arm.json"
    file.write_text(json.dumps({"elbow_flex": motor(low, low + width, drive_mode)}))
    raw = low + share * width
    degrees = (raw - (low + low + width) / 2) * 360 / 4095
    (found,) = radians_per_percent(file, ["elbow_flex"]) * percent(raw, low, low + width, drive_mode)
    assert found == pytest.approx(np.radians(degrees), abs=1e-9)


def test_a_convention_in_percent_scales_joints_by_their_motors_and_the_gripper_by_100(tmp_path):
    file = tmp_path / "arm.json"
    file.write_text(json.dumps({"gripper": motor(), "elbow_flex": motor(0, 4095), "shoulder_pan": motor(0, 2047)}))
    scales = replace(SETTINGS, calibration=str(file)).convention("").scales(NAMES)
    np.testing.assert_allclose(scales, [np.pi * 2047 / 4095 / 100, np.pi / 100, 0.01])
    np.testing.assert_allclose(
        replace(SETTINGS, joint_unit="deg").convention("").scales(NAMES), [*np.radians([1, 1]), 0.01]
    )
    np.testing.assert_array_equal(replace(SETTINGS, joint_unit="rad").convention("").scales(NAMES), np.ones(3))


@pytest.mark.parametrize(
    "content, why",
    [
        (None, "action.calibration: there is no file .*arm.json; is it the robot's calibration file, ~/.cache"),
        ("[]", "holds no motors by name"),
        ({"shoulder_pan": motor()}, "has no motor 'elbow_flex'; it has: shoulder_pan; action.joints must name"),
        ({"shoulder_pan": motor(), "elbow_flex": motor(9, 9)}, "elbow_flex.range_max"),
        ({"shoulder_pan": motor(), "elbow_flex": motor(drive_mode="no")}, "elbow_flex.drive_mode"),
        ({"shoulder_pan": motor(), "elbow_flex": motor(range_min=None)}, "elbow_flex.range_min"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(tmp_path, content, why):
    file = tmp_path / "arm.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=why):
        replace(SETTINGS, calibration=str(file)).convention("")


def test_percent_without_a_calibration_are_refused():
    with pytest.raises(UserError, match=r"depends on each motor's calibration: set action\.calibration"):
        SETTINGS.convention("")
