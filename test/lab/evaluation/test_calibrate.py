# SPDX-License-Identifier: Apache-2.0
"""Calibration: tolerances as users write them, deviations, limits, and the profile that comes out."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bags
from support.gl import needs_gl
from typer.testing import CliRunner

from specvla_ros.engine.settings import EngineSettings, engine_settings_from
from specvla_ros.errors import UserError
from specvla_ros.lab.bundled.policies import bundled_policy, nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation import simulate
from specvla_ros.lab.evaluation.calibrate import (
    PROFILE_FILE,
    Calibration,
    Candidate,
    Trial,
    calibrate,
    write_profile,
)
from specvla_ros.lab.evaluation.deviation import Deviation, deviation
from specvla_ros.lab.evaluation.frame_sources import frame_source
from specvla_ros.lab.evaluation.paired import PairedComparison, Rate, paired_difference
from specvla_ros.lab.evaluation.simulate import SimulateSettings
from specvla_ros.lab.plans import CalibratePlan, Limits, SimulatePlan
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.models.checkpoint import load_target
from specvla_ros.models.observation import Observation
from specvla_ros.settings.profiles import merge_parameters
from specvla_ros.speculation.settings import NO_HEAD, DraftSettings, Tolerance, adjusted

NONE, NEAR, FAR = map(Tolerance.parse, ("0.0001mm", "2mm,1.1deg", "30mm,20deg"))


def test_tolerances_are_read_as_they_are_written():
    assert Tolerance.parse("2mm, 1.1deg") == Tolerance(2.0, 1.1)
    assert str(Tolerance.parse("0.5mm")) == "0.5mm" and str(Tolerance.parse("5bins")) == "5bins"
    acceptance = Tolerance.parse("2mm,1.1deg").acceptance
    assert acceptance.tolerance_m == pytest.approx(0.002)
    assert acceptance.tolerance_rad == pytest.approx(math.radians(1.1), abs=1e-6)
    assert Tolerance.parse("1bin").acceptance.bins == (1,)
    assert Tolerance.parse("5mm,3deg") > Tolerance.parse("2mm,4deg")


@pytest.mark.parametrize("text", ["", "2", "2cm", "0mm", "-1mm", "1mm,2mm", "5bins,1mm", "1.5bins", "1..2mm"])
def test_what_is_no_tolerance_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"2mm,1\.1deg"):
        Tolerance.parse(text)


def test_deviation_is_that_of_displacement_rotation_and_gripper():
    plain = np.zeros((100, 7))
    other = plain.copy()
    other[:, 0], other[:, 1] = 0.003, 0.004
    other[0, :3] = (0.0, 0.0, 0.02)
    other[:, 5] = math.radians(2)
    other[:3, 6] = 1.0
    found = deviation(list(plain), list(other))
    assert found.p95_mm == pytest.approx(5) and found.largest_mm == pytest.approx(20)
    assert found.p95_deg == found.largest_deg == pytest.approx(2)
    assert found.gripper_share == 0.03 and found.lost_share == 0
    other[:50] = np.nan
    assert deviation(list(plain), list(other)).lost_share == 0.5
    assert deviation(list(plain), [np.full(7, np.nan)] * 100).lost_share == 1
    with pytest.raises(UserError, match=r"have 3 values: .* not known"):
        deviation([np.zeros(3)], [np.zeros(3)])
    joints = (*(f"joint{i}" for i in range(1, 7)), "gripper")
    with pytest.raises(UserError, match=r"the values joint1 joint2 .* not known, only that of x y z"):
        deviation(list(plain), list(other), joints)


def test_pairs_that_never_differ_are_no_certainty():
    assert paired_difference(0, 0, 0) == (0, -1, 1)
    middle, low, high = paired_difference(0, 0, 300)
    assert middle == 0 and low == -high and 0 < high < 0.01
    assert paired_difference(0, 0, 30)[2] > high
    lost, low, high = paired_difference(8, 2, 100)
    assert lost == pytest.approx(-0.06) and low < -0.06 < high < 0.005


def candidate(**given) -> Candidate:
    trial = Trial("2mm", Tolerance(2.0), EngineSettings("spec", acceptance=Tolerance(2.0).acceptance))
    known: dict[str, Any] = dict(
        trial=trial, action_s=0.01, speed_up=2.0, tau=3.0, forwards_per_action=3.0, deviation=Deviation()
    )
    return Candidate(**known | given)


def test_each_limit_refuses_with_its_figures():
    limits = Limits(loss_points=2, p95_mm=1, p95_deg=1, gripper_share=0.1)
    exact = candidate(speed_up=1.5, trial=Trial("strict", None, EngineSettings("spec")))
    assert not candidate().judged(limits, exact).refusals
    for found, said in (
        (candidate(deviation=Deviation(p95_mm=1.5)), "deviation 1.5 mm"),
        (candidate(deviation=Deviation(p95_deg=1.5)), "deviation 1.5 deg"),
        (candidate(deviation=Deviation(gripper_share=0.25)), "gripper differs in 25.00%"),
        (candidate(deviation=Deviation(lost_share=0.01)), "no action for 1.00%"),
        (candidate(speed_up=1.5), "not faster than strict"),
    ):
        (refusal,) = found.judged(limits, exact).refusals
        assert said in refusal
    few, many = (PairedComparison(Rate(n, n), Rate(n, n), 0, 0, 1.0) for n in (20, 300))
    assert candidate().with_success(many, limits).refusals == ()
    assert "points of success" in candidate().with_success(few, limits).refusals[0]
    with pytest.raises(UserError, match="--max-mm"):
        Limits(p95_mm=-1)


@pytest.mark.parametrize(
    "engine",
    [
        EngineSettings("ar"),
        EngineSettings("spec", draft=adjusted(DraftSettings(head="/some/head", nodes=8), temporal=True)),
        EngineSettings("spec", acceptance=Tolerance(2.0, 1.1).acceptance),
        EngineSettings("spec", acceptance=Tolerance(bins=5).acceptance),
    ],
)
def test_the_profile_is_read_back_as_the_setting_that_was_chosen(tmp_path: Path, engine: EngineSettings):
    chosen = candidate(trial=Trial("any", None, engine))
    path = tmp_path / PROFILE_FILE
    write_profile(path, Calibration((chosen,), chosen, Limits(), {}, {"emulate": {"name": "an Orin"}}))
    again = engine_settings_from(params_file=path)
    assert (again.mode, again.acceptance, again.draft) == (engine.mode, engine.acceptance, engine.draft)
    assert "emulated an Orin, not measured on one" in path.read_text()


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_the_profile_names_the_quantisation_that_it_was_found_for(tmp_path: Path, quantization: str):
    chosen = candidate(trial=Trial("any", None, EngineSettings("ar")))
    path = tmp_path / PROFILE_FILE
    write_profile(path, Calibration((chosen,), chosen, Limits(), {}, {"policy": {"quantization": quantization}}))
    named = merge_parameters([path], {}, node="policy").get("model.quantization", "none")
    assert named == quantization


def test_images_without_an_action_are_lost_and_without_any_nothing_is_chosen(tmp_path: Path):
    policy = load_target(bundled_policy("digits"), device="cpu")
    base = SimulateSettings(
        policy.directory, engine=EngineSettings("spec", draft=adjusted(DraftSettings(head=NO_HEAD), chunk_shift=True))
    )
    image, plan = bags.pixels(2), CalibratePlan((), nodes=(8,))
    seen, unanswered = (Observation(image, text, 1) for text in ("lift the red cube", "word " * 2000))
    found = calibrate(policy, base, [seen, unanswered], plan, tmp_path / "one")
    assert [each.deviation.lost_share for each in found.candidates] == [0.5, 0.5]
    with pytest.raises(UserError, match=r"answered none of the 2 images with an action.*bad_instruction: .*own robot"):
        calibrate(policy, base, [unanswered] * 2, plan, tmp_path / "none")
    assert not (tmp_path / "none" / PROFILE_FILE).exists()


@needs_gl
def test_in_a_world_with_few_starts_those_that_give_images_judge_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    began: list[int] = []

    class FewStarts(TableRobot):
        """The table as a LIBERO suite."""

        def reset(self, task: str, seed: int) -> None:
            assert task == "libero_goal/3" and 0 <= seed < 50
            began.append(seed)
            super().reset("lift_red", seed)

    monkeypatch.setattr(simulate, "LiberoRobot", FewStarts)
    monkeypatch.setattr(simulate, "require_libero", lambda: None)
    tried = ["--tolerance", "30mm,20deg", "--nodes", "8", "--max-mm", "1000", "--max-deg", "1000", "--emulate", "orin"]
    of_policy = ["--policy", "nano", "--unnorm-key", "specvla_table", "--device", "cpu", "-p", "draft.temporal:=true"]
    command = ["calibrate", *of_policy, *tried, "--world", "libero_goal", "--task", "libero_goal/3", "--frames", "45"]
    result = CliRunner().invoke(app, [*command, "--max-gripper", "100", "--seed", "38", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "reduced to --episodes 2: episodes from seed 40 on give images" in result.output
    images, judged = began[:-4], began[-4:]
    assert images == [*range(40, 40 + len(images))] and judged == [38, 39] * 2
    late = CliRunner().invoke(app, [*command, "--seed", "40", "--out", str(tmp_path / "late")])
    assert isinstance(late.exception, UserError) and "from seed 40 on give images" in str(late.exception)


@pytest.mark.nightly
@needs_gl
def test_the_most_relaxed_setting_within_the_limits_is_chosen(tmp_path: Path):
    policy, base, plan = _small_calibration()
    frames = list(islice(frame_source(policy, None, 0, engine=base.engine), 20))
    anything = calibrate(policy, base, frames, plan, tmp_path / "wide")
    assert anything.chosen.trial.tolerance == FAR and anything.chosen.speed_up > 1
    assert anything.candidates[0].trial.name == "ar" and anything.candidates[0].speed_up == 1.0
    assert list(anything.refused) == ["0.0001mm"] and "smaller than one bin" in anything.refused["0.0001mm"]

    exact = calibrate(
        policy, base, frames, replace(plan, limits=Limits(p95_mm=0, p95_deg=0)), tmp_path / "exact"
    ).chosen
    assert exact.trial.tolerance is None and exact.deviation == Deviation() and exact.trial.engine.mode == "spec"


@needs_gl
@pytest.mark.nightly
def test_what_episodes_were_acted_with_is_chosen_and_written_as_a_profile(tmp_path: Path):
    policy, base, plan = _small_calibration()
    frames = list(islice(frame_source(policy, None, 0, engine=base.engine), 30))
    anything = calibrate(policy, base, frames, plan, tmp_path / "wide")
    off = {each.trial.tolerance: each.deviation.p95_mm for each in anything.candidates}  # of window mass, the last
    assert 0 < off[NEAR] < off[FAR]
    episodes = SimulatePlan(("lift_red",), episodes=3, films=0)
    tight = replace(plan, limits=replace(plan.limits, p95_mm=off[NEAR]), episodes=episodes)
    found = calibrate(policy, base, frames, tight, tmp_path / "tight")
    assert found.chosen.trial.tolerance == NEAR
    assert found.chosen.pairs is not None and found.chosen.pairs.first.n == 3
    assert all("p95 deviation" in each.refusals[0] for each in found.candidates if each.trial.tolerance == FAR)
    assert [each.trial.tolerance for each in found.shortlist] == [None, None, NEAR, FAR]
    assert found.chosen in found.shortlist
    written = json.loads((tmp_path / "tight" / "calibration.json").read_text())
    assert written["chosen"]["name"] == found.chosen.trial.name
    assert "Emulation" in (tmp_path / "tight" / "report.html").read_text()
    profile = engine_settings_from(params_file=tmp_path / "tight" / PROFILE_FILE)
    assert profile.acceptance == NEAR.acceptance and profile.draft.drafters["temporal"].enabled


def _small_calibration() -> tuple[Any, SimulateSettings, CalibratePlan]:
    base = SimulateSettings(
        nano_policy(), engine=EngineSettings("spec", draft=adjusted(DraftSettings(), temporal=True))
    )
    # Of three pairs nothing is certain: all of the success may be lost.
    wide = Limits(loss_points=100, p95_mm=1000, p95_deg=1000, gripper_share=1)
    plan = CalibratePlan((NONE, NEAR, FAR), nodes=(8,), limits=wide, emulate="orin")
    return load_target(base.policy, device="cpu"), base, plan
