# SPDX-License-Identifier: Apache-2.0
"""The driver over real topics: every output arrives where the action meant, and what is wrong moves nothing."""

import math
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mujoco
import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from rclpy.client import Client
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Header
from std_srvs.srv import SetBool
from support.driving import LIMITS, MOVE, NAMES, START, arm

import specvla_ros.lab.simulation
from specvla_ros.control.inverse_kinematics import UnreachableError
from specvla_ros.control.pose import Pose
from specvla_ros.errors import UserError
from specvla_ros.msg import GuardState
from specvla_ros.ros.driver.parameters import DriverParameters
from specvla_ros.ros.qos import LATCHED_STATE
from specvla_ros.ros.tool_pose import JointInput

ORDER = "specvla_ros.ros.driver.joint_order"
TABLE = Path(specvla_ros.lab.simulation.__file__).parent / "assets" / "table.xml"
JOINTS = [f"joint{i}" for i in range(1, 8)]
HOME = dict(zip(JOINTS, (0.0, 0.15, 0.0, -2.2, 0.0, 2.35, 0.785), strict=True))
GOAL = START.displaced(np.array(MOVE[:6]))
JOINT_OUTPUT = {
    "joints__model": str(TABLE),
    "joints__names": JOINTS,
    "joints__tool": "pinch",
    "joints__max_speed": [2.0],
    "joints__check_order": False,
    "tool_pose_source": "joint_states",
}
TRIES = {"output": "position_array", **JOINT_OUTPUT, "joints__check_order": True}
ASKS = {"output": "position_array", **JOINT_OUTPUT, "joints__controller": "/forward_position_controller"}


def assert_at(pose, goal, tolerance=1e-4):
    metres, radians = pose.distance(goal)
    assert metres < tolerance and radians < 10 * tolerance, (metres, radians)


def test_poses_take_the_tool_to_where_the_action_meant():
    with arm(output="pose", gripper__output="array", gripper__open_value=0.08) as robot:
        robot.start()
        robot.act()
        reaches(robot, GOAL)
        assert {message.header.frame_id for message in robot.poses} == {"base_link"}
        assert robot.grippers[-1].data.tolist() == [0.0]
        robot.act((0.0, 0, 0, 0, 0, 0, 1.0))
        robot.until(lambda: robot.grippers[-1].data.tolist() == [0.08])


def test_twists_take_the_tool_there_and_are_zero_and_fresh_at_rest():
    with arm(output="twist") as robot:
        robot.start()
        robot.act()
        robot.rest()
        assert_at(robot.pose, GOAL, 0.012)  # velocities on a clock that jitters
        robot.until(lambda: len(robot.twists) > 5 and not any(moves(message) for message in robot.twists[-5:]))
        for message in robot.twists[-5:]:
            age_s = robot.driver.get_clock().now().nanoseconds - (
                message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
            )
            assert 0 <= age_s < 10**10
            assert message.header.frame_id == "base_link"


@pytest.mark.parametrize("output", ["pose", "twist"])
def test_a_command_is_stamped_with_the_time_that_its_motion_was_computed_for(output, monkeypatch):
    with arm(output=output) as robot:
        robot.start()
        driver = robot.driver._driver
        assert driver is not None
        computed, step = [], driver.step

        def preempted(now_s, steady_s):
            target = step(now_s, steady_s)
            time.sleep(0.03)
            computed.append(now_s)
            return target

        monkeypatch.setattr(driver, "step", preempted)
        sent = robot.poses if output == "pose" else robot.twists
        robot.until(lambda: len(computed) > 5)
        robot.until(lambda: abs(stamp_s(sent[-1]) - computed[-1]) < 1e-6)


def stamp_s(message):
    return message.header.stamp.sec + message.header.stamp.nanosec * 1e-9


def moves(message):
    linear, angular = message.twist.linear, message.twist.angular
    return any((linear.x, linear.y, linear.z, angular.x, angular.y, angular.z))


def reaches(robot, goal, tolerance=1e-4):
    robot.rest()
    robot.until(lambda: robot.pose.distance(goal)[0] < tolerance and robot.pose.distance(goal)[1] < 10 * tolerance)


def tool_of(positions):
    model = mujoco.MjModel.from_xml_path(str(TABLE))
    data = mujoco.MjData(model)
    for name, value in zip(JOINTS, positions, strict=True):
        data.joint(name).qpos[0] = value
    mujoco.mj_forward(model, data)
    site = data.site("pinch")
    return Pose(site.xpos.copy(), site.xmat.reshape(3, 3).copy())


