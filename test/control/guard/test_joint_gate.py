# SPDX-License-Identifier: Apache-2.0
"""Commands to joints are guarded as those to the tool are: by what the joints and the tool are measured to do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.guarding import HOME, JOINTS, LIMITS, Rig, rig, settings

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointCommand, Measured, SentJoints, Stamp
from specvla_ros.control.guard.guard import Guard, State
from specvla_ros.control.guard.joint_gate import JointGate
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics

OUTPUTS = ("joint_trajectory", "position_array")
SLOW, FAST = 0.3, 1.0  # rad/s


def push(each: Rig, speed: float, seconds: float, *, moving: np.ndarray | None = None) -> None:
    """A driver that sends the first joint on, whatever the robot does; `moving`: which joints follow."""
    target = each.joints.copy()
    follows = np.zeros(2, bool) if moving is None else moving
    each._follow = lambda sent: None  # type: ignore[method-assign]
    for _ in range(round(seconds * 100)):
        target = target + np.array([min(speed, 1.0), 0.3]) * 0.01
        each.advance(0.01)
        stamp = Stamp(None if each.output == "position_array" else each.clock_ns)
        ahead = np.array([0.0 if each.output == "position_array" else TRAJECTORY_AHEAD_S])
        each.hear(command=JointCommand(stamp, None, target[None], ahead))
        sent = each.tick().sent
        if isinstance(sent, SentJoints):
            each.joints = np.where(follows, sent.positions, each.joints)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("speed", "most_rad"), [(SLOW, 0.13), (FAST, 0.36)])
def test_a_joint_that_does_not_move_is_noticed_soon_and_its_target_comes_back(
    output: str, speed: float, most_rad: float
) -> None:
    each = rig(output)
    each.until_passing()
    stuck = each.joints.copy()
    push(each, speed, 2.0)
    assert each.guard.state is State.STOPPED and "did not move" in each.guard.reason
    sent = [each for _, each in each.sent if isinstance(each, SentJoints)]
    assert 0.02 < max(np.abs(each.positions - stuck).max() for each in sent) < most_rad
    np.testing.assert_allclose(sent[-1].positions, stuck, atol=2e-4)
    assert each.guard.clear_stop(each.now) == ""


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_was_sent_is_back_at_a_robot_that_does_not_move_as_soon_as_limits_allow(output: str) -> None:
    each = rig(output)
    each.until_passing()
    stuck = each.joints.copy()
    push(each, SLOW, 2.0)
    away = [(at_s, np.abs(sent.positions - stuck).max()) for at_s, sent in each.sent if isinstance(sent, SentJoints)]
    farthest_s = max(away, key=lambda each: each[1])[0]
    back_s = next(at_s for at_s, rad in away if at_s > farthest_s and rad < 2e-4)
    assert back_s - farthest_s < 0.3, "a robot that hears again meanwhile moves no longer than that"


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_robot_that_hears_again_and_moves_late_is_not_swung(output: str) -> None:
    """A target returns to where the robot stood, and not to where it is by then, again and again."""
    each = rig(output)
    each.until_passing()
    stuck = each.joints.copy()
    push(each, SLOW, 2.0)
    gate = each.guard._gate
    for _ in range(50):
        each.joints = each.joints + 1e-3  # as `push` left it, it follows nothing
        each.advance(0.01)
        each.hear({"command"})
        assert isinstance(gate, JointGate)
        gate.recall(each.guard._watch.measured(each.now))  # as it is while the robot is still found not to have moved
        each.tick()
    sent = [sent for _, sent in each.sent if isinstance(sent, SentJoints)]
    np.testing.assert_allclose(sent[-1].positions, stuck, atol=2e-4)
    assert each.guard.clear_stop(each.now) == ""


@pytest.mark.parametrize("output", OUTPUTS)
def test_one_stuck_joint_is_noticed_beside_others_that_move(output: str) -> None:
    each = rig(output)
    each.until_passing()
    push(each, SLOW, 1.0, moving=np.array([True, False]))
    assert each.guard.state is State.STOPPED and "elbow was commanded" in each.guard.reason


@pytest.mark.parametrize("output", (*OUTPUTS, "joint_trajectory_chunk"))
def test_a_held_robot_is_sent_no_further_than_it_is_found_to_stand_and_then_back(output: str) -> None:
    each = rig(output)
    each.until_passing()
    held = each.joints.copy()
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.run(2.0)
    sent = [each.positions for _, each in each.sent if isinstance(each, SentJoints)]
    assert each.guard.state is State.STOPPED and "shoulder was commanded" in each.guard.reason
    assert 0.03 < max(np.abs(positions - held).max() for positions in sent) < 0.1
    np.testing.assert_allclose(sent[-1], held, atol=2e-4)


@pytest.mark.parametrize("output", (*OUTPUTS, "joint_trajectory_chunk", "velocity_array"))
def test_a_tool_that_is_carried_out_of_the_workspace_stops_at_its_edge(output: str) -> None:
    each = rig(output)
    each.tool = np.array([HOME[0], HOME[1], 0.1])
    each.until_passing()
    while each.guard.state is State.PASSING and each.tool[2] > -0.1:
        each.tool = each.tool - np.array([0.0, 0.0, 0.002])  # 0.2 m/s
        each.run(0.01)
    assert each.guard.tally.last is not None and each.guard.tally.last.cause is Cause.OUTSIDE
    assert each.tool[2] > -0.01


@pytest.mark.parametrize(("below_m", "passes"), [(0.0, True), (0.008, True), (0.02, False), (0.045, False)])
@pytest.mark.parametrize("output", OUTPUTS)
def test_joints_do_not_move_while_the_tool_is_outside_of_the_workspace(
    output: str, below_m: float, passes: bool
) -> None:
    each = rig(output)
    each.tool = np.array([HOME[0], HOME[1], LIMITS.workspace_min[2] - below_m])
    for _ in range(200):
        each.begin_anew()
        each.run(0.01)
    assert (each.guard.state is State.PASSING) is passes
    assert passes or "outside the workspace" in each.guard.reason


@pytest.mark.parametrize(("share", "stops"), [(1.1, False), (1.6, True)])
def test_joints_that_move_the_tool_too_fast_are_braked_and_go_on_by_themselves(share: float, stops: bool) -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    for _ in range(30):
        each.tool = each.tool + np.array([0.0, share * LIMITS.linear_speed * 0.01, 0.0])
        each.run(0.01)
    assert bool(each.guard.tally.counts[Cause.TOOL_TOO_FAST]) is stops
    assert not any(cause.latches for cause in each.guard.tally.counts)
    each.until_passing()


def test_a_trajectory_gives_measured_joints_the_time_that_their_speed_needs() -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    each.run(0.5)
    near = each.outcomes[-1].sent
    assert isinstance(near, SentJoints) and near.after_s == TRAJECTORY_AHEAD_S
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.joints = each.joints - np.array([0.2, 0.0])  # a link that was lost for a moment, say
    each.advance(0.01)
    each.hear()
    far = each.tick().sent
    assert isinstance(far, SentJoints)
    point = far.positions + TRAJECTORY_AHEAD_S * far.velocities
    assert far.after_s == pytest.approx((np.abs(point - each.joints) / JOINTS.max_speed).max())
    assert far.after_s > 0.15


def test_a_stop_after_a_late_tick_does_not_take_back_what_the_controller_went_meanwhile() -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    each.run(0.3)
    last = each.tick().sent
    assert isinstance(last, SentJoints) and last.velocities[0] > 0.1
    reached = last.positions[0] + 0.025 * last.velocities[0]  # by half of 50 ms, on the way to a point 60 ms ahead
    each.advance(0.05)
    each.hear(["command"])
    each.guard.press_stop("test", each.now)
    stop = each.tick().sent
    assert isinstance(stop, SentJoints)
    assert trajectory_point(stop.positions, stop.velocities)[0] >= reached


def test_no_point_of_a_trajectory_lies_beyond_a_joints_range() -> None:
    """Points lie ahead of a joint that still brakes before its end."""
    each = rig("joint_trajectory")
    each.until_passing()
    push(each, FAST, 1.995 - each.joints[0], moving=np.ones(2, bool))
    for _ in range(30):
        each.advance(0.01)
        there = np.array([[1.995, each.joints[1]]])
        each.hear(command=JointCommand(Stamp(each.clock_ns), None, there, np.array([TRAJECTORY_AHEAD_S])))
        each.tick()
    sent = [each for _, each in each.sent if isinstance(each, SentJoints)]
    points = [each.positions + TRAJECTORY_AHEAD_S * each.velocities for each in sent]
    assert 1.96 < max(point[0] for point in points) <= JOINTS.position_max[0] + 1e-9


def taken(*commands: JointCommand, joints: tuple[float, float] | None = (0.0, 0.0)) -> Refusal | None:
    """What a gate says of the last of some commands, each 0.01 s after the one before."""
    gate, refusal = JointGate(settings("joint_trajectory")), None
    measured = Measured(None, None if joints is None else np.array(joints), np.zeros(3))
    for index, command in enumerate(commands):
        now = Instant(50.0 + 0.01 * index, 10**9 + index * 10**7)
        refusal = gate.take(command, measured, now)
    return refusal


def command(
    *points: tuple[float, ...],
    times_s: tuple[float, ...] = (0.1,),
    at_s: float = 0.0,
    names: tuple[str, ...] | None = None,
) -> JointCommand:
    return JointCommand(Stamp(10**9 + round(at_s * 1e9)), names, np.array(points), np.array(times_s))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (command((0.1, 0.1)), None),
        (command((0.1, 0.1), (0.1, 0.1), times_s=(0.1, 0.1)), Cause.BAD_FORM),
        (command((0.1, 0.1), (0.1, 0.1), times_s=(0.2, 0.1)), Cause.BAD_FORM),
        (command((0.1, 0.1), times_s=(-0.01,)), Cause.BAD_FORM),
        (command((0.1, 0.1), times_s=(0.1, 0.2)), Cause.BAD_FORM),
        (command((0.1, 0.1, 0.1)), Cause.BAD_FORM),
        (command((0.1,)), Cause.BAD_FORM),
        (command(times_s=()), Cause.BAD_FORM),
        (command((0.1, np.nan)), Cause.NOT_FINITE),
        (command((0.1, 0.1), times_s=(np.inf,)), Cause.NOT_FINITE),
        (command((0.1, 0.1), names=("elbow", "shoulder")), None),
        (command((0.1, 0.1), names=("elbow", "wrist")), Cause.BAD_FORM),
        (command((0.49, 0.0)), None),
        (command((0.51, 0.0)), Cause.FAR),
        (command((0.0, 0.0), (0.099, 0.199), times_s=(0.1, 0.2)), None),
        (command((0.0, 0.0), (0.102, 0.0), times_s=(0.1, 0.2)), Cause.OVER_SPEED),
        (command((0.0, 0.0), (0.0, 0.202), times_s=(0.1, 0.2)), Cause.OVER_SPEED),
    ],
)
def test_a_command_is_judged_by_its_form_its_distance_and_its_own_speed(
    given: JointCommand, refused: Cause | None
) -> None:
    refusal = taken(given)
    assert (refusal.cause if refusal else None) == refused


@pytest.mark.parametrize(
    ("then", "refused"),
    [((0.0295, 0.0), None), ((0.031, 0.0), Cause.OVER_SPEED), ((0.0, 0.0595), None), ((0.0, -0.061), Cause.OVER_SPEED)],
)
def test_a_step_between_two_commands_is_judged_by_each_joints_speed(
    then: tuple[float, float], refused: Cause | None
) -> None:
    """1 and 2 rad/s in 0.01 s and 0.02 s of slack."""
    refusal = taken(command((0.0, 0.0)), command(then, at_s=0.01))
    assert (refusal.cause if refusal else None) == refused
    assert refusal is None or ("shoulder" in refusal.detail) is (then[0] != 0.0)


@pytest.mark.parametrize(
    ("there", "commanded", "passes"),
    [
        (1.99, 2.0, True),
        (1.99, 2.01, False),
        (2.1, 2.1, True),
        (2.1, 2.11, False),
        (-2.1, -2.1, True),
        (-2.1, -2.11, False),
    ],
)
def test_a_joint_out_of_its_range_may_come_back_and_get_no_further_out(
    there: float, commanded: float, passes: bool
) -> None:
    refusal = taken(command((commanded, 0.0)), joints=(there, 0.0))
    assert (refusal is None) is passes
    assert refusal is None or refusal.cause is Cause.OUTSIDE


def test_the_joint_that_is_furthest_beyond_its_own_speed_is_named() -> None:
    refusal = taken(command((0.0, 0.0), (0.105, 0.15), times_s=(0.1, 0.2)))
    assert refusal is not None and "moves shoulder at 1.05 per second, and joints.max_speed is 1" in refusal.detail


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_hand_may_move_the_tool_fast_while_motion_is_held(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.5, without=["enable", "command"])
    each.run(0.2, without=["enable", "command"])
    for _ in range(20):
        each.tool = each.tool + np.array([0.0, 0.0045, 0.0])
        each.run(0.01, without=["enable", "command"])
    assert not each.guard.tally.counts[Cause.TOOL_TOO_FAST]


class TwoLinks(ToolKinematics):
    """An arm in a plane, of 0.2 m each, whose tool is at HOME while it is stretched; by hand, without MuJoCo."""

    def __init__(self) -> None:
        pass

    def pose_at(self, positions: np.ndarray) -> Pose:
        shoulder, both = positions[0], positions.sum()
        x, y = np.cos(shoulder) + np.cos(both), np.sin(shoulder) + np.sin(both)
        return Pose(np.array([0.1 + 0.2 * x, 0.2 * y, HOME[2]]), np.eye(3))

    def tool_moves(self, positions: np.ndarray) -> np.ndarray:
        shoulder, both = positions[0], positions.sum()
        elbow = 0.2 * np.array([-np.sin(both), np.cos(both), 0.0])
        return np.stack([0.2 * np.array([-np.sin(shoulder), np.cos(shoulder), 0.0]) + elbow, elbow], axis=1)


ARM = TwoLinks()


class ArmRig(Rig):
    """A rig whose tool is where its joints take it, and whose driver stays there."""

    def command(self) -> Any:
        return order(self, self.joints)

    def hear(self, *given: Any, **named: Any) -> None:
        self.tool = ARM.pose_at(self.joints).position
        super().hear(*given, **named)


def arm_rig(output: str, shoulder: float = 0.0, **changes: Any) -> ArmRig:
    return ArmRig(Guard(settings(output, **changes), ARM), output, joints=np.array([shoulder, 0.0]))


def order(each: Rig, positions: np.ndarray) -> JointCommand:
    if each.output == "position_array":
        return JointCommand(Stamp(None), None, positions[None], np.zeros(1))
    return JointCommand(Stamp(each.clock_ns), None, positions[None], np.array([0.01]))


def send_on(each: Rig, speeds: tuple[float, float], seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """A driver that sends the joints on at these speeds; what went out, [ticks, 2], and its tool, [ticks, 3]."""
    target, sent = each.joints.copy(), [each.joints.copy()]
    for _ in range(round(seconds * 100)):
        target = target + 0.01 * np.array(speeds)
        each.advance(0.01)
        each.hear(command=order(each, target))
        each.tick()
        sent.append(each.joints.copy())
    return np.array(sent), np.array([ARM.pose_at(joints).position for joints in sent])


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("speeds", [(0.9, 0.0), (0.0, 1.5), (0.8, 0.8), (-0.9, 0.1)])
@pytest.mark.parametrize("output", OUTPUTS)
def test_joints_that_are_commanded_within_their_limits_move_the_tool_within_its_own(
    output: str, speeds: tuple[float, float], share: float
) -> None:
    each = arm_rig(output)
    each.until_passing()
    each.guard.scale_speed(share)
    joints, tools = send_on(each, speeds, 0.3)
    assert each.guard.state is State.PASSING
    tool_speeds = np.linalg.norm(np.diff(tools, axis=0), axis=1) / 0.01
    most = share * LIMITS.linear_speed
    assert 0.98 * most < tool_speeds.max() < 1.01 * most, "as fast as it may, and no faster"
    velocities = np.diff(joints, axis=0) / 0.01
    assert (np.abs(velocities) <= np.array(JOINTS.max_speed) + 1e-9).all()
    assert (np.abs(np.diff(velocities, axis=0)) / 0.01 <= np.array(JOINTS.max_acceleration) + 1e-6).all()


def test_a_tool_that_is_commanded_too_fast_falls_behind_and_goes_on_by_itself() -> None:
    each = arm_rig("position_array", -1.2)
    each.until_passing()
    send_on(each, (0.9, 0.0), 2.0)
    assert set(each.guard.tally.counts) <= {Cause.FAR, Cause.DRIVER_SILENT} and each.guard.tally.counts[Cause.FAR]
    each.until_passing()


def test_a_tool_that_is_slow_enough_is_not_slowed() -> None:
    known, unknown = arm_rig("position_array"), ArmRig(rig("position_array").guard, "position_array")
    for each in (known, unknown):
        each.until_passing()
        send_on(each, (0.3, 0.2), 0.5)
    assert known.joints[0] > 0.1
    np.testing.assert_allclose(known.joints, unknown.joints, atol=1e-12)


def judged(shoulder: float, commanded: float, *, known: bool = True) -> Refusal | None:
    """What is said of a command, with the arm's shoulder at a place."""
    gate = JointGate(settings("position_array"), ARM if known else None)
    here = np.array([shoulder, 0.0])
    measured = Measured(ARM.pose_at(here), here, np.zeros(3))
    return gate.take(command((commanded, 0.0), times_s=(0.0,)), measured, Instant(50.0, 10**9))


