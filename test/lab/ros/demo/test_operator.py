# SPDX-License-Identifier: Apache-2.0
"""The demo's operator, beside a guard that answers as the real one does."""

from functools import partial

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.executors import SingleThreadedExecutor
from std_msgs.msg import Bool
from std_srvs.srv import Trigger
from support.patience import wait_until

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.ros.demo.operator import Operator
from specvla_ros.lab.ros.demo.record import DemoRecord
from specvla_ros.lab.ros.sim_robot.outputs import EPISODE
from specvla_ros.msg import SimEpisode
from specvla_ros.ros.qos import DIAGNOSTICS, HEARTBEAT


def _longer(what, than):
    return len(what) > than


class Guard:
    """Says a state, and refuses to clear a stop as long as its cause persists; it is the robot too."""

    def __init__(self):
        self.node = rclpy.create_node("guard")
        self.state, self.persists, self.asked = "passing", 0, 0
        self._diagnostics = self.node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self.node.create_service(Trigger, "/guard/clear_stop", self._on_clear)
        self._episodes = self.node.create_publisher(SimEpisode, "/sim_robot/episode", EPISODE)
        self.held: list[bool] = []
        self.node.create_subscription(Bool, "/guard/enable", lambda m: self.held.append(m.data), HEARTBEAT)

    def say(self):
        self._diagnostics.publish(DiagnosticArray(status=[DiagnosticStatus(name="guard: gate", message=self.state)]))

    def episode(self, number, state):
        self._episodes.publish(SimEpisode(episode=number, state=state, task="lift_red"))

    def _on_clear(self, request, response):
        self.asked += 1
        response.success = self.asked > self.persists
        if response.success:
            self.state = "passing"
        return response


@pytest.fixture
def scene(tmp_path):
    rclpy.init()
    guard, operator = Guard(), Operator(DemoRecord(tmp_path, nano_policy(), commanded=True), commanded=True)
    executor = SingleThreadedExecutor()
    executor.add_node(guard.node)
    executor.add_node(operator)

    def spin():
        guard.say()
        executor.spin_once(timeout_sec=0.02)

    yield guard, operator, spin
    executor.shutdown()
    operator.destroy_node()
    guard.node.destroy_node()
    rclpy.shutdown()


def test_a_new_start_clears_a_stop_that_nobody_pressed_as_soon_as_its_cause_is_gone(scene):
    guard, operator, spin = scene
    guard.state, guard.persists = "stopped: not_following: the arm is 60 mm from its command", 2
    wait_until(lambda: operator.motion.latched, meanwhile=spin)
    assert operator.begin_episode() == "not_following: the arm is 60 mm from its command"
    wait_until(lambda: operator.motion.guard == "passing", meanwhile=spin)
    for _ in range(20):
        spin()
    asked = guard.asked
    assert asked >= 3, "asked again until the cause was gone"
    for _ in range(20):
        spin()
    assert guard.asked == asked, "and then no more"


@pytest.mark.parametrize("state", ["stopped: stop: stop was pressed (topic)", "holding: driver_silent: for 0.2 s"])
def test_a_new_start_leaves_what_was_pressed_and_what_ends_by_itself(scene, state):
    guard, operator, spin = scene
    guard.state = state
    wait_until(lambda: operator.motion.guard == state, meanwhile=spin)
    assert operator.begin_episode() == ""
    for _ in range(20):
        spin()
    assert guard.asked == 0


def test_a_stop_in_the_middle_of_an_episode_stays_until_the_next(scene):
    guard, operator, spin = scene
    guard.state = "passing"
    guard.episode(0, SimEpisode.RUNNING)
    assert operator.begin_episode() == ""
    wait_until(lambda: operator.motion.begun, meanwhile=spin)
    guard.state = "stopped: not_following: the arm is 60 mm from its command"
    wait_until(lambda: operator.motion.latched, meanwhile=spin)
    for _ in range(20):
        spin()
    assert guard.asked == 0


def test_what_stops_the_guard_as_the_world_is_set_back_is_cleared_before_motion_begins(scene):
    guard, operator, spin = scene
    guard.state = "holding: not_enabled: ~/enable is false"
    guard.episode(0, SimEpisode.RUNNING)
    wait_until(lambda: operator.motion.guard == guard.state, meanwhile=spin)
    assert operator.begin_episode() == ""
    guard.state = "stopped: pose_leaps: the measured pose moved 0.300 m and 0.00 rad within 0.010 s"
    wait_until(lambda: operator.motion.begun, meanwhile=spin)
    assert guard.asked >= 1


def test_the_switch_is_held_while_an_aborted_episode_waits_for_commands(scene):
    guard, _, spin = scene
    guard.episode(0, SimEpisode.RUNNING)
    wait_until(lambda: guard.held and guard.held[-1], meanwhile=spin)
    guard.episode(0, SimEpisode.ABORTED)
    for _ in range(40):
        spin()
    held = len(guard.held)
    wait_until(lambda: len(guard.held) > held + 3, meanwhile=spin)
    assert False not in guard.held


def test_the_switch_is_held_in_episodes_and_let_go_between_them(scene):
    guard, _, spin = scene
    for _ in range(20):
        spin()
    assert True not in guard.held, "not before the first"
    for number in (0, 1):
        guard.episode(number, SimEpisode.RUNNING)
        wait_until(lambda: guard.held and guard.held[-1], meanwhile=spin)
        held = len(guard.held)
        wait_until(partial(_longer, guard.held, held + 3), meanwhile=spin)  # the heartbeat goes on
        guard.episode(number, SimEpisode.SUCCEEDED)
        wait_until(lambda: not guard.held[-1], meanwhile=spin)
        released = len(guard.held)
        for _ in range(20):
            spin()
        assert True not in guard.held[released:]


def test_an_episodes_end_is_seen_although_the_next_start_follows_before_the_terminal_is_drawn(scene):
    guard, operator, spin = scene
    wait_until(lambda: guard._episodes.get_subscription_count(), meanwhile=spin)
    for number in range(3):
        guard.episode(number, SimEpisode.RUNNING)
        guard.episode(number, SimEpisode.SUCCEEDED)
    wait_until(lambda: len(operator._record.episodes) == 3, meanwhile=spin)
