# SPDX-License-Identifier: Apache-2.0
"""The demo's operator, beside a guard that answers as the real one does."""

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.executors import SingleThreadedExecutor
from std_srvs.srv import Trigger
from support.patience import wait_until

from specvla_ros.lab.bundled.policies import nano_policy
from specvla_ros.lab.ros.demo.operator import Operator
from specvla_ros.lab.ros.demo.record import DemoRecord
from specvla_ros.ros.qos import DIAGNOSTICS


class Guard:
    """Says a state, and refuses to clear a stop as long as its cause persists."""

    def __init__(self):
        self.node = rclpy.create_node("guard")
        self.state, self.persists, self.asked = "passing", 0, 0
        self._diagnostics = self.node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self.node.create_service(Trigger, "/guard/clear_stop", self._on_clear)

    def say(self):
        self._diagnostics.publish(DiagnosticArray(status=[DiagnosticStatus(name="guard: gate", message=self.state)]))

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
    assert operator.begin_episode() == ""
    guard.state = "stopped: not_following: the arm is 60 mm from its command"
    wait_until(lambda: operator.motion.latched, meanwhile=spin)
    for _ in range(20):
        spin()
    assert guard.asked == 0
