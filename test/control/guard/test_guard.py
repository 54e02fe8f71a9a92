# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in, what goes out stays within the limits, and stops within the stated time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.guarding import BASE, HOME, JOINTS, LIMITS, MOVES_S, START_NS, UPRIGHT, Rig, rig, velocities
from support.guarding import settings as guard_settings
from support.nightly import examples

from specvla_ros.control.gripper import GripperLimits
from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import (
    Command,
    GripperCommand,
    JointCommand,
    JointPositions,
    JointVelocities,
    Sent,
    SentJoints,
    SentTwist,
    SentVelocities,
    Stamp,
    ToolPose,
    TwistCommand,
)
from specvla_ros.control.guard.guard import STALL_S, Guard, State
from specvla_ros.control.guard.settings import CHUNK_BRAKING, HEARD_S
from specvla_ros.control.inverse_kinematics import TRAJECTORY_AHEAD_S, trajectory_point
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError

LATCHING = [cause for cause in Cause if cause.latches]
RAMP_S = 0.125  # speed over acceleration, of every block of the limits
COMMAND_TIMEOUT_S = 0.1
OUTPUTS = ("twist", "pose", "joint_trajectory", "joint_trajectory_chunk", "position_array", "velocity_array")
UNSTAMPED = ("position_array", "velocity_array")
FAULTS = (
    *("none", "none", "none", "no_command", "no_tool", "no_joints", "no_enable", "no_action", "wild", "nan", "frame"),
    *("stop", "clear", "disable", "tool_nan", "tool_jump", "joints_jump", "clock_back", "clock_ahead", "clock_still"),
    *("old_command", "gripper_nan", "sources"),
)


@dataclass(frozen=True)
class Stretch:
    """Some ticks with one fault."""

    fault: str
    ticks: int
    dt_s: float
    seed: int


stretches = st.builds(
    Stretch,
    st.sampled_from(FAULTS),
    st.integers(1, 80),
    st.sampled_from([0.001, 0.005, 0.01, 0.01, 0.01, 0.03, 0.09, 0.3]),
    st.integers(0, 2**31),
)


def wild(output: str, each: Rig, random: np.random.Generator):
    """A command of any size."""
    scale = 10.0 ** random.uniform(-3, 3)
    if output == "twist":
        return TwistCommand(each.stamp, random.normal(size=6) * scale)
    if output == "pose":
        turn = random.normal(size=4)
        return ToolPose(each.stamp, each.tool + random.normal(size=3) * scale, tuple(turn / np.linalg.norm(turn)))
    if output == "velocity_array":
        return JointVelocities(Stamp(None), random.normal(size=2) * scale)
    points = int(random.integers(1, 5))
    positions = each.joints + random.normal(size=(points, 2)) * scale
    stamp = Stamp(None if output == "position_array" else each.clock_ns)
    return JointCommand(stamp, None, positions, np.cumsum(random.uniform(0.001, 0.2, points)))


def beyond_speed(command: Command, each: Rig) -> bool:
    """True if a wild command asks for more speed than the limits: from where the robot is, within the timeout."""
    if isinstance(command, TwistCommand):
        lengths = np.linalg.norm(command.velocity.reshape(2, 3), axis=1)
        return bool((lengths > [LIMITS.linear_speed, LIMITS.angular_speed]).any())
    if isinstance(command, ToolPose):
        return bool(np.linalg.norm(command.position - each.tool) > LIMITS.linear_speed * COMMAND_TIMEOUT_S)
    if isinstance(command, JointVelocities):
        return bool((np.abs(command.velocities) > JOINTS.max_speed).any())
    first = np.abs(command.positions[0] - each.joints)
    return bool((first > np.array(JOINTS.max_speed) * COMMAND_TIMEOUT_S).any())


def suffer(each: Rig, stretch: Stretch, truth: "Truth") -> None:
    """One stretch, and what must then be true."""
    random = np.random.default_rng(stretch.seed)
    for _ in range(stretch.ticks):
        fault, guard = stretch.fault, each.guard
        clock_s = {"clock_back": -1.0, "clock_ahead": 5.0, "clock_still": 0.0}.get(fault, stretch.dt_s)
        each.advance(stretch.dt_s, clock_s=clock_s)
        without = {fault.removeprefix("no_")} if fault.startswith("no_") else set()
        command = None
        if fault == "wild":
            command = wild(each.output, each, random)
            fault = fault if beyond_speed(command, each) else "none"
        elif fault in ("nan", "frame", "old_command"):
            command = spoiled(each.command(), fault)
        elif fault == "tool_nan":
            without = {"tool"}
            guard.tool(ToolPose(each.stamp, np.array([np.nan, 0, 0]), UPRIGHT), each.now)
        elif fault == "tool_jump":
            each.tool = random.uniform(-1, 1, 3)
        elif fault == "joints_jump":
            each.joints = random.uniform(-3, 3, 2)
        elif fault == "stop":
            guard.press_stop("test", each.now)
        elif fault == "clear":
            truth.stopped &= guard.clear_stop(each.now) != ""
        elif fault == "disable":
            without = {"enable"}
            guard.enable(False, each.now)
        elif fault == "gripper_nan":
            guard.gripper(GripperCommand(None, np.array([np.nan])), each.now)
        guard.sources("two" if fault == "sources" else "")
        each.hear(without, command)
        truth.note(each, fault, without)
        each.tick()
        truth.check(each)


def spoiled(command, fault: str):
    if fault == "old_command":
        stamp = command.stamp
        return replace(command, stamp=replace(stamp, ns=stamp.ns - 10**9 if stamp.ns is not None else None))
    if isinstance(command, JointVelocities):
        return replace(command, velocities=command.velocities * np.nan)
    if fault == "frame" and not isinstance(command, JointCommand):
        return replace(command, stamp=replace(command.stamp, frame_id="camera"))
    if isinstance(command, TwistCommand):
        return replace(command, velocity=command.velocity * np.nan)
    if isinstance(command, ToolPose):
        return replace(command, position=command.position * np.nan)
    return replace(command, positions=command.positions * np.nan)


