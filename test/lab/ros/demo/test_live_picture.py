# SPDX-License-Identifier: Apache-2.0
"""What the demo's live picture says of an answer: its first action, its tokens per forward, its text."""

from pathlib import Path

import pytest
from rich.console import Console

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.ros.demo.operator import TypedLine, picture
from specvla_ros.lab.ros.demo.record import DemoRecord
from specvla_ros.lab.ros.demo.run import _verdict
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.msg import DecodeStats, Reasoning, SimEpisode, VlaAction

NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]


def shown(record: DemoRecord) -> str:
    console = Console(width=160)
    with console.capture() as said:
        console.print(picture(record, None, TypedLine(), "", TASKS))
    return said.get()


def test_a_chunk_is_shown_by_its_first_action_and_the_text_before_it(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=False)
    values = [round(0.001 * i, 3) for i in range(14)]
    for _ in range(2):
        record.on_action(VlaAction(names=NAMES, values=values, horizon=2))
    record.on_stats(DecodeStats(tokens_per_forward=[3, 0, 5], forwards=3, tau=4.0))
    record.on_reasoning(Reasoning(text="now reach the red cube :"))
    said = shown(record)
    assert "x +0.000  y +0.001" in said and "gripper +0.006" in said and "+0.007" not in said
    assert "8 tokens in 3 forwards, 4.0 per forward" in said
    assert "text " in said and "now reach the red cube :" in said


def test_an_answer_that_comes_in_parts_counts_once_by_its_first_part(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=False)
    for second, seconds, partial in ((1, 0.2, True), (1, 0.5, True), (1, 0.9, False), (2, 0.3, False)):
        action = VlaAction(names=NAMES, values=[0.0] * 7, horizon=1, decode_s=seconds, partial=partial)
        action.header.stamp.sec = second
        record.on_action(action)
    assert [*record.recent] == [(1.0, 0.2), (2.0, 0.3)]


def test_an_episode_that_restarts_counts_once_by_its_last_attempt(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=True)

    def tell(index: int, state: int, finished: int) -> None:
        record.on_episode(
            SimEpisode(task="lift_red", seed=index, episode=index, state=state, finished_so_far=finished, time_s=1.0)
        )

    tell(0, SimEpisode.RUNNING, 0)
    tell(0, SimEpisode.ABORTED, 0)
    assert [episode.succeeded for episode in record.episodes] == [False]
    tell(0, SimEpisode.RUNNING, 0)
    tell(0, SimEpisode.SUCCEEDED, 1)
    tell(1, SimEpisode.RUNNING, 1)
    tell(1, SimEpisode.ABORTED, 2)  # the simulation diverged: another one follows
    tell(2, SimEpisode.RUNNING, 2)
    tell(2, SimEpisode.FAILED, 3)
    assert [(each.seed, each.succeeded) for each in record.episodes] == [(0, True), (1, False), (2, False)]
    assert record.unseen == 0


def test_an_episode_says_when_each_action_came_and_how_old_its_image_was(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=False)
    record.on_episode(SimEpisode(state=SimEpisode.RUNNING, task="lift_red"))
    for second, seconds in ((11, 0.2), (12, 0.4)):
        action = VlaAction(names=NAMES, values=[0.0] * 7, horizon=1, decode_s=seconds)
        action.header.stamp.sec = second
        record.on_action(action)
    over = SimEpisode(state=SimEpisode.SUCCEEDED, task="lift_red", time_s=4.0)
    over.header.stamp.sec = 14
    record.on_episode(over)
    (episode,) = record.episodes
    assert episode.acted_s == pytest.approx((1.2, 2.4)) and episode.latency_s == pytest.approx((0.2, 0.4))
    # 0.2 s grows to 1.4 s in 1.2 s, then 0.4 s to 2.0 s in 1.6 s.
    assert episode.picture_age_s == pytest.approx((1.2 * 0.8 + 1.6 * 1.2) / 2.8)
    record.finish({"settings": {"engine": {"mode": "spec"}, "clock": "ros"}})
    assert "age of the image acted on [ms]" in (tmp_path / "demo" / "report.html").read_text()


def test_an_episode_counts_what_was_decoded_and_dropped_in_it_and_those_that_were_missed(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=False)

    def answer(dropped: int) -> None:
        drops = {"drop_reasons": ["stale", "paused"], "drop_counts": [dropped, 0]}
        record.on_stats(DecodeStats(tokens_per_forward=[3, 4], accept_lengths=[3], **drops))

    answer(5)
    record.on_episode(SimEpisode(state=SimEpisode.RUNNING, task="lift_red"))
    answer(6)
    answer(8)
    record.on_episode(SimEpisode(state=SimEpisode.SUCCEEDED, task="lift_red", time_s=4.0, finished_so_far=1))
    assert record.episodes[0].drops == {"stale": 3} and record.unseen == 0
    summary = record.finish({"settings": {"engine": {"mode": "spec"}, "clock": "ros"}})
    assert (summary.decode.actions, summary.decode.forwards, summary.decode.tau) == (2, 4, 4.0)
    record.on_episode(SimEpisode(state=SimEpisode.RUNNING, task="lift_red", episode=2, finished_so_far=2))
    assert record.unseen == 1
    record.on_episode(SimEpisode(state=SimEpisode.FAILED, task="lift_red", episode=4, finished_so_far=5))
    assert record.unseen == 3


def test_a_verdict_is_of_the_judged_task_whatever_was_asked_last(tmp_path: Path) -> None:
    record = DemoRecord(tmp_path / "demo", nano_policy(), commanded=False)
    record.on_episode(SimEpisode(state=SimEpisode.SUCCEEDED, task="lift_red", time_s=2.3, instruction="make coffee"))
    assert _verdict(record.episodes[0], TASKS) == "lift the red cube: done after 2.3 s"
    assert "1, lift_red, 2.3 s, 0 actions  done" in shown(record)


def test_nothing_is_said_of_what_has_not_come(tmp_path: Path) -> None:
    said = shown(DemoRecord(tmp_path / "demo", nano_policy(), commanded=False))
    assert "forwards" not in said and "text" not in said
