# SPDX-License-Identifier: Apache-2.0
"""Demonstrations: complete bags, the same after being killed, disturbed in what is done but not in what is recorded."""

import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from support.gl import needs_gl
from support.patience import wait_until
from typer.testing import CliRunner

from specvla_ros.errors import UserError
from specvla_ros.lab.bags import demonstrations as demonstration_bag
from specvla_ros.lab.bags.frames import TopicChoice, bag_frames, choose_topics
from specvla_ros.lab.bags.reader import open_bag
from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.cli.app import app
from specvla_ros.lab.plans import CollectPlan
from specvla_ros.lab.simulation.collect import collect, demonstrate
from specvla_ros.lab.simulation.driven_robot import DrivenRobot
from specvla_ros.lab.simulation.joint_goals import JointGoals
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.tasks import DEMONSTRATION_FIRST_SEED, TASKS
from specvla_ros.lab.training.dataset import load_demonstrations
from specvla_ros.messages.image_message import rgb_from_compressed

pytestmark = needs_gl


def frames(bag):
    with open_bag(bag) as reader:
        return list(bag_frames(reader, choose_topics(reader, TopicChoice())))


def test_bag_holds_what_the_expert_saw_and_did(tmp_path):
    result = collect(tmp_path, CollectPlan(tasks=("put_red",), episodes=2, noise=0.0))
    assert (result.wanted, result.kept, result.new, result.failed) == (2, 2, 2, 0)
    bag = tmp_path / f"put_red-{DEMONSTRATION_FIRST_SEED}"
    recorded = frames(bag)
    times_ns = [frame.image.time_ns for frame in recorded]
    assert {frame.instruction for frame in recorded} == {"put the red cube on the block"}
    robot = TableRobot()
    robot.reset("put_red", DEMONSTRATION_FIRST_SEED)
    for frame, passed_ns in zip(recorded, [*np.diff(times_ns), 200_000_000], strict=True):
        np.testing.assert_allclose(frame.recorded, demonstrate(robot.task, robot.state()))
        shown = rgb_from_compressed(frame.image.message()).astype(int)
        assert np.abs(shown - robot.look()).mean() < 3  # JPEG
        robot.take(np.array(frame.recorded))
        for _ in range(round(passed_ns / 50e6)):
            robot.advance()
    assert robot.succeeded()
    robot.close()


@pytest.mark.nightly
def test_noise_is_in_what_is_done_not_in_what_is_recorded(tmp_path):
    collect(tmp_path, CollectPlan(tasks=("lift_blue",), episodes=6, noise=1.0))
    disturbed = 0
    robot = TableRobot(image_size=32)
    for seed in range(DEMONSTRATION_FIRST_SEED, DEMONSTRATION_FIRST_SEED + 6):
        robot.reset("lift_blue", seed)
        for frame in frames(tmp_path / f"lift_blue-{seed}"):
            if not np.allclose(frame.recorded, demonstrate(robot.task, robot.state())):
                disturbed += 1  # followed exactly, the recorded actions would lead elsewhere
                break
            robot.take(np.array(frame.recorded))
            for _ in range(4):
                robot.advance()
    robot.close()
    assert 1 <= disturbed <= 6


@pytest.mark.nightly
def test_where_a_policy_acts_the_expert_labels_and_failures_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("specvla_ros.lab.simulation.collect._POLICY_SHARE", 1.0)
    monkeypatch.setattr(
        "specvla_ros.lab.simulation.collect._decided", lambda *_, **__: np.array([0, 0, 0.02, 0, 0, 0, 1.0])
    )
    result = collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=1, noise=0.0, policy=nano_policy()))
    assert (result.new, result.failed) == (1, 0)
    recorded = frames(tmp_path / f"lift_red-{DEMONSTRATION_FIRST_SEED}")
    robot = TableRobot(image_size=32)
    robot.reset("lift_red", DEMONSTRATION_FIRST_SEED)
    assert len(recorded) == robot.max_steps * 4  # up and away for ever, a picture every 0.05 s
    for frame in recorded:
        np.testing.assert_allclose(frame.recorded, demonstrate(robot.task, robot.state()))
        robot.take(np.array([0, 0, 0.02, 0, 0, 0, 1.0]))
        robot.advance()
    robot.close()


@pytest.mark.nightly
def test_a_policy_that_acts_is_asked_with_every_picture(tmp_path):
    collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=1, noise=0.0, policy=nano_policy()))
    recorded = frames(tmp_path / f"lift_red-{DEMONSTRATION_FIRST_SEED}")
    times = np.diff([frame.image.time_ns for frame in recorded])
    assert (times == 50_000_000).mean() > 0.3  # its turns


def test_all_sensors_are_recorded_at_every_picture(tmp_path):
    collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=1, noise=0.0, all_sensors=True))
    bag = tmp_path / f"lift_red-{DEMONSTRATION_FIRST_SEED}"
    choice = TopicChoice(cameras={"wrist": "/wrist/image_raw"}, state_topic="/joint_states")
    with open_bag(bag) as reader:
        topics = choose_topics(reader, choice)
        recorded = list(bag_frames(reader, topics))
    assert len(recorded) == len(frames(bag)) and not any(frame.missing for frame in recorded)
    robot = TableRobot()
    robot.reset("lift_red", DEMONSTRATION_FIRST_SEED)
    assert topics.states.names == robot.state_names
    for frame, passed_ns in zip(recorded, np.diff([each.image.time_ns for each in recorded]), strict=False):
        assert frame.state is not None
        np.testing.assert_allclose(frame.state, robot.feel())
        wrist = rgb_from_compressed(frame.others["wrist"].message()).astype(int)
        assert np.abs(wrist - robot.look("wrist")).mean() < 3 < np.abs(wrist - robot.look()).mean()
        robot.take(np.array(frame.recorded))
        for _ in range(round(passed_ns / 50e6)):
            robot.advance()
    robot.close()


