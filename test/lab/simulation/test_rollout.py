# SPDX-License-Identifier: Apache-2.0
"""Time in an episode: what the policy's slowness costs, and what it must not change."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.expert_engine import ExpertEngine, as_engine
from support.gl import needs_gl
from support.pace import invented_pace

from specvla_ros.control.convention import ACTION_NAMES
from specvla_ros.engine.batch import TickWork
from specvla_ros.engine.outcome import Action, DecodeRecord, Drop, DropReason, StageTimings
from specvla_ros.errors import UserError
from specvla_ros.lab.planning.device import read_device
from specvla_ros.lab.planning.stage_times import read_stage_times
from specvla_ros.lab.simulation.robot import TableRobot
from specvla_ros.lab.simulation.rollout import Clock, Rollout, TickTime
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.models.observation import Observation
from specvla_ros.speculation.drafters.registry import DraftWork

pytestmark = needs_gl
ORIN = read_device("orin").as_json()


@pytest.fixture(scope="module")
def robot():
    robot = TableRobot(image_size=32)
    yield robot
    robot.close()


def pace(total_s: float) -> TickTime:
    return invented_pace(0.1 * total_s, 0.3 * total_s, 0.1 * total_s)


def run(robot: TableRobot, clock: Clock, total_s: float, task: str = "lift_red", seeds: int = 8):
    rollout = Rollout(as_engine(ExpertEngine(robot)), robot, clock, pace(total_s))
    return [rollout.run(task, seed) for seed in range(seeds)]


def test_lockstep_world_waits_however_slow_the_policy_is(robot):
    fast, slow = (run(robot, Clock.LOCKSTEP, total_s, seeds=3) for total_s in (0.01, 3.0))
    assert [(r.succeeded, r.steps, r.time_s) for r in fast] == [(r.succeeded, r.steps, r.time_s) for r in slow]
    assert all(result.succeeded for result in fast)
    assert fast[0].time_s == pytest.approx(0.2 * fast[0].steps, abs=0.2)
    assert slow[0].latency_s == pytest.approx([3.0] * slow[0].steps)


def test_realtime_world_moves_on_and_slowness_costs_success(robot):
    fast, slow = (run(robot, Clock.REALTIME, total_s) for total_s in (0.02, 1.5))
    assert all(result.succeeded for result in fast)
    assert sum(result.succeeded for result in slow) < len(slow)
    assert np.mean([result.time_s for result in slow]) > 1.5 * np.mean([result.time_s for result in fast])


def test_realtime_latency_is_the_time_from_the_picture_to_the_action(robot):
    (result,) = run(robot, Clock.REALTIME, 0.5, seeds=1)
    # The picture is the newest of those taken each 50 ms.
    assert all(0.5 - 1e-6 <= seconds <= 0.55 + 1e-6 for seconds in result.latency_s)
    assert result.steps == len(result.latency_s)


def test_the_picture_that_is_followed_ages_until_the_next_action(robot):
    (result,) = run(robot, Clock.REALTIME, 0.5, seeds=1)
    # One frame at a time: the last action is followed while the next one, of a picture 0.5 s younger, is decided.
    assert 0.75 - 1e-6 <= result.picture_age_s <= 0.825 + 1e-6
    assert len(result.acted_s) == result.steps and np.diff(result.acted_s) == pytest.approx(0.5, abs=0.051)
    (waited,) = run(robot, Clock.LOCKSTEP, 0.5, seeds=1)
    assert waited.picture_age_s is None and waited.acted_s == ()


def test_what_is_done_after_the_time_limit_is_no_success(robot, monkeypatch):
    limit_s = 0.2 * TASKS[0].max_steps
    monkeypatch.setattr(robot, "succeeded", lambda: robot.world.time_s > limit_s + 0.01)
    for total_s in (3.0, 5.0, 7.0):  # ticks of a second and more, during which the limit passes
        (result,) = run(robot, Clock.REALTIME, total_s, TASKS[0].name, seeds=1)
        assert not result.succeeded and result.time_s == pytest.approx(limit_s)


def test_a_fast_policy_does_not_make_the_arm_faster(robot):
    lockstep = run(robot, Clock.LOCKSTEP, 0.01, seeds=4)
    realtime = run(robot, Clock.REALTIME, 0.001, seeds=4)
    for waited, moved in zip(lockstep, realtime, strict=True):
        assert moved.steps > 2 * waited.steps
        assert moved.time_s > 0.6 * waited.time_s


def test_a_policy_of_two_cameras_and_a_state_is_given_them(robot):
    class TwoCameras(ExpertEngine):
        target = SimpleNamespace(**vars(ExpertEngine.target) | {"cameras": ("agent", "hand"), "state_dims": 9})

    looked: list[Observation] = []
    engine = as_engine(TwoCameras(robot))
    rollout = Rollout(engine, robot, Clock.LOCKSTEP, pace(0.1), on_look=looked.append)
    assert rollout.run("lift_red", 0).succeeded
    for seen in looked:
        assert [*seen.cameras] == ["agent", "hand"] and seen.state is not None and seen.state.shape == (9,)
    assert not np.array_equal(looked[0].cameras["agent"], looked[0].cameras["hand"])
    newest, (positions, _) = looked[-1].state, robot.world.joint_state()
    assert newest is not None and np.abs(newest - positions).max() < 0.2, "joint positions of a moment before"
    assert np.abs(looked[0].state - newest).max() > 0.05


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({"cameras": ("a", "b", "c")}, r"images of 3 cameras \(a, b, c\), but this robot has 2: front, wrist"),
        ({"cameras": ()}, "images of 0 cameras"),
        ({"state_dims": 8}, "a state of 8 numbers, but this robot's state has 9: joint1, joint2"),
        ({"state_dims": 2, "state_names": ("joint1", "hip")}, "a state of joint1, hip, but this robot's state has 9"),
    ],
)
def test_a_policy_that_needs_more_than_the_robot_has_is_refused(robot, needs, why):
    expert = ExpertEngine(robot)
    expert.target = SimpleNamespace(**vars(ExpertEngine.target) | needs)
    with pytest.raises(UserError, match=why):
        Rollout(as_engine(expert), robot, Clock.LOCKSTEP, pace(0.1))


def test_a_policy_may_read_a_part_of_the_state(robot):
    expert = ExpertEngine(robot)
    expert.target = SimpleNamespace(
        **vars(ExpertEngine.target) | {"state_dims": 2, "state_names": ("joint2", "joint1")}
    )
    looked: list[Observation] = []
    Rollout(as_engine(expert), robot, Clock.LOCKSTEP, pace(0.1), on_look=looked.append).run("lift_red", 0)
    assert all(seen.state is not None and seen.state.shape == (2,) for seen in looked)
    newest = looked[-1].state
    assert newest is not None and np.abs(newest - robot.feel()[[1, 0]]).max() < 0.2


def test_policy_without_actions_ends_the_episode_and_never_moves_the_robot(robot):
    class Dead(ExpertEngine):
        def tick(self):
            assert self._waiting is not None
            observation, _ = self._waiting
            self._waiting = None
            self.last_work = TickWork(images=1, prompts=1)
            return [Drop(observation, DropReason.ENGINE_FAULT, "gone")]

    for clock in Clock:
        rollout = Rollout(as_engine(Dead(robot)), robot, clock, pace(0.1))
        result = rollout.run("lift_red", 0)
        assert not result.succeeded and "no action for 10 images" in result.failure
        assert result.drops == {"engine_fault": 10} and result.acted_on is None


def test_realtime_robot_acts_on_the_first_action_and_each_answer_counts_once(robot):
    class InParts(ExpertEngine):
        takes_partial = False

        def tick(self):
            waiting, parts = self._waiting, self._ticks in (2, 4)
            outcomes = super().tick()
            if not (parts and self.takes_partial):
                return outcomes
            assert waiting is not None
            observation, values = waiting
            record = DecodeRecord("ar")
            action = Action(observation, ACTION_NAMES, values[None], (0,), StageTimings(), record, 1, partial=True)
            return [action]

    whole, early = (
        Rollout(as_engine(kind(robot)), robot, Clock.REALTIME, pace(0.5)) for kind in (ExpertEngine, InParts)
    )
    later, sooner = whole.run("lift_red", 0), early.run("lift_red", 0)
    assert all(0.3 - 1e-6 <= seconds <= 0.35 + 1e-6 for seconds in sooner.latency_s)
    assert sooner.picture_age_s and later.picture_age_s
    assert sooner.picture_age_s < later.picture_age_s - 0.15
    assert sooner.decode["actions"] in (sooner.steps, sooner.steps - 1)  # the last answer may be under way


@pytest.mark.parametrize("clock", Clock)
def test_world_that_diverges_ends_the_episode(robot, clock):
    class Wild(ExpertEngine):
        def tick(self):
            outcomes = super().tick()
            for outcome in outcomes:
                assert isinstance(outcome, Action)
                outcome.values[:] = np.nan
            return outcomes

    result = Rollout(as_engine(Wild(robot)), robot, clock, pace(0.1)).run("lift_red", 0)
    assert "not finite" in result.failure and not result.succeeded


def test_draft_model_is_not_emulated():
    with pytest.raises(UserError, match="no stage times for a draft model"):
        read_stage_times("orin").tick_s(TickWork(nodes=5, drafting=DraftWork(model_forwards=1, model_rows=9)))


def test_device_too_small_for_the_model_is_not_emulated():
    with pytest.raises(UserError, match="Orin Nano 8 GB has 8 GB of memory, but OpenVLA-7B takes 15"):
        read_stage_times("orin_nano")


@pytest.mark.parametrize(
    "text, message",
    [
        (
            None,
            "an existing file nor one of a100, h100, h200, l4, orin, orin_nano, orin_nx, rtx4090, rtx5090, thor;",
        ),
        ("[", "cannot be read as JSON"),
        ("{}", "lacks the field 'name'; it needs name"),
        (json.dumps(ORIN | {"stage_times": {"vision_s": 0.1}}), "stage_times are no longer read"),
    ],
)
def test_device_that_cannot_be_read_is_refused(text, message, tmp_path):
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_stage_times(str(path))
