# SPDX-License-Identifier: Apache-2.0
"""Twists and poses are judged one by one, by how far they are from the limits, the robot and the one before."""

from dataclasses import replace

import numpy as np
import pytest
from support.guarding import BASE, HOME, LIMITS, START_NS, UPRIGHT, Rig, rig, settings

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, Measured, SentTwist, Stamp, ToolPose, TwistCommand
from specvla_ros.control.guard.guard import State
from specvla_ros.control.guard.tool_gates import PoseGate, TwistGate, pose_of, within
from specvla_ros.control.pose import Pose

HERE = Measured(Pose(HOME, np.eye(3)), None, np.zeros(3))
UNKNOWN = Measured(None, None, np.zeros(3))


def at(seconds: float) -> Instant:
    return Instant(50.0 + seconds, START_NS + round(seconds * 1e9))


def twist(seconds: float, *velocity: float, frame: str = BASE) -> TwistCommand:
    return TwistCommand(Stamp(at(seconds).clock_ns, frame), np.array([*velocity, *[0.0] * (6 - len(velocity))]))


def pose(seconds: float, *way: float, turn_rad: float = 0.0) -> ToolPose:
    where = HOME + np.array([*way, *[0.0] * (3 - len(way))])
    quaternion = (float(np.cos(turn_rad / 2)), 0.0, 0.0, float(np.sin(turn_rad / 2)))
    return ToolPose(Stamp(at(seconds).clock_ns, BASE), where, quaternion)


def cause(refusal: Refusal | None) -> Cause | None:
    return None if refusal is None else refusal.cause


# Twists


@pytest.mark.parametrize(
    ("velocity", "refused"),
    [
        ((0.249, 0.0, 0.0), None),
        ((0.26, 0.0, 0.0), Cause.OVER_SPEED),
        ((0.17, 0.17, 0.0), None),
        ((0.18, 0.18, 0.0), Cause.OVER_SPEED),
        ((0.0, 0.0, 0.0, 0.99), None),
        ((0.0, 0.0, 0.0, 1.02), Cause.OVER_SPEED),
        ((0.0, 0.0, 0.0, 0.0, 0.0, np.nan), Cause.NOT_FINITE),
        ((-np.inf, 0.0), Cause.NOT_FINITE),
    ],
)
def test_a_twist_is_refused_above_the_limits_of_speed(velocity: tuple[float, ...], refused: Cause | None) -> None:
    assert cause(TwistGate(settings("twist")).take(twist(0.0, *velocity), HERE, at(0.0))) == refused


def test_a_twist_of_another_frame_is_refused_with_both_names() -> None:
    refusal = TwistGate(settings("twist")).take(twist(0.0, 0.1, frame="camera"), HERE, at(0.0))
    assert refusal is not None and refusal.cause is Cause.BAD_FORM
    assert "'camera'" in refusal.detail and f"'{BASE}'" in refusal.detail


@pytest.mark.parametrize(
    ("then", "refused"),
    [
        ((0.115, 0.0), None),  # 2 m/s² in 0.01 s and 0.05 s of jitter: 0.12 m/s
        ((0.125, 0.0), Cause.OVER_ACCELERATION),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.47), None),  # 8 rad/s²: 0.48 rad/s
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.49), Cause.OVER_ACCELERATION),
    ],
)
def test_a_second_twist_may_not_jump_further_than_the_limits_of_acceleration_and_some_jitter(
    then: tuple[float, ...], refused: Cause | None
) -> None:
    gate = TwistGate(settings("twist"))
    assert gate.take(twist(0.0), HERE, at(0.0)) is None
    assert cause(gate.take(twist(0.01, *then), HERE, at(0.01))) == refused


def test_a_first_twist_may_begin_anywhere_and_so_may_one_after_a_refusal() -> None:
    gate = TwistGate(settings("twist"))
    assert gate.take(twist(0.0, 0.2), HERE, at(0.0)) is None
    assert gate.take(twist(0.01, -0.2), HERE, at(0.01)) is not None
    assert not gate.wants_motion, "what was refused is forgotten, with the one before"
    assert gate.take(twist(0.02, -0.2), HERE, at(0.02)) is None


def test_a_jump_counts_from_stamp_to_stamp_whenever_twists_arrive() -> None:
    gate = TwistGate(settings("twist"))
    assert gate.take(twist(0.0), HERE, at(0.05)) is None
    assert gate.take(twist(0.1, 0.2), HERE, at(0.051)) is None


