# SPDX-License-Identifier: Apache-2.0
"""Transitions are answered, whatever rclpy does, and why a node stopped is kept."""

from pathlib import Path
from typing import Any

import pytest
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.client import Client
from rclpy.executors import SingleThreadedExecutor
from support.patience import wait_until
from support.ros import robot

from specvla_ros.errors import UserError
from specvla_ros.ros.node import ManagedNode, answer_impossible_transitions


def asked(transition: int) -> ChangeState.Request:
    return ChangeState.Request(transition=Transition(id=transition))


def test_what_rclpy_raises_for_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    rclpy.init()
    node = rclpy.create_node("arm", enable_rosout=False)

    def raises(request: ChangeState.Request, response: ChangeState.Response) -> ChangeState.Response:
        raise RuntimeError("Failed to trigger: Transition is not registered, at ./src/rcl_lifecycle.c:355")

    node.create_service(ChangeState, "change_state", raises)
    answer_impossible_transitions(node)
    client: Client[Any, Any] = node.create_client(ChangeState, "change_state")
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        wait_until(client.service_is_ready)
        answer = client.call_async(asked(Transition.TRANSITION_ACTIVATE))
        wait_until(answer.done, meanwhile=lambda: executor.spin_once(timeout_sec=0.05))
        result: Any = answer.result()
        assert not result.success
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()
    said = capfd.readouterr().err
    assert "transition 3 is not possible in this state: Failed to trigger: Transition is not registered" in said
    assert ".c:355" not in said


def test_the_policy_answers_what_it_cannot_do_and_goes_on(checkpoint: Path) -> None:
    with robot(checkpoint) as r:
        client: Client[Any, Any] = r.user.create_client(ChangeState, "/policy/change_state")
        r.until(client.service_is_ready)
        for transition, success in (
            (Transition.TRANSITION_ACTIVATE, False),
            (Transition.TRANSITION_CLEANUP, False),
            (Transition.TRANSITION_CONFIGURE, True),
            (Transition.TRANSITION_CONFIGURE, False),
            (Transition.TRANSITION_ACTIVATE, True),
        ):
            answer = client.call_async(asked(transition))
            r.until(answer.done)
            result: Any = answer.result()
            assert result.success == success, transition


class Arm(ManagedNode):
    """Notes what it is told; `problem` is what a hook raises."""

    def __init__(self) -> None:
        super().__init__("arm", enable_rosout=False)
        self.told: list[str] = []
        self.problem: Exception | None = None

    def _note_or_raise(self, what: str) -> None:
        self.told.append(what)
        if self.problem is not None:
            raise self.problem

    def _setup(self) -> None:
        self._note_or_raise("setup")

    def _start(self) -> None:
        self._note_or_raise("start")

    def _stop(self) -> None:
        self.told.append("stop")

    def _teardown(self) -> bool:
        self.told.append("teardown")
        return True


def test_a_managed_node_undoes_what_failed_and_keeps_the_first_reason() -> None:
    rclpy.init()
    arm = Arm()
    try:
        arm.problem = UserError("no limits")
        assert arm.trigger_configure().name == "FAILURE"
        assert (arm.told, arm.stop_reason) == (["setup", "stop", "teardown"], "no limits")
        arm.problem = None
        assert arm.trigger_configure().name == "SUCCESS" and arm.stop_reason == ""
        arm.problem, arm.told = UserError("no pose"), []
        assert arm.trigger_activate().name == "FAILURE"
        assert (arm.told, arm.stop_reason, arm.active) == (["start", "stop"], "no pose", False)
        arm.problem = None
        assert arm.trigger_activate().name == "SUCCESS" and arm.active
        arm.trigger_deactivate()
        arm.trigger_cleanup()
        assert (arm.stop_reason, arm.active) == ("deactivated", False)
        arm.problem = RuntimeError("the wire is loose")
        arm.trigger_configure()
        assert arm.stop_reason == "the wire is loose", "not that it is an error"
    finally:
        arm.destroy_node()
        rclpy.try_shutdown()
