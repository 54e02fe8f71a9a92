# SPDX-License-Identifier: Apache-2.0
"""The driver's control step on a robot that lags, without ROS."""

import numpy as np
import pytest

from specvla_ros.control.action_space import ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion, TrackingVelocity
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.driver import Driver, NotFollowingError
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.guard.tool_gates import JITTER_S
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, PoseHistory
from specvla_ros.errors import UserError

LIMITS = Limits(
    linear_speed=0.6,
    angular_speed=3.0,
    linear_acceleration=2.5,
    angular_acceleration=10.0,
    linear_jerk=125.0,
    angular_jerk=500.0,
    workspace_min=(-1.0, -1.0, -1.0),
    workspace_max=(1.0, 1.0, 1.0),
)
DT_S = 0.01
MOVE = np.array([[0.05, 0.02, 0.0, 0.0, 0.0, 0.3, 1.0]])
SLOW = 0.2  # of what it is told: it lags more than behind MoveIt Servo's filter (4 / 7)


class Robot:
    """It is sent velocities, and goes at a part of them."""

    def __init__(self, follows_velocity=True):
        self.history, self.now_s, self.pose = PoseHistory[Pose](), 100.0, Pose(np.zeros(3), np.eye(3))
        follower = ActionFollower(
            ToolSpace(LIMITS), BoundedMotion(LIMITS), Gripper(GripperSettings(open_value=0.08)), self.history
        )
        self.driver = Driver(
            follower,
            self.history,
            tracking=TrackingVelocity(LIMITS) if follows_velocity else None,
            pose_timeout_s=0.1,
            pose_source="here",
            start_output=lambda: None,
            say=lambda reason: None,
        )
        self.sent = []

    def run(self, seconds, *, measured=True):
        for _ in range(round(seconds / DT_S)):
            if measured:
                self.history.add(self.now_s, self.pose)
            target = self.driver.step(self.now_s, self.now_s)
            assert target is not None
            self.sent.append(target.velocity.copy())
            self.pose = self.pose.displaced(SLOW * DT_S * target.velocity)
            self.now_s = round(self.now_s + DT_S, 4)

    def act(self):
        self.driver.take(StampedAction(self.now_s, MOVE, ActionConvention(0.2)), self.now_s)


@pytest.mark.parametrize("lost", ["poses", "guard"])
def test_a_velocity_does_not_jump_when_what_is_missing_is_no_longer_known(lost):
    robot = Robot()
    robot.run(0.2)
    robot.act()
    robot.run(0.15)
    correction = robot.sent[-1] - robot.driver.target.velocity
    assert np.linalg.norm(correction[:3]) > 2 * LIMITS.linear_acceleration * DT_S, "it makes up for much"
    before = len(robot.sent)
    if lost == "guard":
        robot.driver.passing(False, robot.now_s)
    robot.run(0.6, measured=lost == "guard")
    assert robot.driver.problem or lost == "guard"
    known = before - 1 if lost == "guard" else before + 9  # poses are fresh for 0.1 s more
    changes = np.diff(robot.sent[known:], axis=0)
    assert np.linalg.norm(changes[:, :3], axis=1).max() <= LIMITS.linear_acceleration * DT_S * 1.001
    assert np.linalg.norm(changes[:, 3:], axis=1).max() <= LIMITS.angular_acceleration * DT_S * 1.001
    assert np.abs(robot.sent[-1]).max() < 1e-9


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_velocity_does_not_jump_when_the_speed_is_turned_down_and_up(share):
    robot = Robot()
    robot.run(0.2)
    far = np.array([[0.15, 0.0, 0.0, 0.0, 0.0, 0.6, 1.0]])
    robot.driver.take(StampedAction(robot.now_s, far, ActionConvention(0.4)), robot.now_s)
    robot.run(0.25)
    before = len(robot.sent)
    for scale in (share, 1.0):
        robot.driver.speed_scale = scale
        robot.run(0.8)
        if scale == share:
            speed, turning = (np.linalg.norm(robot.sent[-1][part]) for part in (slice(3), slice(3, 6)))
            assert speed <= share * LIMITS.linear_speed + 1e-9 and turning <= share * LIMITS.angular_speed + 1e-9
    changes = np.diff(robot.sent[before - 1 :], axis=0)
    assert np.linalg.norm(changes[:, :3], axis=1).max() <= LIMITS.linear_acceleration * (DT_S + JITTER_S)
    assert np.linalg.norm(changes[:, 3:], axis=1).max() <= LIMITS.angular_acceleration * (DT_S + JITTER_S)


