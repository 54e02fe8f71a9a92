# SPDX-License-Identifier: Apache-2.0
"""What rclpy's lifecycle nodes lack."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleNodeMixin
from rclpy.node import Node


def init_lifecycle_node(node: LifecycleNode, name: str, **node_arguments: Any) -> None:
    """In place of LifecycleNode's own constructor, which offers no callback group for the lifecycle services.

    In one of their own, `get_state`, parameters and diagnostics are served while a transition waits.

    Args:
        node: to construct.
        name: of the node.
        node_arguments: those of rclpy.node.Node.
    """
    Node.__init__(node, name, **node_arguments)
    LifecycleNodeMixin.__init__(node, callback_group=ReentrantCallbackGroup())
    answer_impossible_transitions(node)


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
