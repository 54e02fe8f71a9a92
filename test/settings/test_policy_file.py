# SPDX-License-Identifier: Apache-2.0
"""A parameter file says the same to a command, to Python and to the node."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specvla_ros.control.guard.settings import GuardParameters
from specvla_ros.errors import UserError
from specvla_ros.lab.ros.sim_robot.episodes import SimRobotParameters
from specvla_ros.models.settings import ModelSettings
from specvla_ros.policy_parameters import PolicyParameters, SharedParameters, model_settings, read_policy_file
from specvla_ros.ros.driver.parameters import DriverParameters
from specvla_ros.ros.task import TaskParameters
from specvla_ros.settings.parameter import values_of


def write(path: Path, parameters: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"/**": {"ros__parameters": dict(parameters)}}))
    return path


def test_how_to_load_is_read_and_what_is_given_beside_the_file_wins(tmp_path: Path) -> None:
    given = {"model": {"prompt": "ecot", "cameras": ["front"]}, "center_crop": True, "unnorm_key": "bridge_orig"}
    found = read_policy_file(write(tmp_path / "ecot.yaml", given | {"decode": {"max_reasoning_tokens": 9}}))
    assert found["decode.max_reasoning_tokens"] == 9
    wanted = ModelSettings("other", prompt="ecot", center_crop=True, cameras=("front",))
    assert model_settings(found, {"unnorm_key": "other"}) == wanted


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modle.prompt", "model.prompt"),
        ("center_corp", "center_crop"),
        ("unorm_key", "unnorm_key"),
        ("draft.node", "draft.nodes"),
        ("acceptance.nonsense", "acceptance"),
        ("action.d", "action.dt"),
    ],
)
def test_a_misspelt_name_is_refused(tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"p\.yaml: there is no parameter '{name}'; .*{meant}"):
        read_policy_file(write(tmp_path / "p.yaml", {name: 1}))


def test_an_unknown_name_in_the_policys_own_section_is_refused_and_one_for_all_nodes_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "p.yaml", {"zoom": {"level": 3}, "use_sim_time": True, "image_transport": "raw"})
    assert read_policy_file(path)["zoom.level"] == 3
    assert "p.yaml: skipped 1 names that are not policy parameters: zoom.level" in caplog.text
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({"policy": content["/**"], "other": {"ros__parameters": {"zoom": 1}}}))
    with pytest.raises(UserError, match=r"p\.yaml: there is no parameter 'zoom\.level'; known: checkpoint"):
        read_policy_file(path)


@pytest.mark.parametrize(
    "settings",
    [PolicyParameters, SharedParameters, DriverParameters, GuardParameters, TaskParameters, SimRobotParameters],
)
def test_what_other_nodes_take_is_left_to_them(tmp_path: Path, settings: type) -> None:
    read_policy_file(write(tmp_path / "p.yaml", dict.fromkeys(values_of(settings()), 1)))