@pytest.mark.parametrize(("edge_m", "outside"), [(0.02, False), (-0.02, True)])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_a_twist_is_outside_where_a_stop_of_it_would_end(
    edge_m: float, outside: bool, axis: int, direction: float
) -> None:
    """0.2 m/s for 0.03 s, then 2 m/s²: 0.006 m and 0.01 m; the edge may be passed by 0.01 m."""
    edge = (LIMITS.workspace_max if direction > 0 else LIMITS.workspace_min)[axis]
    where = HOME.copy()
    where[axis] = edge + direction * (0.01 - 0.016 - edge_m)
    velocity = np.zeros(3)
    velocity[axis] = 0.2 * direction
    gate, measured = TwistGate(settings("twist")), Measured(Pose(where, np.eye(3)), None, np.zeros(3))
    assert gate.take(twist(0.0, *velocity), measured, at(0.0)) is None
    assert [each.cause for each in gate.conditions(measured)] == [Cause.OUTSIDE] * outside


def test_what_still_goes_out_is_outside_too_whatever_the_command_says() -> None:
    gate = TwistGate(settings("twist"))
    gate.take(twist(0.0, 0.0, 0.2), HERE, at(0.0))
    for _ in range(20):
        gate.go(at(0.0), 0.01)
    gate.take(twist(0.5, 0.0, -0.1), HERE, at(0.5))
    at_edge = Measured(Pose(np.array([HOME[0], LIMITS.workspace_max[1], HOME[2]]), np.eye(3)), None, np.zeros(3))
    assert [each.cause for each in gate.conditions(at_edge)] == [Cause.OUTSIDE]
    gate.forget()
    assert not gate.conditions(at_edge), "without a command there is nothing to judge"


def test_a_twist_slews_to_its_command_and_brakes_to_rest() -> None:
    gate = TwistGate(settings("twist"))
    gate.take(twist(0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.5), HERE, at(0.0))
    assert gate.wants_motion and gate.at_rest
    speeds = [float(gate.go(at(0.0), 0.01).velocity[0]) for _ in range(8)]
    np.testing.assert_allclose(speeds, np.minimum(0.1, 0.02 * np.arange(1, 9)))
    assert not gate.at_rest
    stopping = [gate.stop(HERE, at(0.0), 0.01) for _ in range(7)]
    np.testing.assert_allclose(
        [each.velocity[0] for each in stopping], np.maximum(0, 0.1 - 0.02 * np.arange(1, 8)), atol=1e-12
    )
    assert gate.at_rest and not stopping[-1].velocity.any()


def test_a_late_tick_slews_no_twist_further_than_two_periods() -> None:
    gate = TwistGate(settings("twist"))
    gate.take(twist(0.0, 0.2), HERE, at(0.0))
    assert gate.go(at(0.0), 0.09).velocity[0] == pytest.approx(2.0 * 0.02)


def test_without_a_command_a_twist_goes_to_zero() -> None:
    gate = TwistGate(settings("twist"))
    gate.take(twist(0.0, 0.1), HERE, at(0.0))
    for _ in range(10):
        gate.go(at(0.0), 0.01)
    gate.forget()
    assert not gate.wants_motion
    assert gate.go(at(0.0), 0.01).velocity[0] == pytest.approx(0.08)


def driven(gate: TwistGate, seconds: float, velocity: tuple[float, ...], *, moves_m: float = 0.0) -> list[Refusal]:
    """A robot that is told to move, and what is wrong then."""
    where = HOME.copy()
    gate.begin(HERE)
    found: list[Refusal] = []
    for tick in range(round(seconds * 100)):
        measured = Measured(Pose(where.copy(), np.eye(3)), None, np.zeros(3))
        gate.watch(measured)
        gate.take(twist(0.01 * tick, *velocity), measured, at(0.01 * tick))
        gate.go(at(0.01 * tick), 0.01)
        where = where + np.array([moves_m, 0.0, 0.0])
        found = gate.conditions(measured)
    return found


