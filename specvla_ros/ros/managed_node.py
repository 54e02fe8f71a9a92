# SPDX-License-Identifier: Apache-2.0
"""A lifecycle node whose transitions are written once, with what rclpy's lifecycle nodes lack."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleNodeMixin, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node

from specvla_ros.errors import UserError


class ManagedNode(LifecycleNode):
    """Sets up in configure, works while active; a node gives what is its own in the hooks below.

    The lifecycle services have a callback group of their own, which LifecycleNode's own constructor does not offer: so
    `get_state`, parameters and diagnostics are served while a transition waits.

    Args:
        name: of the node.
        node_arguments: those of rclpy.node.Node.

    Attributes:
        active: whether it works.
        stop_reason: why it does not, in words: the first reason since it last did or was told to; empty: it does.
    """

    mendable: type[Exception] = UserError  # what `_setup` raises for a user to mend; anything else is an error

    def __init__(self, name: str, **node_arguments: Any) -> None:
        Node.__init__(self, name, **node_arguments)
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        answer_impossible_transitions(self)
        self.active = False
        self.stop_reason = ""

    @abstractmethod
    def _setup(self) -> None:
        """Makes everything that work needs."""

    @abstractmethod
    def _start(self) -> None:
        """Begins to work."""

    @abstractmethod
    def _stop(self) -> None:
        """Ends work; may be called again, or after a `_start` that failed."""

    @abstractmethod
    def _teardown(self) -> bool:
        """Lets everything go that `_setup` made, however far it came; False when something hangs."""

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Sets up; what a user can mend is refused, and configure may be tried again."""
        return self._attempt("not configured", self._setup, self.mendable, undo=self.close)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begins to work."""
        answer = self._attempt("not activated", self._start, UserError, undo=self._stop)
        if answer is not TransitionCallbackReturn.SUCCESS:
            return answer
        self.active = True
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Ends work, and silences the managed publishers."""
        self._note("deactivated")
        self.active = False
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Lets everything go."""
        self.close()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate and cleanup; the node can then only end."""
        self._note("shut down")
        self.close()
        return super().on_deactivate(state)  # nothing else silences the managed publishers

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured, with nothing left running."""
        self._note("an error in a transition")
        self.close()
        return super().on_deactivate(state)

    def close(self) -> bool:
        """Ends work and lets everything go; False when something hangs."""
        self.active = False
        self._stop()
        return self._teardown()

    def _attempt(
        self, problem: str, hook: Callable[[], None], mendable: type[Exception], undo: Callable[[], Any]
    ) -> TransitionCallbackReturn:
        self.stop_reason = ""
        try:
            hook()
        except Exception as error:
            self._note(str(error) or repr(error))
            if not isinstance(error, mendable):
                raise
            undo()
            self.get_logger().error(f"{problem}: {error}")
            return TransitionCallbackReturn.FAILURE
        return TransitionCallbackReturn.SUCCESS

    def _note(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason


def answer_impossible_transitions(node: Node) -> None:
    """Has a transition that the state does not allow refused.

    Jazzy's rclpy raises for it, which leaves a traceback in the log and whoever asked without an answer.
    """
    for service in node.services:
        if service.srv_type is ChangeState:
            service.callback = partial(_change_state, node, service.callback)


def _change_state(node: Node, change: Callable[[Any, Any], Any], request: Any, response: Any) -> Any:
    try:
        return change(request, response)
    except Exception as error:  # rclpy catches what the transitions' own callbacks raise
        reason = str(error).split(", at ")[0]  # without the positions in C files that rcl appends
        node.get_logger().warning(f"transition {request.transition.id} is not possible in this state: {reason}")
        response.success = False
        return response