@pytest.mark.parametrize("output", ["joint_trajectory", "joint_trajectory_chunk", "position_array"])
def test_joints_take_the_tool_there(output):
    with arm(output=output, **JOINT_OUTPUT) as robot:
        robot.joints = HOME
        robot.start()
        start = tool_of([*HOME.values()])
        robot.act()
        robot.rest()
        robot.spin(20)
        positions = robot.arrays[-1].data if output == "position_array" else robot.trajectories[-1].points[-1].positions
        assert_at(tool_of(positions), start.displaced(np.array(MOVE[:6])), 2e-3)
        if output != "position_array":
            assert all(message.joint_names == JOINTS for message in robot.trajectories)
            assert all(message.points[0].time_from_start.nanosec > 0 for message in robot.trajectories)
            stamps = [stamp_s(message) for message in robot.trajectories]
            assert stamps[0] > 0 and (np.diff(stamps) > 0).all(), "by the time that the motion was computed for"


def measured_at(joints, apart_m):
    """The pose of a point so far below the one that the model names."""
    return tool_of([*joints.values()]).displaced(np.array([0.0, 0.0, -apart_m, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("output", "apart_m"), [("position_array", 0.01), ("joint_trajectory", 0.03), ("position_array", 0.048)]
)
def test_a_tool_that_is_measured_at_another_point_than_the_models_is_not_moved(output, apart_m):
    with arm(output=output, **JOINT_OUTPUT | {"tool_pose_source": "topic"}) as robot:
        robot.pose = measured_at(HOME, apart_m)
        activated(robot)
        robot.until(lambda: f"{apart_m:.3f} m and 0.000 rad apart" in robot.core.problem)
        robot.until(lambda: robot.actions.get_subscription_count())
        robot.act()
        robot.spin(20)
        assert robot.refused() == {"not_following": 1} and not robot.arrays and not robot.trajectories
        robot.pose = measured_at(HOME, 0.0)
        robot.until(lambda: robot.core.anchored)


@pytest.mark.parametrize("output", ["joint_trajectory", "position_array"])
def test_a_tool_that_is_found_at_another_point_while_it_stands_is_not_led_there(output):
    """As after a change of tools. Wherever the joints went, the tool would be measured as far away."""
    with arm(output=output, **JOINT_OUTPUT | {"tool_pose_source": "topic"}) as robot:
        robot.joints, robot.pose = HOME, measured_at(HOME, 0.0)
        robot.start()
        for _ in range(200):
            robot.pose = measured_at(robot.joints, 0.04)
            robot.spin(1)
        assert "0.040 m and 0.000 rad apart" in robot.core.problem
        np.testing.assert_allclose([*robot.joints.values()], [*HOME.values()], atol=1e-6)
        robot.pose = measured_at(robot.joints, 0.0)
        robot.until(lambda: robot.core.anchored and not robot.core.problem)
        robot.act()
        assert not robot.refused()


def test_joint_velocities_take_the_tool_there_and_end_in_zeros():
    with arm(output="velocity_array", **JOINT_OUTPUT) as robot:
        robot.joints = HOME
        robot.start()
        start = tool_of([*HOME.values()])
        robot.act()
        robot.rest()
        robot.until(lambda: not any(robot.arrays[-1].data))
        assert_at(tool_of([*robot.joints.values()]), start.displaced(np.array(MOVE[:6])), 2e-3)
        sent = np.array([message.data for message in robot.arrays])
        assert np.abs(sent).max() <= np.array(JOINT_OUTPUT["joints__max_speed"]).max()


FAR = (0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def under_way(robot):
    """Follows a long action, until the robot moves; returns the velocities that are sent last."""
    robot.joints, robot.pose = HOME, tool_of([*HOME.values()])
    robot.start()
    robot.act(FAR, action_dt=2.0)

    def velocities():
        if robot.arrays:
            return np.array(robot.arrays[-1].data)
        return np.array([moves(robot.twists[-1])], dtype=float) if robot.twists else np.zeros(1)

    robot.until(lambda: velocities().any())
    return velocities


@pytest.mark.parametrize("output", ["twist", "velocity_array"])
def test_velocities_end_in_zeros_when_the_driver_is_deactivated_or_fails(output, monkeypatch):
    """Many controllers keep the last velocity: silence would leave the arm in motion."""
    with arm(output=output, **JOINT_OUTPUT) as robot:
        velocities = under_way(robot)
        robot.driver.trigger_deactivate()
        robot.until(lambda: not velocities().any())
    with arm(output=output, **JOINT_OUTPUT) as robot:
        velocities = under_way(robot)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no number"):
            patched.setattr(robot.core, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("no number")))
            robot.spin(5)
        robot.until(lambda: not velocities().any())


def test_a_guard_is_sent_no_sudden_zeros():
    """It would refuse them as a jump, which latches; silence makes it brake."""
    with arm(output="velocity_array", **JOINT_OUTPUT) as robot:
        passing = robot.node.create_publisher(GuardState, "guard_state", LATCHED_STATE)
        passing.publish(GuardState(state=GuardState.PASSING, speed_scale=1.0))
        velocities = under_way(robot)
        robot.until(lambda: robot.driver._guard_spoke)
        robot.driver.trigger_deactivate()
        for _ in range(10):
            robot.executor.spin_once(timeout_sec=0.02)
        assert velocities().any()


def test_velocities_brake_when_no_target_can_be_followed(monkeypatch):
    limits = {"joints__max_acceleration": [20.0], "joints__max_jerk": [500.0]}
    with arm(output="velocity_array", **JOINT_OUTPUT, **limits) as robot:
        velocities = under_way(robot)
        sent = []  # by the driver, since a busy machine loses some on their way here
        publisher = vars(robot.driver._output)["_publisher"]
        publish = publisher.publish

        def published(message):
            sent.append(message.data)
            publish(message)

        def unreachable(target):
            raise UnreachableError("out of reach")

        monkeypatch.setattr(publisher, "publish", published)
        robot.until(lambda: sent)
        monkeypatch.setattr(robot.driver._solver, "follow", unreachable)
        robot.until(lambda: not velocities().any())
        assert len(sent) > 1 and (np.abs(np.diff(np.array(sent), axis=0)) <= 0.2 + 1e-9).all()
        assert robot.refused()["unreachable"] > 0


def test_joints_that_are_measured_no_more_bring_velocities_to_rest():
    """The tool's pose comes from elsewhere and goes on, while the joints' errors would grow unseen."""
    with arm(output="velocity_array", tool_pose_timeout_s=0.3, **JOINT_OUTPUT | {"tool_pose_source": "topic"}) as robot:
        velocities = under_way(robot)
        publisher, silent = robot._joint_states, SimpleNamespace(publish=lambda message: None)
        robot._joint_states = silent  # type: ignore[assignment]
        robot.until(lambda: "the newest joint_states are" in robot.core.problem)
        robot.until(lambda: not velocities().any())
        robot._joint_states = publisher
        robot.until(lambda: not robot.core.problem)


def test_joints_from_the_future_do_not_count_as_measured():
    """Else velocities would go on without a measurement until the clock is there."""
    with arm(output="velocity_array", tool_pose_timeout_s=0.3, **JOINT_OUTPUT | {"tool_pose_source": "topic"}) as robot:
        velocities = under_way(robot)
        publisher, ahead_s = robot._joint_states, 60

        def publish(message):
            message.header.stamp.sec += ahead_s
            publisher.publish(message)

        robot._joint_states = SimpleNamespace(publish=publish)
        robot.until(lambda: "the stamp of joint_states lies" in robot.driver._last_refusal)
        robot.until(lambda: "the newest joint_states are" in robot.core.problem)
        robot.until(lambda: not velocities().any())
        robot._joint_states = publisher
        robot.until(lambda: not robot.core.problem)


def test_joints_that_were_measured_before_the_clock_went_back_are_measured_no_more():
    with arm(output="velocity_array", tool_pose_timeout_s=0.3, **JOINT_OUTPUT | {"tool_pose_source": "topic"}) as robot:
        velocities = under_way(robot)
        robot._joint_states = SimpleNamespace(publish=lambda message: None)
        robot.spin(5)
        robot.driver._joints_s += 60.0  # as seen from a clock that went back by a minute
        robot.until(lambda: "no joint_states received since the clock went back" in robot.core.problem)
        robot.until(lambda: not velocities().any())


def test_the_order_of_velocities_is_asked_for_and_not_tried(capfd):
    with arm(output="velocity_array", **{**JOINT_OUTPUT, "joints__check_order": True}) as robot:
        assert robot.driver.trigger_configure().name == "FAILURE"
        assert "set joints.controller to the controller's node" in capfd.readouterr().err


def test_another_parts_joint_states_are_no_error():
    """A gripper has a publisher of its own, and knows nothing of the arm; what is not commanded may be NaN."""
    heard: list[Any] = []
    bad: list[str] = []
    node: Any = SimpleNamespace(create_subscription=lambda *_: None)
    joints = JointInput(node, ("a", "b"), lambda _, positions: heard.append(positions), bad.append)
    joints._on_message(JointState(name=["finger"], position=[]))
    assert joints.lacking == "joint_states: no message has 'a'; they have finger" and not heard and not bad
    header = Header(stamp=Time(seconds=1).to_msg())
    joints._on_message(JointState(header=header, name=["b", "finger", "a"], position=[2.0, math.nan, 1.0]))
    assert heard == [{"a": 1.0, "b": 2.0}] and not joints.lacking and not bad
    joints._on_message(JointState(name=["a", "b"], position=[1.0]))
    joints._on_message(JointState(name=["a", "b"], position=[1.0, math.nan]))
    joints._on_message(JointState(name=["a", "b", "b"], position=[1.0, 1.0, 1.0]))
    assert len(heard) == 1 and [text.removeprefix("joint_states: it has ") for text in bad] == [
        "2 names and 1 positions",
        "a value that is not finite: b is nan",
        "a duplicate name: b",
    ]
    joints._on_message(JointState(name=["finger"], position=[0.0]))
    assert joints.lacking == "joint_states: it has a duplicate name: b"


def test_an_arm_in_two_messages_is_measured_when_the_older_one_was():
    heard: list[Any] = []
    node: Any = SimpleNamespace(create_subscription=lambda *_: None)
    joints = JointInput(node, ("a", "b"), lambda at_s, found: heard.append((round(at_s, 3), found)), pytest.fail)

    def part(name: str, position: float, at_s: float) -> None:
        stamp = Time(nanoseconds=round(at_s * 1e9)).to_msg()
        joints._on_message(JointState(header=Header(stamp=stamp), name=[name], position=[position]))

    part("a", 1.0, 1.00)
    part("b", 2.0, 1.01)
    part("a", 3.0, 1.02)  # waits for a new position of b
    part("b", 4.0, 1.03)
    part("a", 5.0, 1.04)
    part("b", 6.0, 1.20)  # the position of a is too old
    assert heard == [(1.0, {"a": 1.0, "b": 2.0}), (1.02, {"a": 3.0, "b": 4.0})]
    assert joints.lacking == "joint_states: 'a' came 0.160 s before the last message, maximum 0.05 s"


def test_a_dry_run_sends_nothing_and_needs_no_limits():
    with arm(**{name.replace(".", "__"): None for name in LIMITS}) as robot:
        assert robot.driver.trigger_configure().name == "SUCCESS"
        assert robot.driver.trigger_activate().name == "SUCCESS"
        robot.until(lambda: robot.actions.get_subscription_count())
        robot.act()
        assert robot.driver._taken == 1
        assert not (robot.poses or robot.twists or robot.arrays or robot.trajectories)


@pytest.mark.parametrize(
    ("values", "changes", "kind"),
    [
        ((math.nan, *MOVE[1:]), {}, "not_finite"),
        ((*MOVE[:6], math.inf), {}, "not_finite"),
        ((3.0, *MOVE[1:]), {}, "too_large"),
        (MOVE, {"age_s": 1.5}, "too_old"),
        (MOVE, {"age_s": -0.5}, "from_the_future"),
        (MOVE, {"age_s": 0.9}, "no_pose"),
        (MOVE, {"action_dt": 0.0}, "unreadable"),
        (MOVE, {"rotation": "euler"}, "unreadable"),
        (MOVE, {"reference": ""}, "unreadable"),
        (MOVE, {"horizon": 0}, "unreadable"),
        (MOVE, {"horizon": 4_000_000_000}, "unreadable"),
        (MOVE, {"names": []}, "unreadable"),
        (MOVE, {"names": [f"joint_{i}" for i in range(7)]}, "unreadable"),
        (MOVE[:5], {"names": NAMES[:5]}, "wrong_shape"),
    ],
)
def test_what_is_wrong_is_refused_and_moves_nothing(values, changes, kind):
    with arm(output="pose") as robot:
        robot.start()
        robot.act(values, **changes)
        assert robot.refused() == {kind: 1}
        robot.spin(30)
        assert_at(robot.pose, START, 1e-9)
        robot.act()
        reaches(robot, GOAL)


def test_an_action_in_another_frame_is_refused():
    with arm(output="pose") as robot:
        robot.start()
        message = robot.action()
        message.header.frame_id = "camera_optical"
        robot.actions.publish(message)
        robot.until(robot.refused)
        assert "base_link" in robot.driver._last_refusal


def test_a_change_of_convention_while_active_is_refused():
    with arm(output="pose") as robot:
        robot.start()
        robot.act()
        robot.act(action_dt=0.1)
        assert robot.refused() == {"unreadable": 1}
        assert "deactivate" in robot.driver._last_refusal


def test_several_frames_in_flight_are_refused_where_nothing_compensates():
    with arm(output="pose", compensate="none") as robot:
        robot.start()
        robot.act(mode="specpipe")
        assert robot.refused() == {"unreadable": 1}
        robot.act(mode="spec")
        reaches(robot, GOAL)


def test_without_a_measured_pose_the_tool_comes_to_rest_and_follows_nothing():
    with arm(output="pose", tool_pose_timeout_s=0.3) as robot:
        robot.start()
        robot.act((0.2, 0, 0, 0, 0, 0, 0), action_dt=2.0)
        robot.measured = False
        robot.until(lambda: "old" in robot.core.problem)
        robot.rest()
        assert robot.pose.distance(START)[0] < 0.15
        robot.act(action_dt=2.0)
        assert robot.refused() == {"not_following": 1}
        robot.measured = True
        robot.until(lambda: not robot.core.problem)


def test_a_measured_pose_from_the_future_is_refused_and_the_next_ones_count():
    with arm(output="pose") as robot:
        robot.start()
        seconds = robot.driver.get_clock().now().nanoseconds // 10**9
        message = PoseStamped(header=Header(stamp=Time(seconds=seconds + 60).to_msg(), frame_id="base_link"))
        message.pose.orientation.w = 1.0
        robot._tool_pose.publish(message)
        robot.until(lambda: robot.refused() == {"bad_state": 1})
        assert "s ahead of the clock" in robot.driver._last_refusal
        robot.act()
        reaches(robot, GOAL)


def test_a_refused_measurement_is_told_until_a_good_one_of_its_kind_comes():
    """Then the reason why the tool stands is another, and must not stay hidden."""
    with arm(output="pose", diagnostics_period_s=0.05) as robot:
        robot.measured = False
        assert robot.driver.trigger_configure().name == "SUCCESS"
        assert robot.driver.trigger_activate().name == "SUCCESS"
        message = PoseStamped(header=Header(stamp=Time(seconds=1).to_msg(), frame_id="world"))
        robot._tool_pose.publish(message)
        robot.until(lambda: robot.diagnostics and "its frame is 'world'" in robot.status().message)
        message.header = Header(frame_id="base_link")
        message.pose.orientation.w = 1.0
        robot._tool_pose.publish(message)
        robot.until(lambda: "tool pose: header.stamp is 0: its publisher must fill in" in robot.status().message)
        robot.pose, robot.measured = Pose(np.array([1.5, 0.0, 0.3]), START.rotation), True
        robot.until(lambda: "outside the workspace" in robot.status().message)


def test_hold_brings_the_tool_to_rest_until_it_is_told_to_go_on():
    with arm(output="pose") as robot:
        robot.start()
        client: Client = robot.node.create_client(SetBool, "/driver/hold")
        robot.until(client.service_is_ready)
        robot.act((0.2, 0, 0, 0, 0, 0, 0), action_dt=2.0)
        answer = client.call_async(SetBool.Request(data=True))
        robot.until(answer.done)
        robot.rest()
        here = robot.pose
        robot.act(action_dt=2.0)
        assert robot.refused() == {"not_following": 1}
        robot.spin(20)
        assert_at(robot.pose, here, 1e-9)
        answer = client.call_async(SetBool.Request(data=False))
        robot.until(answer.done)
        robot.act(action_dt=2.0)
        reaches(robot, here.displaced(np.array(MOVE[:6])))


def test_a_robot_that_was_held_elsewhere_is_not_pulled_to_where_it_was_sent():
    with arm(output="pose") as robot:
        robot.start()
        robot.held = True
        robot.act((0.2, 0, 0, 0, 0, 0, 0))
        robot.rest()
        robot.until(lambda: robot.core.target.pose.distance(START)[0] < 1e-6)
        robot.rest()
        robot.held = False
        robot.act()
        reaches(robot, GOAL)


def test_while_the_guard_lets_nothing_through_the_target_stays_at_the_robot():
    with arm(output="pose") as robot:
        robot.start()
        passing = robot.node.create_publisher(GuardState, "guard_state", LATCHED_STATE)
        robot.act((0.2, 0, 0, 0, 0, 0, 0), action_dt=1.0)
        robot.spin(10)
        robot.held = True
        passing.publish(GuardState(state=GuardState.HOLDING, speed_scale=1.0))
        robot.until(lambda: robot.core.guarded)
        robot.rest()  # it brakes past the robot first
        robot.until(lambda: robot.core.target.pose.distance(robot.pose)[0] < 0.003)
        robot.act(action_dt=1.0)
        assert robot.refused() == {"not_following": 1}
        here, robot.held = robot.pose, False
        passing.publish(GuardState(state=GuardState.PASSING, speed_scale=1.0))
        robot.until(lambda: not robot.core.guarded)
        robot.act(action_dt=1.0)
        reaches(robot, here.displaced(np.array(MOVE[:6])), 0.004)


def test_a_tool_outside_the_workspace_is_not_moved():
    with arm(output="pose") as robot:
        robot.pose = Pose(np.array([1.5, 0.0, 0.3]), START.rotation)
        assert robot.driver.trigger_configure().name == "SUCCESS"
        assert robot.driver.trigger_activate().name == "SUCCESS"
        robot.until(lambda: "outside the workspace" in robot.core.problem)
        assert not robot.poses


def test_two_publishers_of_actions_stop_the_robot():
    with arm(output="pose") as robot:
        robot.start()
        second = robot.node.create_publisher(type(robot.action()), "action", 10)
        robot.until(lambda: "only one may" in robot.core.problem)
        robot.act()
        assert robot.refused() == {"not_following": 1}
        robot.node.destroy_publisher(second)
        robot.until(lambda: not robot.core.problem)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"output": "pose", "limits__linear_jerk": None}, "limits.linear_jerk"),
        ({"output": "twist", "limits__workspace_min": None, "limits__workspace_max": None}, "limits.workspace_min"),
        ({"output": "position_array"}, "joints.model"),
        ({"output": "position_array", **JOINT_OUTPUT, "joints__tool": "hand_of_god"}, "no site or body"),
        ({"output": "position_array", **JOINT_OUTPUT, "joints__names": ["elbow"]}, "no joint 'elbow'"),
        ({"output": "position_array", **JOINT_OUTPUT, "joints__max_speed": None}, "joints.max_speed"),
        ({"output": "position_array", **JOINT_OUTPUT, "joints__model": "/nowhere.xml"}, "/nowhere.xml"),
        ({"output": "pose", "gripper__output": "trajectory"}, "gripper.joint"),
        ({"output": "pose", "tool_pose_source": "joint_states"}, "joints.model"),
    ],
)
def test_what_is_missing_is_refused_before_motion(parameters, words, capfd):
    with arm(**parameters) as robot:
        assert robot.driver.trigger_configure().name == "FAILURE"
        assert words in capfd.readouterr().err


