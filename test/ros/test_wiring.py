# SPDX-License-Identifier: Apache-2.0
"""What launch files make of their arguments and of parameters."""

import pytest

from specvla_ros.errors import UserError
from specvla_ros.ros.wiring import RobotTopics, refused_images_warning, sensor_remappings


def test_cameras_and_the_state_are_remapped() -> None:
    assert sensor_remappings(" wrist=/wrist/color , state=/joint_states") == [
        ("wrist/image", "/wrist/color"),
        ("wrist/image/compressed", "/wrist/color/compressed"),
        ("state", "/joint_states"),
    ]
    assert sensor_remappings("") == []


def test_driver_and_guard_of_one_of_two_arms_hear_the_policy_of_both() -> None:
    both = RobotTopics(action="/policy/action")
    for remappings in (both.driver, both.guard):
        assert dict(remappings)["action"] == "/policy/action"
    assert dict(RobotTopics().driver)["action"] == "policy/action"


@pytest.mark.parametrize("text", ["wrist", "wrist=", "=/topic", "wrist=/a,state"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"expected NAME=TOPIC, comma-separated"):
        sensor_remappings(text)


def test_a_policy_that_answers_older_pictures_than_anybody_follows_is_told_with_both_parameters() -> None:
    assert refused_images_warning(1.0, 1.0) == ""
    said = refused_images_warning(2.0, 1.0)
    assert "max_image_age_s is 2 s" in said and "max_action_age_s of driver and guard is 1 s" in said
    assert "max_image_age_s is 0, which sets none, but" in refused_images_warning(0.0, 1.0)
