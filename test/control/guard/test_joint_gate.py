# SPDX-License-Identifier: Apache-2.0
"""Commands to joints are guarded as those to the tool are: by what the joints and the tool are measured to do."""

import numpy as np
import pytest
from support.guarding import HOME, JOINTS, LIMITS, Rig, rig

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import JointCommand, SentJoints, Stamp
from specvla_ros.control.guard.guard import State
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S

OUTPUTS = ("joint_trajectory", "position_array")
SLOW, FAST = 0.3, 1.0  # rad/s


def push(each: Rig, speed: float, seconds: float, *, moving: np.ndarray | None = None) -> None:
    """A driver that sends the first joint on, whatever the robot does; `moving`: which joints follow."""
    target = each.joints.copy()
    follows = np.zeros(2, bool) if moving is None else moving
    each._follow = lambda sent: None  # type: ignore[method-assign]
    for _ in range(round(seconds * 100)):
        target = target + np.array([min(speed, 1.0), 0.3]) * 0.01
        each.advance(0.01)
        stamp = Stamp(None if each.output == "position_array" else each.clock_ns)
        ahead = np.array([0.0 if each.output == "position_array" else TRAJECTORY_AHEAD_S])
        each.hear(command=JointCommand(stamp, None, target[None], ahead))
        sent = each.tick().sent
        if isinstance(sent, SentJoints):
            each.joints = np.where(follows, sent.positions, each.joints)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("speed", "most_rad"), [(SLOW, 0.13), (FAST, 0.36)])
def test_a_joint_that_does_not_move_is_noticed_soon_and_its_target_comes_back(
    output: str, speed: float, most_rad: float
) -> None:
    each = rig(output)
    each.until_passing()
    stuck = each.joints.copy()
    push(each, speed, 2.0)
    assert each.guard.state is State.STOPPED and "did not move" in each.guard.reason
    sent = [each for _, each in each.sent if isinstance(each, SentJoints)]
    assert 0.02 < max(np.abs(each.positions - stuck).max() for each in sent) < most_rad
    np.testing.assert_allclose(sent[-1].positions, stuck, atol=2e-4)
    assert each.guard.clear_stop(each.now) == ""


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_stuck_joint_is_noticed_beside_others_that_move(output: str) -> None:
    each = rig(output)
    each.until_passing()
    push(each, SLOW, 1.0, moving=np.array([True, False]))
    assert each.guard.state is State.STOPPED and "elbow was sent" in each.guard.reason


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_tool_that_is_carried_out_of_the_workspace_stops_at_its_edge(output: str) -> None:
    each = rig(output)
    each.tool = np.array([HOME[0], HOME[1], 0.1])
    each.until_passing()
    while each.guard.state is State.PASSING and each.tool[2] > -0.1:
        each.tool = each.tool - np.array([0.0, 0.0, 0.002])  # 0.2 m/s
        each.run(0.01)
    assert each.guard.tally.last is not None and each.guard.tally.last.cause is Cause.OUTSIDE
    assert each.tool[2] > -0.01


@pytest.mark.parametrize(("below_m", "passes"), [(0.0, True), (0.008, True), (0.02, False), (0.045, False)])
@pytest.mark.parametrize("output", OUTPUTS)
def test_joints_do_not_move_while_the_tool_is_outside_of_the_workspace(
    output: str, below_m: float, passes: bool
) -> None:
    each = rig(output)
    each.tool = np.array([HOME[0], HOME[1], LIMITS.workspace_min[2] - below_m])
    for _ in range(200):
        each.begin_anew()
        each.run(0.01)
    assert (each.guard.state is State.PASSING) is passes
    assert passes or "outside of the workspace" in each.guard.reason


@pytest.mark.parametrize(("share", "stops"), [(1.1, False), (1.6, True)])
def test_joints_that_move_the_tool_too_fast_are_braked_and_go_on_by_themselves(share: float, stops: bool) -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    for _ in range(30):
        each.tool = each.tool + np.array([0.0, share * LIMITS.linear_speed * 0.01, 0.0])
        each.run(0.01)
    assert bool(each.guard.tally.counts[Cause.TOOL_TOO_FAST]) is stops
    assert not any(cause.latches for cause in each.guard.tally.counts)
    each.until_passing()


def test_a_trajectory_gives_measured_joints_the_time_that_their_speed_needs() -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    each.run(0.5)
    near = each.outcomes[-1].sent
    assert isinstance(near, SentJoints) and near.after_s == TRAJECTORY_AHEAD_S
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.joints = each.joints - np.array([0.2, 0.0])  # a link that was lost for a moment, say
    each.advance(0.01)
    each.hear()
    far = each.tick().sent
    assert isinstance(far, SentJoints)
    point = far.positions + TRAJECTORY_AHEAD_S * far.velocities
    assert far.after_s == pytest.approx((np.abs(point - each.joints) / JOINTS.max_speed).max())
    assert far.after_s > 0.15