def test_what_may_change_while_it_moves_is_in_force_and_the_rest_is_refused():
    with arm(output="pose") as robot:
        robot.start()
        changed = robot.driver.set_parameters([Parameter("max_action_age_s", value=0.05)])
        assert changed[0].successful
        robot.act(age_s=0.1)
        assert robot.refused() == {"too_old": 1}
        for name, value in (("output", "twist"), ("limits.linear_speed", 9.0), ("compensate", "none")):
            (answer,) = robot.driver.set_parameters([Parameter(name, value=value)])
            assert not answer.successful and "cleanup" in answer.reason
        robot.driver.trigger_deactivate()
        robot.driver.trigger_cleanup()
        (answer,) = robot.driver.set_parameters([Parameter("output", value="twist")])
        assert answer.successful


def test_it_can_be_configured_again():
    with arm(output="pose") as robot:
        for _ in range(2):
            robot.start()
            assert robot.driver.trigger_deactivate().name == "SUCCESS"
            robot.until(lambda: robot.actions.get_subscription_count() == 0)
            assert robot.driver.trigger_cleanup().name == "SUCCESS"
        robot.until(lambda: robot.node.count_publishers("/driver/pose") == 0)


def test_an_action_that_was_refused_decides_nothing():
    """One of another robot's simulation, too old, with another convention."""
    with arm(output="pose", diagnostics_period_s=0.1) as robot:
        robot.start()
        motion = lambda: robot.diagnostics[-1].status[0]  # noqa: E731
        robot.act(age_s=60.0, rotation="rpy")
        robot.until(lambda: robot.diagnostics and "no action was followed yet" in motion().message)
        assert motion().level == DiagnosticStatus.WARN
        robot.act()
        robot.until(lambda: motion().message.startswith("following actions, but no guard reports on /guard_state"))
        assert motion().level == DiagnosticStatus.WARN
        robot.act(rotation="rpy")
        robot.until(lambda: any("but the first that was followed" in each.value for each in motion().values))