@pytest.mark.parametrize("follows_velocity", [True, False])
@pytest.mark.parametrize("moved", [(0.0, 0.0, 0.0, 0.0, 0.0, 0.6), (0.1, 0.0, 0.0, 0.0, 0.0, 0.0)])
def test_while_the_guard_holds_the_target_goes_to_where_the_robot_is_put(follows_velocity, moved):
    robot = Robot(follows_velocity)
    robot.run(0.2)
    robot.driver.passing(False, robot.now_s)
    robot.run(0.2)
    robot.pose = put = robot.pose.displaced(np.array(moved))
    for _ in range(100):  # somebody holds it there
        robot.run(DT_S)
        robot.pose = put
    way_m, turn_rad = robot.driver.target.pose.distance(put)
    assert way_m < 0.005 and turn_rad < 0.03, "else the guard never finds it near enough to go on"


def test_a_guard_that_lets_nothing_through_ends_the_grippers_command():
    robot = Robot()
    robot.run(0.1)
    robot.act()
    gripper = robot.driver.follower._gripper
    assert gripper.position is not None
    robot.driver.passing(False, robot.now_s)
    robot.run(0.1)
    robot.driver.passing(True, robot.now_s)
    assert gripper.position is None
    robot.act()
    assert gripper.position is not None


class Started:
    """A driver that begins at a measured pose and is stepped by hand, on two clocks."""

    def __init__(self, *, follows_velocity=False, at=(0.0, 0.0, 0.0), start_output=lambda: None):
        self.history, self.now_s, self.steady_s = PoseHistory[Pose](), 100.0, 7.0
        self.said: list[str] = []
        self.follower = ActionFollower(
            ToolSpace(LIMITS), BoundedMotion(LIMITS), Gripper(GripperSettings()), self.history
        )
        self.driver = Driver(
            self.follower,
            self.history,
            tracking=TrackingVelocity(LIMITS) if follows_velocity else None,
            pose_timeout_s=0.1,
            pose_source="here",
            start_output=start_output,
            say=self.said.append,
        )
        self.pose = Pose(np.array(at), np.eye(3))

    def step(self, seconds=DT_S, *, clock_s=None, measured=True):
        self.steady_s += seconds
        self.now_s += seconds if clock_s is None else clock_s
        if measured:
            self.history.add(self.now_s, self.pose)
        return self.driver.step(self.now_s, self.steady_s)

    def follow(self, seconds):
        """Steps with a robot that is where it is sent."""
        for _ in range(round(seconds / DT_S)):
            self.pose = self.step().pose

    def act(self, values=MOVE):
        self.driver.take(StampedAction(self.now_s, values, ActionConvention(0.2)), self.now_s)

    def refused(self):
        with pytest.raises(NotFollowingError) as why:
            self.act()
        return str(why.value)


def test_motion_begins_where_the_tool_is_measured_and_not_before():
    robot = Started(at=(0.1, 0.2, -0.3))
    assert robot.step(measured=False) is None
    assert not robot.driver.anchored and robot.refused() == "no tool pose received from here yet"
    target = robot.step()
    assert robot.driver.anchored and robot.driver.problem == ""
    np.testing.assert_allclose(target.pose.position, [0.1, 0.2, -0.3])


def test_an_action_is_refused_until_the_first_step():
    assert Started().refused() == "no tool pose yet"


@pytest.mark.parametrize(("age_s", "rests"), [(0.09, False), (0.11, True)])
def test_the_tool_rests_when_its_pose_is_older_than_the_timeout(age_s, rests):
    robot = Started()
    robot.step()
    robot.step(age_s, measured=False)
    assert (robot.driver.problem != "") is rests
    if rests:
        assert "0.11 s old, and the limit is 0.1 s" in robot.driver.problem and robot.said
        assert "0.11 s old" in robot.refused()


def test_the_tool_goes_on_when_its_pose_is_known_again():
    robot = Started()
    robot.step()
    robot.step(0.2, measured=False)
    assert robot.driver.problem
    robot.step()
    assert not robot.driver.problem and len(robot.said) == 1
    robot.act()