def test_every_picture_is_labelled_for_every_instruction(tmp_path):
    collect(tmp_path, CollectPlan(tasks=("push_green",), episodes=1, noise=0.0))
    bag = tmp_path / f"push_green-{DEMONSTRATION_FIRST_SEED}"
    assert sorted(path.name for path in bag.iterdir()) == ["metadata.yaml", f"{bag.name}.mcap"], "nothing is hidden"
    data = load_demonstrations([bag], tmp_path / "cache", 32, TopicChoice())
    assert data.instructions == tuple(sorted(task.instruction for task in TASKS))
    assert data.actions.shape[1:] == (len(TASKS), 7)
    robot = TableRobot(image_size=32)
    robot.reset("push_green", DEMONSTRATION_FIRST_SEED)
    for place, which in enumerate(data.instruction_of[0]):
        task = next(each for each in TASKS if each.instruction == data.instructions[which])
        np.testing.assert_allclose(data.actions[0, place], demonstrate(task, robot.state()))
    robot.close()


def test_with_joints_their_goals_are_recorded_beside_where_they_are(tmp_path):
    assert collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=1, noise=0.0, joints=True)).new == 1
    bag = tmp_path / f"lift_red-{DEMONSTRATION_FIRST_SEED}"
    data = load_demonstrations([bag], tmp_path / "cache", 32, TopicChoice(state_topic="/joint_states"))
    robot = DrivenRobot(image_size=32, command="position_array", joints=True)
    assert data.action_names == robot.action_names and data.state_names == robot.state_names
    goals = JointGoals(robot.world.model, robot.world.arm)
    robot.reset("lift_red", DEMONSTRATION_FIRST_SEED)
    gaps_ns = np.diff(data.time_ns, append=data.time_ns[-1])
    for goal, start, state, passed_ns in zip(data.actions[:, 0], data.starts, data.states, gaps_ns, strict=True):
        np.testing.assert_allclose(state, robot.feel())
        np.testing.assert_array_equal(start, [*state[:7], 0.0])
        action = goals.displacement(demonstrate(robot.task, robot.state()), state[:7])
        np.testing.assert_allclose(goal - start, action)
        robot.take(action)
        for _ in range(round(passed_ns / 50e6)):
            robot.advance()
    assert robot.succeeded() and not robot.refused
    robot.close()


def test_killed_collection_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, "-m", "specvla_ros.cli", "collect", "--out", str(tmp_path), "--task", "lift_red"]
    process = subprocess.Popen([*command, "--episodes", "200"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("lift_red-*"))) >= 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {bag.name: bag.stat().st_mtime_ns for bag in tmp_path.glob("lift_red-*")}
    assert 3 <= len(kept) < 200
    result = collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=len(kept) + 2))
    assert result.kept == len(kept) + 2 and result.new == 2
    assert not list(tmp_path.glob(".*"))
    assert all((tmp_path / name).stat().st_mtime_ns == stamp for name, stamp in kept.items())
    assert all(frames(bag) for bag in tmp_path.iterdir())


def test_demonstrations_with_other_options_are_not_taken_for_those_that_are_wanted(tmp_path):
    lift = CollectPlan(tasks=("lift_red",), episodes=1)
    assert collect(tmp_path, lift).new == 1
    for options, words in (
        ({"joints": True}, "joints"),
        ({"all_sensors": True}, "all_sensors"),
        ({"noise": 0.5}, "noise=0.5"),
        ({"policy": nano_policy()}, "policy=nano"),
    ):
        with pytest.raises(UserError, match=f"other options.*{words}.*choose another --out or --seed"):
            collect(tmp_path, replace(lift, episodes=2, **options))
    assert len([*tmp_path.iterdir()]) == 1
    assert collect(tmp_path, replace(lift, joints=True, first_seed=1)).new == 1
    assert collect(tmp_path, replace(lift, episodes=2, workers=2)).kept == 2


def test_full_disk_is_said_and_keeps_what_is_there(tmp_path, monkeypatch):
    collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demonstration_bag, "_write", full)
    with pytest.raises(UserError, match=r"No space left on device\. Free some space.*recorded so far is kept"):
        collect(tmp_path, CollectPlan(tasks=("lift_red",), episodes=2))
    assert [bag.name for bag in tmp_path.iterdir()] == [f"lift_red-{DEMONSTRATION_FIRST_SEED}"]


def test_unknown_task_is_refused(tmp_path):
    with pytest.raises(UserError, match="no task 'dance'"):
        collect(tmp_path / "out", CollectPlan(tasks=("dance",), episodes=1))


def test_a_seed_below_0_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["collect", "--out", str(tmp_path / "out"), "--episodes", "1", "--seed", "-1"])
    assert done.exit_code == 2 and "greater than or equal to 0" in done.output
    assert not (tmp_path / "out").exists()
