# SPDX-License-Identifier: Apache-2.0
"""The guard's node over real DDS; the test plays driver, policy, robot and operator."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.time import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64MultiArray, String
from std_srvs.srv import Trigger
from support.guarding import BASE, HOME, JOINTS, LIMITS
from support.patience import wait_until
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_msgs.msg import VlaAction
from specvla_ros.control.guard.guard import State
from specvla_ros.errors import UserError
from specvla_ros.ros.guard.node import GuardNode
from specvla_ros.ros.qos import ACTION, CLOCK, COMMAND, DIAGNOSTICS
from specvla_ros.settings.parameter import values_of

TYPES = {
    "pose": PoseStamped,
    "twist": TwistStamped,
    "joint_trajectory": JointTrajectory,
    "joint_positions": Float64MultiArray,
}
TOPICS = {"pose": "pose", "twist": "twist", "joint_trajectory": "joint_trajectory", "position_array": "joint_positions"}
# A busy machine may pause a test for long; what is tested is what happens, not when.
PATIENT = {"command_timeout_s": 0.5, "state_timeout_s": 1.0, "enable_timeout_s": 1.0, "action_timeout_s": 2.0}
PARAMETERS = {
    "base_frame": BASE,
    "max_action_age_s": 5.0,
    "gripper.output": "array",
    "gripper.open_value": 0.04,
    "black_box_s": 0.0,
    "realtime_priority": 0,
    **{f"limits.{name}": value for name, value in vars(LIMITS).items()},
    **values_of(JOINTS),
    **PATIENT,
}


@dataclass
class Scene:
    """The guard, and everybody around it: each turn of `until` says what they say once."""

    guard: GuardNode
    user: Node
    executor: SingleThreadedExecutor
    output: str
    silent: set[str] = field(default_factory=set)
    sent: list[Any] = field(default_factory=list)
    gripper: list[float] = field(default_factory=list)
    diagnostics: list[DiagnosticArray] = field(default_factory=list)
    speed: float = 0.05
    instruction: str = "lift"

    def __post_init__(self) -> None:
        kind = TOPICS[self.output]
        make = self.user.create_publisher
        self.commands = make(TYPES[kind], f"command/{kind}", COMMAND)
        self.grippers = make(Float64MultiArray, "command/gripper", COMMAND)
        self.poses = make(PoseStamped, "tool_pose", 10)
        self.joints = make(JointState, "joint_states", 10)
        self.actions = make(VlaAction, "action", ACTION)
        self.enables = make(Bool, "/guard/enable", 1)
        self.stops = make(Empty, "/guard/stop", 1)
        self.confirms = make(String, "/guard/confirm", 1)
        self.user.create_subscription(TYPES[kind], f"/guard/{kind}", self.sent.append, 100)
        self.user.create_subscription(
            Float64MultiArray, "/guard/gripper", lambda message: self.gripper.append(message.data[0]), 10
        )
        self.user.create_subscription(DiagnosticArray, "/diagnostics", self.diagnostics.append, DIAGNOSTICS)
        self.services = {name: self.user.create_client(Trigger, f"/guard/{name}") for name in ("stop", "clear_stop")}
        self.clock_ns: Callable[[], int] = lambda: self.guard.get_clock().now().nanoseconds
        self.command = self.right_command
        self.position = 0.0
        self._said_s = time.monotonic()

    @property
    def state(self) -> State:
        return self.guard.guard.state

    def header(self, message: Any) -> Any:
        message.header.stamp = Time(nanoseconds=self.clock_ns()).to_msg()
        message.header.frame_id = BASE
        return message

    def right_command(self) -> Any:
        """What a right driver sends."""
        kind = TOPICS[self.output]
        if kind == "twist":
            twist = self.header(TwistStamped())
            twist.twist.linear.y = self.speed
            return twist
        if kind == "pose":
            return self.pose_at(self.position)
        positions = [0.5 * self.position, -self.position]
        if kind == "joint_positions":
            return Float64MultiArray(data=positions)
        return JointTrajectory(joint_names=list(JOINTS.names), points=[JointTrajectoryPoint(positions=positions)])

    def pose_at(self, y: float) -> PoseStamped:
        pose = self.header(PoseStamped())
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = (HOME + np.array([0, y, 0])).tolist()
        pose.pose.orientation.w = 1.0
        return pose

    def say(self) -> None:
        """Driver, robot, policy and operator, once each."""
        now_s = time.monotonic()
        if self.state is State.PASSING and self.output != "twist":
            self.position += self.speed * min(now_s - self._said_s, 0.05)
        self._said_s = now_s
        messages = {
            "tool": (self.poses, lambda: self.pose_at(self.position if self.output != "twist" else now_s % 1 * 0.1)),
            "joints": (self.joints, self.joint_state),
            "action": (self.actions, lambda: self.header(VlaAction(instruction=self.instruction))),
            "enable": (self.enables, lambda: Bool(data=True)),
            "command": (self.commands, lambda: self.command()),
        }
        for name, (publisher, make) in messages.items():
            if name not in self.silent:
                publisher.publish(make())

    def joint_state(self) -> JointState:
        names = [*JOINTS.names, "finger"]
        return self.header(JointState(name=names, position=[0.5 * self.position, -self.position, 0.0]))

    def until(self, condition: Callable[[], object]) -> None:
        def turn() -> None:
            self.say()
            end_s = time.monotonic() + 0.01
            while time.monotonic() < end_s:
                self.executor.spin_once(timeout_sec=0.002)

        wait_until(condition, meanwhile=turn, failed=lambda: f"{self.state}: {self.guard.guard.reason}")

    def start(self) -> None:
        """Until motion passes."""
        self.until(lambda: self.state is State.PASSING)
        self.until(lambda: self.sent and self.moving(self.sent))

    def moving(self, sent: Sequence[Any]) -> bool:
        """Whether the last of what went out moves."""
        if self.output == "twist":
            return abs(sent[-1].twist.linear.y) > 0
        return len(sent) > 1 and self.value(sent[-1]) != self.value(sent[-2])

    @staticmethod
    def value(message: Any) -> float:
        if isinstance(message, PoseStamped):
            return float(message.pose.position.y)
        return float(message.points[0].positions[1] if isinstance(message, JointTrajectory) else message.data[1])

    def stands(self) -> bool:
        """Whether what goes out goes on, and is zero or the same."""
        last = self.sent[-5:]
        if len(last) < 5:
            return False
        if self.output == "twist":
            return all(message.twist == TwistStamped().twist for message in last)
        return len({self.value(message) for message in last}) == 1

    def until_stopped(self, cause: str) -> None:
        """Until the cause is named and what goes out stands."""
        self.until(lambda: self.state is not State.PASSING and cause in self.guard.guard.reason)
        self.sent.clear()
        self.until(self.stands)

    def call(self, service: str) -> Trigger.Response:
        future = self.services[service].call_async(Trigger.Request())
        self.until(future.done)
        return future.result()

    def status(self, task: str) -> Any:
        """The newest of a task on /diagnostics."""
        self.until(lambda: self._statuses(task))
        return self._statuses(task)[-1]

    def _statuses(self, task: str) -> list[Any]:
        return [each for array in self.diagnostics for each in array.status if each.name == f"guard: {task}"]


@contextmanager
def scene(output: str, **parameters: Any) -> Iterator[Scene]:
    chosen = {**PARAMETERS, "output": output, **{name.replace("__", "."): value for name, value in parameters.items()}}
    overrides = [
        Parameter(name, value=list(value) if isinstance(value, tuple) else value) for name, value in chosen.items()
    ]
    rclpy.init()
    executor = SingleThreadedExecutor()
    guard = GuardNode(parameter_overrides=overrides)
    user = rclpy.create_node("user", enable_rosout=False)
    for node in (guard, user):
        executor.add_node(node)
    try:
        yield Scene(guard, user, executor, output)
    finally:
        assert guard.close(), "the loop or the black box did not end"
        executor.shutdown()
        for node in (guard, user):
            node.destroy_node()
        rclpy.try_shutdown()


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
        each.joint_state = lambda: each.header(JointState(name=list(JOINTS.names), position=[float("nan"), 0.0]))
        each.until_stopped("state_missing")


def test_nothing_moves_without_the_switch() -> None:
    with scene("twist") as each:
        each.silent = {"enable"}
        each.until_stopped("not_enabled")
        each.enables.publish(Bool(data=False))
        each.until(lambda: "says false" in each.guard.guard.reason)


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
            elif output == "joint_trajectory":
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


def test_stop_by_topic_and_by_service_is_latched_until_cleared() -> None:
    with scene("twist") as each:
        each.start()
        each.stops.publish(Empty())
        each.until_stopped("stop was pressed (topic)")
        assert each.state is State.STOPPED
        each.until(lambda: each.call("clear_stop").success)
        each.start()
        assert each.call("stop").success
        each.until_stopped("stop was pressed (service)")
        assert "persists" in each.call("clear_stop").message or each.state is not State.STOPPED


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
        each.until_stopped("there are 2 nodes named /guard")
        twin.destroy_node()


def test_an_instruction_must_be_confirmed() -> None:
    with scene("twist", require_confirm=True) as each:
        each.until(lambda: "nobody confirmed 'lift'" in each.guard.guard.reason)
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

        each.say = with_clock
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
        each.until(lambda: any(pair.key == "late_max_ms" for pair in each.status("loop").values))


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


def test_a_stop_is_written_and_rosbags_reads_it(tmp_path: Path) -> None:
    from support.black_boxes import read_black_box

    directory = tmp_path / "box"
    with scene("twist", black_box_s=60.0, black_box_dir=str(directory)) as each:
        each.start()
        each.stops.publish(Empty())
        each.until_stopped("stop")
        each.until(lambda: list(directory.glob("*.mcap")))
    file = next(directory.glob("*.mcap"))
    counts, last = read_black_box(file)
    for topic in ("/command/twist", "/guard/twist", "/tool_pose", "/action", "/guard/enable", "/guard/stop"):
        assert counts[topic] > 0, counts
    assert counts["/guard/stop"] == 1
    assert last["/guard/twist"].twist.linear.y == 0
    assert last["/action"].instruction == "lift"