@pytest.mark.parametrize(("ahead_s", "jumps"), [(0.24, 0), (0.26, 1), (-0.001, 1), (-5.0, 1)])
def test_a_clock_that_leaps_or_goes_back_begins_everything_anew(ahead_s, jumps):
    robot = Started()
    robot.step()
    robot.act()
    robot.step()
    robot.step(clock_s=ahead_s if ahead_s < 0 else DT_S + ahead_s, measured=False)
    assert robot.driver.clock_jumps == jumps
    assert (robot.history.newest is None) is (jumps == 1)
    assert sum("the clock jumped" in each for each in robot.said) == jumps
    if jumps:
        assert robot.step(measured=False) is None, "it does not go on from poses of another time"
        assert robot.step() is not None
        robot.act()


def test_a_clock_that_leaps_before_motion_began_harms_nothing():
    robot = Started()
    robot.step(measured=False)
    assert robot.step(clock_s=5.0, measured=False) is None
    assert robot.driver.clock_jumps == 1
    assert robot.step() is not None and robot.driver.anchored


def test_a_clock_that_leaps_leaves_the_tool_where_it_was_sent():
    robot = Started()
    robot.step()
    robot.act()
    robot.follow(0.1)
    before = robot.driver.target
    assert before.moving
    robot.step(clock_s=5.0, measured=False)
    robot.step(clock_s=DT_S)
    assert not robot.driver.target.moving
    assert robot.driver.target.pose.distance(robot.pose) < (1e-9, 1e-9)