class Truth:
    """What must hold, told from the inputs alone: since when there is a reason to stop."""

    def __init__(self, each: Rig) -> None:
        self.heard_s = dict.fromkeys(("command", "tool", "enable"), each.steady_s)
        self.stopped = False
        self.reason_s: float | None = None
        self.longest_s, self.last_s = 0.0, each.steady_s

    def note(self, each: Rig, fault: str, without: set[str]) -> None:
        judged = {"nan", "frame", "wild"} if each.output in UNSTAMPED else {"nan", "frame", "wild", "old_command"}
        for name in self.heard_s:
            if name not in without and not (name == "command" and fault in judged):
                self.heard_s[name] = each.steady_s
        if fault == "stop":
            self.stopped = True
        limits_s = {"command": COMMAND_TIMEOUT_S, "tool": 0.2, "enable": 0.5}
        silent = any(each.steady_s - self.heard_s[name] > limit for name, limit in limits_s.items())
        if fault in ("nan", "disable", "sources", "tool_nan", "stop") or silent or self.stopped:
            self.reason_s = each.steady_s if self.reason_s is None else self.reason_s
            self.longest_s = max(self.longest_s, each.steady_s - self.last_s)
        else:
            self.reason_s, self.longest_s = None, 0.0
        self.last_s = each.steady_s

    def check(self, each: Rig) -> None:
        """From full speed within the limits, and a tick before it and one that rounds it up, of whatever length."""
        ramp_s = RAMP_S / CHUNK_BRAKING + HEARD_S if each.output == "joint_trajectory_chunk" else RAMP_S
        if self.reason_s is None or each.steady_s - self.reason_s <= ramp_s + 2 * self.longest_s + 1e-6:
            return
        for at_s, _, velocity in velocities(each.sent[-2:], output=each.output):
            assert np.abs(velocity).max() < 1e-9, (at_s - self.reason_s, velocity, each.guard.reason)


def assert_within_limits(each: Rig) -> None:
    found = velocities(each.sent, output=each.output)
    of_joints = each.output not in ("twist", "pose")
    speed = np.array(JOINTS.max_speed) if of_joints else np.array([LIMITS.linear_speed, LIMITS.angular_speed])
    acceleration = (
        np.array(JOINTS.max_acceleration)
        if of_joints
        else np.array([LIMITS.linear_acceleration, LIMITS.angular_acceleration])
    )
    # Of a chunk it is the mean velocity of a tick, and the cubic to the next output begins with four times its mean
    # acceleration, a share of the limit.
    ahead = each.output == "joint_trajectory_chunk"
    mean = 4 * CHUNK_BRAKING if ahead else 1.0
    last_s, last_dt_s, last = -np.inf, 0.0, None
    for at_s, dt_s, velocity in found:
        length = np.linalg.norm(velocity, axis=1)
        assert np.isfinite(length).all()
        # The cubic that joins two motions sent ahead may swing a little.
        assert (length <= speed * (1.01 if ahead else 1 + 1e-6) + 1e-9).all(), (at_s, length)
        if dt_s > STALL_S:
            if each.output == "joint_trajectory_chunk":  # the robot went on meanwhile, by itself
                last = None
                continue
            assert length.max() < 1e-9, "a process that did not run begins at rest"
        elif last is not None and abs(at_s - dt_s - last_s) < 1e-9:
            change = np.linalg.norm(velocity - last, axis=1)
            between_s = max(dt_s, (dt_s + last_dt_s) / 2) if ahead else dt_s
            assert (change <= acceleration * between_s * (mean + 1e-6) + 1e-6).all(), (at_s, dt_s, change)
        last_s, last_dt_s, last = at_s, dt_s, velocity


@pytest.mark.parametrize("output", OUTPUTS)
@given(st.lists(stretches, min_size=1, max_size=25))
@example([Stretch("wild", 6, 0.09, 224)])  # happen to be within the limits: of velocities,
@example([Stretch("wild", 6, 0.09, 239)])  # of twists,
@example([Stretch("wild", 6, 0.09, 11)])  # and of chunks
@settings(max_examples=examples(60))
def test_whatever_comes_in_the_output_stays_within_limits_and_stops_in_time(output: str, plan: list[Stretch]) -> None:
    each = rig(output)
    each.until_passing()
    truth = Truth(each)
    for stretch in plan:
        suffer(each, stretch, truth)
    assert_within_limits(each)
    assert_inside(each)


