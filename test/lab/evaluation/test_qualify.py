# SPDX-License-Identifier: Apache-2.0
"""Qualification: verdicts on outcomes that are known, and of the nano policy on a device that is far too slow."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import edit_json
from support.nightly import nightly_but
from typer.testing import CliRunner

import specvla_ros.lab.planning
from specvla_ros import EngineSettings, UserError
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation import simulate
from specvla_ros.lab.evaluation.qualify import (
    REFERENCE,
    Judgement,
    Pair,
    Verdict,
    boldest,
    device_candidates,
    qualify,
    tolerance_candidates,
)
from specvla_ros.lab.evaluation.simulate import EpisodeJob, SimulateSettings
from specvla_ros.lab.plans import Criterion, QualifyPlan
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult

ORIN = Path(specvla_ros.lab.planning.__file__).parent / "devices" / "orin.json"


def judged(outcomes: list[tuple[bool, bool]]) -> Judgement:
    pairs = tuple(Pair("lift", seed, *each) for seed, each in enumerate(outcomes))
    return Judgement("it", pairs, Criterion())


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], Verdict.NOT_TRIED),
        ([(True, True)] * 10, Verdict.UNDECIDED),
        ([(True, True)] * 60, Verdict.QUALIFIED),
        ([(False, True)] * 60, Verdict.QUALIFIED),
        ([(True, False)] * 15, Verdict.REFUSED),
        ([(False, False)] * 60, Verdict.REFUSED),  # as well as the reference, which never works
        ([(True, True), (True, False)] * 60, Verdict.REFUSED),
    ],
)
def test_verdicts_on_outcomes_that_are_clear(outcomes: list[tuple[bool, bool]], verdict: Verdict) -> None:
    assert judged(outcomes).verdict is verdict


@pytest.mark.parametrize(
    ("both", "reference_only", "wrong"),
    nightly_but(
        lambda case: case[2] is Verdict.QUALIFIED,
        [(0.8, 0.1, Verdict.QUALIFIED), (0.8, 0.09, Verdict.REFUSED)],
        of_several=True,
    ),
)
def test_a_wrong_verdict_is_rare_at_the_margin(both: float, reference_only: float, wrong: Verdict) -> None:
    """A candidate whose success is below by just the margin, and one that is just inside it; looked at 15 times."""
    generator = np.random.default_rng(7)
    outcomes = [(True, True), (True, False), (False, False)]
    chances = [both, reference_only, 1 - both - reference_only]
    verdicts = []
    for _ in range(150):
        drawn = [outcomes[i] for i in generator.choice(3, 300, p=chances)]
        looks = (judged(drawn[:n]).verdict for n in range(20, 301, 20))
        verdicts.append(next((each for each in looks if each is not Verdict.UNDECIDED), Verdict.UNDECIDED))
    assert np.mean([each is wrong for each in verdicts]) <= 0.05


@pytest.mark.parametrize("change", [{"margin": 0.0}, {"success": 1.0}, {"alpha": float("nan")}])
def test_criteria_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be between 0 and 1"):
        Criterion(**change)


def test_candidates_are_judged_in_order_until_one_fails_and_each_episode_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With outcomes that are made up: the second device loses half of the starts, the third is not tried."""
    ran: list[tuple[str, str, int]] = []

    def made_up(job: EpisodeJob) -> EpisodeResult:
        of = job.settings.emulate or REFERENCE
        ran.append((of, job.task, job.seed))
        if len(ran) == 70:
            raise KeyboardInterrupt
        return EpisodeResult(job.task, job.seed, "lift", of != "l4" or job.seed % 2 == 0, 5, 1.0)

    monkeypatch.setattr(simulate, "run_job", made_up)
    base = SimulateSettings(policy=nano_policy(), engine=EngineSettings("spec"))
    candidates = device_candidates(base, ["rtx5090", "l4", "orin"])
    assert {each.clock for each in candidates.values()} == {Clock.REALTIME}
    plan = QualifyPlan(pairs=200, first_seed=5)
    with pytest.raises(KeyboardInterrupt):
        qualify(candidates, plan, Criterion(), tmp_path)
    found = qualify(candidates, plan, Criterion(), tmp_path)
    assert [each.verdict for each in found] == [Verdict.QUALIFIED, Verdict.REFUSED, Verdict.NOT_TRIED]
    assert boldest(found) == "rtx5090"
    del ran[69]  # the one that was interrupted is done again
    assert len(ran) == len(set(ran)), "what was done is taken up, and the reference's episodes are shared"
    assert {of for of, _, _ in ran} == {REFERENCE, "rtx5090", "l4"}
    starts = [(pair.task, pair.seed) for pair in found[0].pairs]
    assert [seed for _, seed in starts] == list(range(5, 5 + len(starts))) and len({task for task, _ in starts}) == 5
    written = json.loads((tmp_path / "qualify.json").read_text())
    assert [each["verdict"] for each in written["results"]] == ["qualified", "refused", "not tried"]
    page = (tmp_path / "report.html").read_text()
    assert "rtx5090 qualifies." in page and "l4: refused after" in page
    with pytest.raises(UserError, match=r"results of other settings \(criterion.margin"):
        qualify(candidates, plan, Criterion(margin=0.2), tmp_path)


