# SPDX-License-Identifier: Apache-2.0
"""The driver's control step on a robot that lags, without ROS."""

import numpy as np
import pytest

from specvla_ros.control.bounded_motion import BoundedMotion
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.driver import Driver
from specvla_ros.control.follower import ActionFollower
from specvla_ros.control.gripper import Gripper, GripperSettings
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose, PoseHistory

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
        self.history, self.now_s, self.pose = PoseHistory(), 100.0, Pose(np.zeros(3), np.eye(3))
        follower = ActionFollower(BoundedMotion(LIMITS), Gripper(GripperSettings(open_value=0.08)), self.history)
        self.driver = Driver(
            follower,
            self.history,
            LIMITS,
            follows_velocity=follows_velocity,
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
