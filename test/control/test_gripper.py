# SPDX-License-Identifier: Apache-2.0
"""A gripper opens and closes outside of a band around the threshold, and is told nothing before an action says so."""

import pytest

from specvla_ros.control.convention import GripperSign
from specvla_ros.control.gripper import Gripper, GripperLimits, GripperSettings
from specvla_ros.errors import UserError

SETTINGS = GripperSettings(open_value=0.08, closed_value=0.01, threshold=0.6, hysteresis=0.2)


@pytest.mark.parametrize(
    ("openness", "position"), [(0.81, 0.08), (0.79, None), (0.6, None), (0.41, None), (0.39, 0.01)]
)
@pytest.mark.parametrize("sign", [GripperSign.OPEN_HIGH, GripperSign.CLOSE_HIGH])
def test_a_first_number_within_the_band_commands_nothing(
    openness: float, position: float | None, sign: GripperSign
) -> None:
    gripper = Gripper(SETTINGS)
    gripper.take(openness if sign is GripperSign.OPEN_HIGH else 1.0 - openness, sign)
    assert gripper.position == position


def test_within_the_band_the_gripper_stays() -> None:
    gripper = Gripper(SETTINGS)
    for openness, position in ((0.9, 0.08), (0.5, 0.08), (0.3, 0.01), (0.7, 0.01), (0.9, 0.08)):
        gripper.take(openness, GripperSign.OPEN_HIGH)
        assert gripper.position == position
    gripper.reset()
    assert gripper.position is None


def test_a_robot_without_a_gripper_is_told_nothing() -> None:
    gripper = Gripper(SETTINGS)
    gripper.take(1.0, GripperSign.NONE)
    assert gripper.position is None


@pytest.mark.parametrize(("threshold", "hysteresis"), [(0.5, 0.5), (0.1, 0.1), (0.9, 0.1), (0.05, 0.1)])
def test_a_band_that_leaves_no_way_to_open_or_to_close_is_refused(threshold: float, hysteresis: float) -> None:
    with pytest.raises(UserError, match=r"gripper\.threshold"):
        GripperSettings(threshold=threshold, hysteresis=hysteresis)
    GripperSettings(threshold=0.5, hysteresis=0.49)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": "trajectory", "open_value": 0.04}, r"gripper\.joint"),
        ({"output": "array"}, r"gripper\.open_value and gripper\.closed_value, which are both 0: set them to"),
        ({"output": "trajectory", "joint": "finger"}, r"gripper\.open_value and gripper\.closed_value"),
    ],
)
def test_what_a_gripper_lacks_is_told(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        GripperLimits(**changes).require()


def test_a_gripper_that_lacks_nothing_and_one_that_is_not_commanded_are_let_through() -> None:
    GripperLimits().require()
    GripperLimits(output="array", open_value=0.04).require()
    GripperLimits(output="trajectory", open_value=0.04, joint="finger").require()
