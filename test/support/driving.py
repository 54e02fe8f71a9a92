# SPDX-License-Identifier: Apache-2.0
"""A driver and its robot, over real DDS, in one process and on one thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from support.patience import PATIENCE_S, wait_until
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.driver import Driver
from specvla_ros.control.pose import Pose, PoseHistory, quaternion, quaternion_matrix
from specvla_ros.msg import VlaAction
from specvla_ros.ros.driver.node import DriverNode
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS

LIMITS = {
    "limits.linear_speed": 1.0,
    "limits.angular_speed": 3.0,
    "limits.linear_acceleration": 10.0,
    "limits.angular_acceleration": 30.0,
    "limits.linear_jerk": 500.0,
    "limits.angular_jerk": 1500.0,
    "limits.workspace_min": [0.2, -0.5, 0.0],
    "limits.workspace_max": [0.8, 0.5, 0.6],
}
# A busy machine measures late; and the process is the tests' own, whose children would have its priority.
PATIENT = {"tool_pose_timeout_s": 2.0, "realtime_priority": 0}
NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
START = Pose(np.array([0.5, 0.0, 0.3]), np.diag([1.0, -1.0, -1.0]))
MOVE = (0.05, 0.02, -0.01, 0.0, 0.0, 0.1, 0.0)


@dataclass
class Arm:
    """A robot that is exactly where it is sent, its driver, and who watches both."""

    driver: DriverNode
    node: Node
    executor: SingleThreadedExecutor
    pose: Pose = START
    joints: dict[str, float] = field(default_factory=dict)
    held: bool = False  # whether it stays where it is, whatever it is sent
    wired: tuple[int, ...] | None = None  # which number of an array each joint takes; None: its own
    measured: bool = True  # whether the tool's pose is published
    poses: list[PoseStamped] = field(default_factory=list)
    twists: list[TwistStamped] = field(default_factory=list)
    trajectories: list[JointTrajectory] = field(default_factory=list)
    arrays: list[Float64MultiArray] = field(default_factory=list)
    grippers: list[Float64MultiArray] = field(default_factory=list)
    diagnostics: list[DiagnosticArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        node = self.node
        node.create_subscription(PoseStamped, "/driver/pose", self._on_pose, COMMAND)
        node.create_subscription(TwistStamped, "/driver/twist", self._on_twist, COMMAND)
        node.create_subscription(JointTrajectory, "/driver/joint_trajectory", self._on_trajectory, COMMAND)
        node.create_subscription(Float64MultiArray, "/driver/joint_positions", self._on_array, COMMAND)
        node.create_subscription(Float64MultiArray, "/driver/joint_velocities", self._on_velocities, COMMAND)
        node.create_subscription(Float64MultiArray, "/driver/gripper", self.grippers.append, COMMAND)
        node.create_subscription(DiagnosticArray, "/diagnostics", self.diagnostics.append, DIAGNOSTICS)
        self.actions = node.create_publisher(VlaAction, "action", ACTION)
        self._tool_pose = node.create_publisher(PoseStamped, "tool_pose", 10)
        self._joint_states: Any = node.create_publisher(JointState, "joint_states", 10)
        node.create_timer(0.01, self._publish_state)

    @property
    def core(self) -> Driver:
        """What the node has made when it is active."""
        assert self.driver._driver is not None
        return self.driver._driver

    def until(self, condition: Callable[[], object]) -> None:
        """Spins until the condition holds; fails after a while."""
        wait_until(
            condition,
            meanwhile=lambda: self.executor.spin_once(timeout_sec=0.05),
            failed=lambda: f"still waiting; refused {dict(self.driver._refusals)}, {self.core.problem}",
        )

    def start(self) -> None:
        """Configures, activates and waits until the driver follows actions."""
        assert self.driver.trigger_configure().name == "SUCCESS"
        assert self.driver.trigger_activate().name == "SUCCESS"
        self.until(lambda: self.core.anchored and self.actions.get_subscription_count())

    def act(self, values: Any = MOVE, *, age_s: float = 0.0, **changes: Any) -> None:
        """Publishes an action, and waits until the driver has judged it."""
        judged = self.driver._taken + sum(self.driver._refusals.values())
        self.actions.publish(self.action(values, age_s=age_s, **changes))
        self.until(lambda: self.driver._taken + sum(self.driver._refusals.values()) > judged)

    def action(self, values: Any = MOVE, *, age_s: float = 0.0, **changes: Any) -> VlaAction:
        stamp = self.driver.get_clock().now().nanoseconds - round(age_s * 1e9)
        message = VlaAction(
            names=NAMES,
            values=[float(value) for value in values],
            horizon=1,
            action_dt=0.2,
            reference="delta",
            action_frame="base",
            rotation="rotation_vector",
            gripper="open_high",
            mode="ar",
        )
        message.header.stamp = Time(sec=stamp // 10**9, nanosec=stamp % 10**9)
        message.header.frame_id = "base_link"
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    def rest(self) -> None:
        """Spins until the driver has nothing to move any more, for ten control steps."""
        still, seen, deadline = 0, None, time.monotonic() + PATIENCE_S
        while still < 10:
            assert time.monotonic() < deadline, f"it never rests: {self.core.target.pose} is sent, {self.pose} measured"
            self._until_step_after(seen)
            seen = self.core._last_step
            still = 0 if self.core.target.moving else still + 1
        self.spin(5)

    def spin(self, steps: int) -> None:
        """Spins for so many control steps."""
        for _ in range(steps):
            seen = self.core._last_step
            self._until_step_after(seen)

    def _until_step_after(self, seen: tuple[float, float] | None) -> None:
        self.until(lambda: self.core._last_step != seen)

    def refused(self) -> dict[str, int]:
        return dict(self.driver._refusals)

    def status(self) -> Any:
        return next(s for a in reversed(self.diagnostics) for s in a.status if s.name == "driver: motion")

    def _publish_state(self) -> None:
        stamp = self.node.get_clock().now().to_msg()
        if self.measured:
            message = PoseStamped()
            message.header.stamp, message.header.frame_id = stamp, "base_link"
            place, turn = message.pose.position, message.pose.orientation
            place.x, place.y, place.z = self.pose.position.tolist()
            turn.w, turn.x, turn.y, turn.z = quaternion(self.pose.rotation)
            self._tool_pose.publish(message)
        if self.joints:
            states = JointState(name=[*self.joints], position=[*self.joints.values()])
            states.header.stamp = stamp
            self._joint_states.publish(states)

    def _on_pose(self, message: PoseStamped) -> None:
        self.poses.append(message)
        if self.held:
            return
        place, turn = message.pose.position, message.pose.orientation
        self.pose = Pose(np.array([place.x, place.y, place.z]), quaternion_matrix(turn.w, turn.x, turn.y, turn.z))

    def _on_trajectory(self, message: JointTrajectory) -> None:
        self.trajectories.append(message)
        self.joints = dict(zip(message.joint_names, message.points[0].positions, strict=True))

    def _on_array(self, message: Float64MultiArray) -> None:
        self.arrays.append(message)
        data = np.array(message.data)
        self.joints = dict(zip(self.joints, data if self.wired is None else data[list(self.wired)], strict=True))

    def _on_velocities(self, message: Float64MultiArray) -> None:
        """Each joint goes on at its velocity for a control step."""
        self.arrays.append(message)
        data = np.array(message.data)
        self.joints = dict(zip(self.joints, np.array([*self.joints.values()]) + 0.01 * data, strict=True))

    def _on_twist(self, message: TwistStamped) -> None:
        if self.twists:
            passed_s = (_ns(message) - _ns(self.twists[-1])) * 1e-9
            linear, angular = self.twists[-1].twist.linear, self.twists[-1].twist.angular
            speed = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
            self.pose = self.pose.displaced(speed * min(passed_s, 0.1))
        self.twists.append(message)


def _ns(message: Any) -> int:
    nanoseconds: int = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
    return nanoseconds


@contextmanager
def arm(**parameters: Any) -> Iterator[Arm]:
    """A driver with parameters, `limits` included, unconfigured, and its robot.

    A busy machine lets the driver's loop stand still for a while, which must not end a test's motion.
    """
    values = {**LIMITS, **PATIENT, **{name.replace("__", "."): value for name, value in parameters.items()}}
    overrides = [Parameter(name, value=value) for name, value in values.items() if value is not None]
    rclpy.init()
    executor = SingleThreadedExecutor()
    stalls = patch("specvla_ros.control.driver.STALL_S", 60.0)
    gaps = patch("specvla_ros.ros.driver.node.PoseHistory", partial(PoseHistory, gap_s=60.0))
    stalls.start()
    gaps.start()
    driver = DriverNode(parameter_overrides=overrides)
    node = Node("arm")
    executor.add_node(driver)
    executor.add_node(node)
    try:
        yield Arm(driver, node, executor)
    finally:
        driver.close()
        executor.shutdown(timeout_sec=1.0)
        driver.destroy_node()
        node.destroy_node()
        rclpy.try_shutdown()
        stalls.stop()
        gaps.stop()
