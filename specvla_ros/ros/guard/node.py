# SPDX-License-Identifier: Apache-2.0
"""The node `guard`: commands of the driver in, commands to the robot out, deny by default."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped, TwistStamped
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64MultiArray, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from specvla_ros.control.gripper import GripperOutput
from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, Sent, SentTwist
from specvla_ros.control.guard.guard import Guard, Outcome, State
from specvla_ros.control.guard.settings import GuardParameters, Output
from specvla_ros.control.pose import Pose
from specvla_ros.msg import VlaAction
from specvla_ros.ros import motion_messages as messages
from specvla_ros.ros.guard.black_box import BlackBox
from specvla_ros.ros.guard.loop import SteadyLoop
from specvla_ros.ros.node import STEADY, DiagnosticsPublisher, make_status, raise_priority, run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters
from specvla_ros.ros.qos import (
    ACTION,
    COMMAND,
    DIAGNOSTICS,
    HEARTBEAT,
    INSTRUCTION,
    LATCHED_INSTRUCTION,
    LATCHED_STATE,
    STATE,
)

_SOURCES_S = 0.5
_RECENT_S = 0.5  # within which two publishers of a topic take turns
_LOG_S = 0.1
_END_S = 0.2  # more than a stop takes
_LOG_PERIOD_S = 5.0  # between two messages of one cause
_LEVELS = {
    State.PASSING: DiagnosticStatus.OK,
    State.HOLDING: DiagnosticStatus.WARN,
    State.STOPPED: DiagnosticStatus.ERROR,
}
_COMMANDS: dict[Output, tuple[str, type, Callable[..., Any]]] = {
    Output.POSE: ("pose", PoseStamped, messages.tool_pose),
    Output.TWIST: ("twist", TwistStamped, messages.twist_command),
    Output.JOINT_TRAJECTORY: ("joint_trajectory", JointTrajectory, messages.trajectory_command),
    Output.POSITION_ARRAY: ("joint_positions", Float64MultiArray, messages.array_command),
}
_GRIPPERS: dict[GripperOutput, tuple[str, type, Callable[..., Any]]] = {
    GripperOutput.ARRAY: ("gripper", Float64MultiArray, messages.gripper_array),
    GripperOutput.TRAJECTORY: ("gripper_trajectory", JointTrajectory, messages.gripper_trajectory),
}


class Senders:
    """Tells at once when two take turns on a topic: the graph tells later, and only of those it has found."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, float]] = {}
        self._heard: dict[str, tuple[str, int]] = {}

    def again(self, topic: str, info: Any) -> bool:
        """If the topic's last message comes once more, by a second subscription of other QoS."""
        sent_ns = info.get("source_timestamp", 0) if isinstance(info, dict) else 0
        sent = str(info.get("publisher_gid")) if sent_ns else "", sent_ns
        last, self._heard[topic] = self._heard.get(topic), sent
        return bool(sent_ns) and last == sent

    def another(self, topic: str, info: Any, steady_s: float) -> bool:
        """Whether another publisher than this message's was heard on the topic a moment ago."""
        identity = info.get("publisher_gid") if isinstance(info, dict) else None
        gid = bytes(identity["data"]) if isinstance(identity, dict) else b""
        last, self._last[topic] = self._last.get(topic), (gid, steady_s)
        return last is not None and gid != last[0] and steady_s - last[1] < _RECENT_S


