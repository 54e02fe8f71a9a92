# SPDX-License-Identifier: Apache-2.0
"""The simulated arm commanded over real DDS, as an arm is that is sold."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray
from support.gl import needs_gl
from support.ideal_driver import ACTION_DT_S, IdealDriver
from support.nightly import nightly_but
from support.patience import wait_until
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from specvla_ros.control.pose import quaternion
from specvla_ros.errors import UserError
from specvla_ros.lab.ros.sim_robot.node import Phase, SimRobot
from specvla_ros.lab.simulation.collect import demonstrate
from specvla_ros.lab.simulation.commanded_arm import COMMANDS
from specvla_ros.lab.simulation.motion_record import read_motion_record
from specvla_ros.messages.image_message import stamp_ns
from specvla_ros.msg import SimEpisode

pytestmark = needs_gl

STILL_M = 0.002
OFF_S = 0.35  # the arm's controllers are, after a new start
TYPES = {
    "pose": (PoseStamped, "pose"),
    "twist": (TwistStamped, "twist"),
    "joint_trajectory": (JointTrajectory, "joint_trajectory"),
    "joint_trajectory_chunk": (JointTrajectory, "joint_trajectory"),
    "position_array": (Float64MultiArray, "joint_positions"),
    "velocity_array": (Float64MultiArray, "joint_velocities"),
}


def to_message(command: str, value: Any, stamp: Time) -> Any:
    if command == "pose":
        message = PoseStamped()
        message.header.frame_id, message.header.stamp = value[0], stamp
        place, turn = message.pose.position, message.pose.orientation
        place.x, place.y, place.z = value[1].position.tolist()
        turn.w, turn.x, turn.y, turn.z = quaternion(value[1].rotation)
        return message
    if command == "twist":
        message = TwistStamped()
        message.header.frame_id, message.header.stamp = value.frame, stamp
        linear, angular = message.twist.linear, message.twist.angular
        linear.x, linear.y, linear.z = value.linear.tolist()
        angular.x, angular.y, angular.z = value.angular.tolist()
        return message
    if command.endswith("_array"):
        return Float64MultiArray(data=value.tolist())
    ahead = Duration(nanosec=round(value.points[0].time_s * 1e9))
    point = JointTrajectoryPoint(positions=value.points[0].positions.tolist(), time_from_start=ahead)
    return JointTrajectory(joint_names=list(value.joints), points=[point])


@dataclass
class Scene:
    """The node under test, and a node that commands and watches."""

    sim: SimRobot
    user: Node
    executor: SingleThreadedExecutor
    command: str
    on_tool: Callable[[PoseStamped], None] = lambda message: None
    images: list[int] = field(default_factory=list)
    episodes: list[SimEpisode] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    joints: list[JointState] = field(default_factory=list)
    tools: list[PoseStamped] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind, name = TYPES[self.command]
        self.motion = self.user.create_publisher(kind, f"/sim_robot/command/{name}", 10)
        self.gripper = self.user.create_publisher(Float64MultiArray, "/sim_robot/command/gripper", 10)
        listen = self.user.create_subscription
        listen(SimEpisode, "/sim_robot/episode", self.episodes.append, 100)
        listen(Clock, "/clock", lambda m: self.clocks.append(m.clock.sec * 10**9 + m.clock.nanosec), 100)
        listen(JointState, "/joint_states", self.joints.append, 100)
        listen(Image, "/camera/image_raw", lambda m: self.images.append(stamp_ns(m.header)), 10)
        listen(PoseStamped, "/sim_robot/tool_pose", self._on_tool, 100)

    def _on_tool(self, message: PoseStamped) -> None:
        self.tools.append(message)
        self.on_tool(message)

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(
            condition,
            meanwhile=lambda: self.executor.spin_once(timeout_sec=0.02),
            failed=lambda: f"still waiting in {self.sim.phase}: {self.episodes[-1:]}",
        )

    def pass_time(self, seconds: float) -> None:
        """Lets simulated time pass."""
        end = self.sim._now_ns + round(seconds * 1e9)
        self.until(lambda: self.sim._now_ns >= end)

    def hand(self) -> np.ndarray:
        return self.sim.robot.state().hand


@contextmanager
def scene(command: str, **parameters: Any) -> Iterator[Scene]:
    settings = {"tasks": ["lift_red"], "episodes": 1, "image_size": 32, "pause_between_s": 0.0}
    given = {**settings, "command": command, **parameters}
    rclpy.init()
    executor = SingleThreadedExecutor()
    sim = SimRobot(parameter_overrides=[Parameter(name, value=value) for name, value in given.items()])
    user = rclpy.create_node("driver", enable_rosout=False)
    for node in (sim, user):
        executor.add_node(node)
    try:
        yield Scene(sim, user, executor, command)
    finally:
        sim.close()
        executor.shutdown()
        for node in (sim, user):
            node.destroy_node()
        rclpy.try_shutdown()


class ExpertDriver:
    """Does the task, by commands."""

    def __init__(self, s: Scene) -> None:
        self._scene, self._driver = s, IdealDriver(s.sim.robot.world, s.command)
        self._episode, self._next_s = -1, 0.0

    def __call__(self, message: PoseStamped) -> None:
        s, now_s = self._scene, stamp_ns(message.header) * 1e-9
        if s.sim.phase is not Phase.RUNNING or now_s < s.sim.episode.began_ns * 1e-9 + OFF_S:
            return
        if self._episode != s.sim.episode.start.index:
            self._episode, self._next_s = s.sim.episode.start.index, now_s
            self._driver.reset()
        if now_s >= self._next_s:
            self._next_s += ACTION_DT_S
            self._driver.take(demonstrate(s.sim.robot.task, s.sim.robot.state()))
        s.motion.publish(to_message(s.command, self._driver.command(now_s, 0.01), message.header.stamp))
        s.gripper.publish(Float64MultiArray(data=[self._driver.gripper()]))


@pytest.mark.parametrize("command", nightly_but(lambda command: command == "twist", COMMANDS))
def test_episodes_succeed_by_every_interface(command: str, tmp_path: Path) -> None:
    with scene(command, episodes=2, record=str(tmp_path / "motion")) as s:
        s.on_tool = ExpertDriver(s)
        s.until(lambda: s.sim.finished)
        s.until(lambda: s.episodes and s.episodes[-1].finished_so_far == 2)
        ends = [message for message in s.episodes if message.state != SimEpisode.RUNNING]
        assert [end.state for end in ends] == [SimEpisode.SUCCEEDED] * 2
        assert all(end.actions > 50 and end.stale_actions == 0 for end in ends)
    rows = read_motion_record(tmp_path / "motion").rows
    assert set(rows["episode"]) == {0, 1}
    for episode, end in enumerate(ends):
        judged = rows[(rows["episode"] == episode) & (rows["running"] == 1)]
        assert len(judged) * 0.01 == pytest.approx(end.time_s, abs=0.02)


def assert_without_gaps(stamps: list[int], resets: int = 1) -> None:
    """Each control step has one; a reset takes a step of its own."""
    steps = np.diff(stamps)
    assert set(steps) <= {10_000_000, 20_000_000} and (steps > 10_000_000).sum() <= resets


def test_clock_tool_and_joints_come_with_each_step_and_images_at_their_rate() -> None:
    with scene("pose", camera_rate_hz=10.0) as s:
        s.until(lambda: s.sim.phase is Phase.RUNNING and len(s.images) > 5)
        s.pass_time(1.0)
        arm = s.sim.robot.world.arm
        assert s.joints[-1].name == list(arm.joint_names)
        assert s.tools[-1].header.frame_id == "base_link"
        for stamps in ([stamp_ns(m.header) for m in s.tools], [stamp_ns(m.header) for m in s.joints]):
            assert_without_gaps(stamps)
        assert_without_gaps(sorted(set(s.clocks)))
        began = s.sim.episode.began_ns
        assert not (np.diff([stamp for stamp in s.images if stamp >= began]) % 100_000_000).any()
        place = s.tools[-1].pose.position
        assert np.linalg.norm(s.hand() - [place.x, place.y, place.z]) < STILL_M


def test_between_episodes_the_arm_obeys_on_and_its_clock_goes_on() -> None:
    with scene("position_array", exit_when_done=False, tasks=["lift_red"], pause_between_s=1.0) as s:
        s.on_tool = ExpertDriver(s)
        s.until(lambda: s.sim.phase is Phase.DONE)
        s.on_tool = lambda message: None
        joints = s.sim.robot.world.joint_state()[0][:7]
        images = len(s.images)
        s.motion.publish(Float64MultiArray(data=[joints[0] + 0.2, *joints[1:]]))
        s.pass_time(1.0)
        assert s.sim.robot.world.joint_state()[0][0] == pytest.approx(joints[0] + 0.2, abs=0.01)
        s.until(lambda: len(s.images) > images + 10)
        assert_without_gaps([stamp_ns(m.header) for m in s.joints])
        # The tool is out of sight for a while before the arm is put somewhere else.
        assert max(np.diff([stamp_ns(m.header) for m in s.tools])) > 100_000_000


def test_what_was_on_its_way_to_the_last_episode_does_not_pull_the_arm_back() -> None:
    with scene("pose", episodes=2) as s:
        s.on_tool = ExpertDriver(s)
        s.until(lambda: s.episodes and s.episodes[-1].finished_so_far == 1)
        old = s.tools[-1]
        s.on_tool = lambda message: s.motion.publish(old)
        s.until(lambda: s.sim.phase is Phase.RUNNING and s.sim.episode.start.index == 1)
        start = s.hand()
        s.pass_time(0.25)
        s.on_tool = lambda message: None
        s.pass_time(0.5)
        there = np.array([old.pose.position.x, old.pose.position.y, old.pose.position.z])
        assert np.linalg.norm(start - there) > 0.05
        assert np.linalg.norm(s.hand() - start) < STILL_M


def bad(command: str, s: Scene) -> list[Any]:
    """Messages that the real interface would not take."""
    now = s.tools[-1].header.stamp
    pose, twist = PoseStamped(), TwistStamped()
    pose.header.frame_id, pose.header.stamp = "base_link", now
    twist.header.frame_id, twist.header.stamp = "base_link", now
    pose.pose.orientation.w = 1.0
    twist.twist.linear.x = math.nan
    pose.pose.position.x = math.inf
    zero, camera = PoseStamped(), TwistStamped()
    zero.header.frame_id, zero.pose.orientation.w = "base_link", 0.0
    camera.header.frame_id, camera.header.stamp = "camera", now
    camera.twist.linear.x = 0.1
    names = list(s.sim.robot.world.arm.joints)
    point = JointTrajectoryPoint(positions=[0.0] * 7, time_from_start=Duration(sec=1))
    return {
        "pose": [pose, zero],
        "twist": [twist, camera],
        "joint_trajectory": [
            JointTrajectory(joint_names=[*names[:6], "elbow"], points=[point]),
            JointTrajectory(joint_names=names, points=[point, point]),
        ],
        "position_array": [Float64MultiArray(data=[0.0] * 6), Float64MultiArray(data=[math.nan] * 7)],
        "velocity_array": [Float64MultiArray(data=[0.0] * 6), Float64MultiArray(data=[math.nan] * 7)],
    }[command.removesuffix("_chunk")]


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_commands_are_counted_and_never_move_the_arm(command: str) -> None:
    with scene(command) as s:
        s.until(lambda: s.sim.phase is Phase.RUNNING)
        s.pass_time(0.5)
        hand = s.hand()
        wrong = bad(command, s)
        for message in wrong:
            s.motion.publish(message)
        s.gripper.publish(Float64MultiArray(data=[0.0, 0.0]))
        s.until(lambda: s.sim.episode.ignored == len(wrong) + 1)
        s.pass_time(0.5)
        assert s.sim.episode.actions == 0
        assert np.linalg.norm(s.hand() - hand) < STILL_M


def test_a_twist_that_is_not_repeated_moves_the_arm_for_a_tenth_of_a_second() -> None:
    with scene("twist") as s:
        s.until(lambda: s.sim.phase is Phase.RUNNING)
        s.pass_time(0.5)
        hand = s.hand()
        message = TwistStamped()
        message.header.frame_id, message.header.stamp = "base_link", s.tools[-1].header.stamp
        message.twist.linear.z = 0.2
        s.motion.publish(message)
        s.until(lambda: s.sim.episode.actions == 1)
        s.pass_time(0.3)
        there = s.hand()
        assert 0.002 < there[2] - hand[2] < 0.021
        s.pass_time(0.5)
        assert np.linalg.norm(s.hand() - there) < STILL_M


def test_who_waits_for_a_commander_says_so() -> None:
    with scene("pose", wait_for_policy_s=0.3) as s:
        s.user.destroy_publisher(s.motion)
        wait_until(lambda: not s.sim.count_publishers("/sim_robot/command/pose"))
        s.until(lambda: s.sim.finished)
        assert "publisher of /sim_robot/command/pose" in s.sim.failure


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"command": "pose", "clock": "lockstep"}, "lockstep waits for actions.*set clock to realtime"),
        ({"command": "effort"}, "must be one of: action, pose, twist"),
        ({"robot": "r2d2"}, "must be one of: table, panda, ur5e"),
        ({"record": "/dev/null/motion"}, "cannot be written"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    rclpy.init()
    try:
        with pytest.raises(UserError, match=message):
            SimRobot(parameter_overrides=[Parameter(name, value=value) for name, value in parameters.items()])
    finally:
        rclpy.try_shutdown()
