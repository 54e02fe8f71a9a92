# SPDX-License-Identifier: Apache-2.0
"""The guard's access to the robot's own interfaces: its states, its gripper's action, the escalation service."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.task import Future
from std_srvs.srv import Trigger

from specvla_ros.control.guard.robot_state import StateRule
from specvla_ros.errors import UserError

SWITCH = "controller_manager_msgs/srv/SwitchController"


def state_type(rule: StateRule) -> type:
    """The class of a rule's message; raises UserError if its package is not installed."""
    package, _, name = rule.message_type.partition("/msg/")
    try:
        found: type = getattr(importlib.import_module(f"{package}.msg"), name)
    except (ImportError, AttributeError):
        raise UserError(f"robot_states names {rule.message_type}, which is not installed; {_apt(package)}") from None
    return found


def _apt(package: str) -> str:
    return f"apt install ros-$ROS_DISTRO-{package.replace('_', '-')}"


class GripperGoals:
    """Sends a gripper's positions as goals of its action, each once: a repeated goal would start the motion again.

    A goal that was refused, or whose server is gone, is sent again with the driver's next message.

    Raises UserError if the action's package is not installed.
    """

    def __init__(self, node: Node) -> None:
        try:
            from control_msgs.action import GripperCommand
        except ImportError:
            raise UserError(
                "gripper.output: action needs the package control_msgs, which is not installed; "
                f"{_apt('control_msgs')}, or set gripper.output to array or trajectory"
            ) from None
        self._goal: Callable[[], Any] = GripperCommand.Goal
        # Remaps apply to topics, not to actions. With the name resolved, gripper_topic can name either.
        self._client: Any = ActionClient(node, GripperCommand, node.resolve_topic_name("~/gripper"))
        self._sent: float | None = None

    def forget(self) -> None:
        """Allows the last goal to be sent again: after motion ends, the gripper may be moved by hand."""
        self._sent = None

    def send(self, position: float) -> None:
        if not self._client.server_is_ready():
            self._sent = None  # one that starts knows of no goal
        elif position != self._sent:  # the driver repeats it twice a second
            self._sent, goal = position, self._goal()
            goal.command.position = position
            self._client.send_goal_async(goal).add_done_callback(partial(self._on_answer, position))

    def _on_answer(self, position: float, answer: Future) -> None:
        handle = answer.result()
        if self._sent == position and (handle is None or not handle.accepted):
            self._sent = None


class Escalation:
    """Calls a service to stop the robot: a Trigger, as of a UR's dashboard, or ros2_control's SwitchController.

    The latter deactivates `controllers`. A service that does not exist is reported.
    """

    def __init__(self, node: Node, service: str, controllers: tuple[str, ...]) -> None:
        self._node, self._controllers = node, [name for name in controllers if name]
        self._service = node.resolve_service_name(service) if service else ""
        self._client: Any = None
        self._make: Callable[[], Any] = Trigger.Request

    def look(self) -> str:
        """Finds the service, outside the loop. Returns the problem in words; empty: none."""
        if not self._service or self._client is not None:
            return ""
        types = dict(self._node.get_service_names_and_types()).get(self._service)
        if not types:
            return f"escalation_service {self._service} does not exist yet"
        kind: Any = Trigger
        if SWITCH in types:
            try:
                kind = importlib.import_module("controller_manager_msgs.srv").SwitchController
            except ImportError:
                return f"escalation_service is a {SWITCH}, which is not installed; {_apt('controller_manager_msgs')}"
            self._make = lambda: kind.Request(deactivate_controllers=self._controllers, strictness=1)
        self._client = self._node.create_client(kind, self._service)
        return ""

    def ask(self) -> str:
        """Calls the service without waiting. Returns what was called, in words."""
        if self._client is None:
            return "nothing called: escalation_service is not set" if not self._service else f"no {self._service}"
        self._client.call_async(self._make())
        return f"called {self._service}"
