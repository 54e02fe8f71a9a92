# SPDX-License-Identifier: Apache-2.0
"""`specvla simulate`: results that are complete, honest and survive being killed."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import av
import numpy as np
import pytest
from support.dying import run_job_dying_once, simulating_host_dying_once
from support.gl import needs_gl
from support.patience import wait_until
from support.random_qwen_vl import FAST_IDS, SHAPES, add_nora, write_qwen_vl
from typer.testing import CliRunner

from specvla_ros.engine.outcome import DecodeRecord
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.evaluation import simulate as simulation
from specvla_ros.lab.evaluation.paired import Rate, mcnemar_p, wilson_interval
from specvla_ros.lab.evaluation.simulate import EPISODES_FILE, SimulateSettings, read_episodes, simulate
from specvla_ros.lab.evaluation.simulate_summary import age_over_time, compare_episodes, summarise_episodes
from specvla_ros.lab.plans import NanoShape, SimulatePlan
from specvla_ros.lab.simulation.rollout import Clock, EpisodeResult
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.lab.training.nano import write_nano

SHAPE = NanoShape(image_size=28, patch_size=14, vision_dim=32, vision_depth=2, hidden_size=64, layers=1, head_dim=16)
SHORT = 0.25  # of the time: an untrained policy takes all that it is given
INSTRUCTIONS = [task.instruction for task in TASKS]


def write_policy(directory, reach=0.05):
    stats = {"action": {"q01": [-reach] * 3 + [-0.2] * 3 + [0], "q99": [reach] * 3 + [0.2] * 3 + [1]}}
    stats["action"]["mask"] = [True] * 6 + [False]
    write_nano(directory, SHAPE, INSTRUCTIONS, {"table": stats}, seed=0)
    # Nothing but action tokens can win, so that every answer of the untrained policy is an action.
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    head = tensors["language_model.lm_head.weight"]
    head[: len(head) - 64 - 256] = 0
    head[len(head) - 64 :] = 0
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    assert torch.isfinite(head).all()
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@needs_gl
def test_results_are_complete(policy, tmp_path):
    seen = []
    summary = simulate(
        SimulateSettings(policy, emulate="rtx5090", time_limit=SHORT),
        SimulatePlan(tasks=("lift_red", "put_red"), episodes=2, first_seed=5),
        tmp_path / "out",
        lambda result, done, wanted: seen.append((result.task, result.seed, done, wanted)),
    )
    assert seen == [("lift_red", 5, 1, 4), ("put_red", 5, 2, 4), ("lift_red", 6, 3, 4), ("put_red", 6, 4, 4)]
    assert summary.success.n == 4 and set(summary.tasks) == {"lift_red", "put_red"}
    assert summary.latency_s["p50"] == pytest.approx(0.1288, abs=1e-3)
    assert summary.action_rate_hz == pytest.approx(5.0, rel=0.01)
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["context"]["emulation"]["name"] == "NVIDIA RTX 5090"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<b>Emulation</b> of NVIDIA RTX 5090" in page and "data:video/mp4" in page
    assert "age of the image acted on [ms]" not in page, "in lockstep the world waits"
    films = sorted((tmp_path / "out" / "films").glob("*.mp4"))
    acted = json.loads(films[0].with_suffix(".json").read_text())
    assert acted["names"][-1] == "gripper" and {len(values) for _, values in acted["acted"]} == {7}
    assert [film.name for film in films] == ["lift_red-5.mp4", "put_red-5.mp4"]
    with av.open(str(films[0])) as film:
        assert sum(1 for _ in film.decode(video=0)) == TASKS[0].max_steps * 4 * SHORT


@needs_gl
def test_what_is_finished_is_not_run_again(policy, tmp_path):
    settings, out = SimulateSettings(policy, time_limit=SHORT), tmp_path / "out"
    simulate(settings, SimulatePlan(tasks=("lift_red",), episodes=2, films=0), out)
    lines = (out / EPISODES_FILE).read_text().splitlines(keepends=True)
    # As a killed process leaves it.
    (out / EPISODES_FILE).write_text(lines[0] + lines[1][:20])
    seen = []
    plan = SimulatePlan(tasks=("lift_red",), episodes=3, films=0)
    summary = simulate(settings, plan, out, lambda result, *_: seen.append(result.seed))
    assert seen == [1, 2] and summary.success.n == 3
    assert len(read_episodes(out)) == 3
    with pytest.raises(UserError, match="results of other settings"):
        simulate(SimulateSettings(policy, clock=Clock.REALTIME, time_limit=SHORT), plan, out)


@needs_gl
def test_a_report_shows_the_films_of_its_own_episodes(policy, tmp_path):
    settings = SimulateSettings(policy, time_limit=SHORT)
    simulate(settings, SimulatePlan(tasks=("lift_red", "put_red"), episodes=1, films=1), tmp_path)
    simulate(settings, SimulatePlan(tasks=("lift_red",), episodes=1, films=0), tmp_path)
    report = (tmp_path / "report.html").read_text()
    assert "lift_red-0</figcaption>" in report and "put_red-0" not in report


@pytest.mark.nightly
@needs_gl
def test_killed_simulation_goes_on_where_it_stopped(policy, tmp_path):
    command = [sys.executable, "-m", "specvla_ros.cli", "simulate", "--policy", str(policy), "--out", str(tmp_path)]
    command += ["--task", "lift_blue", "--episodes", "30", "--films", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    episodes = tmp_path / EPISODES_FILE
    wait_until(lambda: process.poll() is not None or (episodes.exists() and episodes.read_text().count("\n") >= 2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(read_episodes(tmp_path))
    assert 2 <= kept < 30
    seen = []
    plan = SimulatePlan(tasks=("lift_blue",), episodes=kept + 2, films=0)
    simulate(SimulateSettings(policy), plan, tmp_path, lambda result, *_: seen.append(result.seed))
    assert seen == [kept, kept + 1]


@needs_gl
@pytest.mark.parametrize(
    "where",
    (
        pytest.param({"workers": 2}, id="processes"),
        pytest.param({"workers": 2, "ray": "local"}, id="ray", marks=pytest.mark.nightly),
    ),
)
@pytest.mark.nightly
def test_a_killed_worker_changes_no_episode_and_each_is_counted_once(policy, tmp_path, where, monkeypatch, request):
    if "ray" in where:
        request.getfixturevalue("cluster")
    settings = SimulateSettings(policy, emulate="h200", time_limit=SHORT)
    plan = SimulatePlan(("push_green",), episodes=3, films=2)
    here = simulate(settings, plan, tmp_path / "here")
    monkeypatch.setattr(simulation, "run_job", run_job_dying_once)
    there = simulate(settings, replace(plan, **where), tmp_path / "there")
    assert (tmp_path / "there" / ".died").exists(), "the worker was not killed"
    assert read_episodes(tmp_path / "there") == read_episodes(tmp_path / "here")
    assert len((tmp_path / "there" / EPISODES_FILE).read_text().splitlines()) == there.success.n == here.success.n == 3


@needs_gl
@pytest.mark.nightly
@pytest.mark.parametrize(
    "where",
    (
        pytest.param({}, id="processes"),
        pytest.param({"workers": 2, "ray": "local"}, id="ray", marks=pytest.mark.nightly),
    ),
)
def test_workers_that_share_an_engine_see_the_same_episodes_though_it_is_killed(
    policy, tmp_path, where, monkeypatch, request
):
    if "ray" in where:
        request.getfixturevalue("cluster")
    settings = SimulateSettings(policy, time_limit=SHORT)
    plan = SimulatePlan(("push_green", "lift_red"), episodes=2, films=0)
    simulate(settings, plan, tmp_path / "here")
    died = tmp_path / ".died"
    monkeypatch.setattr(simulation, "host_engine", partial(simulating_host_dying_once, died))
    there = simulate(settings, replace(plan, **where, per_engine=2), tmp_path / "there")
    assert died.exists(), "the engine was not killed"
    here, packed = (  # in other times: the ticks carry more than one
        {start: replace(episode, latency_s=()) for start, episode in read_episodes(tmp_path / name).items()}
        for name in ("here", "there")
    )
    assert packed == here and there.success.n == 4


def test_in_real_time_no_engine_is_shared(policy, tmp_path):
    with pytest.raises(UserError, match="--per-engine 2 needs --clock lockstep"):
        simulate(SimulateSettings(policy, clock=Clock.REALTIME), SimulatePlan(per_engine=2), tmp_path)


def test_a_robot_that_follows_one_action_of_an_answer_is_not_given_the_last_ones(policy, tmp_path):
    with pytest.raises(UserError, match=r"decode\.commit needs a robot that follows all actions of an answer"):
        simulate(SimulateSettings(policy, engine=EngineSettings(commit="executed")), SimulatePlan(), tmp_path)


@needs_gl
def test_policy_of_another_robot_is_refused_before_motion(tmp_path):
    plan = SimulatePlan(episodes=1)
    with pytest.raises(UserError, match=r"do not fit this robot: the policy moves by up to 0.94"):
        simulate(SimulateSettings(write_policy(tmp_path / "libero", 0.94)), plan, tmp_path / "a")
    with pytest.raises(UserError, match="do not fit this robot"):
        simulate(SimulateSettings(write_policy(tmp_path / "still", 1e-4)), plan, tmp_path / "b")


def test_policies_of_other_families_are_simulated(tmp_path, monkeypatch):
    nora = add_nora(write_qwen_vl(tmp_path / "nora", SHAPES[0], seed=1, actions=FAST_IDS))
    monkeypatch.setattr(simulation, "run_job", lambda job: EpisodeResult(job.task, job.seed, "lift", True, 5, 1.0))
    plan = SimulatePlan(tasks=("lift_red",), episodes=2, films=0)
    assert simulate(SimulateSettings(nora), plan, tmp_path / "out").success == Rate(2, 2)


def test_bad_input_is_refused_before_anything_runs(policy, tmp_path):
    with pytest.raises(UserError, match="no task 'fly'"):
        simulate(SimulateSettings(policy), SimulatePlan(tasks=("fly",)), tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        simulate(SimulateSettings(tmp_path / "none"), SimulatePlan(), tmp_path)
    with pytest.raises(
        UserError, match="--emulate 'toaster' is neither an existing file nor one of a100, h100, h200, l4, orin, "
    ):
        simulate(SimulateSettings(policy, emulate="toaster"), SimulatePlan(), tmp_path)
    assert not list(tmp_path.iterdir())


@needs_gl
def test_full_disk_keeps_what_is_finished(policy, tmp_path, monkeypatch):
    settings = SimulateSettings(policy, time_limit=SHORT)
    plan = SimulatePlan(tasks=("lift_red",), episodes=3, films=0)
    simulate(settings, SimulatePlan(tasks=("lift_red",), episodes=1, films=0), tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device; finished episodes are kept"):
        simulate(settings, plan, tmp_path, full)
    assert len(read_episodes(tmp_path)) == 2
    seen = []
    simulate(settings, plan, tmp_path, lambda result, *_: seen.append(result.seed))
    assert seen == [2]


def test_damaged_line_is_named(tmp_path):
    (tmp_path / EPISODES_FILE).write_text("{}\n{}\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_episodes(tmp_path)


def episode(task: str, seed: int, succeeded: bool, **more) -> EpisodeResult:
    return EpisodeResult(task, seed, "do it", succeeded, steps=10, time_s=2.0, **more)


def test_summary_adds_up():
    episodes = [
        episode("lift_red", 0, True, latency_s=(0.1, 0.2), acted_on="red_cube", drops={"stale": 2}),
        episode("lift_red", 1, False, latency_s=(0.3,), acted_on="blue_cube", failure="gone"),
        episode("push_green", 0, True, acted_on="green_cube"),
    ]
    summary = summarise_episodes(episodes, context={})
    assert summary.success == Rate(2, 3) and summary.listened == Rate(2, 3)
    assert summary.tasks["lift_red"].acted_on == {"red_cube": 1, "blue_cube": 1}
    assert summary.tasks["lift_red"].failures == {"gone": 1}
    assert summary.latency_s["p50"] == pytest.approx(0.2) and summary.drops == {"stale": 2}
    assert summary.action_rate_hz == pytest.approx(5.0)
    assert summarise_episodes([], context={}).success.as_json()["high"] == 1.0


def test_the_age_of_the_image_acted_on_is_shown_over_a_tasks_first_episode_with_actions():
    timed = episode("lift_red", 1, True, acted_s=(1.0, 1.5, 3.0), latency_s=(0.3, 0.2, 0.4))
    later = replace(timed, seed=2, acted_s=(9.0,), latency_s=(9.0,))
    summary = summarise_episodes([episode("lift_red", 0, False), timed, later, episode("push", 0, True)], context={})
    assert summary.acted == {"lift_red": ((1.0, 0.3), (1.5, 0.2), (3.0, 0.4))}
    wanted = [(1.0, 0.3), (1.5, 0.8), (1.5, 0.2), (3.0, 1.7), (3.0, 0.4)]
    assert np.array(age_over_time(summary.acted["lift_red"])) == pytest.approx(np.array(wanted))


def test_comparison_is_over_pairs():
    first = {("t", seed): episode("t", seed, seed < 8) for seed in range(10)}
    second = {("t", seed): episode("t", seed, seed < 2) for seed in range(2, 12)}
    comparison = compare_episodes(first, second)
    assert comparison.first == Rate(6, 8) and comparison.second == Rate(0, 8)
    assert (comparison.only_first, comparison.only_second) == (6, 0)
    assert comparison.p == pytest.approx(2 * 0.5**6)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [(5, "no significant difference (p = 0.0625, 5 pairs"), (6, "\nsignificant difference (p = 0.0312, 6")],
)
def test_too_few_pairs_are_not_said_to_be_alike(tmp_path, pairs, words):
    for name, succeeded in (("first", True), ("second", False)):
        (tmp_path / name).mkdir()
        lines = [json.dumps(asdict(episode("t", seed, succeeded))) + "\n" for seed in range(pairs)]
        (tmp_path / name / EPISODES_FILE).write_text("".join(lines))
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "first"), str(tmp_path / "second")])
    assert words in done.output and "alike" not in done.output


def frame(
    index: int, seconds: float, forwards: int, tokens: list[int] | None, values: list[float] | None = None
) -> str:
    drop = None if tokens else {"reason": "stale", "detail": ""}
    record = {**asdict(DecodeRecord("spec", tokens_per_forward=(1,) * forwards)), "forwards": forwards}
    answer = {"tokens": tokens, "decode": record, "values": values} if tokens else {}
    usual = {"stamp_ns": 0, "seq": None, "epoch": 1, "instruction": "", "recorded": None, "drop": drop}
    return json.dumps({"frame": index, "time_ns": index, "total_s": seconds, **usual, **answer}) + "\n"


def test_replays_are_compared_frame_by_frame(tmp_path):
    for name, seconds, forwards in (("first", 0.2, 7), ("second", 0.1, 3)):
        (tmp_path / name / "bag").mkdir(parents=True)
        other = [7, 3] if name == "second" else None
        lines = [frame(i, seconds, forwards, tokens) for i, tokens in enumerate([[1, 2], [7, forwards], other])]
        (tmp_path / name / "bag" / "frames.jsonl").write_text("".join(lines))
    (tmp_path / "empty").mkdir()

    def compare(*names: str):
        return CliRunner().invoke(app, ["compare", *(str(tmp_path / name) for name in names)])

    shown = compare("first", "second").output
    assert "3 pairs of the same frame; 1 have different tokens" in shown
    assert "second: p50 100.0 ms, 3.00 forwards per action; 1 frames that only this run answered" in shown
    assert "is 2.00 times as fast as" in shown
    assert "is a replay: compare two replays" in str(compare("first", "empty").exception)


def test_replays_are_compared_by_their_distance_on_the_robot(tmp_path):
    """Millimetres and degrees decide about a tolerance, not the number of different tokens."""
    for name, far in (("first", 0.0), ("second", 1.0)):
        (tmp_path / name / "bag").mkdir(parents=True)
        moves = [[far * mm / 1000, 0, 0, 0, 0, far * np.radians(2), far] for mm in (0, 1, 9)]
        (tmp_path / name / "bag" / "frames.jsonl").write_text(
            "".join(frame(i, 0.1, 3, [i, int(far)], values) for i, values in enumerate(moves))
        )
    names = [str(tmp_path / name) for name in ("first", "second")]
    shown = CliRunner().invoke(app, ["compare", *names]).output
    assert "difference: 1.00 mm and 2.00 degrees (median), 8.20 mm and 2.00 degrees (95th percentile)" in shown
    assert "at most 9.00 mm and 2.00 degrees; 100.0% have another gripper command" in shown
    as_json = json.loads(CliRunner().invoke(app, ["compare", "--json", *names]).output)
    assert as_json["median"][0] == pytest.approx(1.0) and as_json["deviation"]["largest_mm"] == pytest.approx(9.0)
    joints = {"names": [*(f"joint{i}" for i in range(1, 7)), "gripper"]}
    (tmp_path / "first" / "bag" / "summary.json").write_text(json.dumps(joints))
    assert " mm and " not in CliRunner().invoke(app, ["compare", *names]).output, "seven values of joints are no pose"


@pytest.mark.parametrize(
    ("successes", "n", "percent"),
    [(0, 300, "0 %"), (1, 300, "0.3 %"), (1, 3, "33 %"), (199, 200, "99.5 %"), (200, 200, "100 %"), (0, 0, "0 %")],
)
def test_a_rate_reads_100_percent_only_if_every_episode_succeeded(successes, n, percent):
    assert Rate(successes, n).percent == percent


@pytest.mark.parametrize(
    "successes, n, low, high",
    # R's prop.test(x, n, correct = FALSE)
    [(0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (81, 100, 0.7222, 0.8749), (10, 10, 0.7225, 1.0)],
)
def test_wilson_interval(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_mcnemar_is_exact():
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 5) == 1.0
    assert mcnemar_p(1, 9) == mcnemar_p(9, 1) == pytest.approx(22 / 1024)
