# SPDX-License-Identifier: Apache-2.0
"""Joint velocities: what leads out, runs away or does nothing is refused, and a stop ends in repeated zeros."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.guarding import JOINTS, LIMITS, Rig, rig, settings

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import JointVelocities, SentVelocities, Stamp
from specvla_ros.control.guard.guard import Guard, State
from specvla_ros.control.pose import Pose


class TwoJoints:
    """A tool at 1 m per radian: shoulder along x, elbow along z."""

    def pose_at(self, positions: np.ndarray) -> Pose:
        return Pose(np.array([0.5 + positions[0], 0.0, 0.3 + positions[1]]), np.eye(3))

    def tool_moves(self, positions: np.ndarray) -> np.ndarray:
        return np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], *[[0.0, 0.0]] * 3])


@pytest.fixture
def each() -> Rig:
    made = rig("velocity_array")
    made.until_passing()
    made.run(0.3)
    return made


def send(each: Rig, *velocities: float, seconds: float = 0.01) -> None:
    """Commands for a while, at 100 Hz."""
    for _ in range(round(seconds * 100)):
        each.advance(0.01)
        each.hear(command=JointVelocities(Stamp(None), np.array(velocities)))
        each.tick()


def sent(each: Rig) -> np.ndarray:
    found = each.sent[-1][1]
    assert isinstance(found, SentVelocities)
    return found.velocities


def rising(each: Rig, velocities: Any, seconds: float) -> None:
    """Commands that rise to these within the limits, then stay."""
    wanted, now = np.array(velocities, dtype=float), sent(each).copy()
    step = 0.005 * np.array(JOINTS.max_acceleration)
    for _ in range(round(seconds * 100)):
        now = now + np.clip(wanted - now, -step, step)
        send(each, *now)
        if each.guard.state is not State.PASSING:
            return


@pytest.mark.parametrize(
    "velocities, cause, words",
    [
        ((1.1, 0.0), Cause.OVER_SPEED, "shoulder is commanded 1.1 per second, and joints.max_speed is 1"),
        ((0.2, 1.9), Cause.OVER_ACCELERATION, "the velocity of elbow changed by"),
        ((0.2,), Cause.BAD_FORM, "the command has 1 velocities, but joints.names has 2"),
        ((0.2, np.nan), Cause.NOT_FINITE, "NaN"),
    ],
)
def test_a_wrong_command_stops_motion_within_the_limits(each: Rig, velocities, cause, words) -> None:
    send(each, *velocities)
    assert each.guard.state is State.STOPPED and words in each.guard.reason
    assert each.guard.tally.counts[cause] == 1
    each.run(0.2)
    assert not sent(each).any()


def test_a_stop_brakes_and_then_repeats_zeros(each: Rig) -> None:
    begun = np.abs(sent(each))
    each.guard.press_stop("test", each.now)
    ticks = []
    for _ in range(100):
        each.run(0.01)
        ticks.append(np.abs(sent(each)))
    assert (ticks[0] < begun).all() and ticks[0].any(), "it brakes, it does not leap to rest"
    assert (np.abs(np.diff(ticks, axis=0)) <= 0.01 * np.array(JOINTS.max_acceleration) + 1e-9).all()
    assert not np.array(ticks[20:]).any()
    assert all(isinstance(message, SentVelocities) for _, message in each.sent[-80:]), "the controller keeps the last"


def test_silence_means_zeros(each: Rig) -> None:
    each.run(0.4, without=["command"])
    assert not sent(each).any() and "driver_silent" in each.guard.reason


def test_a_joint_stops_before_the_end_of_its_range(each: Rig) -> None:
    rising(each, (0.0, 1.8), 3.0)
    assert each.guard.cause == Cause.OUTSIDE.value and "leads elbow to" in each.guard.reason
    each.run(0.3, without=["command"])
    assert 1.2 < each.joints[1] <= JOINTS.position_max[1] + 0.02


def guarded(**changes: Any) -> Rig:
    made = Rig(Guard(settings("velocity_array", **changes), TwoJoints()), "velocity_array")  # type: ignore[arg-type]
    made.until_passing()
    return made


def test_the_tool_stops_before_the_edge_of_the_workspace() -> None:
    each = guarded()
    rising(each, (0.24, 0.0), 3.0)
    assert "lead the tool to" in each.guard.reason and each.guard.cause == Cause.OUTSIDE.value
    each.run(0.3, without=["command"])
    assert 0.7 < 0.5 + each.joints[0] <= LIMITS.workspace_max[0] + 0.02


def test_the_tool_keeps_its_speed_limit_and_the_scale() -> None:
    each = guarded(limits=replace(LIMITS, workspace_min=(-5.0, -5.0, -5.0), workspace_max=(5.0, 5.0, 5.0)))
    rising(each, (0.8, 0.6), 0.5)
    assert each.guard.state is State.PASSING
    assert np.linalg.norm(sent(each)) == pytest.approx(LIMITS.linear_speed, rel=1e-3)
    each.guard.scale_speed(0.1)
    send(each, 0.8, 0.6, seconds=0.1)
    assert np.linalg.norm(sent(each)) == pytest.approx(0.1 * LIMITS.linear_speed, rel=1e-3)


def test_an_arm_that_does_not_move_is_no_longer_commanded_to(each: Rig) -> None:
    stays = each.joints.copy()
    for _ in range(60):
        each.joints = stays
        send(each, 0.2, 0.0)
    assert each.guard.cause == Cause.NOT_FOLLOWING.value and "shoulder was commanded" in each.guard.reason
    assert not sent(each).any()
    send(each, 0.0, 0.0, seconds=0.5)
    assert each.guard.clear_stop(each.now) == "", "an arm that moves again may be used again"
    each.until_passing()


def test_after_a_gap_in_its_output_zeros_are_sent_at_once(each: Rig) -> None:
    assert sent(each).any()
    each.advance(0.3)
    each.hear()
    each.tick()
    assert not sent(each).any()