def assert_inside(each: Rig) -> None:
    """What goes out never leaves the workspace, nor gets further out of it than where the robot was found."""
    for (_, before), (_, now) in zip(each.sent, each.sent[1:], strict=False):
        if isinstance(now, Pose) and isinstance(before, Pose):
            if np.abs(now.position - before.position).max() < 0.05:  # not anchored anew at another place
                low, high = (
                    np.minimum(LIMITS.workspace_min, before.position),
                    np.maximum(LIMITS.workspace_max, before.position),
                )
                assert (now.position >= low - 1e-6).all() and (now.position <= high + 1e-6).all()
        elif isinstance(now, SentJoints) and isinstance(before, SentJoints):
            low, high = (
                np.minimum(JOINTS.position_min, before.positions),
                np.maximum(JOINTS.position_max, before.positions),
            )
            if np.abs(now.positions - before.positions).max() < 0.2:
                assert (now.positions >= low - 1e-6).all() and (now.positions <= high + 1e-6).all()


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_right_driver_is_followed_closely(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(1.0)
    for _ in range(600):
        each.run(0.01)
        assert each.guard.state is State.PASSING, each.guard.reason
        if output == "twist":
            np.testing.assert_allclose(each.sent[-1][1].velocity, each.command().velocity, atol=1e-6)
        elif output == "velocity_array":
            np.testing.assert_allclose(each.sent[-1][1].velocities, each.command().velocities, atol=1e-6)
        elif output == "pose":
            np.testing.assert_allclose(each.sent[-1][1].position, each.command().position, atol=0.002)
        else:
            wanted = 0.2 * np.sin(0.6 * each.phase_s) * np.array([2.0, -1.0])
            np.testing.assert_allclose(each.sent[-1][1].positions, wanted, atol=0.004)
    assert not each.guard.tally.counts.keys() & {cause for cause in Cause if cause.latches}


@pytest.mark.parametrize("output", OUTPUTS)
@given(st.data())
@settings(max_examples=examples(20))
def test_a_jittery_machine_stops_nobody(output: str, data: st.DataObject) -> None:
    each = rig(output)
    each.until_passing()
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    for _ in range(300):
        each.advance(float(random.choice([0.002, 0.01, 0.01, 0.03, 0.06])))
        each.hear({"command"} if random.random() < 0.2 else ())
        each.tick()
        latched = [cause for cause in each.guard.tally.counts if cause.latches]
        assert not latched, each.guard.tally.last


@pytest.mark.parametrize("late_s", [0.03, 0.05, 0.09])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_late_tick_does_not_send_what_it_missed_in_one_message(output: str, late_s: float) -> None:
    each = rig(output)
    each.until_passing()
    each.run(1.0)
    before = each.sent[-1][1]
    each.advance(late_s)
    each.hear()
    each.tick()
    after = each.sent[-1][1]
    step: np.ndarray | np.floating
    most: np.ndarray | float
    if isinstance(before, SentJoints) and isinstance(after, SentJoints):
        ends = [each.positions for each in (before, after)]
        if output == "joint_trajectory":  # meanwhile the robot goes on to the point that it was sent
            ends = [trajectory_point(each.positions, each.velocities) for each in (before, after)]
        step, most = np.abs(ends[1] - ends[0]), np.array(JOINTS.max_speed) * MOVES_S
    elif isinstance(before, Pose) and isinstance(after, Pose):
        step, most = np.abs(after.position - before.position).max(), LIMITS.linear_speed * MOVES_S
    elif isinstance(before, SentVelocities):
        step, most = np.abs(after.velocities - before.velocities), np.array(JOINTS.max_acceleration) * MOVES_S
    else:
        step, most = np.abs(after.velocity - before.velocity)[:3], LIMITS.linear_acceleration * MOVES_S
    assert (np.asarray(step) <= most + 1e-9).all()
    each.run(1.0)
    assert each.guard.state is State.PASSING and not each.guard.tally.counts.keys() & set(LATCHING)
    assert_within_limits(each)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_bad_command_latches_until_it_is_cleared(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.3)
    each.advance(0.01)
    each.hear(command=spoiled(each.command(), "nan"))
    assert each.tick().stopped
    each.run(1.0)
    assert each.guard.state is State.STOPPED
    assert "NaN" in each.guard.reason
    assert each.guard.clear_stop(each.now) == ""
    each.until_passing()


def test_clear_is_refused_while_the_cause_persists() -> None:
    each = rig("twist")
    each.until_passing()
    for _ in range(100):
        each.advance(0.01)
        each.hear(command=spoiled(each.command(), "nan"))
        each.tick()
    assert "persists" in each.guard.clear_stop(each.now)
    assert each.guard.state is State.STOPPED


@pytest.mark.parametrize(
    ("missing", "cause"),
    [
        ("command", Cause.DRIVER_SILENT),
        ("action", Cause.POLICY_SILENT),
        ("tool", Cause.STATE_MISSING),
        ("enable", Cause.NOT_ENABLED),
    ],
)
@pytest.mark.parametrize("output", OUTPUTS)
def test_silence_holds_and_ends_by_itself(output: str, missing: str, cause: Cause) -> None:
    each = rig(output)
    each.until_passing()
    each.run(1.6, without=[missing])
    assert each.guard.state is State.HOLDING
    assert cause in each.guard.tally.counts
    assert cause.value in each.guard.reason
    each.until_passing()


def test_a_silent_policy_does_not_end_a_standstill() -> None:
    each = rig("twist")
    each.until_passing()
    still = TwistCommand(each.stamp, np.zeros(6))
    for _ in range(200):
        each.advance(0.01)
        each.hear({"action"}, replace(still, stamp=each.stamp))
        each.tick()
    assert each.guard.state is State.PASSING


@pytest.mark.parametrize("kind", ["older", "same", "ahead"])
def test_measurements_that_are_no_news_count_as_missing(kind: str) -> None:
    each = rig("twist")
    each.until_passing()
    frozen = each.clock_ns
    for _ in range(50):
        each.advance(0.01)
        each.hear({"tool"})
        stamp = {"older": each.clock_ns - 10**9, "same": frozen, "ahead": each.clock_ns + 10**9}[kind]
        each.guard.tool(ToolPose(Stamp(stamp, BASE), each.tool, UPRIGHT), each.now)
        each.tick()
    assert Cause.STATE_MISSING in {refusal.cause for refusal in each.guard._failing}


def test_an_action_that_comes_in_parts_is_a_sign_of_life_with_each_part_and_not_with_a_repeated_one() -> None:
    each = rig("twist", max_action_age_s=10.0)
    each.until_passing()
    stamp = each.stamp
    for rows in range(1, 6):
        each.guard.action(stamp, "lift", each.now, rows)
        each.run(0.7, without=("action",))
        assert each.guard.state is State.PASSING, each.guard.reason
    each.guard.action(stamp, "lift", each.now, 5)
    each.run(0.7, without=("action",))
    assert each.guard.state is State.HOLDING and each.guard.cause == Cause.POLICY_SILENT.value


def test_actions_of_old_pictures_are_no_sign_of_life() -> None:
    each = rig("twist")
    each.until_passing()
    for _ in range(200):
        each.advance(0.01)
        each.hear({"action"})
        each.guard.action(Stamp(each.clock_ns - 5 * 10**9, BASE), "lift", each.now)
        each.tick()
    assert "5.000 s old" in each.guard.reason


@pytest.mark.parametrize("output", ["pose", "joint_trajectory"])
def test_motion_does_not_resume_with_a_command_from_afar(output: str) -> None:
    each = rig(output, max_lead_m=0.05, max_lead_rad=0.1)
    each.until_passing()
    each.run(0.5)
    held = each.sent[-1]
    each.run(2.0, without=["enable"])
    each.run(1.0)
    assert each.guard.state is State.HOLDING
    assert {Cause.FAR, Cause.NOT_NEAR} & each.guard.tally.counts.keys()
    moved = max(np.abs(velocity).max() for _, _, velocity in velocities(each.sent[-100:]))
    assert moved == 0
    assert held is not each.sent[-1]


@pytest.mark.parametrize("output", ["pose", "joint_trajectory", "position_array"])
def test_a_robot_that_was_moved_by_hand_is_not_held_where_it_was(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.2)
    each.run(1.0, without=["enable"])
    assert each.sent[-1][1] is not None
    each.tool, each.joints = HOME + np.array([0.2, 0.2, 0.1]), each.joints + 0.1
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.run(0.1, without=["enable", "command"])
    assert each.sent[-1][1] is None


@pytest.mark.parametrize("output", ["pose", "joint_trajectory", "position_array"])
def test_a_hand_may_lead_a_held_robot_further_than_any_command_may(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(1.0, without=["enable"])
    each._follow = lambda sent: None  # type: ignore[method-assign]
    for _ in range(60):
        each.tool, each.joints = each.tool + np.array([0.0, 0.004, 0.0]), each.joints + 0.01
        each.run(0.01, without=["enable", "command"])
    assert each.guard.state is State.HOLDING and not each.guard.tally.counts[Cause.NOT_FOLLOWING]


def away_from(sent: Sent | None, each: Rig) -> float:
    """How far a position that was sent is from the robot, in metres or radians."""
    if isinstance(sent, SentJoints):
        return float(np.abs(sent.positions - each.joints).max())
    return float(np.linalg.norm(sent.position - each.tool)) if isinstance(sent, Pose) else 0.0


@pytest.mark.parametrize("moved", [0.3, 0.6])
@pytest.mark.parametrize("output", ["pose", "joint_trajectory", "position_array"])
def test_a_robot_that_comes_back_elsewhere_is_not_sent_to_where_it_was(output: str, moved: float) -> None:
    """Its driver was restarted, and meanwhile somebody moved the arm by its own controls."""
    each, unseen = rig(output), ["tool", "joints", "enable", "command"]
    each.until_passing()
    each.run(0.2)
    each.run(1.0, without=["enable"])
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.run(1.0, without=unseen)
    assert each.sent[-1][1] is None, "its driver would hear this first when it starts again"
    each.joints, each.tool = each.joints + moved, each.tool + np.array([0.1, 0.0, 0.0])
    back_s = each.steady_s
    each.run(1.0, without=["enable", "command"])
    sent = [sent for at_s, sent in each.sent if at_s > back_s and sent is not None]
    assert sent and max(away_from(one, each) for one in sent) < 1e-9, "it is held where it is"


@pytest.mark.parametrize("output", ["pose", "joint_trajectory", "position_array"])
def test_a_robot_that_was_not_seen_for_a_moment_is_held_where_it_was(output: str) -> None:
    """Held at its measured position, an arm that sags would sink a little with each gap."""
    each = rig(output)
    each.until_passing()
    each.run(0.2)
    each.run(1.0, without=["enable"])
    held, each._follow = each.sent[-1][1], lambda sent: None  # type: ignore[method-assign]
    each.joints, each.tool = each.joints - 0.005, each.tool - np.array([0.0, 0.0, 0.005])
    each.run(0.5, without=["tool", "joints", "enable"])
    each.run(0.5, without=["enable"])
    last = each.sent[-1][1]
    assert isinstance(held, Pose | SentJoints) and type(last) is type(held)
    there, then = (one.position if isinstance(one, Pose) else one.positions for one in (last, held))
    np.testing.assert_array_equal(there, then)


def test_a_blocked_robot_latches() -> None:
    each = rig("twist")
    each.until_passing()
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.run(3.0)
    assert each.guard.tally.counts[Cause.NOT_FOLLOWING] == 1
    assert each.guard.state is State.STOPPED


def test_a_driver_that_stands_where_an_arm_that_sank_below_the_floor_was_measured_may_bring_it_back() -> None:
    """It stands 0.3 mm lower than the arm does now; motion that never begins would never come back."""
    each = rig("pose")
    each.tool = HOME * (1, 1, 0) - (0, 0, 0.012)
    commanded = each.tool - (0, 0, 0.0003)
    for _ in range(200):
        each.advance(0.01)
        each.hear(command=ToolPose(each.stamp, commanded, UPRIGHT))
        each.tick()
    assert each.guard.state is State.PASSING, each.guard.reason
    assert each.tool[2] > -0.0121, "it got no further out"
    for _ in range(100):
        each.advance(0.01)
        commanded[2] += 0.0005
        each.hear(command=ToolPose(each.stamp, commanded, UPRIGHT))
        each.tick()
    assert each.guard.state is State.PASSING and each.tool[2] > 0.02


def test_a_twist_out_of_the_workspace_stops_before_the_edge_and_one_back_in_goes() -> None:
    each = rig("twist")
    each.until_passing()

    def drive(seconds: float, speed: float) -> None:
        for _ in range(round(seconds * 100)):
            each.advance(0.01)
            each.hear(command=TwistCommand(each.stamp, np.array([0, speed, 0, 0, 0, 0])))
            each.tick()

    drive(6.0, 0.12)
    assert LIMITS.workspace_max[1] - 0.02 < each.tool[1] <= LIMITS.workspace_max[1] + 0.01
    assert Cause.OUTSIDE in each.guard.tally.counts
    there = each.tool[1]
    drive(2.0, -0.12)
    assert each.tool[1] < there - 0.1


def test_a_confirmation_is_of_one_instruction() -> None:
    each = rig("twist", require_confirm=True)
    each.run(1.0)
    assert "'lift' is not confirmed" in each.guard.reason
    each.guard.confirm("lift")
    each.until_passing()
    each.guard.instruction("drop")
    each.run(0.1)
    assert each.guard.state is State.HOLDING
    each.guard.instruction("lift")
    each.run(1.0)
    assert each.guard.state is State.HOLDING, "an instruction that comes back needs another confirmation"


def test_a_confirmation_may_come_before_the_policy_has_heard_of_it() -> None:
    each = rig("twist", require_confirm=True)
    each.guard.instruction("lift")
    each.guard.confirm("lift")
    each.guard.action(each.stamp, "the one before", each.now)
    each.until_passing()


def test_the_gripper_moves_only_while_motion_passes() -> None:
    each = rig("twist")
    each.guard.gripper(GripperCommand(None, np.array([0.04])), each.now)
    assert each.tick().gripper is None
    each.until_passing()
    assert not [outcome for outcome in each.outcomes if outcome.gripper is not None], "it is not kept for later"
    each.guard.gripper(GripperCommand(None, np.array([0.04])), each.now)
    each.run(0.02)
    assert [outcome.gripper for outcome in each.outcomes if outcome.gripper is not None] == [0.04]
    each.guard.gripper(GripperCommand(("finger",), np.array([0.05])), each.now)
    each.run(0.01)
    assert each.guard.state is State.HOLDING
    assert each.outcomes[-1].gripper is None


def test_joints_of_another_part_do_not_matter() -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    each.guard.joints(JointPositions(each.stamp, ("base_wheel",), np.array([np.nan])), each.now)
    each.run(0.05)
    assert each.guard.state is State.PASSING


def test_a_trajectory_of_several_points_is_followed_to_its_end() -> None:
    each = rig("joint_trajectory", command_timeout_s=1.0)
    each.until_passing()
    start = each.joints.copy()
    path = start + np.outer([0.0, 0.1, 0.2], [1.0, 1.0])
    each.guard.command(JointCommand(Stamp(each.clock_ns + 1), None, path, np.array([0.0, 0.4, 0.8])), each.now)
    each.run(0.9, without=["command"])
    np.testing.assert_allclose(each.sent[-1][1].positions, path[-1], atol=0.002)


def test_a_drivers_trajectory_is_followed_as_it_was_planned() -> None:
    """Its points lie ahead, where the joints get at their present speeds: the plan is to be followed, not its lead."""
    each = rig("joint_trajectory")
    each.until_passing()
    start, planned, followed = each.joints.copy(), [], []
    for tick in range(100):
        phase = 0.05 * tick
        plan, rate = start + 0.1 * (1 - np.cos(phase)), np.full(2, 0.5 * np.sin(phase))  # at most 2.5 rad/s²
        point = trajectory_point(plan, rate)
        each.advance(0.01)
        each.hear(command=JointCommand(each.stamp, None, point[None], np.array([TRAJECTORY_AHEAD_S])))
        each.tick()
        planned.append(plan)
        followed.append(each.joints)
    assert each.guard.state is State.PASSING
    late_s = min(range(8), key=lambda ticks: off_by(planned, followed, ticks)) * 0.01
    assert late_s <= 0.03
    assert off_by(planned, followed, round(late_s / 0.01)) < 0.01


def off_by(planned: list[np.ndarray], followed: list[np.ndarray], ticks: int) -> float:
    """Largest distance in radians from a plan that is followed some ticks later."""
    return float(np.abs(np.array(followed)[ticks:] - np.array(planned)[: len(planned) - ticks]).max())


def test_a_guard_that_stood_still_holds_a_trajectory_where_its_last_point_led() -> None:
    each = rig("joint_trajectory")
    each.until_passing()
    each.run(0.5)
    last = each.outcomes[-1].sent
    assert isinstance(last, SentJoints) and np.abs(last.velocities).max() > 0.05
    each.advance(1.0)
    held = each.tick().sent
    assert isinstance(held, SentJoints)
    np.testing.assert_allclose(held.positions, trajectory_point(last.positions, last.velocities))
    assert not held.velocities.any()


def test_settings_out_of_their_range_are_refused_as_they_are_made() -> None:
    for changes in ({"output": "telepathy"}, {"rate_hz": 1.0}):
        with pytest.raises(UserError, match=f"^{next(iter(changes))} (is|must be) "):
            replace(guard_settings("twist"), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": "none"}, "'output' is not set"),
        ({"gripper": GripperLimits(output="array")}, "gripper.open_value"),
        ({"limits": replace(LIMITS, linear_speed=0.0)}, "limits.linear_speed"),
        ({"stop_time_s": 0.05}, "stop_time_s promises 0.05 s"),
    ],
)
def test_settings_that_guard_nothing_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        Guard(replace(guard_settings("twist"), **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ("",)}, "joints.names"),
        ({"max_speed": (1.0, 1.0, 1.0)}, "joints.max_speed: 2 numbers"),
        ({"position_min": (3.0, 0.0)}, "smaller"),
        ({"max_acceleration": (0.0,)}, "joints.max_acceleration"),
    ],
)
def test_joint_limits_that_are_missing_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Guard(replace(guard_settings("position_array"), joints=replace(JOINTS, **changes)))


