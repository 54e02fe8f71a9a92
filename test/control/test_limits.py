# SPDX-License-Identifier: Apache-2.0
"""Limits say what is missing, how long a stop takes, and where the workspace ends."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guarding import JOINTS

from specvla_ros.control.limits import JointLimits, Joints, Limits
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError

LIMITS = Limits(0.5, 1.5, 3.0, 10.0, 60.0, 200.0, (-0.3, -0.2, 0.0), (0.3, 0.2, 0.4))
INSIDE = np.array([0.1, 0.0, 0.2])
SIZES = (
    *("linear_speed", "angular_speed", "linear_acceleration"),
    *("angular_acceleration", "linear_jerk", "angular_jerk"),
)


@given(st.sets(st.sampled_from(SIZES), min_size=1))
def test_exactly_the_limits_that_are_not_set_are_missing(unset: set[str]) -> None:
    none: dict[str, Any] = dict.fromkeys(unset, 0.0)
    limits = replace(LIMITS, **none)
    assert set(limits.missing) == {f"limits.{name}" for name in unset}
    with pytest.raises(UserError, match="output: pose needs limits"):
        limits.require("output: pose")


def test_a_workspace_that_is_not_set_is_missing_and_one_with_a_corner_at_zero_is_not() -> None:
    assert not LIMITS.missing
    nowhere = replace(LIMITS, workspace_min=(0.0,) * 3, workspace_max=(0.0,) * 3)
    assert nowhere.missing == ("limits.workspace_min", "limits.workspace_max")
    assert not replace(LIMITS, workspace_min=(0.0,) * 3).missing
    assert not replace(LIMITS, workspace_max=(0.0,) * 3, workspace_min=(-1.0,) * 3).missing


def stop_s(speed: float, acceleration: float, jerk: float) -> float:
    """From full speed in the middle of full acceleration, step by step: the acceleration falls, then rises to zero."""
    step_s, velocity, change, time_s = 1e-5, speed - acceleration**2 / (2 * jerk), acceleration, 0.0
    while velocity > 0 or change > 0:
        # Braking ends at rest: let go of it as soon as what is left is needed for that.
        lets_go = change < 0 and velocity <= change**2 / (2 * jerk)
        change = min(0.0, change + jerk * step_s) if lets_go else max(-acceleration, change - jerk * step_s)
        velocity += change * step_s
        time_s += step_s
        if lets_go and change == 0.0:
            break
    return time_s


@pytest.mark.parametrize(("speed", "acceleration", "jerk"), [(0.5, 3.0, 60.0), (0.5, 3.0, 15.0), (1.0, 2.0, 100.0)])
def test_a_stop_takes_as_long_as_jerk_and_acceleration_make_it(speed: float, acceleration: float, jerk: float) -> None:
    limits = replace(LIMITS, linear_speed=speed, linear_acceleration=acceleration, linear_jerk=jerk, angular_speed=0.0)
    assert limits.stop_s == pytest.approx(stop_s(speed, acceleration, jerk), rel=0.01)


def test_the_longer_stop_counts_and_without_limits_there_is_none() -> None:
    slow = replace(LIMITS, angular_acceleration=1.0)
    assert slow.stop_s > 1.5 > replace(slow, angular_speed=0.0).stop_s == pytest.approx(0.5 / 3 + 2 * 3 / 60)
    assert Limits().stop_s == 0.0


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("side", ["workspace_min", "workspace_max"])
def test_the_workspace_ends_at_its_corners(axis: int, side: str) -> None:
    edge, out = getattr(LIMITS, side)[axis], -1.0 if side == "workspace_min" else 1.0
    beyond = INSIDE.copy()
    beyond[axis] = edge + 0.01 * out
    at_edge = INSIDE.copy()
    at_edge[axis] = edge
    assert LIMITS.outside_m(INSIDE) == LIMITS.outside_m(at_edge) == 0.0 < LIMITS.outside_m(beyond)
    assert 0.009 < LIMITS.outside_m(beyond) < 0.011
    assert LIMITS.outside_m(beyond) == pytest.approx(0.01)
    assert LIMITS.outside_m(np.array([*INSIDE[:2], np.nan])) == np.inf, "nowhere is not inside"
    np.testing.assert_allclose(LIMITS.clamped(Pose(beyond, np.eye(3))).position, at_edge)


def test_a_workspace_is_widened_to_a_tool_outside_and_by_an_edge() -> None:
    low, high = LIMITS.widened(INSIDE)
    np.testing.assert_array_equal(low, LIMITS.workspace_min)
    np.testing.assert_array_equal(high, LIMITS.workspace_max)
    low, high = LIMITS.widened(np.array([0.5, -0.4, 0.2]), 0.01)
    np.testing.assert_allclose(low, [-0.31, -0.4, -0.01])
    np.testing.assert_allclose(high, [0.5, 0.21, 0.41])


def test_a_joint_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"joints\.names has elbow more than once"):
        Joints(names=("elbow", "wrist", "elbow"))
    with pytest.raises(UserError, match=r"joints\.model_names has joint2 more than once"):
        Joints(names=("shoulder", "elbow"), model_names=("joint2", "joint2"))


def test_one_number_stands_for_all_joints() -> None:
    assert Joints(names=("a", "b"), max_speed=(2.0,)).speeds.tolist() == [2.0, 2.0]
    assert Joints(names=("a", "b"), max_speed=(1.0, 2.0)).speeds.tolist() == [1.0, 2.0]
    assert replace(JOINTS, max_acceleration=(3.0,)).accelerations.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ("shoulder", "")}, "joints.names"),
        ({"position_min": (-1.0,)}, "joints.position_min: 2 numbers, one for each of joints.names; got 1"),
        ({"max_speed": (1.0, 1.0, 1.0)}, "joints.max_speed: 2 numbers, one for each of joints.names, or one for all"),
        ({"position_max": (2.0, -1.0)}, "smaller than joints.position_max"),
        ({"max_speed": (1.0, 0.0)}, "needs joints.max_speed, which has no default"),
        ({"max_acceleration": (0.0, 1.0)}, "needs joints.max_acceleration, which no robot description"),
    ],
)
def test_what_joints_lack_is_told(change: dict, words: str) -> None:
    JOINTS.require("output: pose")
    joints: JointLimits = replace(JOINTS, **change)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        joints.require("output: joint_trajectory")


def test_one_speed_and_one_acceleration_for_all_joints_are_enough() -> None:
    replace(JOINTS, max_speed=(1.0,), max_acceleration=(8.0,)).require("output: position_array")


def test_a_jerk_that_is_not_given_reaches_the_acceleration_in_a_25th_of_a_second() -> None:
    joints = replace(JOINTS, max_jerk=(500.0, 0.0))
    assert joints.jerks.tolist() == [500.0, pytest.approx(16.0 / 0.04)]
    joints.require_bounds("joints.model")
    with pytest.raises(UserError, match=r"joints\.max_jerk: 2 numbers, one for each of joints\.names, or one for all"):
        replace(joints, max_jerk=(1.0, 1.0, 1.0)).require_bounds("joints.model")
    with pytest.raises(UserError, match="larger than 0 for every joint"):
        replace(joints, max_acceleration=(0.0, 1.0)).require_bounds("joints.model")