@pytest.mark.parametrize(
    ("only_reference", "verdict"), [((), Verdict.QUALIFIED), ((0, 25, 40), Verdict.UNDECIDED)], ids=["good", "open"]
)
def test_in_a_world_with_few_starts_the_verdict_is_made_from_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_reference: tuple[int, ...], verdict: Verdict
) -> None:
    def made_up(job: EpisodeJob) -> EpisodeResult:
        assert 0 <= job.seed < 50, "LIBERO has no such initial state"
        lost = job.settings.clock is Clock.REALTIME and job.seed in only_reference
        return EpisodeResult(job.task, job.seed, "lift", not lost, 5, 1.0)

    monkeypatch.setattr(simulate, "run_job", made_up)
    monkeypatch.setattr(simulate, "require_libero", lambda: None)
    base = SimulateSettings(policy=nano_policy(), world="libero_goal")
    plan = QualifyPlan(tasks=("libero_goal/2",))
    (found,) = qualify(device_candidates(base, []), plan, Criterion(), tmp_path / "one")
    assert found.verdict is verdict and [pair.seed for pair in found.pairs] == [*range(50)]
    said = "undecided after 50 pairs, as the world has no more starts"
    assert (said in str(found)) == (verdict is Verdict.UNDECIDED)
    with pytest.raises(UserError, match="the seeds 0 to 49, not 50"):
        qualify(device_candidates(base, []), QualifyPlan(first_seed=50), Criterion(), tmp_path / "late")


def test_pairs_of_a_world_with_few_starts_are_drawn_until_a_task_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(job: EpisodeJob) -> EpisodeResult:
        lost = job.settings.clock is Clock.REALTIME and job.seed % 10 == 1  # as many as the margin allows
        return EpisodeResult(job.task, job.seed, "lift", not lost, 5, 1.0)

    monkeypatch.setattr(simulate, "run_job", made_up)
    monkeypatch.setattr(simulate, "require_libero", lambda: None)
    base = SimulateSettings(policy=nano_policy(), world="libero_goal")
    (found,) = qualify(device_candidates(base, []), QualifyPlan(pairs=1000), Criterion(), tmp_path)
    starts = [(pair.task, pair.seed) for pair in found.pairs]
    of_tasks = Counter(task for task, _ in starts)
    assert len(set(starts)) == len(starts) and len(of_tasks) == 10 and max(of_tasks.values()) == 50
    assert {seed for _, seed in starts} == set(range(50)) and found.verdict is Verdict.UNDECIDED


def test_tolerances_are_candidates_too() -> None:
    base = SimulateSettings(policy=nano_policy(), engine=EngineSettings("spec"))
    found = tolerance_candidates(base, "orin", [1, 9])
    assert [each.engine.acceptance.bins for each in found.values()] == [(1,), (9,)]
    assert {each.engine.acceptance.rule for each in found.values()} == {"bin_distance"}


@pytest.mark.nightly
def test_the_nano_policy_on_a_device_that_is_far_too_slow(tmp_path: Path) -> None:
    """A setting that was made bad on purpose."""
    slow = tmp_path / "slow.json"
    slow.write_text(ORIN.read_text())
    edit_json(slow, lambda raw: raw.update(bandwidth_gb_s=4.0, dense_tflops=1.0))
    options = ["--policy", "nano", "--out", str(tmp_path / "out"), "--emulate", str(slow), "--task", "lift_red"]
    result = CliRunner().invoke(app, ["qualify", *options])
    assert result.exit_code == 1, result.output
    assert "refused after 20 pairs: success 0 %" in result.output
    again = CliRunner().invoke(app, ["qualify", *options])
    assert again.exit_code == 1 and "refused after 20 pairs" in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--emulate", "orin", "--emulate", "l4", "--bins", "3"], "several --emulate or several --bins"),
        (["--bins", "9", "--bins", "3"], "--bins in increasing order"),
        (["--emulate", "orin", "--emulate", "orin"], "each --emulate device once"),
        (["--emulate", "toaster"], "--emulate 'toaster' is neither an existing file nor one of"),
        (["--task", "dance"], "dance"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["qualify", "--policy", "nano", "--out", str(tmp_path / "out"), *options])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
