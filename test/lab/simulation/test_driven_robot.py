# SPDX-License-Identifier: Apache-2.0
"""The driver's control takes simulated arms through the tasks, whatever interface they have."""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.expert_engine import ExpertEngine, as_engine
from support.gl import needs_gl
from support.nightly import nightly_but
from support.pace import invented_pace

from specvla_ros.control.inverse_kinematics import UnreachableError
from specvla_ros.engine.outcome import Action
from specvla_ros.errors import UserError
from specvla_ros.lab.evaluation.simulate import make_robot
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.commanded_arm import COMMANDS, TOOL_COMMANDS
from specvla_ros.lab.simulation.driven_robot import DrivenRobot, Follow
from specvla_ros.lab.simulation.joint_goals import JointGoals
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
def test_a_chunk_is_followed_to_its_end_and_continues_from_its_start():
    """Eight rows of 1 cm from the image of 0.1 s ago, the first two at first: the arm moves 8 cm."""
    robot, rows = DrivenRobot(image_size=32), np.tile([0.01, 0, 0, 0, 0, 0, 1.0], (8, 1))
    robot.reset("lift_red", 0)
    begin = robot.world.tool().position[0]
    for step in range(60):
        if step in (2, 5):  # 0.1 s and 0.25 s after the image
            robot.take(rows[: 2 if step == 2 else 8], age_s=step * robot.control_dt)
        robot.advance()
    assert not robot.refused
    assert robot.world.tool().position[0] - begin == pytest.approx(0.08, abs=0.005)
    robot.close()


@needs_gl
def test_joint_velocities_brake_when_no_target_can_be_followed(monkeypatch):
    robot = DrivenRobot(command="velocity_array", image_size=32)
    robot.reset("lift_red", 0)
    robot.take(np.array([0.05, 0, 0, 0, 0, 0, 1.0]))
    robot.advance()
    monkeypatch.setattr(robot._solver, "follow", unreachable)
    for _ in range(10):
        robot.advance()
    here = robot.world.tool().position
    for _ in range(10):
        robot.advance()
    assert np.linalg.norm(robot.world.tool().position - here) < 1e-3 and robot.refused["unreachable"]
    robot.close()


def unreachable(target):
    raise UnreachableError("out of reach")


@needs_gl
def test_in_a_rollout_the_image_of_an_answer_counts_from_its_first_own_action():
    class Continuing(ExpertEngine):
        def tick(self):
            answers = [each for each in super().tick() if isinstance(each, Action)]
            return [replace(each, actions=np.tile(each.actions, (4, 1)), given=3) for each in answers]

    robot = DrivenRobot(image_size=32)
    taken: list[np.ndarray] = []
    robot.take = lambda values, age_s=0.0: taken.append(values)  # type: ignore[method-assign]
    engine = as_engine(Continuing(robot))
    result = Rollout(engine, robot, Clock.REALTIME, SLOW, chunks=True).run("lift_red", 0)
    assert taken and all(values.shape == (4, 7) for values in taken)
    assert min(result.latency_s) == pytest.approx(3 * robot.action_dt), "an answer takes less"
    robot.close()


@needs_gl
def test_a_plain_follower_does_not():
    robot = DrivenRobot(follow=Follow.PLAIN, image_size=32)
    assert succeeded(robot) < 3
    robot.close()


@needs_gl
@pytest.mark.parametrize("command", ["joint_trajectory_chunk", "position_array", "velocity_array"])
def test_actions_of_joints_get_there_with_late_images(command):
    robot = DrivenRobot(command=command, image_size=32, joints=True)
    goals = JointGoals(robot.world.model, robot.world.arm)
    robot.reset("lift_red", 0)
    seen: deque[Any] = deque(maxlen=3)  # states and joints, 0.1 s old at the oldest
    for step in range(4 * robot.max_steps):
        seen.append((robot.state(), robot.feel()[:7]))
        if step % 4 == 3:
            state, joints = seen[0]
            robot.take(goals.displacement(demonstrate(robot.task, state), joints), age_s=2 * robot.control_dt)
        robot.advance()
        if robot.succeeded():
            break
    assert robot.succeeded() and not robot.refused
    robot.close()


@pytest.mark.parametrize(
    "follow, interface, joints, why",
    [
        ("driver", "pose", True, "positions of joints: use --interface joint_trajectory,"),
        ("driver", "twist", True, "positions of joints: use --interface joint_trajectory,"),
        ("plain", "", True, "positions of joints, which need --follow driver or guarded"),
        ("guarded", "position_array", False, "the guard lets the joints; use --interface pose or twist"),
    ],
)
def test_interfaces_that_do_not_fit_the_actions_are_refused(follow, interface, joints, why):
    with pytest.raises(UserError, match=why):
        make_robot("table", follow=follow, interface=interface, joints=joints)


@needs_gl
@pytest.mark.parametrize("command", TOOL_COMMANDS)
def test_the_guard_passes_what_the_driver_sends_for_actions_of_the_tool(command):
    robot = DrivenRobot(command=command, follow=Follow.GUARDED, image_size=32)
    robot.reset("lift_blue", 0)
    for _ in range(2 * robot.max_steps):
        robot.take(demonstrate(robot.task, robot.state()))
        for _ in range(4):
            robot.advance()
        if robot.succeeded():
            break
    assert robot.succeeded() and not robot.refused
    robot.close()


@needs_gl
@pytest.mark.parametrize("command", ["joint_trajectory_chunk", "velocity_array"])
def test_the_guard_passes_what_the_driver_sends(command):
    robot = DrivenRobot(command=command, follow=Follow.GUARDED, image_size=32, joints=True)
    goals = JointGoals(robot.world.model, robot.world.arm)
    robot.reset("lift_blue", 0)
    for _ in range(robot.max_steps):
        robot.take(goals.displacement(demonstrate(robot.task, robot.state()), robot.feel()[:7]))
        for _ in range(4):
            robot.advance()
        if robot.succeeded():
            break
    assert robot.succeeded() and not robot.refused
    robot.close()


@needs_gl
def test_the_guard_keeps_back_what_the_driver_must_not_send():
    robot = DrivenRobot(command="position_array", follow=Follow.GUARDED, image_size=32, joints=True)
    robot.reset("lift_blue", 0)
    begin = robot.feel()[:7]
    robot._send = lambda target: begin + 1.0  # a leap of 1 rad
    for _ in range(10):
        robot.advance()
    assert robot.refused["guard"] > 0
    np.testing.assert_allclose(robot.feel()[:7], begin, atol=0.02)
    robot.close()