@pytest.mark.parametrize(
    ("shoulder", "commanded", "passes"),
    [
        (1.2, 1.3, True),  # x 0.207 of 0.2 m
        (1.2, 1.33, True),  # x 0.195, at the edge
        (1.2, 1.36, False),  # x 0.184
        (1.36, 1.34, True),  # back
        (1.36, 1.36, True),
        (1.36, 1.4, False),  # further out
        (1.36, 1.0, True),
    ],
)
def test_the_tool_that_commanded_joints_mean_is_in_the_workspace_or_on_its_way_back(
    shoulder: float, commanded: float, passes: bool
) -> None:
    refusal = judged(shoulder, commanded)
    assert (refusal is None) is passes
    assert refusal is None or (refusal.cause is Cause.OUTSIDE and "take the tool to" in refusal.detail)
    assert judged(shoulder, commanded, known=False) is None, "only who knows the kinematics can tell"


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_tool_outside_is_brought_back_by_joints_whose_kinematics_are_known(output: str) -> None:
    each = arm_rig(output, 1.4)  # 3 cm outside
    each.until_passing()
    send_on(each, (-0.2, 0.0), 0.6)
    assert each.guard.state is State.PASSING and each.joints[0] < 1.32
    far = arm_rig(output, 1.5)  # 7 cm
    far.run(1.0)
    assert "move it back by hand" in far.guard.reason


def test_a_way_between_two_places_inside_that_leads_outside_is_stopped_before() -> None:
    """The shoulder swings the stretched arm past a wall: both ends are inside, and the middle is 2 cm outside."""
    wall = replace(LIMITS, workspace_max=(0.48, 0.4, 0.6))
    each = arm_rig("joint_trajectory", -0.5, limits=wall, max_lead_rad=2.0)
    each.until_passing()
    far_x = 0.0
    for tick in range(300):
        each.advance(0.01)
        points = np.array([[tick / 300 - 0.5, 0.0], [0.5, 0.0]])
        each.hear(command=JointCommand(Stamp(each.clock_ns), None, points, np.array([0.01, 3.02 - 0.01 * tick])))
        each.tick()
        far_x = max(far_x, ARM.pose_at(each.joints).position[0])
    assert each.guard.tally.counts[Cause.OUTSIDE] and far_x < 0.491
    assert not any(cause.latches for cause in each.guard.tally.counts)
