# SPDX-License-Identifier: Apache-2.0
"""What a robot says of itself stops motion, and one that goes on after a stop is noticed."""

from types import SimpleNamespace as Message

import numpy as np
import pytest
from support.guarding import Rig, rig

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import SentJoints
from specvla_ros.control.guard.guard import State
from specvla_ros.control.guard.robot_state import StateRule
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError

# Fields and numbers as ur_dashboard_msgs, franka_msgs and controller_manager_msgs have them.
SAFETY = "/io_and_status_controller/safety_mode ur_dashboard_msgs/msg/SafetyMode mode=1|2"
PROGRAM = "/io_and_status_controller/robot_program_running std_msgs/msg/Bool data=true"
FRANKA = "/franka_robot_state_broadcaster/robot_state franka_msgs/msg/FrankaRobotState robot_mode = 2"
HARDWARE = (
    "/controller_manager/activity controller_manager_msgs/msg/ControllerManagerActivity "
    "hardware_components[arm].state.id=3"
)


def activity(**states: int) -> Message:
    return Message(
        hardware_components=[Message(name=name, state=Message(id=number)) for name, number in states.items()]
    )


@pytest.mark.parametrize(
    ("text", "right", "wrong", "said"),
    [
        (SAFETY, Message(mode=2), Message(mode=3), "safety_mode: mode is 3, but must be 1 or 2"),
        (PROGRAM, Message(data=True), Message(data=False), "data is false, but must be true"),
        (FRANKA, Message(robot_mode=2), Message(robot_mode=4), "robot_mode is 4, but must be 2"),
        (HARDWARE, activity(gripper=1, arm=3), activity(gripper=3, arm=2), "hardware_components[arm].state.id is 2"),
        (HARDWARE, activity(arm=3), activity(gripper=3), "has no hardware_components[arm]"),
        (SAFETY, Message(mode=1), Message(other=1), "has no mode"),
        (
            "/d diagnostic_msgs/msg/DiagnosticStatus level=0",
            Message(level=b"\x00"),
            Message(level=b"\x02"),
            "level is 2",
        ),
    ],
)
def test_a_field_of_any_message_is_read(text: str, right: Message, wrong: Message, said: str) -> None:
    rule = StateRule.parse(text)
    assert rule.problem(right) == ""
    assert said in rule.problem(wrong)


@pytest.mark.parametrize("text", ["/safety_mode", "/a std_msgs/Bool data=true", "/a std_msgs/msg/Bool data", "a b c=d"])
def test_a_rule_of_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"ur_dashboard_msgs/msg/SafetyMode mode=1\|2"):
        rig("twist", robot_states=(text,))


def running(output: str, **changes: object) -> tuple[Rig, StateRule]:
    each = rig(output, robot_states=(SAFETY,), **changes)
    rule = StateRule.parse(SAFETY)
    each.run(1.0)
    assert each.guard.state is State.HOLDING and "safety_mode: no message yet" in each.guard.reason
    each.guard.robot_state(rule, Message(mode=1))
    each.until_passing()
    return each, rule


def test_a_protective_stop_latches_and_cannot_be_cleared_while_it_lasts() -> None:
    each, rule = running("twist")
    each.guard.robot_state(rule, Message(mode=3))
    each.run(1.0)
    assert each.guard.state is State.STOPPED and each.guard.cause == Cause.ROBOT_STOPPED.value
    assert "persists" in each.guard.clear_stop(each.now)
    each.guard.robot_state(rule, Message(mode=1))
    each.run(1.0)
    assert each.guard.state is State.STOPPED, "it goes on by itself"
    assert each.guard.clear_stop(each.now) == ""
    each.until_passing()


def test_a_protective_stop_latches_however_soon_it_ends() -> None:
    each, rule = running("twist")
    each.guard.robot_state(rule, Message(mode=3))
    each.guard.robot_state(rule, Message(mode=1))
    each.run(0.1)
    assert each.guard.state is State.STOPPED and each.guard.cause == Cause.ROBOT_STOPPED.value
    assert each.guard.tally.counts[Cause.ROBOT_STOPPED] == 1


