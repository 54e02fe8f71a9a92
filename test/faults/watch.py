# SPDX-License-Identifier: Apache-2.0
"""Who watches a round over topics, and does what people do, and other nodes: presses, holds, speaks in their place.

Times are the arm's, which no fault changes: its process tells it beside the machine's clock, which all senders have.
"""

import copy
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from faults.guard_stop import KINDS
from faults.robot_process import FAULT_TOPIC, RUNNING_TOPIC, TIME_TOPIC
from geometry_msgs.msg import PoseStamped
from rclpy.executors import SingleThreadedExecutor
from std_msgs.msg import Bool, Empty, Float64MultiArray, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.errors import UserError
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.qos import ACTION, COMMAND, DIAGNOSTICS, HEARTBEAT, LATCHED_STATE, STATE

_TRAJECTORY = (JointTrajectory, "joint_trajectory")
COMMANDS: dict[str, tuple[Any, str]] = KINDS | dict.fromkeys(
    ("joint_trajectory", "joint_trajectory_chunk"), _TRAJECTORY
)
RAW_ACTION, ACTIONS = "/raw/action", "/policy/action"
_HAND_S, _HEARS_S = 5.0, 5.0
_MOVED_M = 0.03
_STATES = {GuardState.HOLDING: "holding", GuardState.PASSING: "passing", GuardState.STOPPED: "stopped"}


