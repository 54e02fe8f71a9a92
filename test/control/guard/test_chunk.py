# SPDX-License-Identifier: Apache-2.0
"""A chunk goes out whole only if nothing on its way, between its points too, is beyond a limit."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from support.guarding import JOINTS, LIMITS, rig, settings

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.chunk import ChunkCheck
from specvla_ros.control.guard.commands import JointCommand, SentJoints, Stamp
from specvla_ros.control.guard.guard import State
from specvla_ros.control.guard.settings import CHUNK_BRAKING, HEARD_S
from specvla_ros.control.joint_path import JointPath
from specvla_ros.control.pose import Pose
from specvla_ros.lab.simulation.controllers import JointState, JointTrajectory, JointTrajectoryController, Point

LENGTH_M = 0.5  # of the arm in these tests, which turns about the origin with its first joint


class Turning:
    """Kinematics of an arm whose first joint turns the tool about the base."""

    def pose_at(self, positions):
        angle = positions[0]
        return Pose(np.array([LENGTH_M * np.cos(angle), LENGTH_M * np.sin(angle), 0.3]), np.eye(3))


def smooth(way_rad=0.1, seconds=0.4, points=9, joint=0):
    """From rest to rest, as 10s³ − 15s⁴ + 6s⁵."""
    share = np.linspace(0.0, 1.0, points)
    positions, velocities = np.zeros((points, 2)), np.zeros((points, 2))
    positions[:, joint] = way_rad * (10 * share**3 - 15 * share**4 + 6 * share**5)
    velocities[:, joint] = way_rad * 30 * (share**2 - 2 * share**3 + share**4) / seconds
    return JointPath(share * seconds, positions, velocities)


def unfit(path, *, kinematics=None, tool_speed=LIMITS.linear_speed, **changes):
    return ChunkCheck(settings("joint_trajectory_chunk", **changes), kinematics).unfit(path, JOINTS.speeds, tool_speed)


def test_a_smooth_motion_within_the_limits_goes_out_whole():
    assert unfit(smooth()) == "" and unfit(smooth(0.04), kinematics=Turning()) == ""


bumpy = smooth()
bumpy.velocities[4] *= -1
ends_moving = smooth()
ends_moving.velocities[-1, 0] = 0.1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (replace(smooth(), velocities=None), "its points have no velocities"),
        (JointPath(np.zeros(1), np.zeros((1, 2)), np.zeros((1, 2))), "it has a single point"),
        (ends_moving, "it does not end at rest"),
        (smooth(seconds=0.6), "it ends 0.60 s ahead, and joints.chunk_s is 0.5"),
        (smooth(0.25), "the speed of shoulder would be 1.17, more than 1"),
        (smooth(0.4, joint=1), "the acceleration of elbow would be 1[45].*"),
        (bumpy, "the acceleration of shoulder"),
    ],
)
def test_a_motion_that_breaks_a_limit_between_or_at_its_points_does_not(path, words):
    changes = {} if "elbow" not in words else {"joints": replace(JOINTS, max_acceleration=(8.0, 10.0))}
    found = unfit(path, **changes)
    assert re.match(words.replace("(", r"\("), found), found


def test_a_joint_that_swings_out_of_its_range_between_two_points_does_not():
    low, high = JOINTS.position_min[0], JOINTS.position_max[0]
    speeds = np.array([[0.0, 0.0], [0.5, 0.0], [-0.5, 0.0], [0.0, 0.0]])
    positions = np.array([[high - 0.05, 0.0], [high - 0.001, 0.0], [high - 0.001, 0.0], [high - 0.05, 0.0]])
    path = JointPath(np.array([0.0, 0.15, 0.3, 0.45]), positions, speeds)
    assert unfit(path) == "shoulder would leave its range" and low < high
    assert unfit(replace(path, positions=positions - 0.05)) == ""


def test_a_joint_that_could_not_be_stopped_before_the_end_of_its_range_does_not():
    path = smooth(0.2, seconds=0.4)  # it brakes harder than the guard does
    at_the_end = replace(path, positions=path.positions + np.array([JOINTS.position_max[0] - 0.2, 0.0]))
    assert unfit(at_the_end) == "shoulder would leave its range if it were stopped"
    assert unfit(replace(path, positions=at_the_end.positions - 0.05)) == ""


def test_the_tool_is_held_to_its_speed_and_to_the_workspace():
    assert unfit(smooth(0.1), kinematics=Turning()) == ""
    assert "the tool would move at 0.2" in unfit(smooth(0.1), kinematics=Turning(), tool_speed=0.2)
    narrow = replace(LIMITS, workspace_max=(0.8, 0.02, 0.6))
    assert unfit(smooth(0.1), kinematics=Turning(), limits=narrow) == "the tool would leave the workspace"


def chunk(each, velocities=True):
    path = smooth(0.1).after(0.0)
    moving = path.velocities if velocities else None
    return JointCommand(Stamp(each.clock_ns), None, each.joints + path.positions, path.times_s, moving)


def passing():
    each = rig("joint_trajectory_chunk")
    each.joints = np.zeros(2)
    each.until_passing()
    while np.abs(each.guard._gate._velocity).max() > 1e-9:
        each.advance(0.01)
        each.hear(command=JointCommand(Stamp(each.clock_ns), None, each.joints[None], np.array([0.02])))
        each.tick()
    return each


def test_a_chunk_is_sent_once_and_what_repeats_it_is_what_is_left_of_it():
    each = passing()
    each.advance(0.01)
    each.hear(command=chunk(each))
    first = each.tick().sent
    assert isinstance(first, SentJoints) and first.path is not None and not first.sent_before
    assert first.path.times_s[0] >= 0.06, "what the arm can still reach in time"
    each.advance(0.01)
    each.hear(["command"])
    again = each.tick().sent
    assert again.sent_before and again.path.end_s == pytest.approx(first.path.end_s - 0.01)
    np.testing.assert_allclose(again.path.positions[-1], first.path.positions[-1])


@pytest.mark.parametrize("change", ["stop", "slower"])
def test_a_stop_and_a_lower_speed_begin_where_the_controller_is(change):
    each = passing()
    each.advance(0.01)
    sent_at_s, path = each.steady_s, smooth(0.1)
    begun = each.joints.copy()
    each.hear(command=chunk(each))
    each.tick()
    for _ in range(8):
        each.advance(0.01)
        each.hear(["command"])
        each.tick()
    each.advance(0.01)
    each.hear(["command"])
    if change == "stop":
        each.guard.press_stop("test", each.now)
    else:
        each.guard.scale_speed(0.1)
    sent = each.tick().sent
    assert not sent.sent_before
    assert not sent.path.velocities[-1].any() and sent.path.end_s < 0.1, "it brakes, at once or unless told otherwise"
    assert np.abs(sent.velocities).max() > 0.1
    np.testing.assert_allclose(sent.positions, begun + path.at(each.steady_s - sent_at_s)[0], atol=2e-3)


def test_a_guard_that_stood_still_finds_the_arm_on_its_way_and_brakes_it_from_there():
    each = passing()
    each.advance(0.01)
    begun, sent_at_s = each.joints.copy(), each.steady_s
    each.hear(command=chunk(each))
    each.tick()
    each.advance(0.2)
    each.hear(["command"])
    sent = each.tick().sent
    assert each.guard.stalls == 1 and each.guard.state is not State.PASSING
    np.testing.assert_allclose(sent.positions, begun + smooth(0.1).at(each.steady_s - sent_at_s)[0], atol=1e-6)
    assert np.abs(sent.velocities).max() > 0.3


def test_a_chunk_that_was_long_on_its_way_is_followed_where_it_is_by_then():
    each, transit_s = passing(), 0.06
    for _ in range(7):
        each.advance(0.01)
        each.hear(["command"])
        each.tick()
    stamp = Stamp(each.clock_ns - round(transit_s * 1e9))
    begun, begun_s, command = each.joints.copy(), each.steady_s, chunk(each)
    each.guard.command(replace(command, stamp=stamp, times_s=command.times_s + transit_s), each.now)
    each.tick()
    for _ in range(8):
        each.advance(0.01)
        each.hear(["command"])
        sent = each.tick().sent
    passed_s = each.steady_s - begun_s
    np.testing.assert_allclose(sent.positions, begun + smooth(0.1).at(passed_s)[0], atol=1e-3)


def test_without_velocities_it_is_followed_point_by_point_and_the_report_says_why():
    each = passing()
    each.advance(0.01)
    each.hear(command=chunk(each, velocities=False))
    path = each.tick().sent.path
    assert path.end_s < 0.1 and not path.velocities[-1].any(), "a step, and the way to rest"
    assert each.guard.report()["last chunk that was not passed whole"] == "its points have no velocities"


def left_of(each, path, begun_s, velocities):
    """What a driver sends of a motion that began at a time."""
    left = path.after(each.steady_s - begun_s)
    return JointCommand(
        Stamp(each.clock_ns), None, left.positions, left.times_s, left.velocities if velocities else None
    )


def test_point_by_point_it_is_known_what_the_controller_does_while_the_guard_is_late():
    each = passing()
    begun_s, path = each.steady_s, smooth(0.1)
    for _ in range(18):
        each.advance(0.01)
        each.hear(command=left_of(each, path, begun_s, velocities=False))
        sent = each.tick().sent
    assert sent.velocities[0] > 0.1
    each.advance(0.04)
    each.hear(command=left_of(each, path, begun_s, velocities=False))
    late = each.tick().sent
    where, velocity = sent.path.at(0.04)
    np.testing.assert_allclose(late.positions, where, atol=0.02 * np.abs(velocity).max() + 1e-3)


def test_chunks_whose_first_points_are_unevenly_ahead_are_no_jump():
    """Points are 20 ms apart, so the first one that is in time is up to 20 ms nearer or further ahead."""
    each = passing()
    begun_s, path = each.steady_s, smooth(0.18, seconds=0.45, points=10)
    for ahead in (0, 2, 0, 2, 0, 2):
        each.advance(0.01)
        command = left_of(each, path, begun_s, velocities=True)
        cut = replace(
            command,
            positions=command.positions[ahead:],
            times_s=command.times_s[ahead:],
            velocities=command.velocities[ahead:],
        )
        each.hear(command=cut)
        each.tick()
    assert each.guard.state is State.PASSING and not each.guard.tally.counts[Cause.OVER_SPEED]
    each.advance(0.01)
    each.hear(command=replace(cut, positions=cut.positions + 0.1, stamp=Stamp(each.clock_ns)))
    assert each.guard.tally.counts[Cause.OVER_SPEED] == 1, "a jump of the motion still is one"


@pytest.mark.parametrize("way_rad", [0.02, 0.1])
@pytest.mark.parametrize("lag_rad", [0.0, 0.05])
@pytest.mark.parametrize("velocities", [True, False])
def test_a_stop_ends_where_the_controller_can_brake_and_never_goes_back(way_rad, lag_rad, velocities):
    """The controller's own command is watched; the measured arm may be behind it, or not be measured for a while."""
    each, controller = passing(), JointTrajectoryController(("shoulder", "elbow"), from_desired=True)
    controller.start(JointState(each.joints.copy(), np.zeros(2)))
    begun_s, path, commanded = each.steady_s, smooth(way_rad), []

    def step():
        each.advance(0.01)
        each.hear(command=left_of(each, path, begun_s, velocities))
        sent = each.tick().sent
        now_s = each.steady_s - begun_s
        if not sent.sent_before:
            controller.take(trajectory(sent), now_s)
        reference = controller.update(JointState(each.joints, np.zeros(2)), now_s)
        each.joints = reference.positions - [lag_rad, 0.0]
        commanded.append(reference.positions[0])

    for _ in range(18):
        step()
    speed = (commanded[-1] - commanded[-2]) / 0.01
    assert speed > 0.02
    each.guard.press_stop("test", each.now)
    for _ in range(18):
        step()
    stopped = np.array(commanded[18:])
    assert (np.diff(stopped) > -1e-6).all(), "it does not go back"
    brakes_s = speed / (CHUNK_BRAKING * JOINTS.accelerations[0]) + HEARD_S
    assert np.ptp(stopped[math.ceil(brakes_s / 0.01) + 1 :]) < 1e-5, "it stands by then, and a control period"


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("moved", [12, 18, 24])
def test_a_stop_asks_no_more_of_the_arm_than_it_can_however_late_the_controller_hears_of_it(late, moved):
    each, controller = passing(), JointTrajectoryController(("shoulder", "elbow"), from_desired=True)
    controller.start(JointState(each.joints.copy(), np.zeros(2)))
    begun_s, path, commanded, waiting = each.steady_s, smooth(0.1), [], []
    for step in range(moved + 25):
        each.advance(0.01)
        each.hear(command=left_of(each, path, begun_s, velocities=True) if step < moved else None)
        if step == moved:
            each.guard.press_stop("test", each.now)
        sent, now_s = each.tick().sent, each.steady_s - begun_s
        waiting.append(None if sent.sent_before else trajectory(sent))
        if len(waiting) > late and (heard := waiting.pop(0)) is not None:
            controller.take(heard, now_s)
        reference = controller.update(JointState(each.joints, np.zeros(2)), now_s)
        each.joints = reference.positions
        commanded.append(reference.positions[0])
    accelerations = np.diff(commanded, n=2) / 0.01**2
    assert np.abs(np.diff(commanded)).max() > 0.002
    assert np.abs(accelerations[moved - 2 :]).max() <= 0.9 * JOINTS.accelerations[0]


def trajectory(sent):
    path = sent.path or JointPath(np.array([sent.after_s]), sent.positions[None], np.zeros((1, 2)))
    assert path.velocities is not None
    rows = zip(path.times_s, path.positions, path.velocities, strict=True)
    points = tuple(Point(time_s, place, velocity, np.zeros(0)) for time_s, place, velocity in rows)
    return JointTrajectory(0.0, ("shoulder", "elbow"), points)
