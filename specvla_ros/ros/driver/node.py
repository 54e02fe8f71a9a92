# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `driver`: stamped actions and the tool's measured pose in, bounded motion commands out."""

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.subscription import Subscription
from rclpy.time import Time
from std_msgs.msg import Bool
from std_srvs.srv import SetBool

from specvla_msgs.msg import VlaAction
from specvla_ros.control.bounded_motion import BoundedMotion, Target, tracking_velocity
from specvla_ros.control.convention import ActionConvention, ActionFrame, GripperSign, Reference, Rotation
from specvla_ros.control.follower import ActionFollower, ActionRefusedError, Compensation, StampedAction
from specvla_ros.control.gripper import Gripper
from specvla_ros.control.inverse_kinematics import JointSolver, UnreachableError
from specvla_ros.control.pose import Pose
from specvla_ros.control.pose_history import PoseHistory
from specvla_ros.errors import UserError
from specvla_ros.ros.diagnostics import DiagnosticsPublisher, make_status
from specvla_ros.ros.driver.outputs.gripper import GripperOutput
from specvla_ros.ros.driver.outputs.robot_output import ROBOT_OUTPUTS, OutputContext, RobotOutput
from specvla_ros.ros.driver.parameters import DriverParameters
from specvla_ros.ros.driver.tool_pose import JointInput, PoseFromTf, PoseSource, PoseTopic, forward_kinematics
from specvla_ros.ros.lifecycle import answer_impossible_transitions
from specvla_ros.ros.parameters import (
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)
from specvla_ros.ros.qos import ACTION, LATCHED_STATE
from specvla_ros.ros.spinning import run_node

_NS = 1e-9
# A clock that runs this much ahead of the steady one, or back, between two control steps has jumped.
_JUMP_S = 0.25
_STALL_S = 0.5
_OUTSIDE_M = 0.005
_NEAR_M = 0.003
_AWAY_S = 0.5
_WATCH_S = 0.2
_SEVERAL_IN_FLIGHT = ("pipeline", "specpipe")
_LOG_PERIOD_S = 5.0