@pytest.mark.parametrize("output", ["pose", "twist", "position_array"])
def test_a_measured_pose_that_leaps_latches_until_somebody_looked(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.5)
    each.tool = each.tool + np.array([0.0, 0.0, 0.05])
    each.run(0.01)
    assert each.guard.state is State.STOPPED and "pose_leaps: the measured pose moved 0.05" in each.guard.reason
    each.run(3.0)
    assert each.guard.state is State.STOPPED
    assert each.guard.clear_stop(each.now) == ""


@pytest.mark.parametrize(("share", "stopped"), [(1.8, False), (6.0, True)])
def test_an_arm_that_swings_faster_than_anything_it_is_sent_latches(share: float, stopped: bool) -> None:
    """It leaps in no message: 1.5 cm in 10 ms, as an arm at the end of its reach did."""
    each = rig("twist")
    each.until_passing()
    begun = each.tool.copy()
    for _ in range(8):
        each.tool = each.tool + np.array([0.0, 0.0, share * LIMITS.linear_speed * 0.01])
        each.run(0.01)
    assert (each.guard.state is State.STOPPED) is stopped
    assert bool(each.guard.tally.counts[Cause.POSE_JUMP]) is stopped
    assert np.linalg.norm(each.tool - begun) > 0.02


def test_a_pose_that_moves_within_reach_or_was_not_seen_for_long_does_not_leap() -> None:
    each = rig("twist", require_enable=False)
    for way_m, unseen_s in ((0.018, 0.0), (0.3, 1.0), (-0.02, 0.0)):
        each.run(0.3)
        each.run(unseen_s, without=("tool",))
        each.tool = each.tool + np.array([way_m, 0.0, 0.0])
        each.run(0.3)
        assert each.guard.tally.counts[Cause.POSE_JUMP] == 0


