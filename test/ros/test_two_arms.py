# SPDX-License-Identifier: Apache-2.0
"""ALOHA over topics: driver and guard of each arm in a namespace of its own follow the answers of one policy."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64MultiArray, Header, String
from support.patience import PATIENCE_S, wait_until
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.lab.files import write_parameters
from specvla_ros.lab.ros.demo.processes import LifecycleClient, NodeProcesses
from specvla_ros.lab.simulation.arms import ALOHA
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.qos import ACTION, HEARTBEAT, LATCHED_STATE
from specvla_ros.ros.wiring import RobotTopics
from specvla_ros.settings.profiles import merge_parameters

has_model = pytest.mark.skipif(importlib.util.find_spec("gym_aloha") is None, reason="needs requirements/robots.txt")

ROOT = Path(__file__).parents[2]
SIDES = ("left", "right")
INSTRUCTION = "fold the towel"
HOME = np.array(ALOHA.home)
STEP = {
    "left": np.array([0.1, 0, 0, 0, 0, 0.2]),
    "right": np.array([-0.15, 0, 0, 0, 0, -0.1]),
}  # to each arm's goal, rad
OPENINGS = {"left": 0.9, "right": 0.1}
# As in the lines of docs/how-to/drive-a-robot.md#two-arms.
TOPICS = RobotTopics(
    instruction="/instruction",
    commands={
        "joint_trajectory": "joint_trajectory_controller/joint_trajectory",
        "gripper": "gripper_controller/commands",
    },
    action="/policy/action",
)


@dataclass
class Arm:
    """An arm that is where the newest trajectory's point for now says."""

    side: str
    node: Node
    positions: np.ndarray = field(default_factory=HOME.copy)  # float64 [6], rad
    stopped: list[bool] = field(default_factory=list)
    gripper: float = 0.0

    def __post_init__(self) -> None:
        name = f"/{self.side}"
        self._points: list[tuple[float, np.ndarray]] = []
        self._states = self.node.create_publisher(JointState, f"{name}/joint_states", 10)
        self.stop = self.node.create_publisher(Empty, f"{name}/guard/stop", 1)
        topic = f"{name}/joint_trajectory_controller/joint_trajectory"
        self.node.create_subscription(JointTrajectory, topic, self._follow, 10)
        self.node.create_subscription(Float64MultiArray, f"{name}/gripper_controller/commands", self._grip, 10)
        self.node.create_subscription(GuardState, f"{name}/guard/state", self._hear, LATCHED_STATE)
        self._enable = self.node.create_publisher(Bool, f"{name}/guard/enable", HEARTBEAT)
        self.node.create_timer(0.01, self._update)

    def _now_s(self) -> float:
        return self.node.get_clock().now().nanoseconds * 1e-9

    def _follow(self, message: JointTrajectory) -> None:
        assert tuple(message.joint_names) == ALOHA.joints
        start = [(self._now_s(), self.positions)]
        after = [each.time_from_start.sec + each.time_from_start.nanosec * 1e-9 for each in message.points]
        positions = [np.array(each.positions) for each in message.points]
        self._points = start + [(start[0][0] + s, each) for s, each in zip(after, positions, strict=True)]

    def _grip(self, message: Float64MultiArray) -> None:
        self.gripper = message.data[0]

    def _hear(self, message: GuardState) -> None:
        self.stopped.append(message.state == GuardState.STOPPED)

    def _update(self) -> None:
        now_s = self._now_s()
        if self._points:
            times, positions = zip(*self._points, strict=True)
            self.positions = np.array([np.interp(now_s, times, column) for column in np.transpose(positions)])
        message = JointState(name=list(ALOHA.joints), position=self.positions.tolist())
        message.header.stamp = Time(nanoseconds=round(now_s * 1e9)).to_msg()
        self._states.publish(message)
        self._enable.publish(Bool(data=True))


