# SPDX-License-Identifier: Apache-2.0
"""The trial of the joints' order, on arms that answer late, in another order, or not at all."""

from collections import deque

import numpy as np
import pytest
from support.guarding import JOINTS, rig

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import JointCommand, Stamp
from specvla_ros.control.guard.guard import State
from specvla_ros.control.joint_order import WAY, JointOrderTrial, choose_ways
from specvla_ros.errors import UserError

NAMES = ("shoulder", "elbow", "wrist")
MAX_SPEED = np.array([1.0, 1.0, 2.0])
DT_S = 0.01
FREE = np.array([[-3.0, 3.0]] * 3)


class Arm:
    """Each joint takes the number at its place in `order`, `late_s` later; `dead`: one that does not move."""

    def __init__(self, start, order=(0, 1, 2), *, late_s=0.0, dead=(), share=1.0):
        self.at, self._order, self._dead, self._share = np.array(start), list(order), list(dead), share
        self._home = self.at.copy()
        self._way = deque([self.at] * (1 + round(late_s / DT_S)))
        self.sent = []

    def take(self, positions):
        self.sent.append(positions)
        there = self._home + self._share * (positions[self._order] - self._home)
        there[self._dead] = self.at[self._dead]
        self._way.append(there)
        self.at = self._way.popleft()


def tried(arm, ways=None, start=None, max_speed=MAX_SPEED):
    start = arm.at.copy() if start is None else start
    ways = choose_ways(NAMES, start, FREE, lambda there: True) if ways is None else ways
    trial, now_s = JointOrderTrial(NAMES, start, ways, max_speed), 100.0
    for _ in range(3000):
        arm.take(trial.step(arm.at, now_s))
        now_s += DT_S
        if trial.done:
            return trial
    raise AssertionError("it never ends")


@pytest.mark.parametrize("arm", [Arm((0.1, 0.5, -1.0)), Arm((0.1, 0.5, -1.0), late_s=0.1), Arm([0.0] * 3, share=0.7)])
def test_the_right_order_passes_and_every_joint_moved_slowly_and_came_back(arm):
    home = arm.at.copy()
    assert tried(arm).problem == ""
    sent = np.array(arm.sent)
    np.testing.assert_allclose(np.ptp(sent, axis=0), WAY, rtol=1e-3)
    np.testing.assert_allclose(sent[-1], home, atol=1e-9)
    speed = np.diff(sent, axis=0) / DT_S
    assert np.abs(speed).max() <= 0.05 + 1e-6 and np.abs(np.diff(speed, axis=0)).max() / DT_S < 0.6
    assert (np.count_nonzero(np.abs(speed) > 1e-9, axis=1) <= 1).all(), "one joint at a time"


def test_two_swapped_joints_that_stand_alike_are_named():
    arm = Arm((0.5, 0.5, -1.0), order=(1, 0, 2))
    said = tried(arm).problem
    assert "'shoulder' was commanded to move by 0.02" in said and "these moved: 'elbow'" in said
    assert "shoulder, elbow, wrist" in said and "configure the driver again" in said
    assert np.ptp(arm.sent, axis=0).max() < 0.6 * WAY, "it turns back as soon as the wrong one moves"
    np.testing.assert_allclose(arm.sent[-1], (0.5, 0.5, -1.0), atol=1e-9)


def test_two_swapped_joints_that_leap_to_each_others_positions_are_named_before_any_is_moved():
    arm = Arm((0.1, 0.5, -1.0), order=(0, 2, 1))
    said = tried(arm).problem
    assert "no joint was commanded" in said and "'elbow' by -1.500, 'wrist' by 1.500" in said
    assert len(arm.sent) < 10 and not np.ptp(arm.sent, axis=0).any()


def test_a_dead_joint_is_named_and_nothing_after_it_is_moved():
    arm = Arm((0.1, 0.5, -1.0), dead=[1])
    assert "'elbow' was commanded to move by 0.02 but moved by 0.000" in tried(arm).problem
    assert np.ptp(np.array(arm.sent)[:, 2]) == 0


