# SPDX-License-Identifier: Apache-2.0
"""Actions of joints are followed as those of tools: once, from their image, within every limit."""

import math

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import examples

from specvla_ros.control.action_space import ActionRefusedError, RefusalReason, ToolSpace
from specvla_ros.control.convention import ActionConvention, ActionFrame, GripperSign, Reference, StampedAction
from specvla_ros.control.driver import Driver
from specvla_ros.control.follower import ActionFollower, Compensation
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.joint_space import JointKinematics, JointMotion, JointSpace
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import PoseHistory, Posture
from specvla_ros.control.robot_model import JointModel
from specvla_ros.errors import UserError

LINK = '<geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.02"/>'
MJCF = f"""
<mujoco><compiler angle="radian"/><worldbody>
  <body><joint name="turn" axis="0 0 1" range="-3 3" limited="true"/>{LINK}
    <body pos="0.3 0 0"><joint name="lift" axis="0 1 0" range="-2 2" limited="true"/>{LINK}
      <body pos="0.3 0 0"><joint name="bend" axis="0 1 0" range="-2 2" limited="true"/>{LINK}
        <site name="tool" pos="0.2 0 0"/>
      </body>
    </body>
  </body>
</worldbody></mujoco>"""
NAMES = ("turn", "lift", "bend")
SPEED, ACCELERATION, JERK = np.array([2.0, 1.5, 2.5]), np.full(3, 20.0), np.full(3, 800.0)
LIMITS = Limits(
    linear_speed=0.6,
    angular_speed=3.0,
    linear_acceleration=10.0,
    angular_acceleration=50.0,
    linear_jerk=500.0,
    angular_jerk=2500.0,
    workspace_min=(-0.9, -0.9, -0.45),
    workspace_max=(0.9, 0.9, 0.45),
)
CONTROL_S, DT_S = 0.01, 0.1
START = np.array([0.1, 0.3, 0.5])
JOINTS = ActionConvention(DT_S, Reference.ABSOLUTE, ActionFrame.JOINTS)
DELTA = ActionConvention(DT_S, Reference.DELTA, ActionFrame.JOINTS)


def model(**changed):
    given_ = {"max_speed": SPEED, "max_acceleration": ACCELERATION, "max_jerk": JERK, **changed}
    return JointModel(mujoco.MjModel.from_xml_string(MJCF), NAMES, "tool", **given_)


class Arm:
    """Joints that are exactly where they are sent, on a clock that the test moves."""

    def __init__(
        self, *, limits=LIMITS, start=START, max_step_rad=1.0, compensation=Compensation.IMAGE_GOAL, **of_model
    ):
        self.kinematics = JointKinematics(model(**of_model))
        self.history, self.now_s = PoseHistory[Posture](), 100.0
        self.gripper = Gripper(GripperSettings(open_value=0.08, closed_value=0.0))
        space = JointSpace(self.kinematics, limits, max_step_rad)
        motion = JointMotion(self.kinematics, model(**of_model), limits)
        self.follower = ActionFollower(space, motion, self.gripper, self.history, compensation=compensation)
        self.follower.rest_at(Posture(np.array(start)))
        self.sent = []
        self.run(0.1)

    def run(self, seconds):
        for _ in range(round(seconds / CONTROL_S)):
            self.target = self.follower.step(self.now_s)
            self.history.add(self.now_s, self.target.pose)
            self.sent.append(self.target.pose.positions)
            self.now_s = round(self.now_s + CONTROL_S, 4)

    def take(self, values, *, age_s=0.0, convention=JOINTS, names=NAMES, partial=False):
        action = StampedAction(self.now_s - age_s, np.atleast_2d(values), convention, partial=partial, names=names)
        self.follower.take(action, self.now_s)

    def refused(self, values, **how):
        with pytest.raises(ActionRefusedError) as why:
            self.take(values, **how)
        return why.value

    def tool_speed(self):
        before, now = (self.kinematics.pose_at(each).position for each in self.sent[-2:])
        return np.linalg.norm(now - before) / CONTROL_S

    @property
    def at(self):
        return self.target.pose.positions


def assert_within_limits(arm, limits=LIMITS):
    sent = np.array(arm.sent)
    speeds = np.diff(sent, axis=0) / CONTROL_S
    assert (np.abs(speeds) <= SPEED * (1 + 1e-6)).all()
    assert (np.abs(np.diff(speeds, axis=0)) / CONTROL_S <= ACCELERATION * (1 + 1e-6)).all()
    tool = np.array([arm.kinematics.pose_at(each).position for each in sent])
    assert (np.linalg.norm(np.diff(tool, axis=0), axis=1) / CONTROL_S <= limits.linear_speed * 1.05).all()
    assert (tool >= np.array(limits.workspace_min) - 1e-3).all()
    assert (tool <= np.array(limits.workspace_max) + 1e-3).all()