class GuardNode(Node):
    """Listens on the executor's thread, and sends on a loop of its own.

    Every message is taken as bytes, for the black box, and read here: bytes that are no message are refused, too.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("guard", **node_arguments)
        with parameters_declared(self, GuardParameters):
            self._chosen = read_parameters(self, GuardParameters)
            self._settings = self._chosen.guard
            self.guard = Guard(self._settings)
        self._lock = threading.Lock()
        self._senders = Senders()
        self._logged_s: dict[Cause, float] = {}
        self._seen = State.HOLDING
        self._scheduling = ""
        self._fault = ""
        directory, seconds = Path(self._chosen.black_box_dir).expanduser(), self._chosen.black_box_s
        self.black_box = BlackBox(directory, seconds, self._chosen.black_box_files) if seconds else None
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._subscribe()
        self._robot, self._gripper = self._advertise()
        self._passing = self.create_publisher(Bool, "~/passing", LATCHED_STATE)
        self._loop = SteadyLoop(self._settings.rate_hz, self._tick, self._on_fault)
        self.create_timer(_SOURCES_S, self._look_for_sources, clock=STEADY)
        self.create_timer(_LOG_S, self._log, clock=STEADY)
        self._diagnostics = DiagnosticsPublisher(self, self._chosen.diagnostics_period_s, self._statuses)
        promise = f"a stop takes at most {self._settings.ramp_s:.3f} s from when its cause is noticed"
        self.get_logger().info(f"guards {self._settings.output} in '{self._settings.base_frame}'; {promise}")
        self._loop.start()
        self._scheduling = raise_priority(self._chosen.realtime_priority)

    def close(self) -> bool:
        """Brakes, ends the loop, and the black box with what it is writing; False when something hangs."""
        with self._lock:
            self.guard.end(self._now())
        deadline_s = time.monotonic() + _END_S + self._settings.ramp_s
        while not self.guard.at_rest and time.monotonic() < deadline_s:
            time.sleep(1 / self._settings.rate_hz)
        ended = self._loop.stop()
        return (self.black_box is None or self.black_box.close()) and ended

    # What arrives

    def _subscribe(self) -> None:
        kind, gripper = self._settings.kind, GripperOutput(self._settings.gripper.output)
        guard = self.guard
        name, message_type, read = _COMMANDS[kind]

        def on_command(message: Any, sent_ns: int | None, now: Instant) -> None:
            guard.command(read(message, sent_ns), now)

        self._listen(message_type, f"command/{name}", COMMAND, on_command, alone=True)
        if gripper is not GripperOutput.NONE:
            name, message_type, read_gripper = _GRIPPERS[gripper]

            def on_gripper(message: Any, sent_ns: int | None, now: Instant) -> None:
                guard.gripper(read_gripper(message), now)

            self._listen(message_type, f"command/{name}", COMMAND, on_gripper, alone=True)

        def on_tool(message: PoseStamped, sent_ns: int | None, now: Instant) -> None:
            guard.tool(messages.tool_pose(message, sent_ns), now)

        def on_joints(message: JointState, sent_ns: int | None, now: Instant) -> None:
            guard.joints(messages.joint_positions(message), now)

        def on_action(message: VlaAction, sent_ns: int | None, now: Instant) -> None:
            guard.action(messages.stamp_of(message.header), message.instruction, now)

        self._listen(PoseStamped, "tool_pose", STATE, on_tool, alone=True)
        if kind.of_joints:
            self._listen(JointState, "joint_states", STATE, on_joints)
        self._listen(VlaAction, "action", ACTION, on_action, alone=True)
        self._listen(Bool, "~/enable", HEARTBEAT, lambda m, s, now: guard.enable(m.data, now), alone=True)
        # A reliable subscription does not match a best-effort publisher (micro-ROS); a best-effort one loses presses.
        for qos in (DIAGNOSTICS, STATE):
            self._listen(Empty, "~/stop", qos, lambda m, s, now: guard.press_stop("topic", now))
        self._listen(String, "~/confirm", INSTRUCTION, lambda m, s, now: guard.confirm(m.data))
        for qos in (INSTRUCTION, LATCHED_INSTRUCTION):
            self._listen(String, "instruction", qos, lambda m, s, now: guard.instruction(m.data))
        self._listen(DiagnosticArray, "/diagnostics", DIAGNOSTICS, lambda m, s, now: None)
        self.create_service(Trigger, "~/stop", self._on_stop)
        self.create_service(Trigger, "~/clear_stop", self._on_clear_stop)

    def _listen(
        self,
        message_type: type,
        topic: str,
        qos: QoSProfile,
        use: Callable[[Any, int | None, Instant], None],
        *,
        alone: bool = False,
    ) -> None:
        """Takes a topic's messages as bytes; `alone`: one publisher at most is right."""
        name = self.resolve_topic_name(topic)
        if alone:
            self._inputs.append(name)
        self._announce(name, message_type)
        is_command = topic.startswith("command/")

        def on_bytes(raw: bytes, info: Any) -> None:
            if self._senders.again(name, info):
                return
            self._record(name, raw)
            try:
                message: Any = deserialize_message(raw, message_type)
            except Exception as error:  # rclpy's own kind, for bytes from anywhere
                problem = f"{name}: {len(raw)} bytes are no {message_type.__name__} ({error})"
                with self._lock:
                    self.guard.reject(Refusal(Cause.BAD_FORM, problem.splitlines()[0]), self._now())
                return
            with self._lock:
                now = self._now()
                if alone and self._senders.another(name, info, now.steady_s):
                    self.guard.reject(Refusal(Cause.TWO_SOURCES, f"two publishers take turns on {name}"), now)
                else:
                    use(message, _sent_ns(info, now) if is_command else None, now)

        self.create_subscription(message_type, name, on_bytes, qos, raw=True)

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._lock:
            self.guard.press_stop("service", self._now())
        response.success, response.message = True, "stopped until ~/clear_stop"
        return response

    def _on_clear_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._lock:
            problem = self.guard.clear_stop(self._now())
        response.success, response.message = not problem, problem or "cleared"
        self.get_logger().warning(f"clear_stop refused: {problem}" if problem else "the stop was cleared")
        return response

    # What goes out

    def _advertise(self) -> tuple[Any, Any]:
        name, message_type, _ = _COMMANDS[self._settings.kind]
        robot = self._publisher(message_type, f"~/{name}")
        gripper = GripperOutput(self._settings.gripper.output)
        if gripper is GripperOutput.NONE:
            return robot, None
        name, message_type, _ = _GRIPPERS[gripper]
        return robot, self._publisher(message_type, f"~/{name}")

    def _publisher(self, message_type: type, topic: str) -> Callable[[Any], None]:
        publisher: Publisher = self.create_publisher(message_type, topic, COMMAND)
        name = publisher.topic_name
        self._outputs.append(name)
        self._announce(name, message_type)

        def send(message: Any) -> None:
            raw = serialize_message(message)
            publisher.publish(raw)
            self._record(name, raw)

        return send

    def _tick(self) -> None:
        with self._lock:
            now = self._now()
            outcome = self.guard.tick(now)
        self._send(outcome, now.clock_ns)
        if outcome.stopped is not None and self.black_box is not None:
            self.black_box.stop(outcome.stopped.cause.value, outcome.stopped.detail)

    def _send(self, outcome: Outcome, clock_ns: int) -> None:
        gripper = self._settings.gripper
        if outcome.sent is not None:
            self._robot(self._message(outcome.sent, clock_ns))
        if outcome.gripper is not None:
            if gripper.output == GripperOutput.ARRAY.value:
                self._gripper(Float64MultiArray(data=[outcome.gripper]))
            else:
                self._gripper(messages.gripper_trajectory_message(outcome.gripper, gripper.joint))

    def _message(self, sent: Sent, clock_ns: int) -> TwistStamped | PoseStamped | JointTrajectory | Float64MultiArray:
        settings = self._settings
        if isinstance(sent, SentTwist):
            return messages.twist_message(sent.velocity, clock_ns, settings.base_frame)
        if isinstance(sent, Pose):
            return messages.pose_message(sent, clock_ns, settings.base_frame)
        if settings.kind is Output.POSITION_ARRAY:
            return messages.array_message(sent.positions)
        return messages.trajectory_message(settings.joints.names, sent.positions, sent.velocities, sent.after_s)

    def _on_fault(self, trace: str) -> None:
        """Zero is right for a twist whatever went wrong; positions are held by who got the last one."""
        self._fault = trace.strip().splitlines()[-1]
        what = f"the guard's loop went on after a fault:\n{trace}"
        self.get_logger().error(what, throttle_duration_sec=_LOG_PERIOD_S)
        if self._settings.kind is Output.TWIST:
            self._robot(messages.twist_message(np.zeros(6), self._now().clock_ns, self._settings.base_frame))

    # Bookkeeping

    def _announce(self, topic: str, message_type: type) -> None:
        if self.black_box is not None:
            package = message_type.__module__.partition(".")[0]
            self.black_box.add_topic(topic, f"{package}/msg/{message_type.__name__}")

    def _record(self, topic: str, raw: bytes) -> None:
        if self.black_box is not None:
            self.black_box.record(topic, raw)

    def _look_for_sources(self) -> None:
        problem = _sources_problem(self, self._inputs, self._outputs)
        with self._lock:
            self.guard.sources(problem)

    def _log(self) -> None:
        with self._lock:
            new, state, reason = self.guard.tally.take_new(), self.guard.state, self.guard.reason
        self._passing.publish(Bool(data=state is State.PASSING))
        now_s = time.monotonic()
        for refusal in new:
            if now_s - self._logged_s.get(refusal.cause, -np.inf) >= _LOG_PERIOD_S:
                self._logged_s[refusal.cause] = now_s
                self.get_logger().warning(f"refused, {refusal.cause.value}: {refusal.detail}")
        if state is not self._seen:
            self._seen = state
            self.get_logger().info(f"{state.value}: {reason}" if reason else state.value)

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        with self._lock:
            guard = self.guard
            state, reason, stalls = guard.state, guard.reason, guard.stalls
            counts, last = dict(guard.tally.counts), guard.tally.last
        values = {f"refused_{cause.value}": counts.get(cause, 0) for cause in Cause}
        said = f"{last.cause.value}: {last.detail}" if last is not None else "(none)"
        what = f"{state.value}: {reason}" if reason else state.value
        gate = make_status(_LEVELS[state], what, {"last_cause": said, **values})
        return {"gate": gate, "loop": self._loop_status(stalls), **self._black_box_status()}

    def _loop_status(self, stalls: int) -> DiagnosticStatus:
        late_s, took_s = self._loop.take_figures()
        fault, self._fault = self._fault, ""
        values: dict[str, object] = {"scheduling": self._scheduling, "ticks": len(late_s), "stalls": stalls}
        if len(late_s):
            for name, seconds in (("late", late_s), ("took", took_s)):
                values[f"{name}_p50_ms"] = f"{np.median(seconds) * 1e3:.2f}"
                values[f"{name}_p99_ms"] = f"{np.percentile(seconds, 99) * 1e3:.2f}"
                values[f"{name}_max_ms"] = f"{seconds.max() * 1e3:.2f}"
        if fault:
            return make_status(DiagnosticStatus.ERROR, f"the loop went on after a fault: {fault}", values)
        return make_status(DiagnosticStatus.OK, "the loop runs", values)

    def _black_box_status(self) -> dict[str, DiagnosticStatus]:
        box = self.black_box
        if box is None:
            return {}
        box.look()
        values = {"messages_lost": box.lost, "last_file": box.last_file or "(none)"}
        level = DiagnosticStatus.WARN if box.problem else DiagnosticStatus.OK
        return {"black box": make_status(level, box.problem or "recording", values)}

    def _now(self) -> Instant:
        return Instant(time.monotonic(), self.get_clock().now().nanoseconds)


