# SPDX-License-Identifier: Apache-2.0
"""The guard's node over real DDS, and everybody around it: driver, policy, robot and operator."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import rclpy
from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64MultiArray, String
from std_srvs.srv import Trigger
from support.guarding import BASE, HOME, JOINTS, LIMITS
from support.patience import wait_until
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.guard.guard import State
from specvla_ros.msg import VlaAction
from specvla_ros.ros.guard.node import GuardNode
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS
from specvla_ros.settings.parameter import values_of

TYPES = {
    "pose": PoseStamped,
    "twist": TwistStamped,
    "joint_trajectory": JointTrajectory,
    "joint_positions": Float64MultiArray,
    "joint_velocities": Float64MultiArray,
}
TOPICS = {
    "pose": "pose",
    "twist": "twist",
    "joint_trajectory": "joint_trajectory",
    "joint_trajectory_chunk": "joint_trajectory",
    "position_array": "joint_positions",
    "velocity_array": "joint_velocities",
}
VELOCITIES = ("twist", "velocity_array")
# A busy machine may pause a test for long; what is tested is what happens, not when.
PATIENT = {"command_timeout_s": 0.5, "state_timeout_s": 1.0, "enable_timeout_s": 1.0, "action_timeout_s": 2.0}
PARAMETERS = {
    "base_frame": BASE,
    "max_action_age_s": 5.0,
    "gripper.output": "array",
    "gripper.open_value": 0.04,
    "black_box_s": 0.0,
    "rate_hz": 100.0,
    "obey_time_s": 10.0,  # a tool that is told to stand goes on to and fro here
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
        self.services: dict[str, Any] = {
            name: self.user.create_client(Trigger, f"/guard/{name}") for name in ("stop", "clear_stop")
        }
        self.clock_ns: Callable[[], Any] = lambda: self.guard.get_clock().now().nanoseconds
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
        if kind == "joint_velocities":
            return Float64MultiArray(data=[0.5 * self.speed, -self.speed])
        if kind == "joint_positions":
            return Float64MultiArray(data=positions)
        points = [JointTrajectoryPoint(positions=positions)]
        if self.output == "joint_trajectory_chunk":
            points = self._chunk(np.array(positions))
        return JointTrajectory(joint_names=list(JOINTS.names), points=points)

    def _chunk(self, positions: np.ndarray) -> list[JointTrajectoryPoint]:
        """On at the same speed for 0.3 s, and then to rest."""
        speeds, points = self.speed * np.array([0.5, -1.0]), []
        for time_s, passed_s, share in ((0.05, 0.05, 1.0), (0.3, 0.3, 1.0), (0.4, 0.35, 0.0)):
            at, moving = (positions + speeds * passed_s).tolist(), (share * speeds).tolist()
            ahead = Duration(nanosec=round(time_s * 1e9))
            points.append(JointTrajectoryPoint(positions=at, velocities=moving, time_from_start=ahead))
        return points

    def pose_at(self, y: float) -> PoseStamped:
        pose = self.header(PoseStamped())
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = (HOME + np.array([0, y, 0])).tolist()
        pose.pose.orientation.w = 1.0
        return pose

    def say(self) -> None:
        """Driver, robot, policy and operator, once each."""
        now_s = time.monotonic()
        if self.state is State.PASSING and self.output != "twist" and "command" not in self.silent:
            self.position += self.speed * min(now_s - self._said_s, 0.05)
        self._said_s = now_s
        to_and_fro_m = 0.05 * abs(now_s % 2 - 1)
        messages = {
            # Told to move, it moves: with velocities to and fro.
            "tool": (self.poses, lambda: self.pose_at(self.position if self.output != "twist" else to_and_fro_m)),
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
        if self.output in VELOCITIES:
            return abs(self.value(sent[-1])) > 0
        return len(sent) > 1 and self.value(sent[-1]) != self.value(sent[-2])

    @staticmethod
    def value(message: Any) -> float:
        if isinstance(message, PoseStamped):
            return float(message.pose.position.y)
        if isinstance(message, TwistStamped):
            return float(message.twist.linear.y)
        return float(message.points[0].positions[1] if isinstance(message, JointTrajectory) else message.data[1])

    def stands(self) -> bool:
        """Whether what goes out goes on, and is zero or the same."""
        last = self.sent[-5:]
        if len(last) < 5:
            return False
        if self.output == "twist":
            return all(message.twist == TwistStamped().twist for message in last)
        if self.output == "velocity_array":
            return not any(any(message.data) for message in last)
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