@dataclass
class Table:
    """Both arms, and the policy that answers for both."""

    node: Node
    executor: SingleThreadedExecutor

    def __post_init__(self) -> None:
        self.arms = {side: Arm(side, self.node) for side in SIDES}
        self._actions = self.node.create_publisher(VlaAction, "/policy/action", ACTION)
        self._instructions = self.node.create_publisher(String, "/instruction", LATCHED_STATE)
        self._instructions.publish(String(data=INSTRUCTION))
        self.goals = {side: HOME.copy() for side in SIDES}
        self._seq = 0
        self.node.create_timer(0.1, self._act)

    def _act(self) -> None:
        values = np.concatenate([[*self.goals[side], OPENINGS[side]] for side in SIDES])
        names = [f"{side}_{name}" for side in SIDES for name in (*ALOHA.joints, "gripper")]
        chunk = np.tile(values, (5, 1))
        self._actions.publish(
            VlaAction(
                header=Header(stamp=self.node.get_clock().now().to_msg(), frame_id="base_link"),
                seq=self._seq,
                instruction=INSTRUCTION,
                names=names,
                values=chunk.ravel().tolist(),
                horizon=len(chunk),
                action_dt=0.04,
                reference="absolute",
                action_frame="joints",
                rotation="rotation_vector",
                gripper="open_high",
            )
        )
        self._seq += 1

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(
            condition,
            meanwhile=lambda: self.executor.spin_once(timeout_sec=0.02),
            failed=lambda: {side: (arm.positions, arm.stopped[-1:], arm.gripper) for side, arm in self.arms.items()},
        )

    def at_goal(self, side: str) -> bool:
        return bool(np.abs(self.arms[side].positions - self.goals[side]).max() < 2e-3)


@contextmanager
def started(side: str, robot: Path, logs: Path) -> Iterator[None]:
    """Driver and guard of an arm, with the namespace and the remappings that robot.launch.py gives them."""
    namespace, client = ("__ns", f"/{side}"), Node(f"starter_of_{side}")
    with NodeProcesses() as nodes:
        for name, remaps in (("driver", TOPICS.driver), ("guard", TOPICS.guard)):
            file, log = logs / f"{side}_{name}.yaml", logs / f"{side}_{name}.log"
            own = {"black_box_dir": str(logs / side)} if name == "guard" else {}
            write_parameters(file, merge_parameters([robot], own, node=name, namespace=side))
            nodes.start(f"ros.{name}.node", params_file=file, remaps=[namespace, *remaps], log=log)
        alive = lambda: nodes.exit_code("driver") is None  # noqa: E731
        LifecycleClient(client, f"/{side}/driver").activate(alive, PATIENCE_S)
        client.destroy_node()
        yield


@pytest.fixture
def table() -> Iterator[Table]:
    rclpy.init()
    node, executor = Node("table"), SingleThreadedExecutor()
    executor.add_node(node)
    try:
        yield Table(node, executor)
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.shutdown()


@has_model
def test_each_arm_follows_its_half_and_a_stop_of_one_leaves_the_other(table: Table, tmp_path: Path) -> None:
    model, robot = tmp_path / "aloha.xml", tmp_path / "aloha.yaml"
    model.write_text(ALOHA.kinematics())
    text = (ROOT / "config" / "robots" / "aloha.yaml").read_text()
    text = text.replace("vx300s.urdf ", f"{model} ").replace("ee_gripper_link", "pinch")
    robot.write_text(text.replace("speed_scale: 0.1", "speed_scale: 1.0"))
    with started("left", robot, tmp_path), started("right", robot, tmp_path):
        check(table)


def check(table: Table) -> None:
    arms = table.arms
    table.until(lambda: all(arm.stopped and not arm.stopped[-1] for arm in arms.values()))
    table.goals |= {side: HOME + step for side, step in STEP.items()}
    table.until(lambda: all(map(table.at_goal, SIDES)))
    table.until(lambda: arms["left"].gripper > 0.05 and arms["right"].gripper < 0.03)

    arms["left"].stop.publish(Empty())
    table.until(lambda: arms["left"].stopped[-1])
    rested = arms["left"].positions
    table.goals |= dict.fromkeys(SIDES, HOME)
    table.until(lambda: table.at_goal("right"))
    assert not arms["right"].stopped[-1] and arms["left"].stopped[-1]
    np.testing.assert_allclose(arms["left"].positions, rested, atol=5e-3)
