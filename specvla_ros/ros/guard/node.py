# SPDX-License-Identifier: Apache-2.0
"""The node `guard`: commands of the driver in, commands to the robot out, deny by default."""

import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import PoseStamped
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message, serialize_message
from rclpy.time import Time
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty, Float64, Header, String
from std_srvs.srv import Trigger

from specvla_ros.control.gripper import GripperOutput
from specvla_ros.control.guard.cause import Cause, Refusal
from specvla_ros.control.guard.commands import Instant, JointPositions, Sent, SentJoints, SentTwist, SentVelocities
from specvla_ros.control.guard.guard import QUIET_S, Guard, State
from specvla_ros.control.guard.robot_state import StateRule
from specvla_ros.control.guard.settings import GuardParameters, GuardSettings, Output
from specvla_ros.control.joint_parts import JointParts
from specvla_ros.control.pose import Pose
from specvla_ros.control.robot_model import ToolKinematics, load_joint_model
from specvla_ros.errors import UserError
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros import motion_messages as messages
from specvla_ros.ros.guard.black_box import BlackBox
from specvla_ros.ros.guard.robot import Escalation, GripperGoals, state_type
from specvla_ros.ros.node import STEADY, DiagnosticsPublisher, SteadyLoop, make_status, raise_priority, run_node
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
    Senders,
    sources_problem,
)
from specvla_ros.ros.tool_pose import PoseFromTf

_SOURCES_S = 0.5
_LOG_S = 0.1
_LOOK_S = 0.01  # between two lookups in tf
_END_S = 0.2  # margin beyond the duration of a stop
_LOG_PERIOD_S = 5.0  # between two messages of one cause
_LEVELS = {
    State.PASSING: DiagnosticStatus.OK,
    State.HOLDING: DiagnosticStatus.WARN,
    State.STOPPED: DiagnosticStatus.ERROR,
}
_STATES = {
    State.HOLDING: GuardState.HOLDING,
    State.PASSING: GuardState.PASSING,
    State.STOPPED: GuardState.STOPPED,
}


