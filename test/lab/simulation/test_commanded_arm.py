# SPDX-License-Identifier: Apache-2.0
"""Arms that obey motion commands: every interface does the tasks, and no command gets more than the arm can do."""

import importlib.util

import numpy as np
import pytest
from support.ideal_driver import IdealDriver
from support.limited_arm import limit
from support.nightly import nightly_but

from specvla_ros.control.limits import JointLimits, Limits
from specvla_ros.control.pose import Pose
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.arms import ARMS
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.commanded_arm import COMMANDS, CommandedArm
from specvla_ros.lab.simulation.controllers import BASE_FRAME, CommandRefusedError, JointTrajectory, Point
from specvla_ros.lab.simulation.tasks import TASKS, draw_layout
from specvla_ros.lab.simulation.world import World

NOTHING = np.zeros(0)


@pytest.fixture(scope="module", params=ARMS, ids=lambda arm: arm.name)
def world(request):
    if request.param is not TABLE_ARM and importlib.util.find_spec("robosuite") is None:
        pytest.skip("needs requirements/robots.txt")
    return World(request.param)


def advance(arm: CommandedArm, seconds: float, now_s: float = 1.0) -> float:
    for _ in range(round(seconds / arm.control_dt)):
        arm.advance(now_s)
        now_s += arm.control_dt
    return now_s


def do(world: World, arm: CommandedArm, driver: IdealDriver, task, seed: int) -> bool:
    world.reset(draw_layout(seed))
    arm.reset()
    driver.reset()
    now_s = 1.0
    for _ in range(2 * task.max_steps):  # Servo's filter takes nearly half of the speed
        driver.take(demonstrate(task, world.state()))
        for _ in range(20):
            arm.controller.take(driver.command(now_s, arm.control_dt), now_s)
            arm.gripper.obey(arm.gripper.array, np.array([driver.gripper()]), now_s)
            arm.advance(now_s)
            now_s += arm.control_dt
            if task.succeeded(world.state()):
                return True
    return False


@pytest.mark.parametrize("command", nightly_but(lambda command: command == "pose", COMMANDS))
def test_tasks_are_done_by_every_interface_with_every_arm(world, command):
    arm, driver = CommandedArm(world, command), IdealDriver(world, command)
    for index, task in enumerate((TASKS[0], TASKS[4])):
        assert do(world, arm, driver, task, seed=index), task.name


def test_a_leap_of_positions_becomes_a_motion_within_speed_range_and_torque(world):
    arm = CommandedArm(world, "position_array")
    world.reset(draw_layout(0))
    arm.reset()
    limits = np.array(world.arm.speed)
    dofs = [world.model.joint(name).dofadr[0] for name in world.arm.joints]
    motors = [world.model.actuator(name) for name in world.arm.motors]
    start = world.joint_state()[0][: len(limits)]
    ranges = np.array([world.model.joint(name).range for name in world.arm.joints])
    arm.controller.take(start + np.eye(len(limits))[0] * 1.2, 1.0)
    fastest = np.zeros(len(limits))
    for _ in range(100):
        arm.advance(1.0)
        fastest = np.maximum(fastest, np.abs(world.data.qvel[dofs]))
        positions = world.joint_state()[0][: len(limits)]
        assert (positions > ranges[:, 0] - 0.02).all() and (positions < ranges[:, 1] + 0.02).all()
        for motor in motors:
            assert abs(world.data.ctrl[motor.id]) <= motor.ctrlrange[1] + 1e-9
    assert (fastest <= 1.1 * limits + 0.1).all()
    assert fastest[0] > 0.5 * limits[0]
    assert world.joint_state()[0][0] == pytest.approx(start[0] + 1.2, abs=0.02)


@pytest.mark.parametrize("output", ["pose", "position_array"])
def test_an_arm_with_limits_of_its_own_keeps_them_where_it_is_sent_far_away(output: str):
    world = World()
    arm = CommandedArm(world, output)
    world.reset(draw_layout(0))
    joints = len(world.arm.joints)
    tool = Limits(linear_speed=0.1, angular_speed=0.5, linear_acceleration=0.5, angular_acceleration=2.5)
    limit(arm, tool, JointLimits(names=world.arm.joints, max_speed=(0.4,), max_acceleration=(2.0,)))
    arm.reset()
    start = world.joint_state()[0][:joints]
    if output == "pose":
        there, way = world.tool(), np.array([0.0, 0.1, 0.1])
        arm.controller.take((BASE_FRAME, Pose(there.position + way, there.rotation)), 1.0)
    else:
        arm.controller.take(start + 0.3, 1.0)
    tools, positions = [world.tool().position], [start]
    for _ in range(300):
        arm.advance(1.0)
        tools.append(world.tool().position)
        positions.append(world.joint_state()[0][:joints])
    speeds = np.linalg.norm(np.diff(tools, axis=0), axis=1) / arm.control_dt
    assert np.abs(np.diff(positions, axis=0)).max() < 1.1 * 0.4 * arm.control_dt
    if output == "pose":
        assert 0.08 < speeds.max() < 1.1 * 0.1 and np.diff(speeds).max() < 1.5 * 0.5 * arm.control_dt
        np.testing.assert_allclose(tools[-1], tools[0] + way, atol=0.002)
    else:
        np.testing.assert_allclose(positions[-1], start + 0.3, atol=0.01)


def test_a_reference_beyond_the_range_stays_within_it():
    world = World()
    arm = CommandedArm(world, "position_array")
    world.reset(draw_layout(0))
    arm.reset()
    arm.controller.take(np.array([0.0, 0.15, 0.0, -2.2, 0.0, 2.35, 99.0]), 1.0)
    advance(arm, 2.5)
    assert world.joint_state()[0][6] == pytest.approx(world.model.joint("joint7").range[1], abs=0.03)


def test_the_newest_of_the_grippers_commands_holds(world):
    arm = CommandedArm(world, "pose")
    world.reset(draw_layout(0))
    arm.reset()
    fingers, now_s = world.arm.gripper, 1.0
    assert world.opening() > 0.075
    arm.gripper.obey(arm.gripper.array, np.array([fingers.closed[0]]), now_s)
    now_s = advance(arm, 1.0, now_s)
    assert world.opening() < 0.005
    opened = JointTrajectory(0.0, fingers.joints[:1], (Point(0.5, np.array([fingers.open[0]]), NOTHING, NOTHING),))
    arm.gripper.obey(arm.gripper.trajectory, opened, now_s)
    now_s = advance(arm, 1.5, now_s)
    assert world.opening() > 0.075
    beyond = fingers.closed[0] + 9.0 * (fingers.closed[0] - fingers.open[0])
    arm.gripper.obey(arm.gripper.array, np.array([beyond]), now_s)
    now_s = advance(arm, 1.0, now_s)
    assert world.opening() < 0.005, "beyond closed is closed"


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [np.nan]])
def test_wrong_commands_of_the_gripper_are_refused_and_the_one_before_holds(values):
    world = World()
    arm = CommandedArm(world, "pose")
    world.reset(draw_layout(0))
    arm.reset()
    with pytest.raises(CommandRefusedError):
        arm.gripper.obey(arm.gripper.array, np.array(values), 1.0)
    advance(arm, 0.5)
    assert world.opening() > 0.075