def test_a_robot_that_poses_no_longer_reach_latches_and_is_sent_nowhere_when_they_do_again() -> None:
    each = rig("pose", max_lead_m=0.2)
    each.until_passing()
    each.run(1.0)
    follow = each._follow
    each._follow = lambda sent: None  # type: ignore[method-assign]
    unreached = each.tool.copy()
    each.run(2.0)
    assert each.guard.state is State.STOPPED and "did not move" in each.guard.reason
    away = [np.linalg.norm(pose.position - unreached) for _, pose in each.sent[-200:] if isinstance(pose, Pose)]
    assert 0.02 < max(away) < 0.04, "it was sent on for 1 cm and 0.2 s at 0.1 m/s, and braked"
    assert away[-1] < 2e-4, "then back: an arm that is let go must not go there by itself"
    each._follow = follow  # type: ignore[method-assign]
    each.run(1.0)
    np.testing.assert_allclose(each.tool, unreached, atol=2e-4)
    assert each.guard.clear_stop(each.now) == ""
    each.until_passing()
    first = each.sent[-1][1]
    assert isinstance(first, Pose)
    assert np.linalg.norm(first.position - unreached) <= LIMITS.linear_speed * 0.01


def test_a_robot_that_lags_is_not_one_that_is_not_reached() -> None:
    each = rig("pose")
    late: list[Sent | None] = []

    def follow(sent: Sent | None) -> None:
        late.append(sent)
        if len(late) > 15 and isinstance(then := late[-15], Pose):
            each.tool = then.position

    each._follow = follow  # type: ignore[method-assign]
    each.until_passing()
    each.run(10.0)
    assert each.guard.state is State.PASSING and each.guard.tally.counts[Cause.NOT_FOLLOWING] == 0


