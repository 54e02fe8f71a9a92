# SPDX-License-Identifier: Apache-2.0
"""The guard's node over real DDS; the test plays driver, policy, robot and operator."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rclpy
import yaml
from geometry_msgs.msg import TwistStamped
from lifecycle_msgs.msg import State as RobotMode
from mcap.reader import make_reader
from rclpy.executors import SingleThreadedExecutor
from rclpy.task import Future
from rclpy.time import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64, Float64MultiArray, String
from std_srvs.srv import Trigger
from support.descriptions import Joint, write_urdf
from support.guard_scene import PARAMETERS, TOPICS, VELOCITIES, Scene, scene
from support.guarding import BASE, JOINTS

from specvla_ros.control.guard.cause import Cause
from specvla_ros.control.guard.commands import Instant
from specvla_ros.control.guard.guard import Outcome, State
from specvla_ros.control.guard.settings import GuardSettings
from specvla_ros.errors import UserError
from specvla_ros.msg import GuardState
from specvla_ros.ros.guard.robot import SWITCH
from specvla_ros.ros.qos import CLOCK, COMMAND, LATCHED_INSTRUCTION, LATCHED_STATE, STATE


@pytest.mark.parametrize("output", TOPICS)
def test_a_right_driver_passes_and_a_dead_one_leaves_the_robot_standing(output: str) -> None:
    with scene(output) as each:
        each.start()
        each.silent = {"command"}
        each.until_stopped("driver_silent")
        assert each.state is State.HOLDING
        each.silent = set()
        each.start()


@pytest.mark.parametrize(
    "missing, cause", [("tool", "state_missing"), ("action", "policy_silent"), ("enable", "not_enabled")]
)
def test_silence_of_anybody_stops(missing: str, cause: str) -> None:
    with scene("twist") as each:
        each.start()
        each.silent = {missing}
        each.until_stopped(cause)
        each.silent = set()
        each.start()


def test_joint_states_that_fail_stop() -> None:
    with scene("joint_trajectory") as each:
        each.start()
        each.joint_state = lambda: each.header(JointState(name=list(JOINTS.names), position=[float("nan"), 0.0]))  # type: ignore[method-assign]
        each.until_stopped("state_missing")


def test_nothing_moves_without_the_switch() -> None:
    with scene("twist") as each:
        each.silent = {"enable"}
        each.until_stopped("not_enabled")
        each.enables.publish(Bool(data=False))
        each.until(lambda: "~/enable is false" in each.guard.guard.reason)


@pytest.mark.parametrize("output", TOPICS)
def test_nan_latches(output: str) -> None:
    with scene(output) as each:
        each.start()
        right, nan = each.command, float("nan")

        def poisoned() -> Any:
            message = right()
            if output == "twist":
                message.twist.linear.x = nan
            elif output == "pose":
                message.pose.position.x = nan
            elif output.startswith("joint_trajectory"):
                message.points[0].positions = [nan, 0.0]
            else:
                message.data = [nan, 0.0]
            return message

        each.command = poisoned
        each.until_stopped("not_finite")
        assert each.state is State.STOPPED
        assert not each.call("clear_stop").success
        each.command = right
        each.until(lambda: each.call("clear_stop").success)
        each.start()


def test_a_chunk_goes_to_the_controller_whole_and_a_stop_revokes_it() -> None:
    with scene("joint_trajectory_chunk") as each:
        each.start()
        each.until(lambda: len(each.sent[-1].points) > 1)
        points = each.sent[-1].points
        assert all(len(point.velocities) == 2 for point in points) and list(points[-1].velocities) == [0.0, 0.0]
        assert 0 < points[0].time_from_start.nanosec < points[-1].time_from_start.nanosec <= 0.4e9
        assert int(next(v.value for v in each.status("gate").values if v.key == "chunks passed whole")) > 0
        each.stops.publish(Empty())
        each.until(lambda: each.state is State.STOPPED and len(each.sent[-1].points) == 1)
        each.sent.clear()
        each.until(each.stands)
        assert all(len(message.points) == 1 for message in each.sent)


def test_too_fast_a_twist_is_refused_with_the_figures() -> None:
    with scene("twist") as each:
        each.start()
        each.speed = 0.5
        each.until_stopped("over_speed")
        assert "0.5 m/s, and limits.linear_speed is 0.25" in each.guard.guard.reason


def test_a_pose_that_jumps_is_refused() -> None:
    with scene("pose") as each:
        each.start()
        each.command = lambda: each.pose_at(each.position + 0.09)
        each.until_stopped("over_speed")
        each.command = lambda: each.pose_at(each.position + 0.3)
        each.until(lambda: "far" in {cause.value for cause in each.guard.guard.tally.counts})


def test_another_frame_is_refused() -> None:
    with scene("twist") as each:
        each.start()
        right = each.command

        def wrong() -> Any:
            message = right()
            message.header.frame_id = "camera"
            return message

        each.command = wrong
        each.until_stopped("bad_form")


def test_bytes_that_are_no_message_are_refused() -> None:
    with scene("twist") as each:
        each.start()
        each.command = lambda: b"\x00\x01\x00\x00\x07"
        each.until_stopped("bad_form")


def test_stop_by_topic_and_by_service_is_latched_until_cleared(capfd: pytest.CaptureFixture[str]) -> None:
    with scene("twist", diagnostics_period_s=0.1) as each:
        each.start()
        each.stops.publish(Empty())
        each.until_stopped("stop was pressed (topic)")
        assert each.state is State.STOPPED
        remedy = "once the cause is gone, call /guard/clear_stop"
        each.until(lambda: each.guard._seen is State.STOPPED and each.status("gate").message.endswith(remedy))
        assert f"stopped: stop: stop was pressed (topic); {remedy}" in capfd.readouterr().err
        each.until(lambda: each.call("clear_stop").success)
        each.start()
        assert each.call("stop").success
        each.until_stopped("stop was pressed (service)")
        assert "persists" in each.call("clear_stop").message or each.state is not State.STOPPED


def test_a_stop_by_a_best_effort_publisher_is_heard_and_one_by_a_reliable_one_is_heard_once() -> None:
    with scene("twist") as each:
        each.start()
        button = each.user.create_publisher(Empty, "/guard/stop", STATE)
        each.until(lambda: button.get_subscription_count() == 1)
        button.publish(Empty())
        each.until_stopped("stop was pressed (topic)")
        each.until(lambda: each.call("clear_stop").success)
        each.start()
        each.stops.publish(Empty())
        each.until_stopped("stop was pressed (topic)")
        assert each.guard.guard.tally.counts[Cause.STOP] == 2


def test_two_publishers_of_a_command_are_refused_and_named() -> None:
    with scene("twist") as each:
        each.start()
        other = rclpy.create_node("intruder", enable_rosout=False)
        other.create_publisher(TwistStamped, "command/twist", COMMAND)
        each.until_stopped("/command/twist has 2 publishers: /intruder, /user")
        other.destroy_node()
        each.start()


def test_a_publisher_past_the_guard_is_refused() -> None:
    with scene("twist") as each:
        each.start()
        each.user.create_publisher(TwistStamped, "/guard/twist", COMMAND)
        each.until_stopped("/guard/twist is also published by /user, past the guard")


def test_a_twin_of_the_guard_is_refused() -> None:
    with scene("twist") as each:
        each.start()
        twin = rclpy.create_node("guard", enable_rosout=False)
        each.until_stopped("there are 2 nodes named /guard: give each a name of its own")
        twin.destroy_node()


def test_an_instruction_must_be_confirmed() -> None:
    with scene("twist", require_confirm=True) as each:
        each.until(lambda: "'lift' is not confirmed" in each.guard.guard.reason)
        each.confirms.publish(String(data="lift"))
        each.start()
        each.instruction = "drop it"
        each.until_stopped("not_confirmed")


def test_the_gripper_passes_while_motion_does() -> None:
    with scene("twist") as each:
        each.start()
        each.grippers.publish(Float64MultiArray(data=[0.03]))
        each.until(lambda: each.gripper == [0.03])
        each.grippers.publish(Float64MultiArray(data=[1.0]))
        each.until_stopped("outside") if each.state is not State.PASSING else None
        each.until(lambda: "outside" in {cause.value for cause in each.guard.guard.tally.counts})
        assert each.gripper == [0.03]


def test_a_clock_that_stops_or_jumps_stops_motion() -> None:
    with scene("twist", use_sim_time=True) as each:
        clocks = each.user.create_publisher(Clock, "/clock", CLOCK)
        world = {"ns": 10**12, "runs": True, "last_s": time.monotonic()}
        say = each.say

        def with_clock() -> None:
            now_s = time.monotonic()
            world["ns"] += round((now_s - world["last_s"]) * 1e9) if world["runs"] else 0
            world["last_s"] = now_s
            clocks.publish(Clock(clock=Time(nanoseconds=world["ns"]).to_msg()))
            say()

        each.say = with_clock  # type: ignore[method-assign]
        each.clock_ns = lambda: world["ns"]
        each.start()
        world["runs"] = False
        each.until_stopped("the clock has stood still")
        world["runs"] = True
        each.start()
        world["ns"] -= 5 * 10**9
        each.until(lambda: "clock" in {cause.value for cause in each.guard.guard.tally.counts})
        each.start()


def test_diagnostics_say_what_is_refused_and_how_the_loop_runs() -> None:
    with scene("twist", diagnostics_period_s=0.1) as each:
        each.silent = {"command"}
        each.until(lambda: each._statuses("gate") and "driver_silent" in each.status("gate").message)
        values = {pair.key: pair.value for pair in each.status("gate").values}
        assert int(values["refused_driver_silent"]) >= 1
        assert "nothing subscribes to" not in each.status("gate").message
        each.until(lambda: any(pair.key == "late_max_ms" for pair in each.status("loop").values))


@pytest.mark.parametrize("output", VELOCITIES)
def test_a_fault_inside_a_tick_leaves_the_robot_standing_and_the_loop_goes_on(output: str) -> None:
    def broken(now: Instant) -> Outcome:
        raise RuntimeError("no number")

    with scene(output, diagnostics_period_s=0.1) as each:
        each.start()
        sound, each.guard.guard.tick = each.guard.guard.tick, broken  # type: ignore[method-assign]
        each.sent.clear()
        each.until(each.stands)
        assert output != "twist" or each.sent[-1].header.frame_id == BASE
        each.until(lambda: "continued after a fault: RuntimeError: no number" in each.status("loop").message)
        each.guard.guard.tick = sound  # type: ignore[method-assign]
        each.start()
        each.until(lambda: each.status("loop").message == "the loop runs")


def test_an_output_without_a_subscriber_is_told() -> None:
    """The robot's controller listens to another topic."""
    with scene("twist", diagnostics_period_s=0.1, gripper__output="trajectory", gripper__joint="finger") as each:
        words = "nothing subscribes to /guard/gripper_trajectory"
        each.until(lambda: each._statuses("gate") and words in each.status("gate").message)