def test_a_policy_whose_clock_is_another_is_found_out():
    with arm(output="pose", diagnostics_period_s=0.1) as robot:
        robot.start()
        robot.act()
        motion = lambda: robot.diagnostics[-1].status[0]  # noqa: E731
        robot.until(lambda: robot.diagnostics and motion().message.startswith("following actions"))
        values = {each.key: each.value for each in motion().values}
        assert float(values["action age s"]) > 0
        assert {"speed m/s", "from target m", "scheduling", "output"} <= values.keys()
        for _ in range(8):  # a second ahead
            robot.act((0.0,) * 7, receive_s=1.0, latency_s=1.0)
        robot.until(lambda: "synchronise the machines" in motion().message)
        values = {each.key: each.value for each in motion().values}
        ahead, _, error = values["policy's clock ahead s"].split()
        assert abs(float(ahead) - 1.0) <= float(error) + 1e-3 < 0.5


@contextmanager
def controller(robot, joints):
    """A node with the parameter of ros2_control's controllers."""
    node = Node("forward_position_controller")
    node.declare_parameter("joints", joints)
    robot.executor.add_node(node)
    try:
        yield
    finally:
        robot.executor.remove_node(node)
        node.destroy_node()


def activated(robot):
    robot.joints = HOME
    assert robot.driver.trigger_configure().name == "SUCCESS"
    assert robot.driver.trigger_activate().name == "SUCCESS"