def test_a_stop_button_that_is_pressed_latches_and_one_that_falls_silent_holds() -> None:
    each = rig("twist")
    each.until_passing()  # nobody asked for a button
    each.guard.stop_button(False, each.now)
    each.run(0.4)
    assert each.guard.state is State.PASSING
    each.run(0.2)
    assert each.guard.state is State.HOLDING and "is the button connected?" in each.guard.reason
    each.guard.stop_button(True, each.now)
    each.run(0.1)
    assert each.guard.state is State.STOPPED
    each.run(1.0)
    assert "persists" in each.guard.clear_stop(each.now), "it is still pressed, as far as anybody knows"
    each.guard.stop_button(False, each.now)
    for _ in range(12):
        each.run(0.1)
        each.guard.stop_button(False, each.now)
    assert each.guard.clear_stop(each.now) == ""


def test_a_press_and_a_release_count_however_soon_they_end() -> None:
    each = rig("twist")
    each.until_passing()
    each.guard.enable(False, each.now)
    each.run(0.01)
    assert each.guard.state is State.HOLDING and each.guard.tally.counts[Cause.NOT_ENABLED] == 1
    each.until_passing()
    each.guard.stop_button(True, each.now)
    each.guard.stop_button(False, each.now)
    each.run(0.1)
    assert each.guard.state is State.STOPPED and each.guard.tally.counts[Cause.STOP] == 1
    assert "~/stop_pressed is true" in each.guard.reason


def test_a_switch_that_is_not_required_holds_nothing() -> None:
    each = rig("twist", require_enable=False)
    each.until_passing()
    each.guard.enable(False, each.now)
    each.run(0.1)
    assert each.guard.state is State.PASSING


def test_a_stop_button_that_is_required_must_be_heard_first() -> None:
    each = rig("twist", require_stop_button=True)
    each.run(1.5)
    assert each.guard.state is State.HOLDING and "no message yet" in each.guard.reason
    for _ in range(10):
        each.guard.stop_button(False, each.now)
        each.run(0.1)
    assert each.guard.state is State.PASSING


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_share_of_the_speed_is_kept_and_reached_within_the_acceleration(output: str, share: float) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.5)
    assert not each.guard.scale_speed(1.1) and not each.guard.scale_speed(float("nan")) and each.guard.speed_scale == 1
    assert each.guard.scale_speed(share)
    each.run(0.2)
    begun = len(each.sent)
    each.run(1.0)
    assert_within_limits(each)
    of_joints = output not in ("twist", "pose")
    limits = JOINTS.speeds if of_joints else np.array([LIMITS.linear_speed, LIMITS.angular_speed])
    found = velocities(each.sent[begun - 1 :], output=output)
    assert (np.array([np.linalg.norm(each, axis=1) for _, _, each in found]) <= share * limits + 1e-9).all()
    assert not any(cause.latches for cause in each.guard.tally.counts), each.guard.tally.counts


@pytest.mark.parametrize("output", ["twist", "pose"])
def test_another_source_outranks_the_driver_while_it_speaks_and_then_the_driver_goes_on(output: str) -> None:
    each = rig(output)
    each.until_passing()
    place = each.tool.copy()

    def lead(seconds: float) -> None:
        for k in range(round(seconds * 100)):
            each.advance(0.01)
            each.hear(("action",))  # a policy that is silent does not matter
            forward = np.array([0.03, 0, 0, 0, 0, 0.0])
            by_hand = (
                TwistCommand(each.stamp, forward)
                if output == "twist"
                else ToolPose(each.stamp, place + np.array([0.0003 * k, 0, 0]), UPRIGHT)
            )
            each.guard.command(by_hand, each.now, override=True)
            each.tick()

    lead(2.0)
    assert each.guard.state is State.PASSING and each.guard.overridden(each.now)
    assert each.tool[0] - place[0] > 0.04 and not each.guard.tally.counts[Cause.TWO_SOURCES]
    assert_within_limits(each)
    each.begin_anew()
    each.run(0.15)
    assert not each.guard.overridden(each.now)
    if output == "twist":
        each.run(1.0)
        assert each.guard.state is State.PASSING


@pytest.mark.parametrize(
    ("output", "command", "cause"),
    [
        ("pose", ToolPose(Stamp(START_NS, BASE), HOME + 0.3, UPRIGHT), Cause.FAR),
        ("twist", TwistCommand(Stamp(START_NS, BASE), np.full(6, np.nan)), Cause.NOT_FINITE),
    ],
)
def test_a_stop_is_told_by_what_ended_motion_and_not_by_the_silence_that_follows(output, command, cause) -> None:
    each = rig(output)
    each.until_passing()
    each.advance(0.01)
    each.hear(command=replace(command, stamp=each.stamp))
    stopped = each.tick().stopped
    assert stopped is not None and stopped.cause is cause


SLUGGISH = replace(LIMITS, linear_acceleration=0.2)  # 0.16 m to get to full speed
WEAK = replace(JOINTS, max_acceleration=(1.0, 2.0))  # 0.5 rad


