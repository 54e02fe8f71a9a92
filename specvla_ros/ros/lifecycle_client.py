"""Brings a lifecycle node to its active state from another process."""

import time
from collections.abc import Callable
from typing import Any

import rclpy
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.client import Client
from rclpy.node import Node
from rclpy.task import Future

from specvla_ros.errors import UserError

_ANSWER_S = 5.0
_NEXT = {
    State.PRIMARY_STATE_UNCONFIGURED: Transition.TRANSITION_CONFIGURE,
    State.PRIMARY_STATE_INACTIVE: Transition.TRANSITION_ACTIVATE,
}


class LifecycleClient:
    """Asks for transitions, and looks at the node's state rather than wait for an answer.

    A service's answer is lost when the server has not yet discovered the client's end of the answer's topic, which
    happens on a loaded machine: what counts is the state that the node is in.

    Args:
        node: that asks; nobody else may spin it meanwhile.
        name: of the lifecycle node, for example `/policy`.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self._get: Client = node.create_client(GetState, f"{name}/get_state")
        self._change: Client = node.create_client(ChangeState, f"{name}/change_state")

    def activate(self, alive: Callable[[], bool], timeout_s: float) -> None:
        """Configures and activates the node.

        Args:
            alive: whether its process runs.
            timeout_s: for all of it.

        Raises:
            UserError: it does not come up, or refuses.
        """
        deadline = time.monotonic() + timeout_s
        asked: Future[Any] | None = None
        asked_for, asked_s = 0, 0.0
        while alive() and time.monotonic() < deadline:
            state = self._state()
            if state == State.PRIMARY_STATE_ACTIVE:
                return
            transition = _NEXT.get(state)
            if transition is None:  # unknown, or on its way
                time.sleep(0.05)
                continue
            if transition == asked_for and asked is not None:
                answer = asked.result() if asked.done() else None
                if answer is not None and not answer.success:
                    raise UserError("the policy node refused to start; its own message above says why")
                if time.monotonic() - asked_s < _ANSWER_S:
                    rclpy.spin_once(self._node, timeout_sec=0.05)
                    continue
            asked = self._change.call_async(ChangeState.Request(transition=Transition(id=transition)))
            asked_for, asked_s = transition, time.monotonic()
        raise UserError("the policy node did not come up; `specvla doctor` says what to fix")

    def _state(self) -> int:
        """The node's state; 0, unknown, when it does not answer."""
        if not self._get.wait_for_service(timeout_sec=0.5):
            return int(State.PRIMARY_STATE_UNKNOWN)
        future = self._get.call_async(GetState.Request())
        rclpy.spin_until_future_complete(self._node, future, timeout_sec=1.0)
        if not future.done():
            self._get.remove_pending_request(future)
            return int(State.PRIMARY_STATE_UNKNOWN)
        answer = future.result()
        return int(answer.current_state.id) if answer is not None else int(State.PRIMARY_STATE_UNKNOWN)