positions = st.lists(st.floats(-0.4, 0.4), min_size=3, max_size=3).map(lambda way: START + np.array(way))
ages = st.integers(0, 30).map(lambda steps: steps * CONTROL_S)


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.tuples(positions, ages, st.integers(1, 25), st.booleans()), min_size=1, max_size=6))
def test_the_joints_end_where_the_newest_image_meant_and_keep_every_limit(actions):
    arm = Arm()
    goal, newest_s = START, -math.inf
    for wanted, age_s, steps, absolute in actions:
        stamp_s = arm.now_s - age_s
        convention = JOINTS if absolute else DELTA
        values = wanted if absolute else wanted - START
        if stamp_s <= newest_s or stamp_s < 100.0:
            assert arm.refused(values, age_s=age_s, convention=convention).refusal in (
                RefusalReason.NOT_NEWER,
                RefusalReason.NO_POSE,
            )
        else:
            newest_s = stamp_s
            try:
                arm.take(values, age_s=age_s, convention=convention)
                goal = wanted if absolute else arm.history.at(stamp_s).positions + values
            except ActionRefusedError as refused:  # at its limit, the tool would exceed it on the way to any other goal
                assert refused.refusal is RefusalReason.BLOCKED and arm.tool_speed() > 0.5 * LIMITS.linear_speed
        arm.run(steps * CONTROL_S)
    arm.run(8.0)
    np.testing.assert_allclose(arm.at, goal, atol=1e-4)
    assert_within_limits(arm)


def test_a_goal_beside_fast_motion_is_reached_at_the_tools_speed():
    """It takes several tries to find a motion that is slow enough, since the joints are already fast."""
    arm = Arm()
    for turn, steps in ((-0.375, 11), (0.0, 23)):
        arm.take((0.0, 0.0, turn), convention=DELTA)
        arm.run(steps * CONTROL_S)
    arm.take((0.0, 0.25, 0.0), convention=DELTA)
    arm.run(8.0)
    assert arm.at[1] == pytest.approx(START[1] + 0.25, abs=1e-4)
    assert_within_limits(arm)


def test_rows_of_a_late_chunk_that_have_passed_are_skipped():
    arm = Arm()
    rows = START + 0.02 * np.arange(1, 9)[:, None]
    arm.run(0.4)
    arm.take(rows, age_s=0.35)
    assert len(arm.follower._steps) == 5
    arm.run(0.1 * 8)  # at the pace of the chunk
    np.testing.assert_allclose(arm.at, rows[-1], atol=5e-3)
    assert_within_limits(arm)


def test_displacements_of_a_chunk_all_count_from_the_joints_in_the_image():
    arm = Arm()
    arm.take(0.02 * np.arange(1, 5)[:, None] * np.ones(3), convention=DELTA)
    arm.run(1.0)
    np.testing.assert_allclose(arm.at, START + 0.08, atol=1e-4)


def test_a_chunk_is_followed_without_a_stop_between_its_rows():
    arm = Arm()
    arm.take(START + 0.05 * np.arange(1, 9)[:, None])
    arm.run(0.2)
    speeds = []
    for _ in range(50):
        arm.run(CONTROL_S)
        speeds.append(arm.target.velocity[0])
    assert min(speeds) > 0.3 and max(speeds) < 0.8


@pytest.mark.parametrize("dt_s", [0.004, 1 / 30, 0.25])
def test_the_period_of_a_chunk_need_not_be_the_controllers(dt_s):
    """Rows are due at their own times: shorter than a control step, between two steps, or much longer."""
    arm, rows = Arm(), 1 + np.arange(round(0.5 / dt_s))
    arm.take(
        START + 0.2 * dt_s * rows[:, None], convention=ActionConvention(dt_s, Reference.ABSOLUTE, ActionFrame.JOINTS)
    )
    begun_s = arm.now_s
    for time_s in (0.2, 0.3, 0.4):
        arm.run(begun_s + time_s - arm.now_s)
        np.testing.assert_allclose(arm.at, START + 0.2 * time_s, atol=0.012)
    arm.run(0.5)
    np.testing.assert_allclose(arm.at, START + 0.2 * dt_s * len(rows), atol=1e-3)


def test_columns_are_taken_by_their_names():
    arm = Arm()
    arm.take([0.6, 0.2, 0.4], names=("bend", "turn", "lift"))
    arm.run(2.0)
    np.testing.assert_allclose(arm.at, [0.2, 0.4, 0.6], atol=1e-4)


def test_a_gripper_beside_the_joints_opens_and_closes():
    arm = Arm()
    opens = ActionConvention(DT_S, Reference.DELTA, ActionFrame.JOINTS, gripper=GripperSign.OPEN_HIGH)
    arm.take([0.0, 0.0, 0.0, 1.0], names=(*NAMES, "gripper"), convention=opens)
    assert arm.gripper.position == 0.08
    arm.run(0.1)
    arm.take([0.0, 0.0, 0.0, 0.0], names=(*NAMES, "gripper"), convention=opens)
    assert arm.gripper.position == 0.0


