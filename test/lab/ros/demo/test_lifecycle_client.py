# SPDX-License-Identifier: Apache-2.0
"""Bringing a node up although answers get lost."""

import threading
from collections.abc import Iterator

import pytest
import rclpy
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from support.patience import PATIENCE_S

from specvla_ros.errors import UserError
from specvla_ros.lab.ros.demo import processes
from specvla_ros.lab.ros.demo.processes import LifecycleClient


class Served:
    """A lifecycle node of which the first answers are lost on their way."""

    def __init__(self, context: Context, lost: int, refuses: bool = False) -> None:
        self.state = State.PRIMARY_STATE_UNCONFIGURED
        self.asked: list[int] = []
        self._lost, self._refuses = lost, refuses
        self._node = Node("served", context=context)
        self._node.create_service(GetState, "/served/get_state", self._get)
        self._node.create_service(ChangeState, "/served/change_state", self._change)
        self._executor = SingleThreadedExecutor(context=context)
        self._executor.add_node(self._node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()

    def _spin(self) -> None:
        while not self._stop.is_set():
            try:
                self._executor.spin_once(timeout_sec=0.05)
            except RuntimeError:  # a callback that raises sends no answer
                continue

    def _get(self, _: GetState.Request, response: GetState.Response) -> GetState.Response:
        configuring = self.state == State.TRANSITION_STATE_CONFIGURING
        response.current_state = State(id=self.state, label="configuring" if configuring else "")
        return response

    def _change(self, request: ChangeState.Request, response: ChangeState.Response) -> ChangeState.Response:
        self.asked.append(request.transition.id)
        response.success = not self._refuses
        if response.success:
            configure = request.transition.id == Transition.TRANSITION_CONFIGURE
            self.state = State.PRIMARY_STATE_INACTIVE if configure else State.PRIMARY_STATE_ACTIVE
        if len(self.asked) <= self._lost:
            raise RuntimeError("lost")
        return response

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._executor.shutdown()
        self._node.destroy_node()


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(processes, "_ANSWER_S", 3.0)
    rclpy.init()
    node = Node("watcher")
    yield node
    node.destroy_node()
    rclpy.shutdown()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_answers_do_not_matter(watcher: Node, lost: int) -> None:
    served = Served(watcher.context, lost)
    try:
        LifecycleClient(watcher, "/served").activate(lambda: True, PATIENCE_S)
    finally:
        served.close()
    assert served.state == State.PRIMARY_STATE_ACTIVE
    assert served.asked == [Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE]


def test_a_refusal_whose_answer_is_lost_is_asked_for_again(watcher: Node) -> None:
    served = Served(watcher.context, lost=1, refuses=True)
    try:
        with pytest.raises(UserError, match="the node served refused to start; its log says why"):
            LifecycleClient(watcher, "/served", "its log says why").activate(lambda: True, PATIENCE_S)
    finally:
        served.close()
    assert served.asked == [Transition.TRANSITION_CONFIGURE] * 2


def test_a_node_that_is_not_there_is_told(watcher: Node) -> None:
    with pytest.raises(UserError, match=r"nobody did not come up in 0\.1 s: its services do not exist"):
        LifecycleClient(watcher, "/nobody").activate(lambda: True, 0.1)
    with pytest.raises(UserError, match="nobody exited before it came up"):
        LifecycleClient(watcher, "/nobody").activate(lambda: False, PATIENCE_S)


@pytest.mark.parametrize(
    ("state", "said"),
    [(State.TRANSITION_STATE_CONFIGURING, "its last known state is configuring"), (0, "it never responded, although")],
)
def test_how_far_a_node_came_is_told(watcher: Node, state: int, said: str) -> None:
    served = Served(watcher.context, lost=0)
    served.state = state
    try:
        with pytest.raises(UserError, match=said):
            LifecycleClient(watcher, "/served").activate(lambda: True, 6.0)
    finally:
        served.close()