class DriverNode(LifecycleNode):
    """Moves the robot as actions say, within limits; without actions, poses or a sound clock it comes to rest.

    Args:
        node_arguments: those of rclpy.node.Node.

    Raises:
        UserError: a parameter has the wrong type or is out of range.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("driver", **node_arguments)
        answer_impossible_transitions(self)
        try:
            declare_parameters(self, DriverParameters, lifecycle=True)
        except UserError:
            self.destroy_node()
            raise
        for name, hint in unknown_parameters(self).items():
            self.get_logger().warning(f"there is no parameter '{name}'; {hint}")
        self._chosen = DriverParameters()
        self._output_context: OutputContext | None = None
        self._inputs: list[JointInput | PoseSource] = []
        self._subscriptions_made: list[Subscription] = []
        self._follower: ActionFollower | None = None
        self._active = False
        self._holding = False
        self._reset()
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self._hold_service = self.create_service(SetBool, "~/hold", self._on_hold)
        self._diagnostics = DiagnosticsPublisher(self, self._chosen.diagnostics_period_s, self._statuses)

    def _reset(self) -> None:
        self._history = PoseHistory()
        self._joints: Mapping[str, float] = {}
        self._anchored = False
        self._away_since_s = math.inf
        self._guarded = False  # whether a guard said that it lets nothing through
        self._convention: ActionConvention | None = None
        self._refusals: Counter[str] = Counter()
        self._taken = 0
        self._action_publishers = self._stalls = self._clock_jumps = 0
        self._problem = ""
        self._last_refusal = ""
        self._last_step: tuple[float, float] | None = None  # node's clock, steady clock

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Checks everything that a motion needs; what a user can mend is refused, and configure may be tried again."""
        try:
            self._chosen = read_parameters(self, DriverParameters)
            self._chosen.check_complete()
            self._diagnostics.set_period(self._chosen.diagnostics_period_s)
            self._build()
        except UserError as error:
            self._release()
            self.get_logger().error(f"not configured: {error}")
            return TransitionCallbackReturn.FAILURE
        self.get_logger().info(self._introduction())
        return TransitionCallbackReturn.SUCCESS

    def _build(self) -> None:
        chosen = self._chosen
        model, period_s = chosen.joints.load(), 1.0 / chosen.rate_hz
        self._solver = None if model is None else JointSolver(model, period_s)
        names = () if model is None else model.joints
        self._output_context = OutputContext(self, chosen.base_frame, period_s, names, self._solver)
        self._output: RobotOutput = ROBOT_OUTPUTS.entries()[chosen.output].make(self._output_context)
        self._gripper = Gripper(chosen.gripper)
        self._gripper_output = GripperOutput(self._output_context, chosen.gripper_output, chosen.gripper_joint)
        if chosen.tool_pose_source == "joint_states" and self._solver is None:
            raise UserError("tool_pose_source: joint_states needs the robot's kinematics; set joints.model")

    def _introduction(self) -> str:
        chosen = self._chosen
        if chosen.limits.missing:
            return f"a dry run that plans no motion: {', '.join(chosen.limits.missing)} not set"
        return f"output {chosen.output}, {chosen.rate_hz:g} Hz, a stop takes {chosen.limits.stop_s:.3f} s at most"

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Listens, waits for a measured pose within the workspace, and moves from there."""
        self._reset()
        chosen = self._chosen
        if not chosen.limits.missing:
            self._follower = ActionFollower(
                BoundedMotion(chosen.limits),
                self._gripper,
                self._history,
                compensation=Compensation(chosen.compensate),
                max_age_s=chosen.max_action_age_s,
                max_future_s=chosen.max_future_s,
                max_step_m=chosen.max_step_m,
                max_step_rad=chosen.max_step_rad,
            )
        self._gripper.reset()
        self._gripper_output.forget()
        try:
            self._listen()
        except UserError as error:
            self._stop()
            self.get_logger().error(f"not activated: {error}")
            return TransitionCallbackReturn.FAILURE
        self._active = True
        # On the steady clock: a clock that stands still must not silence the robot's commands.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timers_made = [
            self.create_timer(1.0 / chosen.rate_hz, self._step, clock=steady),
            self.create_timer(_WATCH_S, self._watch_publishers, clock=steady),
        ]
        return super().on_activate(state)

    def _listen(self) -> None:
        chosen = self._chosen
        self._inputs = [JointInput(self, self._on_joints, self._on_bad)]
        self._pose_source: PoseSource | None = None
        if chosen.tool_pose_source == "topic":
            self._pose_source = PoseTopic(self, chosen.base_frame, self._on_pose, self._on_bad)
        elif chosen.tool_pose_source == "tf":
            self._pose_source = PoseFromTf(self, chosen.base_frame, chosen.tool_frame, self._on_pose, self._on_bad)
        elif self._solver is not None:
            self._kinematics = forward_kinematics(self._solver, self._on_pose, self._on_bad)
        if self._pose_source is not None:
            self._inputs.append(self._pose_source)
        self._subscriptions_made = [
            self.create_subscription(VlaAction, "action", self._on_action, ACTION),
            self.create_subscription(Bool, "guard_passing", self._on_passing, LATCHED_STATE),
        ]

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Sends nothing more: the robot's own controller, or the guard, brings it to rest."""
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Lets everything go."""
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate and cleanup; the node can then only end."""
        self._release()
        return super().on_deactivate(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured, with nothing left running."""
        self._release()
        return super().on_deactivate(state)

    def close(self) -> bool:
        """Sends nothing more."""
        self._release()
        return True

    def _stop(self) -> None:
        if self._active:
            self._active = False
            for timer in self._timers_made:
                self.destroy_timer(timer)
        for each in self._inputs:
            each.destroy()
        self._inputs = []
        for subscription in self._subscriptions_made:
            self.destroy_subscription(subscription)
        self._subscriptions_made = []
        self._follower = None

    def _release(self) -> None:
        self._stop()
        if self._output_context is not None:
            self._output_context.close()
            self._output_context = None

    # Inputs

    def _on_pose(self, stamp_s: float, pose: Pose) -> None:
        self._history.add(stamp_s, pose)

    def _on_joints(self, stamp_s: float, positions: Mapping[str, float]) -> None:
        self._joints = positions
        if self._chosen.tool_pose_source == "joint_states":
            self._kinematics(stamp_s, positions)

    def _on_bad(self, what: str) -> None:
        self._refusals["bad_state"] += 1
        self._last_refusal = what
        self.get_logger().error(what, throttle_duration_sec=_LOG_PERIOD_S)

    def _on_set_parameters(self, parameters: list[Any]) -> SetParametersResult:
        changed = {parameter.name: parameter.value for parameter in parameters}
        try:
            check_values(DriverParameters, changed)
            if self._output_context is not None:  # else they are read when the node is configured
                refuse_fixed(self, DriverParameters, changed, read_in_activate=(), active=self._active)
                self._chosen = read_parameters(self, DriverParameters, changed)
        except UserError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if self._follower is not None:
            self._follower.set_ages(self._chosen.max_action_age_s, self._chosen.max_future_s)
        return SetParametersResult(successful=True)

    def _on_hold(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """Comes to rest and follows nothing, until it is told to go on."""
        self._holding = request.data
        if self._holding and self._follower is not None:
            self._follower.hold(self._now_s())
        response.success = True
        response.message = "the driver holds" if self._holding else "the driver follows actions"
        self.get_logger().info(response.message)
        return response

    def _on_action(self, message: VlaAction) -> None:
        now_s = self._now_s()
        try:
            action = self._read(message)
            if self._follower is None:
                self._taken += 1
                return
            self._check_following()
            self._follower.take(action, now_s)
        except ActionRefusedError as error:
            self._refuse(error.refusal.value, str(error))
        except _NotFollowing as error:
            self._refuse("not_following", str(error))
        except ValueError as error:
            self._refuse("unreadable", str(error))
        else:
            self._taken += 1

    def _on_passing(self, message: Bool) -> None:
        """While the guard lets nothing through, the robot stays where it is, and so must its target."""
        if not message.data and not self._guarded and self._follower is not None:
            self._follower.hold(self._now_s())
        self._guarded = not message.data

    def _check_following(self) -> None:
        if self._problem:
            raise _NotFollowing(self._problem)
        if self._holding:
            raise _NotFollowing("it holds")
        if self._guarded:
            raise _NotFollowing("the guard lets nothing through")
        if not self._anchored:
            raise _NotFollowing("no tool pose yet")

    def _read(self, message: VlaAction) -> StampedAction:
        """The action that a message holds.

        Raises:
            ValueError: it cannot be one of this robot's.
        """
        convention = ActionConvention(
            message.action_dt,
            Reference(message.reference),
            ActionFrame(message.action_frame),
            Rotation(message.rotation),
            GripperSign(message.gripper),
        )
        if not (math.isfinite(convention.dt_s) and convention.dt_s > 0):
            raise ValueError(f"its action_dt is {convention.dt_s} s")
        if self._convention is not None and convention != self._convention:
            raise ValueError(
                f"its numbers mean {_words(convention)}, those of the first action since activation "
                f"{_words(self._convention)}; deactivate and activate the driver after a change of policy"
            )
        if message.header.frame_id != self._chosen.base_frame:
            raise ValueError(
                f"it is in the frame '{message.header.frame_id}', not in base_frame '{self._chosen.base_frame}'"
            )
        if self._chosen.compensate == Compensation.NONE.value and message.mode in _SEVERAL_IN_FLIGHT:
            raise ValueError(
                f"it was decoded as {message.mode}, with several frames in flight, and compensate is none: the same "
                "way would count several times; set compensate to image_goal, or the policy's decode.mode to ar or spec"
            )
        horizon, columns = message.horizon, len(message.names)
        if not columns or horizon * columns != len(message.values):
            raise ValueError(f"it has {len(message.values)} values for {horizon} rows of {columns} names")
        self._convention = convention
        stamp_s = Time.from_msg(message.header.stamp).nanoseconds * _NS
        return StampedAction(stamp_s, np.array(message.values).reshape(horizon, columns), convention)

    def _refuse(self, kind: str, detail: str) -> None:
        self._refusals[kind] += 1
        self._last_refusal = f"{kind}: {detail}"
        self.get_logger().warning(f"an action was refused ({kind}): {detail}", throttle_duration_sec=_LOG_PERIOD_S)

    # The control loop

    def _step(self) -> None:
        now_s = self._now_s()
        if self._pose_source is not None:
            self._pose_source.look()
        self._watch_clock(now_s)
        follower = self._follower
        if follower is None:
            return
        if not self._anchored and not self._anchor(now_s):
            return
        problem = self._input_problem(now_s)
        if problem and not self._problem:
            follower.hold(now_s)
            self.get_logger().error(f"coming to rest: {problem}")
        self._problem = problem
        self._target = follower.step(now_s)
        self._return_where_held(now_s)
        try:
            self._output.send(self._command(self._target), self.get_clock().now())
        except UnreachableError as error:
            follower.hold(now_s)
            self._refuse("unreachable", str(error))
        self._gripper_output.command(self._gripper.position, time.monotonic())

    def _command(self, target: Target) -> Target:
        """What to send: velocities that also make up for what is missing, as long as it is known what is."""
        newest = self._history.newest
        if not self._output.follows_velocity or self._problem or self._guarded or newest is None:
            return target
        return Target(target.pose, tracking_velocity(target, newest[1], self._chosen.limits))

    def _return_where_held(self, now_s: float) -> None:
        """A robot that is held elsewhere, by the guard or by a hand, is not pulled to where it was sent before."""
        newest, follower = self._history.newest, self._follower
        if newest is None or follower is None:
            return
        if self._guarded:
            away = self._target.pose.distance(newest[1])[0] > _NEAR_M
        else:
            away = not follower.follows(self._target.pose, newest[1])
        if self._target.moving or not away:
            self._away_since_s = math.inf
            return
        self._away_since_s = min(self._away_since_s, now_s)
        if newest[0] < self._away_since_s + (0.0 if self._guarded else _AWAY_S):
            return  # it may have been on its way when it was measured
        if self._output.follows_velocity:
            follower.rest_at(newest[1])  # a robot that is sent velocities does not see where its target is
        else:
            follower.return_to(newest[1], now_s)

    def _anchor(self, now_s: float) -> bool:
        """Begins where the tool is measured, once it is."""
        newest = self._history.newest
        problem = self._input_problem(now_s)
        if newest is not None and not problem:
            limits = self._chosen.limits
            if limits.holds(newest[1].position, margin_m=_OUTSIDE_M):
                problem = self._start_output()
            else:
                problem = (
                    f"the tool is at {np.round(newest[1].position, 3).tolist()}, outside the workspace "
                    f"{list(limits.workspace_min)} to {list(limits.workspace_max)}; bring it inside by other means"
                )
        self._problem = problem
        if problem or newest is None or self._follower is None:
            return False
        self._follower.rest_at(newest[1])
        self._target = self._follower.step(now_s)
        self._anchored = True
        self.get_logger().info("the tool's pose is known: following actions")
        return True

    def _start_output(self) -> str:
        try:
            self._output.start(self._joints)
        except UserError as error:
            return str(error)
        return ""

    def _input_problem(self, now_s: float) -> str:
        newest = self._history.newest
        if newest is None:
            return f"no tool pose has come from {self._chosen.tool_pose_source} yet"
        age_s = now_s - newest[0]
        if age_s > self._chosen.tool_pose_timeout_s:
            return f"the newest tool pose is {age_s:.2f} s old, and the limit is {self._chosen.tool_pose_timeout_s:g} s"
        if self._action_publishers > 1:
            return f"{self._action_publishers} nodes publish actions: only one may"
        return ""

    def _watch_publishers(self) -> None:
        """Not at every control step: asking the graph takes as long as a step."""
        self._action_publishers = self.count_publishers(self._subscriptions_made[0].topic_name)

    def _watch_clock(self, now_s: float) -> None:
        """After a standstill what was followed is out of date; stamps around a jump of the clock do not compare."""
        steady_s = time.monotonic()
        last, self._last_step = self._last_step, (now_s, steady_s)
        if last is None or self._follower is None:
            return
        passed_s, real_s = now_s - last[0], steady_s - last[1]
        if real_s > _STALL_S and self._anchored:
            self._stalls += 1
            self.get_logger().warning(
                f"the control loop stood still for {real_s:.3f} s: coming to rest", throttle_duration_sec=_LOG_PERIOD_S
            )
            self._follower.hold(now_s)
        if 0 <= passed_s <= real_s + _JUMP_S:
            return
        self.get_logger().warning(f"the clock jumped by {passed_s:.3f} s: coming to rest, and beginning anew")
        self._clock_jumps += 1
        self._history.clear()
        if self._anchored:
            self._follower.rest_at(self._target.pose)
        self._follower.forget()
        self._anchored = False

    # Diagnostics

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        values: dict[str, object] = {
            "output": self._chosen.output,
            "actions taken": self._taken,
            "actions refused": sum(self._refusals.values()),
            "control loop stood still": self._stalls,
            "clock jumps": self._clock_jumps,
            **{f"refused: {kind}": count for kind, count in sorted(self._refusals.items())},
        }
        if self._last_refusal:
            values["last refusal"] = self._last_refusal
        if self._anchored:
            values["speed m/s"] = f"{np.linalg.norm(self._target.velocity[:3]):.3f}"
            newest = self._history.newest
            if newest is not None:
                values["from target m"] = f"{self._target.pose.distance(newest[1])[0]:.4f}"
        return {"motion": make_status(*self._summary(), values)}

    def _summary(self) -> tuple[bytes, str]:
        if not self._active:
            return DiagnosticStatus.OK, "not active"
        if self._follower is None:
            return DiagnosticStatus.OK, self._introduction()
        if self._problem:
            return DiagnosticStatus.ERROR, self._problem
        if self._holding:
            return DiagnosticStatus.WARN, "holding, as ~/hold was told"
        if self._guarded:
            return DiagnosticStatus.WARN, "waiting: the guard lets nothing through"
        if not self._anchored:
            return DiagnosticStatus.WARN, "waiting for the tool's pose"
        return DiagnosticStatus.OK, "following actions" if self._taken else "waiting for actions"

    def _now_s(self) -> float:
        now_s: float = self.get_clock().now().nanoseconds * _NS
        return now_s


def _words(convention: ActionConvention) -> str:
    parts = (convention.reference, convention.frame, convention.rotation, convention.gripper)
    return ", ".join([f"{convention.dt_s:g} s", *(part.value for part in parts)])


class _NotFollowing(RuntimeError):
    """Why no action is followed at present."""


def main() -> None:
    """Runs the node; the exit code is 2 for a parameter that a user can mend."""
    sys.exit(run_node("driver", DriverNode, close=DriverNode.close))
