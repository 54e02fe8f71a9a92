# SPDX-License-Identifier: Apache-2.0
"""The policy server under load at its smallest size."""

from pathlib import Path

import pytest
from support.benchmark_runs import run

pytestmark = pytest.mark.fault


@pytest.mark.nightly
def test_robots_get_their_actions_beside_attackers_and_over_a_restart(tmp_path: Path):
    result = run("faults.serving_under_load", tmp_path / "out.json", "--robots", 2, "--seconds", 3, "--sessions", 5)
    assert all(part["answers"] > 0 for part in result["parts"].values())
    assert all(part["wrong"] == part["lost"] == 0 for part in result["parts"].values())
    assert min(result["attacks"].values()) > 0 and len(result["attacks"]) == 7
