# SPDX-License-Identifier: Apache-2.0
"""Frames of bags, or of what a policy does itself in simulation."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from support.gl import needs_gl
from support.nightly import nightly_but

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_policy
from specvla_ros.lab.evaluation import frame_sources
from specvla_ros.lab.evaluation.frame_sources import bags_or_simulation, simulation_source
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import ONLY_CAMERA
from specvla_ros.speculation.settings import AcceptanceSettings


@needs_gl
@pytest.mark.parametrize("name", nightly_but(lambda name: name == "nano", ["nano", "fast"]))
def test_what_a_policy_does_is_decoded_without_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_target(bundled_policy(name), device="cpu")
    relaxed = EngineSettings("spec", acceptance=AcceptanceSettings("bin_distance", bins=(3,)))
    ours = list(islice(simulation_source(policy, 4000, engine=relaxed), 12))
    monkeypatch.setattr(frame_sources, "lossless", lambda _, engine: replace(engine, mode="ar"))
    plain = islice(simulation_source(policy, 4000), 12)
    for frame, expected in zip(ours, plain, strict=True):
        np.testing.assert_array_equal(frame.cameras[ONLY_CAMERA], expected.cameras[ONLY_CAMERA])
        assert frame.instruction == expected.instruction


def test_sim_and_bags_do_not_mix() -> None:
    with pytest.raises(UserError, match="cannot be combined with bags"):
        bags_or_simulation(["sim", "bag"])