def test_the_state_is_told_latched_with_its_cause() -> None:
    with scene("twist") as each:
        each.start()
        heard: list[GuardState] = []
        each.user.create_subscription(GuardState, "/guard/state", heard.append, LATCHED_STATE)
        each.until(lambda: heard and heard[-1].state == GuardState.PASSING and not heard[-1].reason)
        assert heard[-1].speed_scale == 1.0 and not heard[-1].overridden
        each.stops.publish(Empty())
        each.until(lambda: heard[-1].state == GuardState.STOPPED)
        assert heard[-1].cause == "stop" and "stop was pressed (topic)" in heard[-1].reason


@pytest.mark.parametrize("latched", [True, False])
def test_what_the_robot_says_of_itself_stops_whether_it_is_latched_or_repeated(latched: bool) -> None:
    with scene("twist", robot_states=["/robot/mode lifecycle_msgs/msg/State id=3"]) as each:
        each.until(lambda: "/robot/mode: it has no publisher" in each.guard.guard.reason)
        modes = each.user.create_publisher(RobotMode, "/robot/mode", LATCHED_STATE if latched else STATE)
        modes.publish(RobotMode(id=3))
        if not latched:
            say, mode = each.say, {"id": 3}

            def say_with_mode() -> None:
                say()
                modes.publish(RobotMode(**mode))

            each.say = say_with_mode  # type: ignore[method-assign]
        each.start()
        if latched:
            modes.publish(RobotMode(id=2))
        else:
            mode["id"] = 2
        each.until_stopped("robot_stopped: /robot/mode: id is 2, but must be 3")
        assert each.state is State.STOPPED