@pytest.mark.parametrize(("still_s", "stalls"), [(0.49, 0), (0.51, 1)])
def test_a_control_loop_that_stood_still_for_half_a_second_follows_nothing_that_is_out_of_date(still_s, stalls):
    robot = Started()
    robot.step()
    robot.act(np.array([[0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]))
    robot.follow(0.1)
    robot.step(still_s)
    assert robot.driver.stalls == stalls and robot.driver.clock_jumps == 0
    robot.follow(2.0)
    assert bool(robot.pose.position[0] > 0.15) is (stalls == 0)


def test_a_loop_that_stood_still_before_motion_began_is_no_stall():
    robot = Started()
    robot.step(measured=False)
    robot.step(3.0)
    assert robot.driver.stalls == 0 and robot.driver.anchored


def test_actions_are_refused_while_it_holds_and_while_the_guard_lets_nothing_through():
    robot = Started()
    robot.step()
    robot.driver.holding = True
    assert robot.refused() == "the driver is holding"
    robot.driver.holding = False
    robot.driver.passing(False, robot.now_s)
    assert robot.refused() == "the guard blocks motion"
    robot.driver.passing(True, robot.now_s)
    robot.act()


def test_a_driver_that_is_told_to_hold_comes_to_rest():
    robot = Started()
    robot.step()
    robot.act(np.array([[0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]))
    robot.follow(0.1)
    robot.driver.follower.hold(robot.now_s)
    robot.follow(LIMITS.stop_s + 2 * DT_S)
    assert not robot.driver.target.moving and robot.pose.position[0] < 0.15


def test_a_guard_that_stops_motion_brings_the_target_to_rest():
    robot = Started()
    robot.step()
    robot.act(np.array([[0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]))
    robot.follow(0.15)
    assert robot.driver.target.moving
    robot.driver.passing(False, robot.now_s)
    robot.follow(LIMITS.stop_s + 2 * DT_S)
    assert not robot.driver.target.moving
    robot.driver.passing(True, robot.now_s)
    robot.follow(1.0)
    assert robot.pose.position[0] < 0.15, "and motion that was stopped is not taken up again"


@pytest.mark.parametrize(("out_m", "begins"), [(0.004, True), (0.006, False)])
def test_a_tool_further_outside_of_the_workspace_than_an_edge_is_brought_back_by_others(out_m, begins):
    robot = Started(at=(0.0, 1.0 + out_m, 0.0))
    assert (robot.step() is not None) is begins
    assert ("outside the workspace" in robot.driver.problem) is not begins


def test_an_output_that_cannot_begin_keeps_the_tool_where_it_is():
    def fails():
        raise UserError("no such joints")

    robot = Started(start_output=fails)
    assert robot.step() is None
    assert robot.driver.problem == "no such joints" and not robot.driver.anchored


@pytest.mark.parametrize(
    ("change", "words"), [({"mismatch": "they differ"}, "they differ"), ({"action_publishers": 2}, "2 nodes publish")]
)
def test_what_others_find_wrong_brings_the_tool_to_rest(change, words):
    robot = Started()
    robot.step()
    for name, value in change.items():
        setattr(robot.driver, name, value)
    robot.step()
    assert words in robot.driver.problem and words in robot.refused()
    robot.driver.mismatch, robot.driver.action_publishers = "", 1
    robot.step()
    assert not robot.driver.problem


@pytest.mark.parametrize("follows_velocity", [True, False])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_tool_is_not_led_to_where_one_of_two_measurements_that_differ_says_it_is(guarded, follows_velocity):
    robot = Started(follows_velocity=follows_velocity)
    robot.step()
    robot.driver.mismatch = "they differ"
    robot.driver.passing(not guarded, robot.now_s)
    begun = robot.driver.target.pose
    robot.pose = put = robot.pose.displaced(np.array([0.04, 0.0, 0.0, 0.0, 0.0, 0.0]))
    targets = [robot.step() for _ in range(120)]
    assert all(target is None or target.pose.distance(begun) < (1e-9, 1e-9) for target in targets)
    assert targets[-1] is None and robot.driver.problem == "they differ"
    robot.driver.mismatch = ""
    assert robot.step().pose.distance(put) < (1e-9, 1e-9)


@pytest.mark.parametrize(
    ("pushed", "returns"), [((0.028, 0.0), False), ((0.032, 0.0), True), ((0.0, 0.19), False), ((0.0, 0.21), True)]
)
@pytest.mark.parametrize("follows_velocity", [True, False])
def test_a_robot_that_was_pushed_away_for_half_a_second_is_not_pulled_back(follows_velocity, pushed, returns):
    robot = Started(follows_velocity=follows_velocity)
    robot.step()
    begun = robot.driver.target.pose
    robot.pose = put = robot.pose.displaced(np.array([pushed[0], 0.0, 0.0, 0.0, 0.0, pushed[1]]))
    for _ in range(45):
        robot.step()
    assert robot.driver.target.pose.distance(begun) < (1e-9, 1e-9), "it may be on its way yet"
    for _ in range(60):
        robot.step()
    assert (max(robot.driver.target.pose.distance(put)) < 1e-6) is returns
    assert (max(robot.driver.target.pose.distance(begun)) < 1e-6) is not returns


@pytest.mark.parametrize(
    ("pushed", "returns"), [((0.0028, 0.0), False), ((0.0032, 0.0), True), ((0.0, 0.019), False), ((0.0, 0.021), True)]
)
def test_while_the_guard_holds_the_target_goes_to_the_robot_at_once_where_it_is_further_away(pushed, returns):
    robot = Started()
    robot.step()
    robot.driver.passing(False, robot.now_s)
    begun = robot.driver.target.pose
    robot.pose = put = robot.pose.displaced(np.array([pushed[0], 0.0, 0.0, 0.0, 0.0, pushed[1]]))
    for _ in range(3):
        robot.step()
    assert (max(robot.driver.target.pose.distance(put)) < 1e-6) is returns
    assert (max(robot.driver.target.pose.distance(begun)) < 1e-6) is not returns


def test_poses_are_sent_as_they_are_planned_and_velocities_with_what_is_missing():
    for follows_velocity in (False, True):
        robot = Started(follows_velocity=follows_velocity)
        robot.step()
        robot.act()
        robot.follow(0.1)
        robot.pose = robot.pose.displaced(np.array([-0.01, 0.0, 0.0, 0.0, 0.0, 0.0]))
        sent = robot.step()
        more = sent.velocity - robot.driver.target.velocity
        np.testing.assert_allclose(more[0], 0.0 if not follows_velocity else 0.06, atol=0.02)
        assert np.linalg.norm(sent.velocity[:3]) <= LIMITS.linear_speed + 1e-9


def test_while_the_guard_holds_a_robot_that_sank_out_of_the_workspace_the_target_is_just_where_it_is():
    """A target that is further out than the tool would be refused, and so nothing would ever begin."""
    robot = Robot(follows_velocity=False)
    robot.run(0.2)
    robot.driver.passing(False, robot.now_s)
    for depth in (0.004, 0.003):
        robot.pose = Pose(np.array([0.0, 0.0, -1.0 - depth]), np.eye(3))
        for _ in range(20):
            robot.history.add(robot.now_s, robot.pose)
            target = robot.driver.step(robot.now_s, robot.now_s)
            robot.now_s = round(robot.now_s + DT_S, 4)
    assert target is not None and target.pose.distance(robot.pose)[0] < 0.0004
