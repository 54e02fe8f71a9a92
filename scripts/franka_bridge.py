# SPDX-License-Identifier: Apache-2.0
"""Bridge from the driver's poses to a Franka through libfranka, tested on `franka-sim`, which implements its protocol.

Uses third-party packages: libfranka's own Python bindings, and a server that implements the FCI over MuJoCo. The server
needs a separate environment, and downloads its arm unless one is given:

    pip install --no-deps pylibfranka==0.21.3                        # into this environment
    python3 -m venv ~/franka_sim && ~/franka_sim/bin/pip install franka-sim==1.1.7
    specvla robot-model --robot panda --out /tmp/panda.xml
    FR3_MJCF=/tmp/panda.xml ~/franka_sim/bin/run-franka-sim-server --no-gripper --enforce-motion-limits
    python scripts/franka_bridge.py 127.0.0.1 --seconds 20 --ros-args -r command/pose:=/driver/pose

Subscribes to `command/pose` (PoseStamped in base_link) and publishes `tool_pose` at 100 Hz. At the end it prints, as
JSON, the arm's distance from the commands and how well the control loop kept its 1 ms period. It adds no safety, and
has not been run on a real arm.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pylibfranka
import rclpy
from geometry_msgs.msg import PoseStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.utilities import remove_ros_args

from specvla_ros.control.guard.cause import Refusal
from specvla_ros.control.guard.tool_gates import pose_of
from specvla_ros.control.pose import Pose
from specvla_ros.ros.motion_messages import pose_message, tool_pose

# Three in series turn 100 Hz steps into a command with continuous acceleration, as the FCI requires.
_FILTERS, _FILTER_S = 3, 0.03
_CYCLE_S = 1e-3
_BASE = "base_link"
_PUBLISH_EVERY = 10  # cycles


class PoseTopics(Node):
    """Receives target poses and publishes measured ones."""

    def __init__(self) -> None:
        super().__init__("franka_bridge")
        self.target: Pose | None = None
        self._tool = self.create_publisher(PoseStamped, "tool_pose", 10)
        self.create_subscription(PoseStamped, "command/pose", self._on_pose, 1)

    def _on_pose(self, message: PoseStamped) -> None:
        pose = pose_of(tool_pose(message, None), _BASE)
        if isinstance(pose, Refusal):
            self.get_logger().error(f"refused a command: {pose.detail}", throttle_duration_sec=5.0)
        else:
            self.target = pose

    def publish(self, pose: Pose) -> None:
        self._tool.publish(pose_message(pose, self.get_clock().now().nanoseconds, _BASE))


@dataclass
class Smoothed:
    """A pose after a chain of low-pass filters."""

    stages: list[Pose]

    def step(self, target: Pose, seconds: float) -> Pose:
        share = 1.0 - np.exp(-seconds / _FILTER_S)
        for index, pose in enumerate(self.stages):
            target = self.stages[index] = pose.toward(target, share)
        return target


@dataclass
class Tally:
    """Statistics of a run."""

    errors_m: list[float] = field(default_factory=list)
    cycles_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    stopped_by: str = ""

    def as_json(self) -> dict[str, object]:
        errors, cycles = np.array(self.errors_m or [np.nan]), np.array(self.cycles_s or [np.nan])
        return {
            "cycles": len(self.cycles_s),
            "largest_speed_m_s": float(np.max(self.speeds or [np.nan])),
            "error_mm": {"median": float(np.median(errors)) * 1e3, "max": float(errors.max()) * 1e3},
            "cycle_ms": {"median": float(np.median(cycles)) * 1e3, "p99": float(np.quantile(cycles, 0.99)) * 1e3},
            "stopped_by": self.stopped_by,
        }


def follow(robot: pylibfranka.Robot, topics: PoseTopics, seconds: float) -> Tally:
    """Follows the newest target for a time; an exception of libfranka ends the run and is reported."""
    tally = Tally()
    control = robot.start_cartesian_pose_control(pylibfranka.ControllerMode.JointImpedance)
    try:
        state, _ = control.readOnce()
        start = _pose(state.O_T_EE_c)
        smoothed, sent, passed_s = Smoothed([start] * _FILTERS), start, 0.0
        while passed_s < seconds:
            began_s = time.perf_counter()
            state, period = control.readOnce()
            measured = _pose(state.O_T_EE)
            passed_s += period.to_sec()
            if len(tally.cycles_s) % _PUBLISH_EVERY == 0:
                topics.publish(measured)
            if topics.target is not None:
                # A command is for the next millisecond, even after lost cycles.
                before, sent = sent, smoothed.step(topics.target, _CYCLE_S)
                tally.speeds.append(float(np.linalg.norm(sent.position - before.position)) / _CYCLE_S)
                tally.errors_m.append(float(np.linalg.norm(measured.position - sent.position)))
            control.writeOnce(pylibfranka.CartesianPose(_columns(sent)))
            tally.cycles_s.append(time.perf_counter() - began_s)
    except (pylibfranka.FrankaException, pylibfranka.ControlException) as error:
        tally.stopped_by = str(error)
    return tally


def _pose(columns: list[float]) -> Pose:
    matrix = np.array(columns).reshape(4, 4).T
    return Pose(matrix[:3, 3].copy(), matrix[:3, :3].copy())


def _columns(pose: Pose) -> list[float]:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = pose.rotation, pose.position
    columns: list[float] = matrix.T.ravel().tolist()
    return columns


def main() -> None:
    """Arguments: the robot's address, and `--seconds N`."""
    address, *rest = remove_ros_args(sys.argv)[1:]
    seconds = float(rest[rest.index("--seconds") + 1]) if "--seconds" in rest else 20.0
    rclpy.init()
    topics = PoseTopics()
    executor = SingleThreadedExecutor()
    executor.add_node(topics)
    spinning = threading.Thread(target=executor.spin)
    spinning.start()
    robot = pylibfranka.Robot(address, pylibfranka.RealtimeConfig.kIgnore)
    print(json.dumps(follow(robot, topics, seconds).as_json(), indent=2))
    executor.shutdown()
    spinning.join()
    rclpy.try_shutdown()


if __name__ == "__main__":
    main()
