# SPDX-License-Identifier: Apache-2.0
"""The driver's control takes simulated arms through the tasks, whatever interface they have."""

import pytest
from support.expert_engine import ExpertEngine, as_engine
from support.gl import needs_gl
from support.nightly import nightly_but
from support.pace import invented_pace

from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow
from specvla_ros.lab.simulation.rollout import Clock, Rollout

SLOW = invented_pace(0.02, 0.1, 0.03)


def succeeded(robot, starts=3):
    rollout = Rollout(as_engine(ExpertEngine(robot)), robot, Clock.REALTIME, SLOW, time_limit=2.0)
    return sum(rollout.run("lift_red", seed).succeeded for seed in range(starts))


@needs_gl
@pytest.mark.parametrize("command", nightly_but(lambda command: command == "joint_trajectory", COMMANDS))
def test_the_driver_gets_there_with_late_actions_by_every_interface(command):
    robot = DrivenRobot(command=command, image_size=32)
    assert succeeded(robot) == 3
    assert not robot.refused
    robot.close()


@needs_gl
def test_a_plain_follower_does_not():
    robot = DrivenRobot(follow=Follow.PLAIN, image_size=32)
    assert succeeded(robot) < 3
    robot.close()