def rushed(each: Rig, seconds: float, *, dt_s: float = 0.01) -> None:
    """A driver that goes at nearly full speed at once, and a robot that follows."""
    begun, way = (
        (each.tool.copy(), np.array([0.0, 1.0, 0.0])) if each.output == "pose" else (each.joints, np.array([0.98, 0]))
    )
    for tick in range(1, 1 + round(seconds / dt_s)):
        each.advance(dt_s)
        if each.output == "pose":
            command: Command = ToolPose(each.stamp, begun + 0.245 * way * tick * dt_s, UPRIGHT)
        else:
            stamp = Stamp(None if each.output == "position_array" else each.clock_ns)
            command = JointCommand(stamp, None, (begun + way * tick * dt_s)[None], np.array([0.0]))
        each.hear(command=command)
        each.tick()
        if each.guard.state is not State.PASSING:
            return


@pytest.mark.parametrize("output", ["pose", "joint_trajectory", "position_array"])
def test_commands_that_run_away_from_what_the_acceleration_allows_latch(output: str) -> None:
    """What goes out may be 0.2 s behind at full speed: 0.05 m, or 0.2 rad."""
    each = rig(output, limits=SLUGGISH, joints=WEAK, stop_time_s=2.0, max_lead_m=0.5, max_lead_rad=1.0)
    each.until_passing()
    rushed(each, 1.0)
    last = each.guard.tally.last
    assert last is not None and last.cause is Cause.OVER_ACCELERATION
    behind = float(last.detail.partition("ran away by ")[2].split()[0])
    allowed = 0.05 if output == "pose" else 0.2
    assert allowed <= behind < 1.15 * allowed


@pytest.mark.parametrize("output", ["pose", "position_array"])
def test_time_that_late_ticks_lost_is_not_the_drivers_fault(output: str) -> None:
    each = rig(output, max_lead_m=0.5, max_lead_rad=1.0)
    each.until_passing()
    rushed(each, 0.2)
    rushed(each, 0.54, dt_s=0.09)
    assert each.guard.state is State.PASSING, each.guard.reason
    assert not each.guard.tally.counts.keys() & set(LATCHING)


def passes_again_after(each: Rig, dt_s: float = 0.01) -> float:
    """Seconds until motion passes, from now, when all is well."""
    for tick in range(300):
        each.begin_anew()
        each.advance(dt_s)
        each.hear()
        each.tick()
        if each.guard.state is State.PASSING:
            return round(tick * dt_s, 3)
    raise AssertionError(each.guard.reason)


@pytest.mark.parametrize("output", OUTPUTS)
def test_motion_resumes_half_a_second_after_the_last_failure(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.guard.sources("two")
    each.run(0.3)
    assert each.guard.state is State.HOLDING
    each.guard.sources("")
    assert passes_again_after(each) == pytest.approx(0.49, abs=0.011)


def test_what_fails_and_heals_by_turns_lets_nothing_through() -> None:
    each = rig("twist")
    each.until_passing()
    for _ in range(10):
        each.guard.sources("two")
        each.run(0.02)
        each.guard.sources("")
        each.run(0.4)
        assert each.guard.state is State.HOLDING


def test_a_stop_can_be_cleared_half_a_second_after_its_cause_was_last_seen() -> None:
    each = rig("twist")
    assert each.guard.clear_stop(each.now) == "", "nothing is stopped"
    each.until_passing()
    each.guard.press_stop("test", each.now)
    each.run(0.49)
    assert "persists: stop, stop was pressed (test)" in each.guard.clear_stop(each.now)
    assert each.guard.state is State.STOPPED
    each.run(0.02)
    assert each.guard.clear_stop(each.now) == ""
    assert passes_again_after(each) == pytest.approx(0.49, abs=0.011), "who clears a stop has a moment to step back"


def test_a_stop_is_not_cleared_while_the_robot_still_moves() -> None:
    each = rig("twist", limits=replace(LIMITS, linear_acceleration=0.15), stop_time_s=2.0)
    each.until_passing()
    each.run(1.0)
    each.guard.press_stop("test", each.now)
    each.advance(0.08)
    each.tick()
    for _ in range(5):
        each.advance(0.09)
        each.tick()
    assert each.guard.clear_stop(each.now) == "the robot is still being stopped"


def test_the_first_cause_that_latched_is_told_and_the_last_one_must_be_gone() -> None:
    each = rig("twist")
    each.until_passing()
    each.guard.press_stop("first", each.now)
    each.run(0.4)
    each.guard.press_stop("second", each.now)
    each.run(0.3)
    assert "first" in each.guard.clear_stop(each.now)


def test_a_grippers_command_that_came_before_or_during_a_stop_never_goes_out() -> None:
    each = rig("twist")
    each.until_passing()
    grip = GripperCommand(None, np.array([0.04]))
    each.guard.gripper(grip, each.now)
    each.guard.press_stop("test", each.now)
    each.run(0.3)
    each.guard.gripper(grip, each.now)
    each.run(0.3)
    assert each.guard.clear_stop(each.now) == ""
    each.guard.gripper(grip, each.now)
    each.until_passing()
    each.run(0.5)
    assert [outcome.gripper for outcome in each.outcomes if outcome.gripper is not None] == []


def test_a_grippers_command_of_the_moment_before_motion_passes_does_not_go_out() -> None:
    each = rig("twist")
    while each.guard.state is not State.PASSING:
        each.guard.gripper(GripperCommand(None, np.array([0.04])), each.now)
        each.run(0.01)
    assert each.outcomes[-1].gripper is None
    each.run(0.1)
    assert not [outcome for outcome in each.outcomes if outcome.gripper is not None]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (GripperCommand(None, np.array([0.0])), None),
        (GripperCommand(None, np.array([0.04])), None),
        (GripperCommand(("finger",), np.array([0.02])), None),
        (GripperCommand(None, np.array([-1e-6])), Cause.OUTSIDE),
        (GripperCommand(None, np.array([0.04 + 1e-6])), Cause.OUTSIDE),
        (GripperCommand(None, np.array([np.inf])), Cause.NOT_FINITE),
        (GripperCommand(None, np.array([0.01, 0.02])), Cause.BAD_FORM),
        (GripperCommand(None, np.array([])), Cause.BAD_FORM),
        (GripperCommand(("thumb",), np.array([0.02])), Cause.BAD_FORM),
        (GripperCommand(("finger", "finger"), np.array([0.02])), Cause.BAD_FORM),
    ],
)
def test_a_grippers_command_is_one_position_between_its_ends(command: GripperCommand, cause: Cause | None) -> None:
    each = rig("twist")
    each.until_passing()
    before = each.guard.tally.counts.copy()
    each.guard.gripper(command, each.now)
    assert [*(each.guard.tally.counts - before)] == [cause] * (cause is not None)
    each.run(0.01)
    assert (each.outcomes[-1].gripper is None) is (cause is not None)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_command_is_dropped_once_its_driver_is_silent_or_anything_was_refused(output: str) -> None:
    each = rig(output)
    each.until_passing()
    each.run(0.2)
    assert each.guard._gate.wants_motion
    each.run(0.12, without=["command"])
    assert not each.guard._gate.wants_motion
    each.until_passing()
    each.run(0.2)
    assert each.guard._gate.wants_motion
    each.guard.gripper(GripperCommand(None, np.array([np.nan])), each.now)
    assert not each.guard._gate.wants_motion