def test_a_controller_of_the_same_order_is_asked_and_then_the_arm_follows():
    with arm(**ASKS) as robot:
        activated(robot)
        robot.until(lambda: "has not reported its joints yet" in robot.core.problem)
        assert not robot.arrays
        with controller(robot, JOINTS):
            robot.until(lambda: robot.core.anchored)
        robot.act()
        assert not robot.refused()


@pytest.mark.parametrize("theirs", [[JOINTS[1], JOINTS[0], *JOINTS[2:]], JOINTS[:6], [""]])
def test_a_controller_of_another_order_is_refused_with_both_and_nothing_is_sent(theirs):
    with arm(**ASKS) as robot, controller(robot, theirs):
        activated(robot)
        robot.until(lambda: "configure the driver again" in robot.core.problem)
        assert str(theirs) in robot.core.problem and str(JOINTS) in robot.core.problem
        robot.act()
        assert robot.refused() == {"not_following": 1} and not robot.arrays
        robot.driver.trigger_deactivate()
        assert robot.driver.trigger_activate().name == "SUCCESS"
        robot.until(lambda: "configure the driver again" in robot.core.problem)
        assert not robot.arrays


def test_a_controller_that_does_not_answer_is_asked_again_and_nothing_is_sent():
    with patch(f"{ORDER}._ANSWER_S", 0.1), arm(**ASKS) as robot:
        activated(robot)
        robot.until(lambda: "does not report its joints" in robot.core.problem)
        assert "/forward_position_controller" in robot.core.problem and str(JOINTS) in robot.core.problem
        assert not robot.arrays
        with controller(robot, JOINTS):
            robot.until(lambda: robot.core.anchored)