def test_a_state_of_a_package_that_is_not_installed_is_refused_with_the_command() -> None:
    wanted = "apt install ros-.ROS_DISTRO-nobodys-msgs"
    with pytest.raises(UserError, match=wanted), scene("twist", robot_states=["/mode nobodys_msgs/msg/Mode mode=1"]):
        pass
    rclpy.try_shutdown()


def test_a_robot_that_goes_on_is_stopped_by_the_service_that_was_named() -> None:
    with scene("twist", escalation_service="/robot/stop", obey_time_s=0.2) as each:
        asked: list[Trigger.Request] = []

        def on_stop(request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
            asked.append(request)
            return response

        each.until(lambda: "/robot/stop does not exist yet" in each.guard._escalation_problem)
        each.user.create_service(Trigger, "/robot/stop", on_stop)
        each.start()
        each.until(lambda: not each.guard._escalation_problem)
        each.silent = {"enable"}
        # The tool goes on, and does not turn round: where it does, it stands for a moment.
        pose_at, since_s = each.pose_at, time.monotonic()
        here_m = 0.05 * abs(since_s % 2 - 1)
        each.pose_at = lambda _: pose_at(here_m + 0.05 * (time.monotonic() - since_s))  # type: ignore[method-assign, assignment]
        each.until(lambda: time.monotonic() > since_s + 0.2)
        each.enables.publish(Bool(data=False))
        each.until(lambda: asked)
        each.until_stopped("not_obeying")
        assert each.state is State.STOPPED
        assert len(asked) == 1


def test_a_share_of_the_speed_is_taken_from_a_topic_and_nonsense_is_not() -> None:
    with scene("twist") as each:
        each.speed = 0.2
        each.start()
        scales = each.user.create_publisher(Float64, "/guard/speed_scale", LATCHED_STATE)
        scales.publish(Float64(data=0.1))
        each.until(lambda: each.sent[-1].twist.linear.y == pytest.approx(0.025))
        scales.publish(Float64(data=7.0))
        each.until(lambda: each.user.count_subscribers("/guard/speed_scale") > 0)
        scales.publish(Float64(data=0.4))
        each.until(lambda: each.sent[-1].twist.linear.y == pytest.approx(0.1))
        assert max(message.twist.linear.y for message in each.sent) <= 0.2


def test_who_outranks_the_driver_is_followed_while_it_speaks() -> None:
    with scene("twist", override=True) as each:
        each.start()
        heard: list[GuardState] = []
        each.user.create_subscription(GuardState, "/guard/state", heard.append, LATCHED_STATE)
        hand = each.user.create_publisher(TwistStamped, "/override/twist", COMMAND)
        say, leads = each.say, {"now": True}

        def with_hand() -> None:
            say()
            if leads["now"]:
                message = each.header(TwistStamped())
                message.twist.linear.x = 0.03
                hand.publish(message)

        each.say = with_hand  # type: ignore[method-assign]
        each.until(lambda: each.sent[-1].twist.linear.x == pytest.approx(0.03))
        each.until(lambda: heard and heard[-1].overridden)
        assert each.state is State.PASSING
        leads["now"] = False
        each.until(lambda: each.sent[-1].twist.linear.x == 0 and each.sent[-1].twist.linear.y == each.speed)
        each.until(lambda: not heard[-1].overridden)


class Goals(list[float]):
    """Positions of a gripper's goals, and a server of its action."""

    accepts = ready = True

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[float] = []

    def send(self, goal: Any) -> Future:
        self.append(goal.command.position)
        answer: Future = Future()
        accepts = self.accepts
        if accepts:
            self.accepted.append(goal.command.position)
        answer.set_result(SimpleNamespace(accepted=accepts))
        return answer


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Goals:
    """In place of control_msgs and a gripper's action."""
    sent = Goals()
    goal = lambda: SimpleNamespace(command=SimpleNamespace(position=None))  # noqa: E731
    client = SimpleNamespace(server_is_ready=lambda: sent.ready, send_goal_async=sent.send)
    actions = SimpleNamespace(GripperCommand=SimpleNamespace(Goal=goal))
    monkeypatch.setitem(sys.modules, "control_msgs", SimpleNamespace(action=actions))
    monkeypatch.setitem(sys.modules, "control_msgs.action", actions)
    monkeypatch.setattr("specvla_ros.ros.guard.robot.ActionClient", lambda *given: client)
    return sent


def test_a_gripper_of_actions_gets_each_position_as_one_goal(goals: Goals) -> None:
    with scene("twist", gripper__output="action") as each:
        each.start()
        for position in (0.03, 0.03, 0.03, 0.0):
            each.grippers.publish(Float64MultiArray(data=[position]))
            each.until(partial(goals.__contains__, position))
        assert goals == [0.03, 0.0]


def test_a_goal_that_is_refused_or_lost_with_its_server_is_sent_again(goals: Goals) -> None:
    with scene("twist", gripper__output="action") as each:
        goals.accepts = False  # as of a controller that is not active yet
        each.start()

        def until(condition: Callable[[], bool]) -> None:
            """Repeats the position meanwhile, as the driver does."""

            def met() -> bool:
                each.grippers.publish(Float64MultiArray(data=[0.03]))
                return condition()

            each.until(met)

        until(lambda: len(goals) >= 2)
        assert not goals.accepted
        goals.accepts = True
        until(lambda: goals.accepted == [0.03])
        goals.ready = False
        until(lambda: each.guard._goals is not None and each.guard._goals._sent is None)
        goals.ready = True
        until(lambda: goals.accepted == [0.03, 0.03])


def test_a_gripper_that_somebody_opened_during_a_hold_is_closed_again_by_the_same_position(goals: Goals) -> None:
    with scene("twist", gripper__output="action") as each:
        each.start()
        for count in (1, 2):
            each.grippers.publish(Float64MultiArray(data=[0.0]))
            each.until(lambda: len(goals) == count)  # noqa: B023 (called before it changes)
            each.silent = {"enable"}
            each.until_stopped("not_enabled")
            each.silent = set()
            each.start()
        assert goals == [0.0, 0.0]


def test_a_service_that_switches_controllers_without_its_package_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("twist", escalation_service="/switch") as each:
        monkeypatch.setattr(each.guard, "get_service_names_and_types", lambda: [("/switch", [SWITCH])])
        monkeypatch.setitem(sys.modules, "controller_manager_msgs.srv", None)
        each.until(lambda: "apt install ros-$ROS_DISTRO-controller-manager-msgs" in each.guard._escalation_problem)
        assert "no /switch" in each.guard._escalation.ask()


def test_a_gripper_of_actions_whose_package_is_missing_is_refused_with_the_command() -> None:
    with pytest.raises(UserError, match="control-msgs"), scene("twist", gripper__output="action"):
        pass
    rclpy.try_shutdown()


def test_limits_that_are_missing_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="linear_speed"), scene("twist", limits__linear_speed=0.0):
        pass
    rclpy.try_shutdown()