def test_a_state_that_nobody_publishes_any_more_holds() -> None:
    each, rule = running("twist")
    each.guard.robot_gone(frozenset({rule.topic}))
    each.run(0.5)
    assert each.guard.state is State.HOLDING and "it has no publisher" in each.guard.reason
    each.guard.robot_gone(frozenset())
    each.guard.robot_state(rule, Message(mode=1))
    each.until_passing()


@pytest.mark.parametrize("output", ["pose", "position_array"])
def test_a_robot_that_was_stopped_is_sent_to_where_it_stands(output: str) -> None:
    each, rule = running(output)
    each.run(0.3)
    stands = each.tool.copy(), each.joints.copy()
    each._follow = lambda sent: None  # type: ignore[method-assign]
    each.run(0.08)  # sent on, and it does not move
    each.guard.robot_state(rule, Message(mode=3))
    each.run(1.0)
    sent = [sent for _, sent in each.sent if sent is not None][-1]
    if isinstance(sent, Pose):
        assert np.abs(sent.position - stands[0]).max() < 2e-4
    else:
        assert isinstance(sent, SentJoints)
        assert np.abs(sent.positions - stands[1]).max() < 2e-4


@pytest.mark.parametrize("output", ["pose", "position_array", "joint_trajectory", "joint_trajectory_chunk"])
def test_a_robot_that_sinks_while_it_is_stopped_does_not_move_when_it_runs_again(output: str) -> None:
    each, rule = running(output)
    each.run(0.3)
    follow, each._follow = each._follow, lambda sent: None  # type: ignore[method-assign]
    each.guard.robot_state(rule, Message(mode=3))
    each.run(0.5)
    silent_from = len(each.sent)
    for _ in range(50):
        each.tool, each.joints = each.tool - np.array([0.0, 0.0, 1e-4]), each.joints - 1e-4
        each.run(0.01)
    assert all(sent is None for _, sent in each.sent[silent_from:]), "it does not listen"
    sunk = each.tool.copy(), each.joints.copy()
    each._follow = follow  # type: ignore[method-assign]
    each.guard.robot_state(rule, Message(mode=1))
    each.run(0.5)
    assert each.guard.state is State.STOPPED and each.sent[-1][1] is not None
    assert np.abs(each.tool - sunk[0]).max() < 1e-9 and np.abs(each.joints - sunk[1]).max() < 1e-9


def test_a_robot_that_goes_on_after_a_stop_is_told_once_and_latches() -> None:
    each = rig("twist")
    each.until_passing()
    each.run(0.5)

    def coast(sent: object) -> None:
        each.tool = each.tool + np.array([0.0, 0.0005, 0.0])  # 0.05 m/s whatever it is told

    each._follow = coast  # type: ignore[method-assign]
    each.guard.enable(False, each.now)
    for _ in range(150):
        each.run(0.01, without=("enable",))
    assert sum(outcome.disobeyed for outcome in each.outcomes) == 1
    assert each.guard.state is State.STOPPED and each.guard.cause == Cause.NOT_OBEYING.value
    assert "still moves at 0.050 m/s" in each.guard.reason


def test_a_robot_that_stands_and_is_then_led_by_hand_obeys() -> None:
    each = rig("twist")
    each.until_passing()
    each.guard.enable(False, each.now)
    each.run(1.0, without=("enable",))
    for _ in range(100):
        each.tool = each.tool + np.array([0.0, 0.001, 0.0])
        each.run(0.01, without=("enable",))
    assert not any(outcome.disobeyed for outcome in each.outcomes)
    assert each.guard.state is State.HOLDING


@pytest.mark.parametrize("output", ["twist", "pose"])
def test_a_tool_whose_pose_falls_silent_in_motion_is_not_known_to_disobey(output: str) -> None:
    each = rig(output, obey_time_s=0.2)
    each.until_passing()
    each.run(0.5)
    each.run(2.0, without=("tool",))
    assert each.guard.state is State.HOLDING and each.guard.cause == Cause.STATE_MISSING.value


def test_a_cleared_stop_is_told_at_once_and_not_as_a_stop_of_another_cause() -> None:
    each = rig("twist")
    each.until_passing()
    each.guard.press_stop("topic", each.now)
    each.run(2.0, without=("action",))
    assert each.guard.clear_stop(each.now) == ""
    assert each.guard.state is State.HOLDING