@contextmanager
def trying(**changes):
    """An arm that tries its order in less time than a real one may."""
    with ExitStack() as patches:
        for name, value in {"_SPEED": 0.5, "_ACCELERATION": 10.0, "_JERK": 500.0, "_STILL_S": 0.05}.items():
            patches.enter_context(patch(f"specvla_ros.control.joint_order.{name}", value))
        with arm(**TRIES, **changes) as robot:
            yield robot


def test_the_right_order_is_tried_once_and_then_actions_are_followed():
    with trying() as robot:
        activated(robot)
        robot.until(lambda: robot.core.anchored and robot.actions.get_subscription_count())
        robot.act()
        assert robot.refused() == {"not_following": 1} and "moved a little" in robot.driver._last_refusal
        robot.until(lambda: not robot.driver._order.pending)
        sent = np.array([message.data for message in robot.arrays])
        np.testing.assert_allclose(np.ptp(sent, axis=0), 0.02, atol=1e-3)
        robot.until(lambda: robot.core.anchored)
        start = tool_of([*robot.joints.values()])
        robot.act()
        robot.rest()
        assert_at(tool_of(robot.arrays[-1].data), start.displaced(np.array(MOVE[:6])), 2e-3)
        robot.driver.trigger_deactivate()
        assert robot.driver.trigger_activate().name == "SUCCESS"
        assert not robot.driver._order.pending