def test_the_guard_needs_neither_torch_nor_a_simulator() -> None:
    heavy = (
        "torch",
        "mujoco",
        "ruckig",
        "mink",
        "scipy",
        "rosbags",
        "mcap",
        "cv2",
        "PIL",
        "tokenizers",
        "transformers",
    )
    code = f"import sys, specvla_ros.ros.guard.node; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_stop_is_written_and_rosbags_and_mcap_read_the_same_of_each_topic(tmp_path: Path) -> None:
    from support.black_boxes import read_black_box

    directory = tmp_path / "box"
    with scene("twist", black_box_s=60.0, black_box_dir=str(directory)) as each:
        each.start()
        each.user.create_publisher(String, "instruction", LATCHED_INSTRUCTION).publish(String(data="lift"))
        each.until(lambda: each.guard.guard._watch.confirmation._asked)
        each.stops.publish(Empty())
        each.until_stopped("stop")
        each.until(lambda: list(directory.glob("*.mcap")))
    file = next(directory.glob("*.mcap"))
    counts, last = read_black_box(file)
    with file.open("rb") as opened:
        assert Counter(channel.topic for _, channel, _ in make_reader(opened).iter_messages()) == counts
    for topic in ("/command/twist", "/guard/twist", "/tool_pose", "/action", "/guard/enable", "/guard/stop"):
        assert counts[topic] > 0, counts
    assert counts["/guard/stop"] == 1
    assert last["/guard/twist"].twist.linear.y == 0
    assert last["/action"].instruction == "lift" and last["/instruction"].data == "lift"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_guard_that_is_told_to_end_brakes_first(signal_number: int, tmp_path: Path) -> None:
    (tmp_path / "guard.yaml").write_text(yaml.safe_dump({"guard": {"ros__parameters": as_yaml(output="twist")}}))
    command = [sys.executable, "-c", "from specvla_ros.ros.guard.node import main; main()"]
    command += ["--ros-args", "--params-file", str(tmp_path / "guard.yaml")]
    rclpy.init()
    executor, user = SingleThreadedExecutor(), rclpy.create_node("user", enable_rosout=False)
    executor.add_node(user)
    passing: Any = SimpleNamespace(get_clock=user.get_clock, guard=SimpleNamespace(state=State.PASSING, reason=""))
    each = Scene(passing, user, executor, "twist", speed=0.2)
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            each.until(lambda: each.sent and each.moving(each.sent))
            each.until(lambda: each.sent[-1].twist.linear.y == each.speed)
            process.send_signal(signal_number)
            each.until(lambda: process.poll() is not None)
            _, said = process.communicate()
        assert process.returncode == 0 and "Traceback" not in said, said
        speeds = [message.twist.linear.y for message in each.sent]
        braking = speeds[max(at for at, speed in enumerate(speeds) if speed == each.speed) :]
        assert len(set(braking)) > 2 and braking == sorted(braking, reverse=True), "it ramps down"
        assert braking[-1] == 0.0
    finally:
        executor.shutdown()
        user.destroy_node()
        rclpy.try_shutdown()


