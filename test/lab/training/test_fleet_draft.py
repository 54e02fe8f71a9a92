# SPDX-License-Identifier: Apache-2.0
"""A head from the day's bags is taken where it is better than the one in use, and refused with the reason."""

import json
from pathlib import Path

import pytest
from support.bags import episode, write_bag
from support.checkpoints import load_openvla
from support.draft_heads import write_random_head
from support.random_checkpoint import write_random_checkpoint

from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.run_directory import REPORT_FILE
from specvla_ros.lab.plans import CalibratePlan, DraftTraining, FleetPlan
from specvla_ros.lab.training import draft_features, train_draft
from specvla_ros.lab.training.fleet_draft import FLEET_FILE, HEAD, FleetDraft, fleet_draft
from specvla_ros.models.families.openvla.target import OpenVLATarget
from specvla_ros.models.settings import ModelSettings
from specvla_ros.speculation.drafters.eagle.head import load_draft_head
from specvla_ros.speculation.settings import Tolerance

pytest.importorskip("accelerate", reason="training needs accelerate: pip install -r requirements/train.txt")

MODEL = ModelSettings(device="cpu")
TAUGHT = DraftTraining(epochs=12, batch_size=8, learning_rate=4e-3, own_steps=3)


@pytest.fixture
def policy(tmp_path: Path) -> OpenVLATarget:
    write_random_checkpoint(tmp_path / "target", seed=4, hidden_size=64, layers=2)
    target = load_openvla(tmp_path / "target", device="cpu")
    write_random_head(tmp_path / "target" / "draft", target.decoder)
    return target


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Bags of the same few pictures, so that a few epochs must teach something."""
    monkeypatch.setattr(draft_features, "SHARD_SAMPLES", 16)
    monkeypatch.setattr(train_draft, "MIN_FRAMES", 17)
    for number in range(9):
        write_bag(tmp_path / "day" / f"bag_{number}", episode(8))
    return tmp_path / "day"


def renew(policy: OpenVLATarget, day: Path, out: Path, plan: FleetPlan, promote: Path | None = None) -> FleetDraft:
    return fleet_draft(policy, MODEL, EngineSettings("spec"), [day], out, plan, promote=promote)


@pytest.mark.nightly
def test_a_better_head_is_taken_and_the_same_again_is_refused(policy: OpenVLATarget, day: Path, tmp_path: Path) -> None:
    used = policy.directory / "draft"
    before = (used / "model.safetensors").read_bytes()
    plan = FleetPlan(TAUGHT, calibrate=CalibratePlan((Tolerance.parse("5bins"),), (8,)))
    found = renew(policy, day, tmp_path / "out", plan, promote=used)
    assert found.refusals == () and found.promoted == used
    forwards = {name: run.tally.forwards_per_action for name, run in found.runs.items()}
    assert forwards["new"] < forwards["in use"] * 0.99 and forwards["plain decoding"] == 7
    assert (used / "model.safetensors").read_bytes() == (tmp_path / "out" / HEAD / "model.safetensors").read_bytes()
    assert found.kept is not None and (found.kept / "model.safetensors").read_bytes() == before
    load_draft_head(used, policy.decoder)
    written = json.loads((tmp_path / "out" / FLEET_FILE).read_text())
    assert len(written["bags"]["trained on"]) == 7 and len(written["bags"]["judged by"]) == 2
    assert not written["bags"]["trained on"].keys() & written["bags"]["judged by"].keys()
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["strict"] and certificate["result"]["actions"] == 16
    assert found.calibration.endswith("calibration/profile.yaml")
    assert (tmp_path / "out" / "calibration" / "profile.yaml").exists()
    assert "The new head is accepted" in (tmp_path / "out" / REPORT_FILE).read_text()

    again = renew(policy, day, tmp_path / "again", FleetPlan(TAUGHT), promote=used)
    assert again.promoted is None and again.kept is None
    (refusal,) = again.refusals
    assert "forwards per action, in use" in refusal and "+0.0%, but -1.0% or less is required" in refusal
    assert "The new head is refused" in (tmp_path / "again" / REPORT_FILE).read_text()
    assert (used / "model.safetensors").read_bytes() == (tmp_path / "out" / HEAD / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds the verdict of an earlier run"):
        renew(policy, day, tmp_path / "again", FleetPlan(TAUGHT, held_out=0.5))


def test_one_bag_and_nonsense_are_refused(policy: OpenVLATarget, day: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot both train a head and judge it"):
        renew(policy, day / "bag_0", tmp_path / "out", FleetPlan(TAUGHT))
    with pytest.raises(UserError, match="--held-out must be between 0 and 1, and --min-gain at least 0"):
        FleetPlan(TAUGHT, held_out=1.5)
    assert not (tmp_path / "out").exists()
