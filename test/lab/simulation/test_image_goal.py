# SPDX-License-Identifier: Apache-2.0
"""An action counts from where the arm was in its picture, however late it comes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expert_engine import ExpertEngine, as_engine
from support.gl import needs_gl
from support.pace import invented_pace

from specvla_ros.control.pose import Pose, rotation_matrix, rotation_vector
from specvla_ros.lab.simulation.robot import ImageGoal, TableRobot
from specvla_ros.lab.simulation.rollout import Clock, Rollout
from specvla_ros.lab.simulation.world import CONTROL_HZ, POSITION_SCALE_M, SCALE

DT_S, STEP_S = 0.2, 0.05


@pytest.fixture(scope="module")
def robot():
    robot = TableRobot(image_size=32)
    yield robot
    robot.close()


displacements = st.lists(st.floats(-1.5, 1.5), min_size=6, max_size=6).map(
    lambda shares: np.array([*(np.array(shares) * SCALE), 1.0])
)


@settings(deadline=None)
@given(displacements, st.lists(displacements, min_size=1, max_size=12), st.floats(0.0, 30.0))
def test_rest_of_the_way_ends_where_the_picture_meant(action, moves, age_s):
    goal = ImageGoal(CONTROL_HZ, SCALE)
    poses = [Pose(np.zeros(3), np.eye(3))]
    goal.reset(poses[0])
    for move in moves:
        last = poses[-1]
        poses.append(Pose(last.position + move[:3], rotation_matrix(move[3:6]) @ last.rotation))
        goal.add(poses[-1])
    before = action.copy()
    left, seconds = goal.left(action, DT_S, age_s)
    np.testing.assert_array_equal(action, before)
    then, now = poses[-1 - min(round(age_s / STEP_S), len(moves))], poses[-1]
    np.testing.assert_allclose(now.position + left[:3], then.position + action[:3], atol=1e-12)
    reached = rotation_matrix(left[3:6]) @ now.rotation
    meant = rotation_matrix(action[3:6]) @ then.rotation
    assert np.linalg.norm(rotation_vector(reached @ meant.T)) < 1e-6
    assert left[6] == action[6]
    speed, own = (np.abs(values[:6] / SCALE).max() for values in (left, action))
    assert speed / seconds <= max(1.0, own) / DT_S * (1 + 1e-5) or left is action


def test_action_that_is_not_late_is_followed_as_it_is():
    goal = ImageGoal(CONTROL_HZ, SCALE)
    goal.reset(Pose(np.zeros(3), np.eye(3)))
    goal.add(Pose(np.ones(3), np.eye(3)))
    action = np.array([0.3, 0, 0, 0, 0, 2.0, 0])
    left, seconds = goal.left(action, DT_S, 0.0)
    assert left is action and seconds == DT_S


@needs_gl
def test_arm_that_went_on_comes_to_where_the_action_meant(robot):
    robot.reset("lift_red", 0)
    start = robot.state().hand
    move = np.array([0.0, 0.04, 0.03, 0, 0, 0, 1.0])
    for late in range(4):  # each is an answer to the very first picture
        robot.take(move, late * DT_S)
        for _ in range(4):
            robot.advance()
    for _ in range(8):
        robot.advance()
    np.testing.assert_allclose(robot.state().hand - start, move[:3], atol=0.004)


@needs_gl
def test_what_was_overshot_is_taken_back_no_faster_than_the_arm_may_go(robot):
    robot.reset("lift_red", 0)
    start = robot.state().hand
    for _ in range(3):
        robot.take(np.array([0, 0.05, 0.02, 0, 0, 0, 1.0]))
        for _ in range(4):
            robot.advance()
    robot.take(np.array([0, 0.0, 0.0, 0, 0, 0, 1.0]), 3 * DT_S)
    goals = [robot.world.goal.position]
    for _ in range(16):
        robot.advance()
        goals.append(robot.world.goal.position)
    assert np.abs(np.diff(goals, axis=0)).max() <= POSITION_SCALE_M * STEP_S / DT_S + 1e-9
    np.testing.assert_allclose(robot.state().hand, start, atol=0.004)


@pytest.mark.nightly
@needs_gl
def test_slow_policy_gets_there_because_its_actions_do_not_add_up(robot, monkeypatch):
    slow = invented_pace(0.05, 0.2, 0.06)

    def succeeded(seeds=8):
        rollout = Rollout(as_engine(ExpertEngine(robot)), robot, Clock.REALTIME, slow, time_limit=3.0)
        return [rollout.run("lift_red", seed).succeeded for seed in range(seeds)]

    assert all(succeeded())
    take = TableRobot.take
    monkeypatch.setattr(TableRobot, "take", lambda self, values, _: take(self, values))
    assert not all(succeeded())