class GuardNode(Node):
    """Receives on the executor's thread, and sends from its own loop.

    Every message is received as bytes, for the black box, and deserialized here; malformed bytes are refused.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("guard", **node_arguments)
        with parameters_declared(self, GuardParameters):
            self._chosen = read_parameters(self, GuardParameters)
            self._settings = self._chosen.guard.completed()
            self._kinematics = self._load_kinematics()
            self.guard = Guard(self._settings, self._kinematics)
        self._parts = JointParts(self._settings.joints.names)
        self._lock = threading.Lock()
        self._senders = Senders()
        self._logged_s: dict[Cause, float] = {}
        self._seen = State.HOLDING
        self._scheduling = ""
        self._fault = self._escalation_problem = ""
        directory, seconds = Path(self._chosen.black_box_dir).expanduser(), self._chosen.black_box_s
        files, output = self._chosen.black_box_files, self._settings.output
        self.black_box = BlackBox(directory, seconds, files, output) if seconds else None
        self._tool_topic = self.resolve_topic_name("tool_pose")
        self._goals: GripperGoals | None = None
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._rules = self._settings.state_rules
        self._subscribe()
        self._escalation = Escalation(self, self._chosen.escalation_service, self._chosen.escalation_controllers)
        self._robot, self._gripper = self._advertise()
        self._state = self.create_publisher(GuardState, "~/state", LATCHED_STATE)
        self._loop = SteadyLoop(self._settings.rate_hz, self._tick, self._on_fault)
        self.create_timer(_SOURCES_S, self._look_for_sources, clock=STEADY)
        self.create_timer(_LOG_S, self._log, clock=STEADY)
        self._diagnostics = DiagnosticsPublisher(self, self._chosen.diagnostics_period_s, self._statuses)
        promise = f"a stop takes at most {self._settings.ramp_s:.3f} s after its cause is detected"
        self.get_logger().info(f"guarding {self._settings.output} in '{self._settings.base_frame}'; {promise}")
        self._loop.start()
        self._scheduling = raise_priority(self._chosen.realtime_priority)

    def close(self) -> bool:
        """Brakes, ends the loop and lets the black box finish writing. Returns False if something hangs."""
        with self._lock:
            self.guard.end(self._now())
        deadline_s = time.monotonic() + _END_S + self._settings.ramp_s
        while not self.guard.at_rest and time.monotonic() < deadline_s:
            time.sleep(1 / self._settings.rate_hz)
        ended = self._loop.stop()
        return (self.black_box is None or self.black_box.close()) and ended

    def _load_kinematics(self) -> ToolKinematics | None:
        """The forward kinematics if needed, else None; raises UserError if needed but not available."""
        source, joints = self._chosen.tool, self._settings.joints
        source.require(joints)
        needed = joints.model and (source.from_joints or (self._settings.kind.of_joints and joints.tool))
        return ToolKinematics(load_joint_model(joints)) if needed else None

    # Inputs

    def _subscribe(self) -> None:
        kind, gripper = self._settings.kind, GripperOutput(self._settings.gripper.output)
        guard, source = self.guard, self._chosen.tool
        name, message_type, read = messages.COMMANDS[kind]

        def on_command(message: Any, sent_ns: int | None, now: Instant, *, override: bool = False) -> None:
            guard.command(read(message, sent_ns), now, override=override)

        self._listen(message_type, f"command/{name}", COMMAND, on_command, alone=True)
        if self._settings.override:
            on_override = partial(on_command, override=True)
            self._listen(message_type, f"override/{name}", COMMAND, on_override, alone=True)
        if gripper is not GripperOutput.NONE:
            name, message_type, read_gripper = messages.GRIPPERS[gripper]

            def on_gripper(message: Any, sent_ns: int | None, now: Instant) -> None:
                guard.gripper(read_gripper(message), now)

            self._listen(message_type, f"command/{name}", COMMAND, on_gripper, alone=True)

        def on_tool(message: PoseStamped, sent_ns: int | None, now: Instant) -> None:
            guard.tool(messages.tool_pose(message, sent_ns), now)

        def on_joints(message: JointState, sent_ns: int | None, now: Instant) -> None:
            joints = messages.joint_positions(message)
            guard.joints(joints, now)
            if source.from_joints and self._kinematics is not None:
                self._take_pose_of(joints, self._kinematics)

        def on_action(message: VlaAction, sent_ns: int | None, now: Instant) -> None:
            guard.action(messages.stamp_of(message.header), message.instruction, now, message.horizon)

        if source.pose_source == "topic":
            self._listen(PoseStamped, "tool_pose", STATE, on_tool, alone=True)
        else:
            self._announce(self._tool_topic, PoseStamped)
        if source.pose_source == "tf":
            self._listen_to_tf()
        if kind.of_joints or source.from_joints:
            self._listen(JointState, "joint_states", STATE, on_joints)
        self._listen(VlaAction, "action", ACTION, on_action, alone=True)
        self._listen(Bool, "~/enable", HEARTBEAT, lambda m, s, now: guard.enable(m.data, now), alone=True)
        # A reliable subscription does not match a best-effort publisher (micro-ROS); a best-effort one loses presses.
        for qos in (DIAGNOSTICS, STATE):
            self._listen(Empty, "~/stop", qos, lambda m, s, now: guard.press_stop("topic", now))
        self._listen(Bool, "~/stop_pressed", HEARTBEAT, lambda m, s, now: guard.stop_button(m.data, now), alone=True)
        for qos in (INSTRUCTION, LATCHED_STATE):
            self._listen(Float64, "~/speed_scale", qos, self._on_speed_scale)
        self._listen_to_robot()
        self._listen(String, "~/confirm", INSTRUCTION, lambda m, s, now: guard.confirm(m.data))
        for qos in (INSTRUCTION, LATCHED_INSTRUCTION):
            self._listen(String, "instruction", qos, lambda m, s, now: guard.instruction(m.data))
        self._listen(DiagnosticArray, "/diagnostics", DIAGNOSTICS, lambda m, s, now: None)
        self.create_service(Trigger, "~/stop", self._on_stop)
        self.create_service(Trigger, "~/clear_stop", self._on_clear_stop)

    def _listen_to_robot(self) -> None:
        """Subscribes twice to each state: latched for those published on a change, and not for periodic ones."""
        for rule in self._rules:

            def on_state(message: Any, sent_ns: int | None, now: Instant, rule: StateRule = rule) -> None:
                self.guard.robot_state(rule, message)

            for qos in (LATCHED_STATE, STATE):
                self._listen(state_type(rule), rule.topic, qos, on_state)

    def _listen_to_tf(self) -> None:
        def on_pose(stamp_s: float, pose: Pose) -> None:
            with self._lock:
                self._take_pose(pose, Time(nanoseconds=round(stamp_s * 1e9)).to_msg())

        def on_bad(problem: str) -> None:
            self.get_logger().error(problem, throttle_duration_sec=_LOG_PERIOD_S)

        source = PoseFromTf(self, self._settings.base_frame, self._chosen.tool.frame, on_pose, on_bad)
        self.create_timer(_LOOK_S, source.look, clock=STEADY)

    def _take_pose_of(self, joints: JointPositions, kinematics: ToolKinematics) -> None:
        """Takes the pose by forward kinematics of a complete set of joints; broken joints void the pose."""
        try:
            if not self._parts.add(joints.names, joints.positions.tolist(), joints.stamp.ns or 0):
                return
            stamp_ns, positions = self._parts.take()
        except UserError:
            stamp_ns, positions = joints.stamp.ns or 0, dict.fromkeys(self._parts.names, math.nan)
        stamp = Time(nanoseconds=stamp_ns).to_msg()
        self._take_pose(kinematics.pose_at(np.array([*positions.values()])), stamp)

    def _take_pose(self, pose: Pose, stamp: Any) -> None:
        """Takes a measured pose that no message carried; the black box records it as one on `tool_pose`."""
        message = messages.pose_message(pose, 0, self._settings.base_frame)
        message.header.stamp = stamp
        self._record(self._tool_topic, serialize_message(message))
        self.guard.tool(messages.tool_pose(message, None), self._now())

    def _on_speed_scale(self, message: Float64, sent_ns: int | None, now: Instant) -> None:
        if not self.guard.scale_speed(message.data):
            problem = f"~/speed_scale {message.data:g} is not between 0 and 1: keeping {self.guard.speed_scale:g}"
            self.get_logger().warning(problem, throttle_duration_sec=_LOG_PERIOD_S)

    def _listen(
        self,
        message_type: type,
        topic: str,
        qos: QoSProfile,
        use: Callable[[Any, int | None, Instant], None],
        *,
        alone: bool = False,
    ) -> None:
        """Subscribes to a topic's messages as bytes. `alone`: it may have at most one publisher."""
        name = self.resolve_topic_name(topic)
        if alone:
            self._inputs.append(name)
        self._announce(name, message_type)
        is_command = topic.startswith(("command/", "override/"))

        def on_bytes(raw: bytes, info: Any) -> None:
            if self._senders.is_repeat(name, info):
                return
            self._record(name, raw)
            try:
                message: Any = deserialize_message(raw, message_type)
            except Exception as error:  # rclpy's own type, for arbitrary bytes
                problem = f"{name}: {len(raw)} bytes are not a {message_type.__name__} ({error})"
                with self._lock:
                    self.guard.reject(Refusal(Cause.BAD_FORM, problem.splitlines()[0]), self._now())
                return
            with self._lock:
                now = self._now()
                if alone and self._senders.is_second_publisher(name, info, now.steady_s):
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
        response.success, response.message = (
            not problem,
            problem
            or f"stop cleared: motion resumes {QUIET_S:g} s after all conditions hold and the enable switch is held",
        )
        self.get_logger().warning(f"clear_stop refused: {problem}" if problem else "the stop was cleared")
        return response

    # Outputs

    def _advertise(self) -> tuple[Callable[[Any], None], Callable[[float], None] | None]:
        name, message_type, _ = messages.COMMANDS[self._settings.kind]
        robot = self._publisher(message_type, f"~/{name}")
        gripper = self._settings.gripper
        if gripper.output == GripperOutput.NONE.value:
            return robot, None
        if gripper.output == GripperOutput.ACTION.value:
            self._goals = GripperGoals(self)
            return robot, self._goals.send
        name, message_type, _ = messages.GRIPPERS[GripperOutput(gripper.output)]
        send = self._publisher(message_type, f"~/{name}")
        return robot, lambda position: send(messages.gripper_message(position, gripper))

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
        if outcome.sent is not None and not (isinstance(outcome.sent, SentJoints) and outcome.sent.sent_before):
            self._robot(messages.sent_message(outcome.sent, self._settings, now.clock_ns))
        if outcome.gripper is not None and self._gripper is not None:
            self._gripper(outcome.gripper)
        if outcome.disobeyed:
            self.get_logger().error(f"the robot does not obey: {self._escalation.ask()}")
        if outcome.stopped is not None and self._goals is not None:
            self._goals.forget()
        if outcome.stopped is not None and self.black_box is not None:
            self.black_box.stop(outcome.stopped.cause.value, outcome.stopped.detail)

    def _on_fault(self, trace: str) -> None:
        """Zero velocities are right after any fault; of positions the receiver holds the last one."""
        self._fault = trace.strip().splitlines()[-1]
        what = f"the guard's loop continued after a fault:\n{trace}"
        self.get_logger().error(what, throttle_duration_sec=_LOG_PERIOD_S)
        if (still := _zero_velocity(self._settings)) is not None:
            self._robot(messages.sent_message(still, self._settings, self._now().clock_ns))

    # Bookkeeping

    def _announce(self, topic: str, message_type: type) -> None:
        if self.black_box is not None:
            package = message_type.__module__.partition(".")[0]
            self.black_box.add_topic(topic, f"{package}/msg/{message_type.__name__}")

    def _record(self, topic: str, raw: bytes) -> None:
        if self.black_box is not None:
            self.black_box.record(topic, raw)

    def _look_for_sources(self) -> None:
        problem = sources_problem(self, self._inputs, self._outputs)
        gone = frozenset(rule.topic for rule in self._rules if not self.count_publishers(rule.topic))
        self._escalation_problem = self._escalation.look()
        with self._lock:
            self.guard.sources(problem)
            self.guard.robot_gone(gone)

    def _log(self) -> None:
        with self._lock:
            guard, now = self.guard, self._now()
            new, state, reason, overridden = guard.tally.take_new(), guard.state, guard.reason, guard.overridden(now)
            cause, speed_scale = guard.cause, guard.speed_scale
        said = GuardState(state=_STATES[state], cause=cause, reason=reason, overridden=overridden)
        said.header, said.speed_scale = Header(stamp=Time(nanoseconds=now.clock_ns).to_msg()), speed_scale
        self._state.publish(said)
        now_s = time.monotonic()
        for refusal in new:
            if now_s - self._logged_s.get(refusal.cause, -np.inf) >= _LOG_PERIOD_S:
                self._logged_s[refusal.cause] = now_s
                self.get_logger().warning(f"refused, {refusal.cause.value}: {refusal.detail}")
        if state is not self._seen:
            self._seen = state
            self.get_logger().info(self._words(state, reason))

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        with self._lock:
            guard = self.guard
            state, reason, stalls = guard.state, guard.reason, guard.stalls
            counts, last, report = dict(guard.tally.counts), guard.tally.last, guard.report()
        said = f"{last.cause.value}: {last.detail}" if last is not None else "(none)"
        values: dict[str, object] = {"last_cause": said, "speed_scale": guard.speed_scale}
        values |= {f"refused_{cause.value}": counts.get(cause, 0) for cause in Cause} | report
        if self._escalation_problem:
            values["escalation"] = self._escalation_problem
        unheard = [topic for topic in self._outputs if not self.count_subscribers(topic)]
        if reason and unheard:
            reason = f"{reason}; nothing subscribes to {', '.join(unheard)}"
        gate = make_status(_LEVELS[state], self._words(state, reason), values)
        return {"gate": gate, "loop": self._loop_status(stalls), **self._black_box_status()}

    def _words(self, state: State, reason: str) -> str:
        remedy = f"; once the cause is gone, call {self.resolve_service_name('~/clear_stop')}"
        return (f"{state.value}: {reason}" if reason else state.value) + (remedy if state is State.STOPPED else "")

    def _loop_status(self, stalls: int) -> DiagnosticStatus:
        fault, self._fault = self._fault, ""
        values = {"scheduling": self._scheduling, "stalls": stalls, **self._loop.take_figures()}
        if fault:
            return make_status(DiagnosticStatus.ERROR, f"the loop continued after a fault: {fault}", values)
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


def _zero_velocity(settings: GuardSettings) -> Sent | None:
    if settings.kind is Output.TWIST:
        return SentTwist(np.zeros(6))
    return SentVelocities(np.zeros(len(settings.joints.names))) if settings.kind is Output.VELOCITY_ARRAY else None


def _sent_ns(info: Any, now: Instant) -> int | None:
    """Time of sending on the node's clock, for message types without a stamp."""
    source_ns = info.get("source_timestamp", 0) if isinstance(info, dict) else 0
    return now.clock_ns - (time.time_ns() - source_ns) if source_ns else None


def main() -> None:
    """Runs the node."""
    sys.exit(run_node("guard", GuardNode, close=GuardNode.close, last_words=True))