def _sent_ns(info: Any, now: Instant) -> int | None:
    """When a message was sent, on the node's clock; for kinds without a stamp."""
    source_ns = info.get("source_timestamp", 0) if isinstance(info, dict) else 0
    return now.clock_ns - (time.time_ns() - source_ns) if source_ns else None


def _sources_problem(node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """What is wrong with who publishes, in words: inputs have one publisher at most, outputs the guard alone."""
    publishers = {topic: _publishers(node, topic) for topic in (*inputs, *outputs)}
    for topic in inputs:
        if len(publishers[topic]) > 1:
            return f"{topic} has {len(publishers[topic])} publishers: {', '.join(sorted(publishers[topic]))}"
    me = node.get_fully_qualified_name()
    for topic in outputs:
        others = [name for name in publishers[topic] if name != me]
        if others:
            return f"{topic} is also published by {', '.join(sorted(others))}, past the guard"
    counts = Counter(f"{namespace.rstrip('/')}/{name}" for name, namespace in node.get_node_names_and_namespaces())
    matter = {me, *(name for topic in inputs for name in publishers[topic])}
    twins = sorted(name for name in matter if counts[name] > 1)
    return f"there are {counts[twins[0]]} nodes named {twins[0]}" if twins else ""


def _publishers(node: Node, topic: str) -> list[str]:
    return [f"{info.node_namespace.rstrip('/')}/{info.node_name}" for info in node.get_publishers_info_by_topic(topic)]


def main() -> None:
    """Runs the node."""
    sys.exit(run_node("guard", GuardNode, close=GuardNode.close, last_words=True))
