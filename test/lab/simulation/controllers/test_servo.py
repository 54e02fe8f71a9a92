# SPDX-License-Identifier: Apache-2.0
"""Twists as MoveIt Servo takes them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples
from support.poses import apart

from specvla_ros.control.robot_model import ToolKinematics
from specvla_ros.lab.simulation.arm import TABLE_ARM, joint_model
from specvla_ros.lab.simulation.controllers import (
    BASE_FRAME,
    COMMAND_TIMEOUT_S,
    CONTROL_DT_S,
    LINEAR_SCALE,
    ROTATIONAL_SCALE,
    TOOL_FRAME,
    CommandRefusedError,
    JointState,
    Twist,
    TwistServo,
)

KINEMATICS = ToolKinematics(joint_model(TABLE_ARM.model(), TABLE_ARM))
HOME = JointState(np.array(TABLE_ARM.home), np.zeros(7))
STEADY = 4 / 7  # what the filter leaves of a steady velocity


def twist(stamp_s=1.0, linear=(0.1, 0.0, 0.0), angular=(0.0, 0.0, 0.0), frame=BASE_FRAME) -> Twist:
    return Twist(stamp_s, frame, np.array(linear), np.array(angular))


def run(servo: TwistServo, start_s: float, seconds: float, command=None) -> np.ndarray:
    """References [steps, joints]; with `command`, that is sent at each step, stamped with the present."""
    positions, state = [], HOME
    for step in range(round(seconds / CONTROL_DT_S)):
        now_s = start_s + step * CONTROL_DT_S
        if command is not None:
            servo.take(Twist(now_s, command.frame, command.linear, command.angular), now_s)
        state = servo.update(state, now_s)
        positions.append(state.positions)
    return np.array(positions)


def servo() -> TwistServo:
    made = TwistServo(KINEMATICS)
    made.start(HOME)
    return made


def test_a_command_counts_for_a_tenth_of_a_second_after_its_stamp_and_then_the_arm_halts():
    one = servo()
    one.take(twist(1.0), 1.0)
    positions = run(one, 1.0, 0.5)
    moving = np.abs(np.diff(positions, axis=0)).max(axis=1) > 1e-6
    last = int(np.flatnonzero(moving)[-1]) + 1
    commanded = round(COMMAND_TIMEOUT_S / CONTROL_DT_S)
    assert commanded - 1 <= last <= commanded + 12, "then the filter runs out"
    tool = [KINEMATICS.pose_at(each).position[0] for each in positions]
    assert 0.5 * STEADY * 0.01 < tool[-1] - tool[0] < 0.011


def test_a_stale_command_moves_nothing():
    one = servo()
    one.take(twist(1.0), 1.2)
    np.testing.assert_array_equal(run(one, 1.2, 0.2), np.tile(HOME.positions, (20, 1)))


def test_a_stamp_in_the_future_counts_for_longer_as_with_servo():
    one = servo()
    one.take(twist(2.0), 1.0)
    positions = run(one, 1.0, 1.5)
    moving = np.abs(np.diff(positions, axis=0)).max(axis=1) > 1e-9
    assert moving[:105].all() and not moving[-20:].any()


@pytest.mark.parametrize("frame", ["", "camera_optical_frame", "world"])
def test_an_unknown_frame_is_invalid_and_stops_what_was_followed(frame):
    one = servo()
    one.take(twist(1.0), 1.0)
    run(one, 1.0, 0.05)
    with pytest.raises(CommandRefusedError, match="not known"):
        one.take(twist(1.05, frame=frame), 1.05)
    positions = run(one, 1.05, 0.3)
    np.testing.assert_allclose(positions[-1], positions[-10], atol=1e-9)


def test_a_twist_in_the_tools_frame_is_turned_into_the_bases():
    there = run(servo(), 1.0, 0.3, twist(linear=(0.0, 0.0, 0.05), frame=TOOL_FRAME))
    start, end = KINEMATICS.pose_at(HOME.positions), KINEMATICS.pose_at(there[-1])
    moved = start.rotation.T @ (end.position - start.position)
    assert moved[2] > 0.005 and np.abs(moved[:2]).max() < 0.2 * moved[2]


@settings(max_examples=examples(40), deadline=None)
@given(
    linear=st.tuples(*[st.floats(-3.0, 3.0)] * 3),
    angular=st.tuples(*[st.floats(-6.0, 6.0)] * 3),
)
def test_no_twist_is_followed_faster_than_servos_scale_or_the_joints_allow(linear, angular):
    positions = run(servo(), 1.0, 0.3, twist(linear=linear, angular=angular))
    speeds = np.abs(np.diff(positions, axis=0)) / CONTROL_DT_S
    assert (speeds <= KINEMATICS.max_speed * 1.001).all()
    for before, after in itertools.pairwise(positions):
        moved_m, turned_rad = apart(KINEMATICS.pose_at(before), KINEMATICS.pose_at(after))
        assert moved_m <= LINEAR_SCALE * CONTROL_DT_S * 1.02 + 1e-9
        assert turned_rad <= ROTATIONAL_SCALE * CONTROL_DT_S * 1.02 + 1e-9


def test_a_steady_twist_moves_the_tool_at_what_the_filter_leaves():
    positions = run(servo(), 1.0, 0.5, twist(linear=(0.0, 0.1, 0.0)))
    before, after = (KINEMATICS.pose_at(each).position for each in positions[[-11, -1]])
    assert (after - before)[1] == pytest.approx(0.1 * 0.1 * STEADY, rel=0.03)


@pytest.mark.parametrize("direction", [(1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (-1.0, 0.0, 0.0)])
def test_joints_halt_before_the_end_of_their_range_and_before_the_arm_is_straight(direction):
    positions = run(servo(), 1.0, 8.0, twist(linear=tuple(0.4 * np.array(direction))))
    assert (positions > KINEMATICS.ranges[:, 0] + 0.09).all() and (positions < KINEMATICS.ranges[:, 1] - 0.09).all()
    sizes = np.linalg.svd(KINEMATICS.tool_moves(positions[-1]))[1]
    assert sizes[0] / sizes[-1] < 35
    np.testing.assert_allclose(positions[-1], positions[-20], atol=2e-3)
