# SPDX-License-Identifier: Apache-2.0
"""Poses as a Cartesian motion controller takes them."""

import numpy as np
import pytest
from support.poses import apart

from specvla_ros.control.pose import Pose, rotation_matrix
from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import TABLE_ARM, joint_model
from specvla_ros.lab.simulation.controllers import (
    BASE_FRAME,
    CONTROL_DT_S,
    CartesianPose,
    CommandRefusedError,
    JointState,
)

KINEMATICS = ToolKinematics(joint_model(TABLE_ARM.model(), TABLE_ARM))
HOME = JointState(np.array(TABLE_ARM.home), np.zeros(7))


def run(controller: CartesianPose, seconds: float) -> np.ndarray:
    return np.array([controller.update(HOME, 1.0).positions for _ in range(round(seconds / CONTROL_DT_S))])


def controller() -> CartesianPose:
    made = CartesianPose(KINEMATICS)
    made.start(HOME)
    return made


@pytest.mark.parametrize(
    "displacement", [(0.05, 0.0, 0.0), (0.0, -0.1, 0.05), (-0.1, 0.1, -0.1)], ids=["ahead", "aside", "back"]
)
def test_newest_target_is_reached_and_kept_for_ever(displacement):
    one, start = controller(), KINEMATICS.pose_at(HOME.positions)
    one.take((BASE_FRAME, start.displaced(np.array([0.1, 0.1, 0.1, 0.0, 0.0, 0.5]))), 1.0)
    run(one, 0.05)
    target = start.displaced(np.array([*displacement, 0.0, 0.0, 0.3]))
    one.take((BASE_FRAME, target), 1.0)
    for seconds in (3.0, 60.0):
        moved_m, turned_rad = apart(target, KINEMATICS.pose_at(run(one, seconds)[-1]))
        assert moved_m < 1e-3 and turned_rad < 5e-3


def test_a_far_target_is_gone_to_no_faster_than_the_joints_allow():
    one = controller()
    one.take((BASE_FRAME, Pose(np.array([-0.5, 0.4, 0.5]), rotation_matrix(np.array([0.0, 2.0, 0.0])))), 1.0)
    positions = run(one, 5.0)
    speeds = np.abs(np.diff(positions, axis=0)) / CONTROL_DT_S
    assert (speeds <= KINEMATICS.max_speed * 1.001).all()
    assert (speeds.max(axis=0) > 0.9 * KINEMATICS.max_speed).any(), "it is no slower than that either"
    assert (positions >= KINEMATICS.ranges[:, 0]).all() and (positions <= KINEMATICS.ranges[:, 1]).all()


def test_another_frame_is_ignored_and_the_target_before_stays():
    one, start = controller(), KINEMATICS.pose_at(HOME.positions)
    target = start.displaced(np.array([0.05, 0.0, 0.0, 0.0, 0.0, 0.0]))
    one.take((BASE_FRAME, target), 1.0)
    with pytest.raises(CommandRefusedError, match="frame is 'camera'"):
        one.take(("camera", start.displaced(np.array([0.0, 0.1, 0.0, 0.0, 0.0, 0.0]))), 1.0)
    assert apart(target, KINEMATICS.pose_at(run(one, 3.0)[-1]))[0] < 1e-3
