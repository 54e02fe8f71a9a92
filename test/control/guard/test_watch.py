# SPDX-License-Identifier: Apache-2.0
"""Everybody is heard for exactly as long as the settings say, by stamps that can be true."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.guarding import BASE, HOME, JOINTS, LIMITS, START_NS, UPRIGHT, settings

from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointPositions, Stamp, ToolPose
from specvla_ros.control.guard.guard import _gate
from specvla_ros.control.guard.watch import ClockWatch, Confirmation, Watch

BEGUN_S = 50.0


def at(seconds: float) -> Instant:
    """A moment on both clocks, which run alike."""
    return Instant(BEGUN_S + seconds, START_NS + round(seconds * 1e9))


def stamped(seconds: float) -> Stamp:
    return Stamp(at(seconds).clock_ns, BASE)


def pose(seconds: float, y_m: float = 0.0, frame: str = BASE) -> ToolPose:
    return ToolPose(replace(stamped(seconds), frame_id=frame), HOME + np.array([0.0, y_m, 0.0]), UPRIGHT)


def joints(seconds: float, *positions: float) -> JointPositions:
    return JointPositions(stamped(seconds), ("finger", *JOINTS.names), np.array([0.0, *positions]))


def causes(found: list[Refusal]) -> set[Cause]:
    return {refusal.cause for refusal in found}


def heard(output: str = "joint_trajectory", **changes: object) -> Watch:
    """Who has just heard everybody."""
    watch = Watch(settings(output, **changes))
    watch.clock.look(at(0.0))
    watch.tool(pose(0.0), at(0.0))
    watch.joints(joints(0.0, 0.1, 0.2), at(0.0))
    watch.enable(True, at(0.0))
    watch.action(stamped(0.0), "lift", at(0.0))
    assert watch.command(stamped(0.0), at(0.0))
    return watch


SILENCES: list[tuple[float, Callable[[Watch, Instant], object]]] = [
    (0.1, lambda watch, now: watch.command_silent(now)),
    (1.0, lambda watch, now: watch.action_silent(now)),
    (0.2, lambda watch, now: watch.measured(now).tool is None),
    (0.2, lambda watch, now: watch.measured(now).joints is None),
    (0.2, lambda watch, now: Cause.STATE_MISSING in causes(watch.problems(now))),
    (0.3, lambda watch, now: Cause.CLOCK in causes(watch.problems(now))),
    (0.5, lambda watch, now: Cause.NOT_ENABLED in causes(watch.problems(now))),
]


@pytest.mark.parametrize(("timeout_s", "silent"), SILENCES)
def test_a_silence_is_noticed_when_its_timeout_is_over_and_not_before(
    timeout_s: float, silent: Callable[[Watch, Instant], object]
) -> None:
    watch = heard()
    assert not silent(watch, at(0.98 * timeout_s))
    assert silent(watch, at(1.02 * timeout_s))


@pytest.mark.parametrize("output", ["twist", "pose"])
def test_joints_are_not_missed_where_the_tool_is_commanded(output: str) -> None:
    watch = Watch(settings(output))
    watch.clock.look(at(0.0))
    watch.tool(pose(0.0), at(0.0))
    watch.enable(True, at(0.0))
    assert not watch.problems(at(0.0))


def test_who_was_never_heard_is_told_from_who_fell_silent() -> None:
    watch = Watch(settings("joint_trajectory"))
    words = [refusal.detail for refusal in watch.problems(at(0.0))]
    assert "tool pose: no message yet" in words and "joint_states: no message yet" in words
    watch.joints(JointPositions(stamped(0.0), ("finger", "left_shoulder"), np.zeros(2)), at(0.0))
    words = [refusal.detail for refusal in watch.problems(at(0.0))]
    assert "joint_states: no message has 'shoulder'; they have finger, left_shoulder" in words
    silent = heard().command_silent(at(0.35))
    assert silent is not None and silent.detail == "command: nothing new for 0.350 s"
    for output, topic in (("pose", "pose"), ("position_array", "joint_positions")):
        never = Watch(settings(output)).command_silent(at(0.0))
        assert never is not None and never.detail.startswith(f"command: no message yet on command/{topic}: ")


@pytest.mark.parametrize(("age_s", "judged"), [(0.09, True), (0.11, False), (-0.09, True), (-0.11, False)])
def test_a_command_is_judged_if_its_stamp_is_no_older_than_the_timeout_and_not_of_the_future(
    age_s: float, judged: bool
) -> None:
    watch = Watch(settings("twist"))
    assert watch.command(stamped(1.0 - age_s), at(1.0)) is judged
    silent = watch.command_silent(at(1.0))
    assert (silent is None) is judged
    assert silent is None or f"{abs(age_s):.3f} s {'old' if age_s > 0 else 'ahead'}" in silent.detail


def test_a_command_without_a_stamp_counts_when_it_comes() -> None:
    watch = Watch(settings("position_array"))
    assert watch.command(Stamp(None), at(1.0))
    assert watch.command(Stamp(None), at(1.05))
    assert watch.command_silent(at(1.14)) is None and watch.command_silent(at(1.16)) is not None


def test_a_command_that_is_refused_leaves_the_driver_silent() -> None:
    watch = heard()
    watch.refuse_command(Refusal(Cause.OUTSIDE, "it is beyond the range"))
    silent = watch.command_silent(at(0.0))
    assert silent is not None and "refused (outside): it is beyond the range" in silent.detail
    assert watch.command(stamped(0.01), at(0.01)) and watch.command_silent(at(0.01)) is None


def test_repeated_and_overtaken_messages_are_no_news() -> None:
    watch = heard()
    assert not watch.command(stamped(0.0), at(0.05))
    assert watch.tool(pose(0.0), at(0.05)) is None
    assert watch.tool(pose(0.04), at(0.05)) is not None
    assert watch.tool(pose(0.03), at(0.06)) is None


@pytest.mark.parametrize(("age_s", "counts"), [(0.19, True), (0.21, False), (-0.09, True), (-0.11, False)])
def test_a_measurement_counts_if_its_stamp_is_no_older_than_the_timeout_and_not_of_the_future(
    age_s: float, counts: bool
) -> None:
    watch = Watch(settings("joint_trajectory"))
    assert (watch.tool(pose(1.0 - age_s), at(1.0)) is not None) is counts
    watch.joints(joints(1.0 - age_s, 0.1, 0.2), at(1.0))
    measured = watch.measured(at(1.0))
    assert (measured.tool is not None) is counts and (measured.joints is not None) is counts


@pytest.mark.parametrize(("age_s", "lives"), [(0.99, True), (1.01, False)])
def test_an_action_is_a_sign_of_life_while_its_picture_is_new_enough(age_s: float, lives: bool) -> None:
    watch = Watch(settings("twist"))
    watch.action(stamped(5.0 - age_s), "lift", at(5.0))
    assert (watch.action_silent(at(5.0)) is None) is lives


def test_joints_are_measured_in_the_order_of_the_parameters() -> None:
    watch = Watch(settings("joint_trajectory"))
    message = JointPositions(stamped(0.0), ("elbow", "finger", "shoulder"), np.array([2.0, 0.0, 1.0]))
    watch.joints(message, at(0.0))
    measured = watch.measured(at(0.0)).joints
    assert measured is not None and measured.tolist() == [1.0, 2.0]


def test_measurements_without_a_stamp_are_told_as_such() -> None:
    watch = Watch(settings("joint_trajectory"))
    for stamp in (Stamp(0, BASE), Stamp(None, BASE)):  # of PoseStamped and of JointState
        watch.tool(replace(pose(0.0), stamp=stamp), at(0.0))
        watch.joints(replace(joints(0.0, 0.1, 0.2), stamp=stamp), at(0.0))
        told = [refusal.detail for refusal in watch.problems(at(0.0)) if refusal.cause is Cause.STATE_MISSING]
        assert [words.partition(": its publisher")[0] for words in told] == [
            "tool pose: header.stamp is 0",
            "joint_states: header.stamp is 0",
        ]


def test_a_tool_that_seems_outside_because_joints_are_in_degrees_is_told_with_a_hint() -> None:
    watch = Watch(settings("joint_trajectory"))
    watch.tool(pose(0.0, y_m=1.0), at(0.0))
    watch.joints(joints(0.0, 0.1, 0.2), at(0.0))
    outside = next(refusal for refusal in watch.problems(at(0.0)) if refusal.cause is Cause.OUTSIDE)
    assert outside.detail.endswith("move it back by hand")
    watch.joints(joints(0.1, 10.0, 20.0), at(0.1))
    outside = next(refusal for refusal in watch.problems(at(0.1)) if refusal.cause is Cause.OUTSIDE)
    assert outside.detail.endswith("joint_states are in radians or metres: is this in degrees or millimetres?")


def test_joints_of_two_publishers_are_merged_and_are_as_old_as_the_older_part() -> None:
    watch, limit_s = Watch(settings("joint_trajectory")), settings("joint_trajectory").state_timeout_s

    def part(name: str, position: float, at_s: float) -> None:
        watch.joints(JointPositions(stamped(at_s), (name,), np.array([position])), at(at_s))

    def measured(at_s: float) -> list[float] | None:
        found = watch.measured(at(at_s)).joints
        return None if found is None else found.tolist()

    part("elbow", 2.0, 0.00)
    assert measured(0.0) is None
    part("shoulder", 1.0, 0.01)
    assert measured(0.01) == [1.0, 2.0]
    part("shoulder", 3.0, 0.02)
    assert measured(0.02) == [1.0, 2.0], "the elbow's position has counted once"
    part("elbow", 4.0, 0.03)
    assert measured(0.03) == [3.0, 4.0]
    for tick in range(40):  # one publisher falls silent
        part("shoulder", 5.0, 0.04 + 0.01 * tick)
    now_s = 0.03 + limit_s + 0.01
    assert measured(now_s) is None
    assert any("nothing new for" in each.detail and "'elbow'" in each.detail for each in watch.problems(at(now_s)))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (JointPositions(stamped(0.01), JOINTS.names, np.array([0.0])), "2 names and 1 positions"),
        (JointPositions(stamped(0.01), JOINTS.names, np.array([0.0, np.nan])), "elbow is nan"),
        (JointPositions(stamped(0.01), (*JOINTS.names, "elbow"), np.zeros(3)), "a duplicate name: elbow"),
    ],
)
def test_joints_that_cannot_be_read_are_missing_at_once_and_until_the_next_ones(
    broken: JointPositions, words: str
) -> None:
    watch = heard()
    watch.joints(broken, at(0.01))
    assert watch.measured(at(0.01)).joints is None
    assert any(words in refusal.detail for refusal in watch.problems(at(0.01)))
    watch.joints(joints(0.02, 0.1, 0.2), at(0.02))
    assert watch.measured(at(0.02)).joints is not None


def test_a_pose_that_cannot_be_read_is_missing_at_once_and_until_the_next_one() -> None:
    watch = heard()
    assert watch.tool(pose(0.01, frame="camera"), at(0.01)) is None
    assert watch.measured(at(0.01)).tool is None
    assert watch.tool(pose(0.02), at(0.02)) is not None
    assert watch.measured(at(0.02)).tool is not None


@pytest.mark.parametrize(("output", "edge_m"), [("twist", 0.05), ("pose", 0.05), ("joint_trajectory", 0.01)])
def test_a_tool_outside_of_the_workspace_may_come_back_from_its_edge_alone(output: str, edge_m: float) -> None:
    for out_m, outside in ((0.9 * edge_m, False), (1.1 * edge_m, True)):
        watch = Watch(settings(output), _gate(settings(output), None).return_m)
        watch.tool(pose(0.0, LIMITS.workspace_max[1] + out_m), at(0.0))
        assert (Cause.OUTSIDE in causes(watch.problems(at(0.0)))) is outside


def test_the_tools_velocity_is_that_of_the_last_tenth_of_a_second() -> None:
    watch = Watch(settings("twist"))
    for step in range(30):
        speed = 0.1 if step < 15 else 0.2
        y_m = 0.1 * min(step, 15) * 0.01 + 0.2 * max(0, step - 15) * 0.01
        watch.tool(pose(0.01 * step, y_m), at(0.01 * step))
        velocity = watch.measured(at(0.01 * step)).velocity
        if step < 5:
            assert velocity is None, "too short to tell"
        elif step < 15 or step > 26:
            assert velocity is not None
            np.testing.assert_allclose(velocity, [0.0, speed, 0.0], atol=1e-9)


@pytest.mark.parametrize(("way_m", "leaps"), [(0.024, False), (0.026, True)])
def test_a_pose_leaps_where_it_goes_further_than_twice_the_limit_and_two_centimetres(way_m: float, leaps: bool) -> None:
    watch = Watch(settings("twist"))
    watch.tool(pose(0.0), at(0.0))
    watch.tool(pose(0.01, way_m), at(0.01))  # 2 * 0.25 m/s * 0.01 s and 0.02 m: 0.025 m
    assert bool(watch.take_leap()) is leaps
    assert not watch.take_leap(), "it is told once"


@pytest.mark.parametrize(("turn_rad", "leaps"), [(0.115, False), (0.125, True)])
def test_a_pose_leaps_where_it_turns_further_than_twice_the_limit_and_a_tenth(turn_rad: float, leaps: bool) -> None:
    watch = Watch(settings("twist"))
    watch.tool(pose(0.0), at(0.0))
    turned = replace(pose(0.01), quaternion=(float(np.cos(turn_rad / 2)), 0.0, 0.0, float(np.sin(turn_rad / 2))))
    watch.tool(turned, at(0.01))  # 2 * 1 rad/s * 0.01 s and 0.1 rad: 0.12 rad
    assert bool(watch.take_leap()) is leaps


def test_after_a_standstill_nothing_heard_counts_and_what_was_queued_is_not_heard() -> None:
    watch = heard()
    watch.forget(at(0.0))
    assert not watch.accepts(at(0.04)) and watch.accepts(at(0.06))
    now = at(0.0)
    assert watch.command_silent(now) is not None and watch.action_silent(now) is not None
    assert watch.measured(now).tool is None and watch.measured(now).joints is None
    assert Cause.NOT_ENABLED in causes(watch.problems(now))
    assert watch.tool(pose(-1e-3), now) is not None, "stamps may begin anew"


def test_a_released_switch_is_told_and_a_held_one_ends_it() -> None:
    watch = heard()
    watch.enable(False, at(0.01))
    (problem,) = watch.problems(at(0.01))
    assert problem == Refusal(Cause.NOT_ENABLED, "~/enable is false")
    watch.enable(True, at(0.02))
    assert not watch.problems(at(0.02))
    assert not heard(require_enable=False).problems(at(0.0))
    silent = heard(state_timeout_s=5.0, clock_timeout_s=5.0).problems(at(0.6))
    assert ["silent" in each.detail for each in silent] == [True]


def test_two_sources_are_a_problem_while_there_are_two() -> None:
    watch = heard()
    watch.sources_problem = "two of them"
    assert watch.problems(at(0.0)) == [Refusal(Cause.TWO_SOURCES, "two of them")]


def test_a_clock_may_run_a_quarter_of_a_second_ahead_of_the_steady_one_and_never_back() -> None:
    for went_s, words in ((0.0, ""), (0.01, ""), (0.25, ""), (0.27, "ahead by 0.260 s"), (-0.001, "back by 0.001 s")):
        clock = ClockWatch()
        assert clock.look(at(0.0)) == ""
        said = clock.look(Instant(BEGUN_S + 0.01, START_NS + round(went_s * 1e9)))
        assert (said == "") is (words == "") and words in said


def test_a_clock_stands_still_since_it_last_went_on() -> None:
    clock = ClockWatch()
    assert clock.still_s(at(1.0)) == 0.0, "nobody looked yet"
    clock.look(at(0.0))
    clock.look(at(0.2))
    clock.look(Instant(BEGUN_S + 0.5, at(0.2).clock_ns))
    assert clock.still_s(Instant(BEGUN_S + 0.6, at(0.2).clock_ns)) == pytest.approx(0.4)


def agreed(*said: tuple[str, str]) -> str:
    confirmation = Confirmation()
    for verb, instruction in said:
        getattr(confirmation, verb)(instruction)
    return confirmation.problem()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "'' is not confirmed"),
        ([("follow", "lift")], "'lift' is not confirmed"),
        ([("ask", "lift")], "'lift' is not confirmed"),
        ([("confirm", "lift"), ("follow", "lift")], ""),
        ([("ask", "lift"), ("confirm", "lift"), ("follow", "lift")], ""),
        ([("confirm", "lift"), ("ask", "lift"), ("follow", "lift")], ""),
        ([("confirm", "lift"), ("follow", "drop")], "the policy follows 'drop'"),
        ([("confirm", "lift"), ("follow", "drop"), ("follow", "lift")], ""),
        ([("ask", "drop"), ("confirm", "lift"), ("follow", "lift")], "'drop' is requested"),
        ([("confirm", "lift"), ("follow", "lift"), ("follow", "drop")], "'drop' is not confirmed"),
        ([("confirm", "lift"), ("follow", "lift"), ("follow", "drop"), ("follow", "lift")], "is not confirmed"),
        ([("confirm", "lift"), ("follow", "lift"), ("ask", "drop"), ("ask", "lift")], "is not confirmed"),
    ],
)
def test_only_what_was_confirmed_is_asked_for_and_followed(said: list[tuple[str, str]], words: str) -> None:
    problem = agreed(*said)
    assert (problem == "") is (words == "") and words in problem