def test_a_wrong_order_is_named_and_nothing_is_followed_until_it_is_configured_again(capfd):
    with trying() as robot:
        robot.wired = (2, 1, 0, 3, 4, 5, 6)  # two that stand alike
        activated(robot)
        robot.until(lambda: "configure the driver again" in robot.core.problem)
        assert "'joint1' was commanded to move by 0.02, but these moved: 'joint3'" in robot.core.problem
        assert "'joint1' was commanded to move by" in capfd.readouterr().err
        robot.spin(10)  # what was sent last arrives
        sent = len(robot.arrays)
        np.testing.assert_allclose(robot.arrays[-1].data, [*HOME.values()], atol=1e-3)
        robot.act()
        robot.spin(20)
        assert robot.refused() == {"not_following": 1} and len(robot.arrays) == sent


def test_nothing_is_tried_while_the_guard_lets_nothing_through_and_it_begins_anew_after_a_stop():
    with trying() as robot:
        passing = robot.node.create_publisher(GuardState, "guard_state", LATCHED_STATE)
        passing.publish(GuardState(state=GuardState.HOLDING, speed_scale=1.0))
        activated(robot)
        robot.until(lambda: robot.core.anchored and robot.core.guarded)
        robot.spin(60)
        assert not np.ptp([message.data for message in robot.arrays], axis=0).any()
        passing.publish(GuardState(state=GuardState.PASSING, speed_scale=1.0))
        robot.until(lambda: robot.joints["joint1"] > 0.01)
        passing.publish(GuardState(state=GuardState.HOLDING, speed_scale=1.0))
        robot.until(lambda: robot.core.guarded)
        robot.spin(2)
        assert robot.driver._order.pending and robot.driver._order._trial is None
        passing.publish(GuardState(state=GuardState.PASSING, speed_scale=1.0))
        robot.until(lambda: not robot.driver._order.pending)
        assert not robot.driver._order.problem


JOINT_ACTIONS = {
    "action_space": "joints",
    **JOINT_OUTPUT,
    "joints__max_acceleration": [10.0],
    "tool_pose_source": "topic",  # the driver follows measured joints, whatever tells the tool's pose
}


def joint_action(positions, **changes):
    return {"values": positions, "names": JOINTS, "action_frame": "joints", "reference": "absolute", **changes}


