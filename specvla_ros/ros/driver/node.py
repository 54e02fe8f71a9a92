# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `driver`: stamped actions and the tool's measured pose in, bounded motion commands out."""

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.time import Time
from std_srvs.srv import SetBool

from specvla_ros.control.action_space import ActionRefusedError, ActionSpace, Motion, ToolSpace
from specvla_ros.control.bounded_motion import BoundedMotion, TrackingVelocity
from specvla_ros.control.chunks import planned
from specvla_ros.control.convention import ActionConvention, StampedAction
from specvla_ros.control.driver import ClockOffset, Driver, NotFollowingError
from specvla_ros.control.follower import ActionFollower, Compensation
from specvla_ros.control.gripper import Gripper
from specvla_ros.control.guard.settings import Output
from specvla_ros.control.guard.watch import MAX_FUTURE_S
from specvla_ros.control.inverse_kinematics import JointSolver, UnreachableError
from specvla_ros.control.joint_parts import UNSTAMPED
from specvla_ros.control.joint_space import JointKinematics, JointMotion, JointSpace
from specvla_ros.control.pose import PoseHistory
from specvla_ros.control.robot_model import JointModel, load_joint_model
from specvla_ros.errors import SYNCHRONISE, UserError
from specvla_ros.messages.action_message import stamped_action
from specvla_ros.msg import GuardState, VlaAction
from specvla_ros.ros.driver.joint_order import JointOrder
from specvla_ros.ros.driver.outputs import ROBOT_OUTPUTS, GripperCommands, OutputContext, RobotOutput
from specvla_ros.ros.driver.parameters import DRY_RUN, JOINTS, DriverParameters
from specvla_ros.ros.node import STEADY, DiagnosticsPublisher, ManagedNode, make_status, raise_priority, run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters, refuse_fixed
from specvla_ros.ros.qos import ACTION, LATCHED_STATE
from specvla_ros.ros.tool_pose import JointInput, PoseFromTf, PoseSource, PoseTopic

_NS = 1e-9
_WATCH_S = 0.2
_STANDS = 0.001  # max motion of a measured tool at rest within _WATCH_S, in metres and radians
_SEVERAL_IN_FLIGHT = ("pipeline", "specpipe", "auto")
_LOG_PERIOD_S = 5.0
_TRIES_ORDER = "each joint is moved a little first, to check that joints.names is in the controller's order"
_JOINTS, _POSE = "joints", "pose"  # kinds of measurements
_CLOCKS_APART_S = 0.02  # beyond the error; machines that are synchronised over a network differ by less


