# SPDX-License-Identifier: Apache-2.0
"""What is true of every controller: it starts where the arm is, holds in silence, and drops what is not finite."""

import numpy as np
import pytest
from support.poses import apart

from specvla_ros.control.pose import Pose
from specvla_ros.lab.simulation.arm import TABLE_ARM
from specvla_ros.lab.simulation.commanded_arm import COMMANDS, CommandedArm
from specvla_ros.lab.simulation.controllers import (
    BASE_FRAME,
    CommandRefusedError,
    JointState,
    JointTrajectory,
    Point,
    Twist,
)
from specvla_ros.lab.simulation.tasks import draw_layout
from specvla_ros.lab.simulation.world import World

HOME = JointState(np.array(TABLE_ARM.home), np.zeros(7))
NOTHING = np.zeros(0)


@pytest.fixture(scope="module")
def world():
    return World()


def bad_command(command: str, value: float) -> object:
    """A command in which one number is `value`."""
    joints = np.array([*TABLE_ARM.home[:6], value])
    return {
        "pose": (BASE_FRAME, Pose(np.array([0.5, 0.0, value]), np.eye(3))),
        "twist": Twist(1.0, BASE_FRAME, np.array([0.1, 0.0, value]), np.zeros(3)),
        "joint_trajectory": JointTrajectory(0.0, TABLE_ARM.joints, (Point(0.1, joints, NOTHING, NOTHING),)),
        "position_array": joints,
        "velocity_array": joints,
    }[command.removesuffix("_chunk")]


@pytest.mark.parametrize("command", COMMANDS)
def test_silence_holds_the_arm_where_it_was_taken_over(world, command):
    arm = CommandedArm(world, command)
    for seed in range(3):
        world.reset(draw_layout(seed))
        arm.reset()
        for step in range(30):  # what the reset left of motion
            arm.advance(1.0 + 0.01 * step)
        start = world.tool()
        for step in range(100):
            arm.advance(1.3 + 0.01 * step)
        moved_m, turned_rad = apart(start, world.tool())
        assert moved_m < 1e-4 and turned_rad < 1e-3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_finite_is_refused_and_moves_nothing(world, command, value):
    controller = CommandedArm(world, command).controller
    controller.start(HOME)
    before = controller.update(HOME, 1.0).positions.copy()
    with pytest.raises(CommandRefusedError, match="finite"):
        controller.take(bad_command(command, value), 1.0)
    for step in range(20):
        np.testing.assert_allclose(controller.update(HOME, 1.01 + 0.01 * step).positions, before, atol=1e-12)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_new_start_forgets_what_was_commanded(world, command):
    controller = CommandedArm(world, command).controller
    controller.start(HOME)
    good = {
        "pose": (BASE_FRAME, Pose(np.array([0.6, 0.1, 0.3]), np.diag([1.0, -1.0, -1.0]))),
        "twist": Twist(1.0, BASE_FRAME, np.array([0.1, 0.0, 0.0]), np.zeros(3)),
        "joint_trajectory": JointTrajectory(
            0.0, TABLE_ARM.joints, (Point(0.5, HOME.positions + 0.1, NOTHING, NOTHING),)
        ),
        "position_array": HOME.positions + 0.1,
        "velocity_array": np.full(7, 0.1),
    }[command.removesuffix("_chunk")]
    controller.take(good, 1.0)
    assert np.abs(controller.update(HOME, 1.0).positions - HOME.positions).max() > 1e-5
    elsewhere = JointState(HOME.positions + 0.05, np.zeros(7))
    controller.start(elsewhere)
    np.testing.assert_allclose(controller.update(elsewhere, 1.05).positions, elsewhere.positions, atol=1e-9)
