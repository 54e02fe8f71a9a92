# SPDX-License-Identifier: Apache-2.0
"""The soak at its smallest size, and that it finds what it looks for."""

from pathlib import Path

import pytest
from faults.soak import MARGINS, Soak, soak_policy
from support.benchmark_runs import run

from specvla_ros.engine.settings import EngineSettings

pytestmark = pytest.mark.fault


def test_soak_passes(tmp_path: Path):
    result = run("faults.soak", tmp_path / "out.json", "--ticks", 60)
    assert result["passed"]
    assert list(result["phases"]) == ["ar", "spec", "pipeline", "specpipe", "switching"]
    assert all(phase["actions"] and not phase["different_actions"] for phase in result["phases"].values())
    assert result["phases"]["spec"]["forwards_per_action"] < 7
    assert result["different_answers"] > 10


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    return Soak(soak_policy(tmp_path_factory.mktemp("policy"), dtype="float32", device="cpu"), seed=1)


def test_soak_finds_a_wrong_action(soak: Soak, monkeypatch: pytest.MonkeyPatch):
    wrong = {key: (*tokens[:3], tokens[3] - 1, *tokens[4:]) for key, tokens in soak.plain.items()}
    monkeypatch.setattr(soak, "plain", wrong)
    found = soak.run(30, [EngineSettings("ar")]).as_json("float32")
    assert found["difference_rate"] == 1
    assert found["widest_margin"] > MARGINS["float32"]
    assert "the two best logits are" in found["failures"][0]


def test_soak_finds_a_slot_that_nobody_gave_back(soak: Soak, monkeypatch: pytest.MonkeyPatch):
    switch = soak._engine.switch

    def switch_and_lose(settings: EngineSettings):
        drops = switch(settings)
        soak._engine.cache.take()
        return drops

    monkeypatch.setattr(soak._engine, "switch", switch_and_lose)
    found = soak.run(10, [EngineSettings("pipeline")])
    assert found.failures[0].startswith("7 slots, 6 free")