class DriverNode(ManagedNode):
    """Moves the robot by actions, within limits. Without actions, poses or a sound clock it comes to rest."""

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("driver", **node_arguments)
        with parameters_declared(self, DriverParameters, lifecycle=True):
            self._chosen = DriverParameters()  # read when the node is configured
        self._output_context: OutputContext | None = None
        self._driver: Driver[Any] | None = None
        self._listening = ExitStack()  # ends the subscriptions and timers of `_start`
        self._holding = False
        self._reset()
        self._follow_changes(DriverParameters)
        self._hold_service = self.create_service(SetBool, "~/hold", self._on_hold)
        self._diagnostics = DiagnosticsPublisher(self, self._chosen.diagnostics_period_s, self._statuses)

    def _reset(self) -> None:
        self._history: PoseHistory[Any] = PoseHistory()
        self._joints: Mapping[str, float] = {}
        self._joints_s = -math.inf
        self._convention: ActionConvention | None = None
        self._refusals: Counter[str] = Counter()
        self._stood_at: Any = None
        self._scheduling = "ordinary"
        self._guard_spoke = False
        self._taken = 0
        self._last_refusal = ""
        self._bad_states: dict[str, str] = {}  # why the last measurement of a kind was refused
        self._clocks, self._action_age_s = ClockOffset(), 0.0

    # Transitions

    def _setup(self) -> None:
        self._chosen = read_parameters(self, DriverParameters)
        self._chosen.check_complete()
        self._diagnostics.set_period(self._chosen.diagnostics_period_s)
        chosen = self._chosen
        model = load_joint_model(chosen.joints) if chosen.joints.model else None
        if model is not None and chosen.output == Output.JOINT_TRAJECTORY_CHUNK:
            model = planned(model)
        self._model, self._solver = model, _joint_commands(chosen, model)
        names, joints_stop_s = ((), 0.0) if model is None else (model.joints, model.stop_s)
        stop_s = joints_stop_s if chosen.action_space == JOINTS else chosen.limits.stop_s
        self._output_context = OutputContext(
            self,
            chosen.base_frame,
            names,
            self._solver,
            self._measured_joints,
            1.0 / chosen.rate_hz,
            chosen.joints.chunk_s,
            stop_s,
        )
        self._output: RobotOutput = ROBOT_OUTPUTS.entries()[chosen.output].make(self._output_context)
        self._order = JointOrder(self._output_context, chosen, self._output)
        self._gripper = Gripper(chosen.gripper)
        self._gripper_output = GripperCommands(self._output_context, chosen.gripper)
        self.get_logger().info(self._introduction())

    def _introduction(self) -> str:
        chosen = self._chosen
        if chosen.limits.missing:
            return f"a dry run without motion planning: {', '.join(chosen.limits.missing)} not set"
        rests = f"its own motion comes to rest within {chosen.limits.stop_s:.3f} s"
        return f"output {chosen.output}, {chosen.rate_hz:g} Hz, {rests}"

    def _start(self) -> None:
        """Subscribes, waits for a measured pose within the workspace, and moves from there."""
        self._reset()
        chosen = self._chosen
        if not chosen.limits.missing:
            follower: ActionFollower[Any] = ActionFollower(
                *_space_and_motion(chosen, self._model, self._solver),
                self._gripper,
                self._history,
                compensation=Compensation(chosen.compensate),
                max_age_s=chosen.max_action_age_s,
                max_future_s=chosen.max_future_s,
            )
            self._driver = Driver(
                follower,
                self._history,
                tracking=TrackingVelocity(chosen.limits) if self._output.follows_velocity else None,
                pose_timeout_s=chosen.tool_pose_timeout_s,
                pose_source=chosen.pose_source,
                start_output=self._start_output,
                say=self.get_logger().error,
            )
            self._driver.holding = self._holding
            self._output.connect(follower)
        self._gripper.reset()
        self._scheduling = raise_priority(chosen.realtime_priority)
        self._listen()
        for period_s, callback in ((1.0 / chosen.rate_hz, self._step), (_WATCH_S, self._look_around)):
            self._listening.callback(self.destroy_timer, self.create_timer(period_s, callback, clock=STEADY))

    def _listen(self) -> None:
        chosen = self._chosen
        names = self._output_context.joints if self._output_context is not None else ()
        self._joint_input = JointInput(self, names, self._on_joints, partial(self._on_bad, _JOINTS))
        self._listening.callback(self._joint_input.destroy)
        self._pose_source: PoseSource | None = None
        on_bad = partial(self._on_bad, _POSE)
        if chosen.pose_source == "topic":
            self._pose_source = PoseTopic(self, chosen.base_frame, self._on_pose, on_bad)
        elif chosen.pose_source == "tf":
            self._pose_source = PoseFromTf(self, chosen.base_frame, chosen.tool.frame, self._on_pose, on_bad)
        if self._pose_source is not None:
            self._listening.callback(self._pose_source.destroy)
        actions = self.create_subscription(VlaAction, "action", self._on_action, ACTION)
        state = self.create_subscription(GuardState, "guard_state", self._on_guard, LATCHED_STATE)
        self._action_topic, self._state_topic = actions.topic_name, state.topic_name
        for subscription in (actions, state):
            self._listening.callback(self.destroy_subscription, subscription)

    def _stop(self) -> None:
        """Stops sending: the robot's own controller, or the guard, brings it to rest."""
        self._listening.close()
        self._stop_velocities()
        self._driver = None

    def _stop_velocities(self) -> None:
        """Stops a robot that keeps its last velocity. A guard does so itself, and refuses a sudden zero as a fault."""
        if self._driver is not None and not self._guard_spoke:
            self._output.stop(self.get_clock().now())

    def _teardown(self) -> bool:
        if self._output_context is not None:
            self._output_context.close()
            self._output_context = None
        return True

    # Inputs

    def _on_pose(self, stamp_s: float, pose: Any) -> None:
        if self._is_ahead(_POSE, "a measured pose", stamp_s):
            return
        if not stamp_s:
            self._on_bad(_POSE, f"tool pose: {UNSTAMPED}")
            return
        self._bad_states.pop(_POSE, None)
        self._history.add(stamp_s, pose)

    def _is_ahead(self, kind: str, what: str, stamp_s: float) -> bool:
        """Refuses a stamp in the future: until then no other would be newer, and the robot would count as measured."""
        ahead_s = stamp_s - self._now_s()
        if ahead_s > MAX_FUTURE_S:
            self._on_bad(kind, f"the stamp of {what} lies {ahead_s:.3f} s ahead of the clock: {SYNCHRONISE}")
        return ahead_s > MAX_FUTURE_S

    def _on_joints(self, stamp_s: float, positions: Mapping[str, float]) -> None:
        if self._is_ahead(_JOINTS, "joint_states", stamp_s):
            return
        self._joints, self._joints_s = positions, stamp_s
        self._bad_states.pop(_JOINTS, None)
        if self._chosen.pose_source != "joint_states" or self._solver is None:
            return
        try:
            pose = self._solver.place_of(positions)
        except UserError as error:
            self._on_bad(_JOINTS, str(error))
        else:
            self._on_pose(stamp_s, pose)

    def _measured_joints(self) -> Mapping[str, float] | None:
        """The joints as far as they may correct the motion."""
        driver = self._driver
        return None if driver is None or driver.problem or driver.guarded else self._joints or None

    def _on_bad(self, kind: str, what: str) -> None:
        self._refusals["bad_state"] += 1
        self._last_refusal = self._bad_states[kind] = what
        self.get_logger().error(what, throttle_duration_sec=_LOG_PERIOD_S)

    def _change(self, changed: Mapping[str, Any]) -> None:
        if self._output_context is not None:  # else they are read when the node is configured
            refuse_fixed(self, DriverParameters, changed, read_in_activate=(), active=self.active)
            self._chosen = read_parameters(self, DriverParameters, changed)
        if self._driver is not None:
            self._driver.follower.set_ages(self._chosen.max_action_age_s, self._chosen.max_future_s)

    def _on_hold(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """Comes to rest and follows no actions until the hold is released."""
        self._holding = request.data
        if self._driver is not None:
            self._driver.holding = self._holding
            if self._holding:
                self._driver.follower.hold(self._now_s())
        response.success = True
        response.message = "the driver holds" if self._holding else "the driver follows actions"
        self.get_logger().info(response.message)
        return response

    def _on_action(self, message: VlaAction) -> None:
        now_s = self._now_s()
        try:
            action = self._read(message)
            self._action_age_s = now_s - action.stamp_s
            self._clocks.add(receive_s=message.receive_s, latency_s=message.latency_s, age_s=self._action_age_s)
            if self._driver is not None:
                if self._order.pending:
                    raise NotFollowingError(_TRIES_ORDER)
                self._driver.take(action, now_s)
        except ActionRefusedError as error:
            self._refuse(error.refusal.value, str(error))
        except NotFollowingError as error:
            self._refuse("not_following", str(error))
        except ValueError as error:
            self._refuse("unreadable", str(error))
        else:
            self._taken += 1
            self._convention = action.convention

    def _on_guard(self, message: GuardState) -> None:
        self._guard_spoke = True
        if self._driver is not None:
            self._driver.speed_scale = message.speed_scale
            passing = message.state == GuardState.PASSING and not message.overridden
            self._driver.passing(passing, self._now_s())

    def _read(self, message: VlaAction) -> StampedAction:
        """The message's action; raises ValueError if it does not fit this robot."""
        action = stamped_action(message, Time.from_msg(message.header.stamp).nanoseconds * _NS)
        if self._chosen.action_prefix:
            action = action.of_arm(self._chosen.action_prefix, self._chosen.joints.names)
        convention = action.convention
        if self._convention is not None and convention != self._convention:
            raise ValueError(
                f"its convention is {_words(convention)}, but the first that was followed since activation had "
                f"{_words(self._convention)}; deactivate and activate the driver after a change of policy"
            )
        if message.header.frame_id != self._chosen.base_frame:
            raise ValueError(
                f"its frame is '{message.header.frame_id}', but base_frame is '{self._chosen.base_frame}': set the "
                "policy's base_frame"
            )
        if self._chosen.compensate == Compensation.NONE.value and message.mode in _SEVERAL_IN_FLIGHT:
            raise ValueError(
                f"its decode mode is {message.mode}, with several frames in flight, but compensate is none: the same "
                "motion would count several times; set compensate to image_goal, or the policy's decode.mode to ar or "
                "spec"
            )
        return action

    def _refuse(self, kind: str, detail: str) -> None:
        self._refusals[kind] += 1
        self._last_refusal = f"{kind}: {detail}"
        self.get_logger().warning(f"an action was refused ({kind}): {detail}", throttle_duration_sec=_LOG_PERIOD_S)

    # The control loop

    def _step(self) -> None:
        try:
            self._control_step()
        except Exception:
            self._stop_velocities()
            raise

    def _control_step(self) -> None:
        now, driver = self.get_clock().now(), self._driver
        if self._pose_source is not None:
            self._pose_source.look()
        if driver is None:
            return
        driver.unmeasured = self._stale_joints(_seconds(now)) if self._output.measures_joints else ""
        began = driver.anchored
        target = driver.step(_seconds(now), time.monotonic())
        if driver.anchored and not began:
            self.get_logger().info(f"a {driver.follower.space.what} was measured: following actions")
        if target is None or self._order.step(driver, self._joints, time.monotonic()):
            return
        try:
            # Stamped with the time that the motion was computed for. A later stamp, after a preemption, would make the
            # next step look too fast.
            self._output.send(target, now)
        except UnreachableError as error:
            driver.follower.hold(_seconds(now))
            self._refuse("unreachable", str(error))
        self._gripper_output.command(self._gripper.position, time.monotonic())

    def _stale_joints(self, now_s: float) -> str:
        """Says that the joints are measured no more; empty if they are. Their errors would grow unseen."""
        age_s, limit_s = now_s - self._joints_s, self._chosen.tool_pose_timeout_s
        if -MAX_FUTURE_S <= age_s <= limit_s:
            return ""
        if not self._joints:
            return "no joint_states received yet"
        if age_s < 0:
            return "no joint_states received since the clock went back"
        return f"the newest joint_states are {age_s:.2f} s old, and the limit is {limit_s:g} s"

    def _start_output(self) -> None:
        if mismatch := self._mismatch():
            self.get_logger().error(mismatch, throttle_duration_sec=_LOG_PERIOD_S)
            raise UserError(mismatch)
        self._output.start(self._joints)
        self._order.start()

    def _mismatch(self) -> str:
        """Describes how measured joints and measured pose disagree; empty if they agree or one of them is unknown."""
        newest = self._history.newest
        if self._solver is None or newest is None or self._pose_source is None or not self._joints:
            return ""
        return self._solver.mismatch(self._joints, newest[1])

    def _look_around(self) -> None:
        """Watches the graph, at a lower rate than the control steps: a query takes as long as a step."""
        if self._driver is None:
            return
        self._driver.action_publishers = self.count_publishers(self._action_topic)
        heard = self._output_context is not None and self._output_context.heard
        self._order.look(heard=heard and (self._guard_spoke or not self.count_publishers(self._state_topic)))
        newest = self._history.newest
        before, self._stood_at = self._stood_at, newest[1] if newest is not None else None
        if before is None or self._stood_at is None or max(before.distance(self._stood_at)) > _STANDS:
            return  # while the tool moves, joints and pose are of different moments
        with suppress(UserError):  # unknown joints, or joints out of range, are reported at the start
            self._driver.mismatch = self._mismatch()

    # Diagnostics

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        driver, of_states = self._driver, self._refusals["bad_state"]
        values: dict[str, object] = {
            "output": self._chosen.output,
            "scheduling": self._scheduling,
            "actions taken": self._taken,
            "actions refused": sum(self._refusals.values()) - of_states,
            "measurements refused": of_states,
            "control loop stalls": driver.stalls if driver is not None else 0,
            "clock jumps": driver.clock_jumps if driver is not None else 0,
            **{f"refused: {kind}": count for kind, count in sorted(self._refusals.items())},
        }
        if self._last_refusal:
            values["last refusal"] = self._last_refusal
        if self.stop_reason:
            values["stopped because"] = self.stop_reason
        clocks = self._clocks.best
        if clocks is not None:
            values["action age s"] = f"{self._action_age_s:.4f}"
            ahead_s = round(clocks.ahead_s, 4) + 0.0  # no negative zero
            values["policy's clock ahead s"] = f"{ahead_s:.4f} +- {clocks.error_s:.4f}"
        if self._history.newest is not None:
            values["measurements per s"] = f"{self._history.per_s:.1f}"
        if driver is not None and driver.anchored:
            newest = self._history.newest
            if newest is not None:
                values |= driver.follower.space.motion(driver.target, newest[1])
        return {"motion": make_status(*self._summary(), values)}

    def _summary(self) -> tuple[bytes, str]:
        if not self.active:
            return DiagnosticStatus.OK, "not active"
        driver = self._driver
        if driver is None:
            return DiagnosticStatus.OK, self._introduction()
        lacking = "" if driver.anchored else self._joint_input.lacking or "; ".join(self._bad_states.values())
        if driver.problem:
            return DiagnosticStatus.ERROR, lacking or driver.problem
        if self._holding:
            return DiagnosticStatus.WARN, "holding, as requested on ~/hold"
        if driver.guarded:
            return DiagnosticStatus.WARN, "waiting: the guard is blocking motion"
        if not driver.anchored:
            waits = f"waiting for a {driver.follower.space.what}"
            return DiagnosticStatus.WARN, waits + (f"; {lacking}" if lacking else "")
        if self._order.pending:
            return DiagnosticStatus.WARN, _TRIES_ORDER
        clocks = self._clocks.best
        if clocks is not None and abs(clocks.ahead_s) - clocks.error_s > _CLOCKS_APART_S:
            return (
                DiagnosticStatus.WARN,
                f"the policy's clock is {clocks.ahead_s:.3f} s ahead of this one: {SYNCHRONISE}",
            )
        if self._taken and not self._guard_spoke and self._chosen.output != DRY_RUN:
            where = f"no guard reports on {self._state_topic}: remap it to the guard's state"
            return DiagnosticStatus.WARN, f"following actions, but {where}"
        if self._taken:
            return DiagnosticStatus.OK, "following actions"
        if self._last_refusal:
            return DiagnosticStatus.WARN, f"no action was followed yet; the last was refused: {self._last_refusal}"
        return DiagnosticStatus.OK, "waiting for actions"

    def _now_s(self) -> float:
        return _seconds(self.get_clock().now())


def _seconds(at: Time) -> float:
    return float(at.nanoseconds * _NS)


def _joint_commands(chosen: DriverParameters, model: JointModel | None) -> JointSolver | JointKinematics | None:
    """Converts targets to joint commands: by inverse kinematics, unless they are the joints' own."""
    if model is None:
        return None
    return JointKinematics(model) if chosen.action_space == JOINTS else JointSolver(model, 1.0 / chosen.rate_hz)


def _space_and_motion(
    chosen: DriverParameters, model: JointModel | None, arm: JointSolver | JointKinematics | None
) -> tuple[ActionSpace[Any], Motion[Any]]:
    """The space of the policy's actions, and bounded motion in it."""
    if isinstance(arm, JointKinematics) and model is not None:
        return JointSpace(arm, chosen.limits, chosen.max_step_rad), JointMotion(arm, model, chosen.limits)
    return ToolSpace(chosen.limits, chosen.max_step_m, chosen.max_step_rad), BoundedMotion(chosen.limits)


def _words(convention: ActionConvention) -> str:
    parts = (convention.reference, convention.frame, convention.rotation, convention.gripper)
    return ", ".join([f"{convention.dt_s:g} s", *(part.value for part in parts)])


def main() -> None:
    """Runs the node."""
    sys.exit(run_node("driver", DriverNode, close=DriverNode.close, last_words=True))
