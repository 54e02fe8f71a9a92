# SPDX-License-Identifier: Apache-2.0
"""An expert's displacement of the tool as one of the joints: exact, with one posture for each goal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import TABLE_ARM, joint_model
from specvla_ros.lab.simulation.joint_goals import JointGoals

ARM, HOME = TABLE_ARM, np.array(TABLE_ARM.home)
MODEL = ARM.model()
TOOL, GOALS = ToolKinematics(joint_model(MODEL, ARM)), JointGoals(MODEL, ARM)
moves = st.tuples(*[st.floats(-0.05, 0.05)] * 3, *[st.floats(-0.2, 0.2)] * 3)
offsets = st.tuples(*[st.floats(-0.15, 0.15)] * 7)


@given(moves, offsets)
@settings(max_examples=40, deadline=None)
def test_the_joints_take_the_hand_to_its_goal_and_upright(move, offset):
    begin = HOME + offset
    found = GOALS.displacement(np.array([*move, 1.0]), begin)
    wanted, reached = TOOL.pose_at(begin).displaced(np.array(move)), TOOL.pose_at(begin + found[:7])
    np.testing.assert_allclose(reached.position, wanted.position, atol=1e-4)
    np.testing.assert_allclose(reached.rotation[:, 2], [0, 0, -1], atol=1e-4)
    assert np.arctan2(*reached.rotation[[1, 0], 0]) == pytest.approx(np.arctan2(*wanted.rotation[[1, 0], 0]), abs=1e-4)
    assert found[7] == 1.0


@given(moves, offsets, offsets)
@settings(max_examples=40, deadline=None)
def test_a_goal_has_one_posture_wherever_the_arm_comes_from(move, one, other):
    goal = TOOL.pose_at(HOME).displaced(np.array(move))
    first, second = (GOALS.posture(goal, HOME + start) for start in (one, other))
    np.testing.assert_allclose(first, second, atol=1e-3)


def test_of_the_postures_at_a_goal_it_is_the_one_nearest_home():
    goal = TOOL.pose_at(HOME).displaced(np.array([0.1, 0.1, -0.1, 0, 0, 0.3]))
    found = GOALS.posture(goal, HOME)
    null = np.linalg.svd(TOOL.tool_moves(found))[2][-1]  # the elbow's motion that keeps the hand where it is
    assert abs(null @ (found - HOME)) < 1e-3 < np.abs(found - HOME).max()
