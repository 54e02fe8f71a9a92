# SPDX-License-Identifier: Apache-2.0
"""Joints that follow a tool, on the Panda's kinematics, without ROS."""

import numpy as np
import pytest
from support.fault_scene import kinematics

from specvla_ros.control.bounded_motion import BoundedMotion, Target
from specvla_ros.control.inverse_kinematics import JointModel, JointSolver
from specvla_ros.control.limits import Limits
from specvla_ros.control.pose import Pose
from specvla_ros.lab.simulation.arms import TABLE_ARM

PERIOD_S = 0.01
LIMITS = Limits(0.25, 1.0, 2.0, 8.0, 50.0, 200.0, (-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


@pytest.fixture
def start() -> dict[str, float]:
    return dict(zip(TABLE_ARM.joints, TABLE_ARM.home, strict=False))


@pytest.fixture
def solver(start: dict[str, float]) -> JointSolver:
    made = JointSolver(
        JointModel(kinematics(TABLE_ARM), TABLE_ARM.joints, "pinch", np.array(TABLE_ARM.speed)), PERIOD_S
    )
    made.start(start)
    return made


@pytest.mark.parametrize("late_s", [0.02, 0.03, 0.05])
def test_a_late_loop_makes_no_joint_faster(solver: JointSolver, start: dict[str, float], late_s: float) -> None:
    motion, here = BoundedMotion(LIMITS), solver.pose_of(start)
    motion.rest_at(here)
    motion.aim(Pose(here.position + np.array([0.0, -0.1, 0.05]), here.rotation), 0.0, move_s=0.8, turn_s=0.8)
    now_s, before_s, speeds = 0.0, 0.0, []
    for step in range(60):
        now_s += late_s if step == 30 else PERIOD_S
        at = motion.at(now_s)
        _, velocity = solver.follow(Target(at.pose, at.velocity, now_s - before_s))
        before_s = now_s
        speeds.append(np.abs(velocity).max())
    assert speeds[30] < 1.1 * max(speeds[20:30])


def test_a_target_that_does_not_say_how_long_it_took_is_one_of_a_period(
    solver: JointSolver, start: dict[str, float]
) -> None:
    here = solver.pose_of(start)
    wanted = Pose(here.position + np.array([0.001, 0.0, 0.0]), here.rotation)
    positions, velocities = solver.follow(Target(wanted, np.zeros(6)))
    np.testing.assert_allclose(positions - list(start.values())[: len(positions)], velocities * PERIOD_S, atol=1e-9)


@pytest.mark.parametrize(("apart_m", "fits"), [(0.0, True), (0.003, True), (0.01, False), (0.04, False)])
def test_a_measured_tool_at_another_point_than_the_models_is_told_with_both(
    solver: JointSolver, start: dict[str, float], apart_m: float, fits: bool
) -> None:
    there = solver.pose_of(start)
    measured = Pose(there.position + np.array([0.0, 0.0, apart_m]), there.rotation)
    said = solver.mismatch(start, measured)
    assert (said == "") is fits
    if not fits:
        assert f"{apart_m:.3f} m and 0.000 rad apart" in said and "joints.tool 'pinch' is at" in said