def as_yaml(**changes: Any) -> dict[str, Any]:
    chosen = PARAMETERS | changes
    return {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}


ARM = [
    Joint("shoulder_pan", "base", "upper", axis=(0, 0, 1), low=-2.0, high=2.0, speed=1.0),
    Joint("elbow_lift", "upper", "fore", axis=(0, 1, 0), low=-0.1, high=0.1, speed=2.0),
]


@pytest.mark.parametrize("output", ["twist", "joint_trajectory"])
def test_the_tool_is_measured_by_the_joints_where_nobody_tells_its_pose(tmp_path: Path, output: str) -> None:
    """An arm whose first joint turns about a column in the middle of the workspace, with its hand 0.1 m away."""
    arm = [
        Joint("column", "base", "post", xyz=(0.5, 0.0, 0.3)),
        Joint("shoulder", "post", "upper", axis=(0, 0, 1), low=-2.0, high=2.0, speed=1.0),
        Joint("elbow", "upper", "fore", axis=(0, 0, 1), low=-2.0, high=2.0, speed=2.0),
        Joint("hand", "fore", "tool0", xyz=(0.1, 0.0, 0.0)),
    ]
    given = {"joints__model": str(write_urdf(tmp_path / "arm.urdf", arm)), "joints__tool": "tool0"}
    box = {"black_box_s": 60.0, "black_box_dir": str(tmp_path / "box")}
    with scene(output, tool_pose_source="joint_states", **given, **box) as each:
        each.silent = {"tool"}
        right, at = each.joint_state, {"turn": 0.0}
        if output == "twist":  # to and fro, as the pose of the scene goes
            each.joint_state = lambda: turned(right(), abs(time.monotonic() % 2 - 1) * 0.3)  # type: ignore[method-assign]
        each.start()
        tool = each.guard.guard._watch.measured(each.guard._now()).tool
        assert tool is not None and np.linalg.norm(tool.position - [0.5, 0.0, 0.3]) == pytest.approx(0.1)
        each.joint_state = lambda: each.header(JointState(name=["finger"], position=[0.0]))  # type: ignore[method-assign]
        each.until_stopped("state_missing")
        each.joint_state = lambda: turned(right(), float("nan"))  # type: ignore[method-assign]
        each.until_stopped("tool pose: it holds NaN")
        each.joint_state = lambda: turned(right(), at["turn"])  # type: ignore[method-assign]
        each.until(lambda: each.guard.guard._watch.measured(each.guard._now()).tool is not None)
        at["turn"] = 0.45
        each.until(lambda: each.guard.guard.tally.counts[Cause.POSE_JUMP])
        each.until(lambda: list((tmp_path / "box").glob("*.mcap")))
    with next((tmp_path / "box").glob("*.mcap")).open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None and summary.statistics is not None
    counts = {summary.channels[key].topic: n for key, n in summary.statistics.channel_message_counts.items()}
    assert counts["/tool_pose"] > 0 and counts["/joint_states"] > 0, "the stop can be measured"


def turned(message: JointState, shoulder: float) -> JointState:
    message.position[0] += shoulder
    return message


def test_a_tool_that_is_measured_by_the_joints_needs_their_model() -> None:
    with pytest.raises(UserError, match=r"set joints\.model"), scene("twist", tool_pose_source="joint_states"):
        pass
    rclpy.try_shutdown()


def test_ranges_and_speeds_that_are_not_given_are_those_of_the_model(tmp_path: Path) -> None:
    given = {
        "joints__model": str(write_urdf(tmp_path / "arm.urdf", ARM)),
        "joints__model_names": ["shoulder_pan", "elbow_lift"],
        "joints__max_speed": [0.0],
        "joints__position_min": [0.0],
        "joints__position_max": [0.0],
    }
    with scene("position_array", **given) as each:
        each.start()
        right = each.command
        each.command = lambda: Float64MultiArray(data=[*right().data[:1], 0.3])
        each.until(lambda: "elbow is commanded outside -0.1 to 0.1" in str(each.guard.guard.tally.last))
    with pytest.raises(UserError, match="no joint 'shoulder'"):
        joints = replace(JOINTS, model=str(given["joints__model"]), max_speed=(0.0,))
        GuardSettings(output="position_array", joints=joints).completed()