@pytest.mark.parametrize(("still_s", "stalls"), [(0.095, 0), (0.105, 1)])
def test_a_guard_that_did_not_run_for_a_tenth_of_a_second_begins_anew(still_s: float, stalls: int) -> None:
    each = rig("twist")
    each.until_passing()
    each.run(0.5)
    each.advance(still_s)
    each.hear()
    outcome = each.tick()
    assert each.guard.stalls == stalls and each.guard.tally.counts[Cause.STALLED] == stalls
    assert (each.guard.state is State.PASSING) is (stalls == 0)
    if stalls:
        assert isinstance(outcome.sent, SentTwist) and not outcome.sent.velocity.any()
        assert outcome.stopped
    each.until_passing()


@pytest.mark.parametrize(
    ("passed_s", "clock_s", "cause"), [(0.2, 0.2, Cause.STALLED), (0.01, 0.5, Cause.CLOCK), (0.01, -0.5, Cause.CLOCK)]
)
def test_a_standstill_or_a_clock_that_jumps_is_told_as_the_cause_and_not_the_silence_that_follows(
    passed_s: float, clock_s: float, cause: Cause
) -> None:
    each = rig("twist")
    each.until_passing()
    each.advance(passed_s, clock_s=clock_s)
    each.hear()
    stopped = each.tick().stopped
    assert stopped is not None and stopped.cause is cause


def test_after_a_standstill_what_was_queued_is_not_heard() -> None:
    each = rig("twist", require_enable=False)
    each.until_passing()
    each.advance(0.2)
    each.tick()
    each.advance(0.04)
    each.hear()
    assert each.guard._watch.measured(each.now).tool is None
    each.guard.gripper(GripperCommand(None, np.array([np.nan])), each.now)
    assert each.guard.state is State.HOLDING and not each.guard.tally.counts[Cause.NOT_FINITE]
    each.advance(0.02)
    each.hear()
    assert each.guard._watch.measured(each.now).tool is not None


def test_a_hand_that_lets_go_is_heard_even_then() -> None:
    each = rig("twist")
    each.until_passing()
    each.advance(0.2)
    each.tick()
    each.guard.enable(False, each.now)
    each.tick()
    assert "~/enable is false" in each.guard.reason


@pytest.mark.parametrize("passing", [True, False])
def test_a_guard_that_ends_brakes_and_lets_nothing_through_any_more(passing: bool) -> None:
    each = rig("twist")
    if passing:
        each.until_passing()
        each.run(0.5)
    assert each.guard.at_rest is not passing
    each.guard.end(each.now)
    each.run(0.3)
    assert each.guard.at_rest and each.guard.state is (State.STOPPED if passing else State.HOLDING)
    assert each.guard.tally.counts[Cause.STOP] == passing


def test_each_end_of_motion_is_told_once_and_so_is_a_stop_while_it_holds() -> None:
    each = rig("twist")
    each.until_passing()
    each.outcomes.clear()
    each.run(0.3, without=["enable"])
    each.run(0.6, without=["enable"])
    assert sum(outcome.stopped is not None for outcome in each.outcomes) == 1
    each.guard.press_stop("test", each.now)
    each.run(0.3)
    assert sum(outcome.stopped is not None for outcome in each.outcomes) == 2


def test_a_failure_counts_each_time_that_it_begins_and_is_told_to_the_log_once() -> None:
    each = rig("twist")
    each.until_passing()
    each.guard.tally.take_new()
    for _ in range(2):
        each.guard.sources("two of them")
        each.run(0.1)
        each.guard.sources("")
        each.run(0.1)
    assert each.guard.tally.counts[Cause.TWO_SOURCES] == 2
    assert [refusal.detail for refusal in each.guard.tally.take_new()] == ["two of them"] * 2
    assert each.guard.tally.take_new() == []


def test_the_reason_is_empty_while_motion_passes_and_says_the_last_cause_when_it_is_about_to() -> None:
    each = rig("twist")
    each.until_passing()
    assert each.guard.reason == ""
    each.guard.sources("two of them")
    each.run(0.01)
    assert each.guard.reason == "two_sources: two of them"
    each.guard.sources("")
    each.run(0.1)
    resumes = "about to resume, after 0.5 s without failures; the last cause was "
    assert each.guard.reason == resumes + "two_sources: two of them"


def test_a_clock_that_jumps_stops_motion_and_forgets_what_was_heard() -> None:
    for jump_s, jumps in ((0.24, 0), (0.27, 1), (-0.02, 1)):
        each = rig("twist")
        each.until_passing()
        each.advance(0.01, clock_s=0.01 + jump_s)
        each.tick()
        assert each.guard.tally.counts[Cause.CLOCK] == jumps
        assert (each.guard._watch.measured(each.now).tool is None) is bool(jumps)


def test_a_driver_that_waited_begins_with_any_command() -> None:
    """While nothing passes its commands follow on nothing: it may begin anew where the robot is."""
    each = rig("twist")
    each.until_passing()
    each.run(0.5)
    each.guard.sources("two")
    each.run(0.2)
    each.advance(0.01)
    each.hear(command=TwistCommand(each.stamp, np.array([0.0, -0.2, 0.0, 0.0, 0.0, 0.0])))
    assert not each.guard.tally.counts[Cause.OVER_ACCELERATION]