class Watch:
    """A node that hears what happens, and does what people do, and policies.

    Args:
        output: the driver's.

    Attributes:
        states: when on the arm's time the guard was in which state for which cause, each change.
        said: the same, with its reason in words.
        action_s: when the last action came that may be followed.
        halts_s: when the arm said that it stopped.
        gripped: when the guard sent which position to the gripper.
        box: what the guard says of its black box.
        late_ms: how late the guard's loop was at most.
        alter: what becomes of an action on its way from the policy.
    """

    def __init__(self, output: str) -> None:
        self.states, self.gripped = list[tuple[float, str, str]](), list[tuple[float, float]]()
        self.said: list[tuple[float, str, str]] = []
        self.halts_s: list[float] = []
        self.box, self.late_ms, self.action_s = dict[str, str](), 0.0, 0.0
        self.alter: Callable[[Any], list[Any]] = lambda message: [message]
        self._times = (0.0, time.time(), 0.0, 0.0)
        self._behind: list[float] = []
        self._places: deque[tuple[float, np.ndarray]] = deque(maxlen=200)
        self._action: Any = None
        self._command: Any = None
        self._second: Callable[[], None] | None = None
        self._button = False
        self.node = rclpy.create_node("watch", enable_rosout=False)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._listen(output)
        publish = self.node.create_publisher
        self._actions = publish(VlaAction, ACTIONS, ACTION)
        self._stops = {
            "reliable": publish(Empty, "/guard/stop", 1),
            "best effort": publish(Empty, "/guard/stop", STATE),
        }
        self._buttons = publish(Bool, "/guard/stop_pressed", HEARTBEAT)
        self._faults = publish(String, FAULT_TOPIC, ACTION)
        self._stop: Any = self.node.create_client(Trigger, "/guard/stop")
        self._clear: Any = self.node.create_client(Trigger, "/guard/clear_stop")
        self._hand = self.node.create_timer(0.1, self._say_button)
        self._hand.cancel()

    def _listen(self, output: str) -> None:
        kind, name = COMMANDS[output]
        self._command_kind, self._command_topic = kind, f"/driver/{name}"
        listen = self.node.create_subscription
        listen(Float64MultiArray, TIME_TOPIC, self._on_time, ACTION)
        listen(GuardState, "/guard/state", self._on_state, LATCHED_STATE)
        listen(Float64MultiArray, "/guard/gripper", self._on_gripper, COMMAND)
        listen(Bool, RUNNING_TOPIC, self._on_running, LATCHED_STATE)
        listen(PoseStamped, "/sim_robot/tool_pose", self._on_pose, STATE)
        listen(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        listen(VlaAction, RAW_ACTION, self._on_action, ACTION)
        listen(kind, self._command_topic, self._on_command, COMMAND)

    # The arm's time

    @property
    def now_s(self) -> float:
        """On the arm's time."""
        return self._at(time.time())

    def _at(self, wall_s: float) -> float:
        return self._times[0] + wall_s - self._times[1]

    @property
    def slip_s(self) -> float:
        """How much less than the machine's time passed for the arm, since `forget_lateness`."""
        return max(self._behind, default=0.0) - min(self._behind, default=0.0)

    def forget_lateness(self) -> None:
        """Of the arm and of the guard's loop."""
        self._behind.clear()
        self.late_ms = 0.0

    def _on_time(self, message: Float64MultiArray) -> None:
        arm_s, wall_s, began_s, ended_s = message.data
        self._times = (arm_s, wall_s, began_s, ended_s)
        self._behind.append(wall_s - arm_s)

    # What happens

    @property
    def passing(self) -> bool:
        """Whether the guard lets motion through."""
        return bool(self.states) and self.states[-1][1] == "passing"

    @property
    def stopped(self) -> bool:
        """Whether a stop is latched."""
        return bool(self.states) and self.states[-1][1] == "stopped"

    def moves(self) -> bool:
        """Whether the tool goes, and the guard lets it."""
        recent = [place for at_s, place in self._places if at_s > self.now_s - 1.0]
        return self.passing and len(recent) > 5 and float(np.linalg.norm(recent[-1] - recent[0])) > _MOVED_M

    def spin(self, seconds: float) -> None:
        """Listens for so many seconds of the steady clock."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def until(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """Listens until a condition holds; False: it does not."""
        end_s = time.monotonic() + patience_s
        while not condition() and time.monotonic() < end_s:
            self.spin(0.05)
        return condition()

    def _on_state(self, message: GuardState, info: Any) -> None:
        state = _STATES[message.state], message.cause
        if not self.states or self.states[-1][1:] != state:
            at_s = self._at(info["source_timestamp"] * 1e-9)
            self.states.append((at_s, *state))
            self.said.append((at_s, state[0], message.reason))

    def _on_gripper(self, message: Float64MultiArray, info: Any) -> None:
        self.gripped.append((self._at(info["source_timestamp"] * 1e-9), message.data[0]))

    def _on_running(self, message: Bool, info: Any) -> None:
        if not message.data:
            self.halts_s.append(self._at(info["source_timestamp"] * 1e-9))

    def _on_pose(self, message: PoseStamped) -> None:
        place = message.pose.position
        self._places.append((self.now_s, np.array([place.x, place.y, place.z])))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            values = {each.key: each.value for each in status.values}
            if status.name == "guard: black box":
                self.box = {"message": status.message, **values}
            if status.name == "guard: loop":
                self.late_ms = max(self.late_ms, float(values.get("late_max_ms", 0.0)))

    def _on_action(self, message: VlaAction, info: Any) -> None:
        """The way from the policy to those that follow it."""
        self._action = message
        changed = self.alter(message)
        if changed and changed[0] is message:
            self.action_s = self._at(info["source_timestamp"] * 1e-9)
        for each in changed:
            self._actions.publish(each)

    def _on_command(self, message: Any) -> None:
        self._command = message

    # What people do

    def press_stop(self, how: str) -> None:
        """What a hand on a button does: `reliable`, `best effort` or by `service`."""
        if how == "service":
            self._stop.call_async(Trigger.Request())
        else:
            self._stops[how].publish(Empty())

    def hold_button(self, pressed: bool) -> None:
        """A stop button that says its level from now on."""
        self._button = pressed
        self._say_button()
        self._hand.reset()

    def let_go_of_button(self) -> None:
        """It falls silent."""
        self._hand.cancel()

    def _say_button(self) -> None:
        self._buttons.publish(Bool(data=self._button))

    def clear_stop(self) -> bool:
        """Lets motion through again; False: nothing was latched."""
        if not self.stopped:
            return False
        end_s = time.monotonic() + _HAND_S
        while self.stopped and time.monotonic() < end_s:
            self._clear.call_async(Trigger.Request())
            self.until(lambda: not self.stopped, 1.0)
        return True

    # What others do

    def tell_robot(self, fault: str) -> float:
        """The arm's process begins a fault; empty: it ends what it does. Returns when, on the arm's time."""
        which = 2 if fault else 3
        before = self._times[which]
        self._faults.publish(String(data=fault))
        if not self.until(lambda: self._times[which] != before, _HEARS_S):
            raise UserError("the arm's process does not hear")
        return self._times[which]

    def second_driver(self) -> None:
        """A second publisher of commands, which goes another way than the driver, slowly."""
        publisher = self.node.create_publisher(self._command_kind, self._command_topic, COMMAND)
        way_m = iter(np.arange(0.0, 10.0, 0.001).tolist())
        self._repeat(publisher, 0.02, lambda: _moved(copy.deepcopy(self._command), next(way_m)))

    def second_policy(self) -> None:
        """A second publisher of actions, which wants back."""

        def back() -> Any:
            message = copy.deepcopy(self._action)
            message.values = [-value for value in message.values]
            message.header.stamp.nanosec = min(999_999_999, message.header.stamp.nanosec + 1)
            return message

        self._repeat(self.node.create_publisher(VlaAction, ACTIONS, ACTION), 0.1, back)

    def _repeat(self, publisher: Any, period_s: float, make: Callable[[], Any]) -> None:
        timer = self.node.create_timer(period_s, lambda: publisher.publish(make()))

        def end() -> None:
            self.node.destroy_timer(timer)
            self.node.destroy_publisher(publisher)

        self._second = end

    def end_second(self) -> None:
        if self._second is not None:
            self._second()

    def close(self) -> None:
        """Leaves."""
        self._executor.shutdown()
        self.node.destroy_node()


def _moved(message: Any, way: float) -> Any:
    """A command somewhat elsewhere: by metres, metres a second or radians."""
    if isinstance(message, JointTrajectory):
        message.points[0].positions[0] += way
    elif isinstance(message, Float64MultiArray):
        message.data[0] += way
    elif isinstance(message, PoseStamped):
        message.pose.position.z += way
    else:
        message.twist.linear.z += way
    return message