@pytest.mark.parametrize(
    "values, how, refusal, words",
    [
        ([17.0, 5.7, 28.6], {}, RefusalReason.TOO_LARGE, "are its values in the robot's unit"),
        ([START, START + 1.2], {}, RefusalReason.TOO_LARGE, "from row 0"),
        ([0.1, 0.3], {"names": NAMES[:2]}, RefusalReason.WRONG_SHAPE, "bend not at all"),
        ([0.1, 0.3, 0.5], {"names": ("turn", "turn", "bend")}, RefusalReason.WRONG_SHAPE, "turn twice; lift not"),
        ([0.1, 0.3, 0.5, 0], {"names": (*NAMES, "wrist")}, RefusalReason.WRONG_SHAPE, "wrist though joints.names"),
        ([0.1, 0.3, 0.5, 0], {}, RefusalReason.WRONG_SHAPE, "expected values of shape"),
        ([0.1, math.nan, 0.5], {}, RefusalReason.NOT_FINITE, "finite"),
        (np.zeros(7), {"convention": ActionConvention(DT_S)}, RefusalReason.WRONG_SPACE, "action_space to tool"),
        ([0.1, 0.3, 0.5], {"age_s": 1.01}, RefusalReason.TOO_OLD, "old"),
    ],
)
def test_an_action_that_does_not_fit_the_arm_is_refused_in_words_and_moves_nothing(values, how, refusal, words):
    arm = Arm()
    error = arm.refused(values, **how)
    assert error.refusal is refusal and words in str(error)
    arm.run(0.5)
    np.testing.assert_allclose(arm.at, START)


def test_a_driver_of_tools_refuses_joints():
    action = StampedAction(0.0, np.zeros((1, 3)), JOINTS, names=NAMES)
    with pytest.raises(ActionRefusedError, match="action_space to joints") as why:
        ToolSpace(LIMITS).check(action)
    assert why.value.refusal is RefusalReason.WRONG_SPACE


def test_a_goal_out_of_a_joints_range_ends_at_the_range():
    arm = Arm(start=[0.0, 1.8, -1.8], limits=LIMITS)
    arm.take([0.0, 2.3, -1.8])
    arm.run(3.0)
    np.testing.assert_allclose(arm.at, [0.0, 2.0, -1.8], atol=1e-4)


def test_no_motion_leaves_the_workspace():
    arm = Arm(start=[0.0, 0.6, 0.5])
    assert arm.refused([0.0, 1.5, 0.6]).refusal is RefusalReason.BLOCKED
    arm.run(1.0)
    np.testing.assert_allclose(arm.at, [0.0, 0.6, 0.5])
    assert_within_limits(arm)


def test_the_tool_keeps_its_speed_limit_where_the_joints_could_be_faster():
    arm = Arm()
    arm.take([1.0, 0.3, 0.5])
    arm.run(3.0)
    np.testing.assert_allclose(arm.at, [1.0, 0.3, 0.5], atol=1e-4)
    assert_within_limits(arm)
    turned = np.abs(np.diff([each[0] for each in arm.sent])) / CONTROL_S
    assert 0.7 * LIMITS.linear_speed / 0.8 < turned.max() < SPEED[0]


def test_without_an_acceleration_limit_no_joint_is_moved():
    with pytest.raises(UserError, match=r"joints\.max_acceleration"):
        JointMotion(JointKinematics(model()), model(max_acceleration=None, max_jerk=None), LIMITS)


class Driven:
    """The driver's control on joints that obey exactly."""

    def __init__(self, positions):
        self.arm = Arm(start=positions)
        self.history, self.now_s = PoseHistory[Posture](), 100.0
        self.arm.follower._history = self.history
        self.driver = Driver(
            self.arm.follower,
            self.history,
            tracking=None,
            pose_timeout_s=0.1,
            pose_source="joint_states",
            start_output=lambda: None,
            say=lambda reason: None,
        )
        self.positions = np.array(positions)

    def run(self, seconds, *, obeys=True, measured=True):
        for _ in range(round(seconds / CONTROL_S)):
            self.now_s = round(self.now_s + CONTROL_S, 4)
            if measured:
                self.history.add(self.now_s, Posture(self.positions))
            target = self.driver.step(self.now_s, self.now_s)
            if target is not None and obeys:
                self.positions = target.pose.positions


def test_the_driver_starts_at_the_measured_joints_and_returns_to_where_the_guard_held_them():
    driven = Driven(START)
    driven.run(0.1)
    assert driven.driver.anchored
    driven.driver.take(StampedAction(driven.now_s, np.atleast_2d(START + 0.6), JOINTS, names=NAMES), driven.now_s)
    driven.run(0.3)
    driven.driver.passing(False, driven.now_s)
    driven.positions = driven.positions - 0.1
    driven.run(1.0, obeys=False)
    np.testing.assert_allclose(driven.driver.target.pose.positions, driven.positions, atol=1e-6)


def test_joints_that_are_not_measured_any_more_are_not_moved():
    driven = Driven(START)
    driven.run(0.1)
    driven.run(0.3, measured=False)
    assert "newest set of joint positions" in driven.driver.problem


def test_no_motion_starts_outside_of_the_workspace():
    driven = Driven([0.0, 1.5, 0.6])
    driven.run(0.1)
    assert not driven.driver.anchored and "outside the workspace" in driven.driver.problem
