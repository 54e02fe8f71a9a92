# SPDX-License-Identifier: Apache-2.0
"""The launch argument that names the topics of further cameras and of the state."""

import pytest

from specvla_ros.errors import UserError
from specvla_ros.ros.wiring import sensor_remappings


def test_cameras_and_the_state_are_remapped() -> None:
    assert sensor_remappings(" wrist=/wrist/color , state=/joint_states") == [
        ("wrist/image", "/wrist/color"),
        ("wrist/image/compressed", "/wrist/color/compressed"),
        ("state", "/joint_states"),
    ]
    assert sensor_remappings("") == []


@pytest.mark.parametrize("text", ["wrist", "wrist=", "=/topic", "wrist=/a,state"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"must be NAME=TOPIC, comma-separated"):
        sensor_remappings(text)