@pytest.mark.parametrize("output", ["joint_trajectory", "joint_trajectory_chunk", "position_array"])
@pytest.mark.parametrize("reference", ["absolute", "delta"])
def test_actions_of_joints_take_the_joints_there(output, reference):
    way = np.array((0.1, -0.05, 0.1, 0.05, 0.1, -0.1, 0.2))
    goal = np.array([*HOME.values()]) + way
    with arm(output=output, gripper__output="array", **JOINT_ACTIONS) as robot:
        robot.joints = HOME
        robot.start()
        wanted = goal if reference == "absolute" else way
        robot.act(**joint_action([*wanted, 1.0], names=[*JOINTS, "gripper"], reference=reference))
        robot.rest()
        robot.spin(20)
        assert robot.refused() == {}
        np.testing.assert_allclose([*robot.joints.values()], goal, atol=1e-3)
        assert robot.grippers[-1].data.tolist() == [0.04]


def test_an_action_of_two_arms_moves_this_one_by_its_own_values():
    goal = np.array([*HOME.values()]) + 0.05
    names = [side + name for side in ("left_", "right_") for name in (*JOINTS, "gripper")]
    with arm(output="position_array", gripper__output="array", action_prefix="right_", **JOINT_ACTIONS) as robot:
        robot.joints = HOME
        robot.start()
        robot.act(**joint_action([*np.zeros(7), 0.0, *goal, 1.0], names=names))
        robot.rest()
        robot.spin(20)
        assert robot.refused() == {}
        np.testing.assert_allclose([*robot.joints.values()], goal, atol=1e-3)
        assert robot.grippers[-1].data.tolist() == [0.04]
        robot.act(**joint_action([*goal, 1.0], names=[*JOINTS, "gripper"]))
        robot.spin(10)
        assert robot.refused() == {"unreadable": 1} and "action_prefix is right_" in robot.driver._last_refusal


def test_an_arm_is_chosen_by_the_names_of_joints_alone():
    with pytest.raises(UserError, match="set action_space to joints"):
        DriverParameters(action_prefix="left_").check_complete()


def test_no_command_lies_beyond_a_range_that_the_parameters_give():
    home = np.array([*HOME.values()])
    ranges = {"joints__position_min": (home - 0.1).tolist(), "joints__position_max": (home + 0.1).tolist()}
    with arm(output="joint_trajectory", **JOINT_ACTIONS, **ranges) as robot:
        robot.joints = HOME
        robot.start()
        robot.act(**joint_action(home + 0.3))
        robot.rest()
        points = np.array([message.points[-1].positions for message in robot.trajectories])
        np.testing.assert_allclose(points.max(axis=0), home + 0.1, atol=1e-9)


@pytest.mark.parametrize(
    "measured, words",
    [
        (dict(zip(JOINTS, np.degrees([*HOME.values()]), strict=True)), "is this in degrees"),
        ({name: value for name, value in HOME.items() if name != "joint4"}, "no message has 'joint4'"),
        ({f"panda_{name}": value for name, value in HOME.items()}, "they have panda_joint1"),
    ],
    ids=["degrees", "missing", "other names"],
)
def test_joints_that_are_not_the_arms_are_told_and_nothing_moves(measured, words):
    with arm(output="joint_trajectory", diagnostics_period_s=0.05, **JOINT_ACTIONS) as robot:
        robot.joints = measured
        assert robot.driver.trigger_configure().name == "SUCCESS"
        assert robot.driver.trigger_activate().name == "SUCCESS"
        robot.until(lambda: robot.diagnostics and words in robot.status().message)
        robot.act(**joint_action([*HOME.values()]))
        robot.spin(10)
        assert robot.refused()["not_following"] == 1 and not robot.core.anchored
        assert not robot.trajectories


def test_actions_of_joints_that_do_not_fit_the_arm_move_nothing():
    with arm(output="position_array", **JOINT_ACTIONS) as robot:
        robot.joints = HOME
        robot.start()
        robot.act(**joint_action(np.degrees([*HOME.values()])))
        robot.act(**joint_action([*HOME.values()], names=[*JOINTS[:6], "wrist"]))
        robot.act()
        robot.spin(10)
        assert robot.refused() == {"too_large": 1, "wrong_shape": 1, "wrong_space": 1}
        assert "action_space to tool" in robot.driver._last_refusal
        np.testing.assert_allclose([*robot.joints.values()], [*HOME.values()], atol=1e-9)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"output": "twist"}, "set output to one of joint_trajectory, joint_trajectory_chunk, position_array"),
        ({"joints__model": None}, "set joints.model to its MJCF or URDF"),
        ({"joints__max_acceleration": [0.0]}, "joints.max_acceleration"),
    ],
)
def test_a_driver_of_joints_says_before_motion_what_it_lacks(changed, words, capfd):
    with arm(**{"output": "position_array", **JOINT_ACTIONS, **changed}) as robot:
        assert robot.driver.trigger_configure().name == "FAILURE" or robot.driver.trigger_activate().name == "FAILURE"
        assert words in capfd.readouterr().err
