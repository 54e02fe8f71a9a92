# SPDX-License-Identifier: Apache-2.0
"""Options that a parameter file or the input also determines."""

from pathlib import Path

import pytest

from specvla_ros.control.convention import ConventionSettings
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.lab.cli.options import BagOptions, topics_of
from specvla_ros.lab.cli.parameter_options import PolicyOptions
from specvla_ros.models.settings import ModelSettings


@pytest.mark.parametrize(("option", "used"), [(None, 0.2), (0.05, 0.05), (0.1, 0.1)])
def test_a_tolerance_of_stamps_replaces_that_of_the_parameter_file(option: float | None, used: float) -> None:
    in_file = {"sync_tolerance_s": 0.2}
    chosen = PolicyOptions(Path("policy"), ModelSettings(), EngineSettings(), ConventionSettings(), in_file)
    assert topics_of(chosen, BagOptions(sync_tolerance_s=option)).sync_tolerance_s == used