@pytest.mark.parametrize(
    ("seconds", "velocity", "moves_m", "stuck"),
    [
        (0.55, (0.1,), 0.0, False),  # 0.0525 m: 0.2 s at 0.25 m/s, and 5 mm
        (0.65, (0.1,), 0.0, True),
        (1.5, (0.1,), 0.0015, False),
        (1.2, (0.1,), 0.000005, True),  # a sensor's noise is no motion
        (0.45, (0.0, 0.0, 0.0, 0.0, 0.0, 0.5), 0.0, False),  # 0.21 rad: 0.2 s at 1 rad/s, and 0.025
        (0.6, (0.0, 0.0, 0.0, 0.0, 0.0, 0.5), 0.0, True),
    ],
)
def test_a_tool_that_does_not_move_is_noticed_after_a_fifth_of_a_second_at_full_speed(
    seconds: float, velocity: tuple[float, ...], moves_m: float, stuck: bool
) -> None:
    found = driven(TwistGate(settings("twist")), seconds, velocity, moves_m=moves_m)
    assert [each.cause for each in found] == [Cause.NOT_FOLLOWING] * stuck


def test_a_stop_forgets_that_the_tool_did_not_move() -> None:
    gate = TwistGate(settings("twist"))
    assert driven(gate, 1.2, (0.1,))
    for _ in range(20):
        gate.stop(HERE, at(0.0), 0.01)
    assert not driven(gate, 0.5, (0.1,))


# Poses


@pytest.mark.parametrize(
    ("way", "turn_rad", "refused"),
    [
        ((0.099,), 0.0, None),
        ((0.101,), 0.0, Cause.FAR),
        ((0.0,), 0.49, None),
        ((0.0,), 0.51, Cause.FAR),
    ],
)
def test_a_pose_is_refused_further_from_the_robot_than_its_lead(
    way: tuple[float, ...], turn_rad: float, refused: Cause | None
) -> None:
    assert cause(PoseGate(settings("pose")).take(pose(0.0, *way, turn_rad=turn_rad), HERE, at(0.0))) == refused


@pytest.mark.parametrize(
    ("way", "turn_rad", "refused"),
    [
        ((0.0074,), 0.0, None),  # 0.25 m/s in 0.01 s and 0.02 s of slack: 0.0075 m
        ((0.0077,), 0.0, Cause.OVER_SPEED),
        ((0.0,), 0.0295, None),  # 1 rad/s: 0.03 rad
        ((0.0,), 0.0305, Cause.OVER_SPEED),
    ],
)
def test_a_pose_is_refused_further_from_the_one_before_than_the_limits_of_speed_allow(
    way: tuple[float, ...], turn_rad: float, refused: Cause | None
) -> None:
    gate = PoseGate(settings("pose"))
    assert gate.take(pose(0.0), HERE, at(0.0)) is None
    refusal = gate.take(pose(0.01, *way, turn_rad=turn_rad), HERE, at(0.01))
    assert cause(refusal) == refused
    if refusal is not None:
        speed = max(float(np.linalg.norm(way)), turn_rad) / 0.01
        assert f" is {speed:.4g} {'rad/s' if turn_rad else 'm/s'}, and limits." in refusal.detail


def test_a_pose_outside_of_the_workspace_is_refused_unless_the_tool_is_as_far_outside() -> None:
    gate, beyond = PoseGate(settings("pose")), LIMITS.workspace_max[1] + 0.02
    near = Measured(Pose(np.array([HOME[0], LIMITS.workspace_max[1] - 0.01, HOME[2]]), np.eye(3)), None, np.zeros(3))
    there = Measured(Pose(np.array([HOME[0], beyond, HOME[2]]), np.eye(3)), None, np.zeros(3))
    assert cause(gate.take(pose(0.0, 0.0, beyond), near, at(0.0))) is Cause.OUTSIDE
    assert cause(gate.take(pose(0.1, 0.0, beyond + 0.001), there, at(0.1))) is Cause.OUTSIDE
    assert gate.take(pose(0.2, 0.0, beyond), there, at(0.2)) is None, "it may come back, and stay"
    assert gate.take(pose(0.3, 0.0, beyond - 0.01), there, at(0.3)) is None


def test_a_pose_is_judged_without_a_measured_one_by_the_limits_alone() -> None:
    gate = PoseGate(settings("pose"))
    assert gate.take(pose(0.0, 0.0, 0.3), UNKNOWN, at(0.0)) is None
    assert gate.not_near(UNKNOWN) is not None