@pytest.mark.parametrize(("share", "moved"), [(-1.0, "-0.020"), (0.4, "0.008")])
def test_a_joint_that_goes_the_other_way_or_less_than_half_of_it_does_not_pass(share, moved):
    arm = Arm((0.1, 0.5, -1.0), share=share)
    assert f"'shoulder' was commanded to move by 0.02 but moved by {moved}" in tried(arm).problem


@pytest.mark.parametrize(("dead", "waits_s"), [([], 0.2), ([0], 1.0)])
def test_before_and_after_each_move_it_waits_and_longer_for_a_joint_that_does_not_answer(dead, waits_s):
    arm = Arm((0.1, 0.5, -1.0), dead=dead)
    tried(arm)
    first = np.array(arm.sent)[:, 0] - 0.1
    assert DT_S * np.argmax(first > 0) == pytest.approx(0.2, abs=2 * DT_S)
    assert DT_S * np.count_nonzero(first > WAY - 1e-9) == pytest.approx(waits_s, abs=2 * DT_S)


def test_a_slow_joint_moves_at_a_fifth_of_its_speed():
    arm = Arm((0.1, 0.5, -1.0))
    assert tried(arm, max_speed=np.array([0.1, 1.0, 2.0])).problem == ""
    fastest = np.abs(np.diff(arm.sent, axis=0)).max(axis=0) / DT_S
    np.testing.assert_allclose(fastest, (0.02, 0.05, 0.05), rtol=1e-6)


def test_a_late_loop_makes_no_leap():
    trial, at = JointOrderTrial(NAMES, np.zeros(3), np.full(3, WAY), MAX_SPEED), np.zeros(3)
    now_s, largest = 0.0, 0.0
    for step in range(400):
        now_s += 1.0 if step % 50 == 40 else DT_S
        there = trial.step(at, now_s)
        largest, at = max(largest, float(np.abs(there - at).max())), there
    assert largest < 0.05 * 0.05 + 1e-9


def test_near_a_limit_or_where_it_may_not_be_a_joint_goes_the_other_way():
    start, ranges = np.array([2.99, 0.0, 0.0]), np.array([[-3.0, 3.0], [-1.0, 1.0], [-np.inf, np.inf]])
    ways = choose_ways(NAMES, start, ranges, lambda there: there[1] <= 0.0)
    np.testing.assert_allclose(ways, (-WAY, -WAY, WAY))
    with pytest.raises(UserError, match=r"would move 'wrist' by 0\.02.*joints\.controller"):
        choose_ways(NAMES, start, ranges, lambda there: there[2] == 0.0)


def test_trials_that_are_interrupted_again_and_again_do_not_take_the_arm_away():
    arm, home = Arm((0.1, 0.5, -1.0)), np.array((0.1, 0.5, -1.0))
    for trials in range(20):
        ways = choose_ways(NAMES, arm.at, FREE, lambda there: True, home)
        trial = JointOrderTrial(NAMES, arm.at.copy(), ways, MAX_SPEED)
        for step in range(70 + trials):
            arm.take(trial.step(arm.at, step * DT_S))
        assert np.abs(arm.at - home).max() < WAY + 1e-9


def test_the_guard_lets_the_trial_through():
    each, sent = rig("position_array"), [np.zeros(2)]
    each.command = lambda: JointCommand(Stamp(None), None, sent[-1][None], np.zeros(1))  # type: ignore[method-assign]
    each.until_passing()
    trial = JointOrderTrial(JOINTS.names, np.zeros(2), np.full(2, WAY), JOINTS.speeds)
    while not trial.done:
        sent.append(trial.step(each.joints, each.steady_s))
        each.run(0.01)
        assert each.guard.state is State.PASSING, each.guard.reason
    assert not trial.problem and not each.guard.tally.counts.get(Cause.OVER_SPEED)
    np.testing.assert_allclose(np.ptp(sent, axis=0), WAY, rtol=1e-3)