@pytest.mark.parametrize(("way_m", "near"), [(0.045, True), (0.055, False)])
def test_motion_resumes_with_a_command_within_half_the_lead(way_m: float, near: bool) -> None:
    gate = PoseGate(settings("pose"))
    gate.take(pose(0.0, way_m), HERE, at(0.0))
    assert (gate.not_near(HERE) is None) is near


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (pose(0.0), None),
        (replace(pose(0.0), stamp=Stamp(0, "camera")), Cause.BAD_FORM),
        (replace(pose(0.0), position=np.array([0.0, np.nan, 0.0])), Cause.NOT_FINITE),
        (replace(pose(0.0), quaternion=(np.inf, 0.0, 0.0, 0.0)), Cause.NOT_FINITE),
        (replace(pose(0.0), quaternion=(0.0, 0.0, 0.0, 0.0)), Cause.BAD_FORM),
        (replace(pose(0.0), quaternion=(1.02, 0.0, 0.0, 0.0)), Cause.BAD_FORM),
        (replace(pose(0.0), quaternion=(1.005, 0.0, 0.0, 0.0)), None),
    ],
)
def test_what_is_no_pose_of_the_base_frame_is_told_by_its_kind(message: ToolPose, refused: Cause | None) -> None:
    found = pose_of(message, BASE)
    assert (found.cause if isinstance(found, Refusal) else None) == refused


@pytest.mark.parametrize(("where", "inside"), [(0.0, True), (1.0, True), (-1e-6, False), (1.0 + 1e-6, False)])
@pytest.mark.parametrize("axis", range(3))
def test_a_box_holds_its_edges(where: float, inside: bool, axis: int) -> None:
    here = np.full(3, 0.5)
    here[axis] = where
    assert within(here, (np.zeros(3), np.ones(3))) is inside


def test_a_pose_that_is_refused_is_forgotten_with_the_one_before() -> None:
    gate = PoseGate(settings("pose"))
    assert gate.take(pose(0.0), HERE, at(0.0)) is None and gate.wants_motion
    assert gate.take(pose(0.01, 0.05), HERE, at(0.01)) is not None
    assert not gate.wants_motion
    assert gate.take(pose(0.02, 0.05), HERE, at(0.02)) is None, "there is none before it"


@pytest.mark.parametrize(("turns_rad", "moves"), [(0.006, True), (0.00003, False)])
def test_a_tool_that_only_turns_moves(turns_rad: float, moves: bool) -> None:
    gate, turned = TwistGate(settings("twist")), HERE.tool
    assert turned is not None
    gate.begin(HERE)
    for tick in range(130):
        measured = Measured(turned, None, np.zeros(3))
        gate.watch(measured)
        gate.take(twist(0.01 * tick, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6), measured, at(0.01 * tick))
        gate.go(at(0.01 * tick), 0.01)
        turned = turned.displaced(np.array([0, 0, 0, 0, 0, turns_rad]))
    assert (gate.conditions(measured) == []) is moves


def creeping(each: Rig, seconds: float, speed: float) -> list[Pose]:
    """A driver that goes on towards the edge, whatever the guard does; what goes out."""
    sent = []
    y = each.tool[1]
    for _ in range(round(seconds * 100)):
        y = min(y + speed * 0.01, LIMITS.workspace_max[1])
        each.advance(0.01)
        each.hear(command=ToolPose(each.stamp, np.array([HOME[0], y, HOME[2]]), UPRIGHT))
        out = each.tick().sent
        assert isinstance(out, Pose)
        sent.append(out)
    return sent


def test_poses_come_to_rest_at_the_very_edge_and_never_beyond() -> None:
    each = rig("pose", max_lead_m=0.3)
    each.until_passing()
    sent = creeping(each, 2.5, 0.24)
    assert each.guard.state is State.PASSING, each.guard.reason
    furthest = max(each.position[1] for each in sent)
    assert LIMITS.workspace_max[1] - 1e-3 < furthest <= LIMITS.workspace_max[1] + 1e-9


def test_a_twist_of_the_base_frame_alone_reaches_the_robot() -> None:
    each = rig("twist")
    each.until_passing()
    each.run(0.5)
    out = each.outcomes[-1].sent
    assert isinstance(out, SentTwist)
    np.testing.assert_allclose(out.velocity, each.command().velocity, atol=1e-6)
