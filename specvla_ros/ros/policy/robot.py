# SPDX-License-Identifier: Apache-2.0
"""One robot's part of a policy node, and the node `<robot>/policy` that each of several robots has.

The part is what the robot sees and is told, what becomes of it, its pauses and its clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from std_msgs.msg import Bool
from std_srvs.srv import SetBool

from specvla_ros.engine.outcome import Drop, DropReason, Freshness, Outcome
from specvla_ros.errors import UserError, shortened
from specvla_ros.messages.action_message import ActionMeaning
from specvla_ros.models.observation import Observation
from specvla_ros.ros.diagnostics import DiagnosticsPublisher
from specvla_ros.ros.managed_node import ManagedNode
from specvla_ros.ros.parameters import (
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)
from specvla_ros.ros.policy.action_publisher import ActionPublisher, Published
from specvla_ros.ros.policy.diagnostics import DropLedger, InferenceHealth, InputHealth
from specvla_ros.ros.policy.inference_thread import InferenceThread
from specvla_ros.ros.policy.inputs import (
    Frames,
    Instruction,
    InstructionInput,
    ObservationInput,
    Senses,
    declared_overrides,
)
from specvla_ros.ros.policy.parameters import READ_IN_ACTIVATE, PolicyParameters, RobotParameters, SharedParameters
from specvla_ros.ros.qos import LATCHED_STATE
from specvla_ros.settings.parameter import walk

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NS = 1e-9
_GRAPH_PERIOD_S = 1.0


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy in memory, and what its robots must know of it."""

    thread: InferenceThread  # runs its engine
    senses: Senses  # what it looks at
    tokenizer: Tokenizer | None  # ids to words; None: it has none
    unnorm_key: str  # of its action statistics
    dt_s: float | None  # seconds over which one of its actions is meant; None: its checkpoint does not say


class RobotPart:
    """Hands a robot's images to the engine and publishes its actions, on the topics of a lifecycle node.

    The node calls `configure`, `activate`, `deactivate` and `release` from the transitions of these names, and
    `take_outcome` with what the engine says of this robot.

    Args:
        node: of the topics, the services and the clock.
        stream: the robot's name in the engine.
        max_image_age_s: the limit of an image's age, asked for at each one; 0: none.

    Attributes:
        active: it listens to images.
        paused: it was paused by its service.
    """

    def __init__(self, node: LifecycleNode, stream: str, max_image_age_s: Callable[[], float]) -> None:
        self._node, self._stream, self._max_image_age_s = node, stream, max_image_age_s
        self._policy: LoadedPolicy | None = None
        self._meaning: ActionMeaning | None = None
        self._instruction: InstructionInput | None = None
        self._inputs: ObservationInput | None = None
        self.active = self.paused = False
        self._last_arrival_ns = 0
        self._count_from_zero()
        self._publisher = ActionPublisher(node, lambda: self._meaning, lambda: self._tokenizer, max_image_age_s)
        self._pause_service = node.create_service(SetBool, "~/pause", self._on_pause)
        self._paused_state = node.create_publisher(Bool, "~/paused", LATCHED_STATE)
        self._paused_state.publish(Bool(data=False))
        self._jump_handle = node.get_clock().create_jump_callback(
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=True),
            post_callback=self._on_clock_jump,
        )
        self._graph_timer = node.create_timer(
            _GRAPH_PERIOD_S, self._follow_publishers, clock=Clock(clock_type=ClockType.STEADY_TIME)
        )

    @property
    def configured(self) -> bool:
        """Whether it has a policy."""
        return self._policy is not None

    @property
    def epoch(self) -> int:
        """The epoch whose actions may go out."""
        return self._publisher.epoch

    @property
    def instruction(self) -> Instruction:
        """That in force."""
        return self._instruction.current if self._instruction is not None else Instruction()

    @property
    def dropped(self) -> dict[str, int]:
        """Frames since activation, by reason, every reason included."""
        return self._drops.since_activation()

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return self._policy.tokenizer if self._policy is not None else None

    # Transitions

    def configure(self, policy: LoadedPolicy, chosen: RobotParameters) -> None:
        """Listens to instructions.

        Raises:
            UserError: the parameters do not fit the policy.
        """
        convention = chosen.action.convention(policy.unnorm_key, policy.dt_s)
        self._meaning = ActionMeaning(convention, policy.unnorm_key, chosen.base_frame)
        self._policy = policy
        self._instruction = InstructionInput(self._node, chosen.instruction, self._on_new_instruction)

    def activate(self, chosen: RobotParameters) -> None:
        """Listens to images.

        Raises:
            UserError: the QoS of a topic cannot be had.
        """
        assert self._policy is not None, "activated before it was configured"
        self._count_from_zero()
        self._publisher.start_over()
        self._inputs = ObservationInput(
            self._node,
            self._policy.senses,
            chosen,
            on_message=self._input_health.add_image,
            on_frames=self._on_frames,
            on_bad=self._drop,
        )
        self.active = True

    def deactivate(self) -> None:
        """Publishes nothing more, and drops what is in flight."""
        self._begin_epoch(forget_stamps=True)
        self.active = False
        if self._inputs is not None:
            self._inputs.destroy()
            self._inputs = None

    def release(self) -> None:
        """Lets the policy go, and gives the place in its engine to another."""
        self.deactivate()
        if self._instruction is not None:
            self._instruction.destroy()
            self._instruction = None
        policy, self._policy = self._policy, None
        if policy is not None:
            # Its newer frames stay: when the engine's turn comes, the robot may be active again.
            epoch = self._publisher.epoch
            policy.thread.call(lambda engine: engine.close(self._stream, before_epoch=epoch))

    # Inputs

    def _on_frames(self, frames: Frames) -> None:
        frame = frames.lead
        if frame.arrived_ns < self._last_arrival_ns:  # rclpy tells of jumps of simulated time only
            self._start_over(f"the clock went back by {(self._last_arrival_ns - frame.arrived_ns) * _NS:.3f} s")
        self._last_arrival_ns = frame.arrived_ns
        self._input_health.add_frame(frame.stamp_ns, frame.age_s)
        if frame.arrived_ns == 0:
            why = "use_sim_time is set, but nothing came on /clock yet: is a bag or simulator running?"
            self._drop(DropReason.BAD_STAMP, why)
            return
        # The age is checked again when the frame begins. Here a wrong clock shows, which needs another message.
        fresh = Freshness(self._max_image_age_s(), self._node.get_parameter("max_future_s").value)
        problem = fresh.problem(frame.stamp_ns, frame.arrived_ns)
        if problem is not None:
            self._drop(*problem)
            return
        self._submit(frames)

    def _submit(self, frames: Frames) -> None:
        frame = frames.lead
        policy, instruction = self._policy, self._instruction
        if policy is None or instruction is None:  # cleaned up while this callback was on its way
            return
        if self.paused:
            self._drop(DropReason.PAUSED)
            return
        # The epoch first: an instruction that comes in between makes this frame void, never the old text valid.
        epoch, wanted = self._publisher.epoch, instruction.current
        if wanted.problem:
            self._drop(DropReason.BAD_INSTRUCTION, wanted.problem)
            return
        if not wanted.text:
            self._drop(DropReason.NO_INSTRUCTION, "publish one on the topic 'instruction' or set the parameter")
            return
        observation = Observation(
            images=frames.images,
            instruction=wanted.text,
            stamp_ns=frame.stamp_ns,
            frame_id=frame.frame_id,
            epoch=epoch,
            received_ns=frame.received_ns,
            receive_s=frame.age_s,
            state=frames.state,
            stream=self._stream,
        )
        policy.thread.submit(observation)

    def _on_new_instruction(self, text: str) -> None:
        policy = self._policy
        if policy is None:
            return
        epoch = self._begin_epoch()
        policy.thread.check_instruction(text, partial(self._on_instruction_checked, text))
        self._node.get_logger().info(f"instruction of epoch {epoch}: '{shortened(text)}'")

    def _on_instruction_checked(self, text: str, problem: str) -> None:
        instruction = self._instruction
        if problem and instruction is not None and instruction.refuse(text, problem):
            self._node.get_logger().error(f"instruction '{shortened(text)}' refused, nothing is published: {problem}")

    def _on_pause(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """No action of before leaves once this has answered; it holds across the node's states, until it is undone."""
        response.success, response.message = True, "paused" if request.data else "not paused"
        if request.data is not self.paused:
            self.paused = request.data
            epoch = self._begin_epoch()
            self._paused_state.publish(Bool(data=request.data))
            self._node.get_logger().info(f"{response.message}: epoch {epoch} begins")
        return response

    def _on_clock_jump(self, jump: TimeJump) -> None:
        self._last_arrival_ns = 0
        self._start_over(f"the clock jumped by {jump.delta.nanoseconds * _NS:.3f} s")

    def _start_over(self, why: str) -> None:
        epoch = self._begin_epoch(forget_stamps=True)
        self._node.get_logger().warning(f"{why}: everything in flight is void, epoch {epoch} begins")

    def _begin_epoch(self, *, forget_stamps: bool = False) -> int:
        """Makes everything in flight void, and frees its slots."""
        epoch = self._publisher.new_epoch(forget_stamps=forget_stamps)
        if self._policy is not None:
            self._policy.thread.begin_epoch(epoch, self._stream, forget_stamps=forget_stamps)
        return epoch

    def _follow_publishers(self) -> None:
        if self._inputs is not None:
            self._inputs.follow_publishers()

    # Called from the inference thread

    def take_outcome(self, outcome: Outcome) -> None:
        """Publishes an action of this robot, or counts the drop."""
        if isinstance(outcome, Drop):
            self._drop(outcome.reason, outcome.detail)
            return
        try:
            published = self._publisher.publish(outcome, self._drops.since_activation())
        except Exception:
            if self._node.context.ok():
                raise
            return  # a signal ended the context: nothing can be published any more
        if isinstance(published, Published):
            self._inference_health.add_action(published.latency_s, published.action_dt)
        else:
            self._drop(published.reason, published.detail)

    def take_fault(self, what: str) -> None:
        """Has the diagnostics say once that the inference thread went on after an exception."""
        self._inference_health.set_fault(what)

    # Bookkeeping

    def _count_from_zero(self) -> None:
        self._drops = DropLedger()
        self._input_health, self._inference_health = InputHealth(), InferenceHealth()

    def _drop(self, reason: DropReason, detail: str = "") -> None:
        message = self._drops.add(reason, detail)
        if message:
            self._node.get_logger().warning(message)

    def statuses(self) -> dict[str, DiagnosticStatus]:
        """For /diagnostics; begins a new period for the rates."""
        drops = self._drops.take_recent()
        idle = "paused" if self.paused else "" if self.active else "not active"
        return {
            "inputs": self._input_health.status(self.active, self.instruction, drops),
            "inference": self._inference_health.status(idle, drops),
        }


class RobotNode(ManagedNode):
    """Takes its place in the engine in configure, listens to images while active.

    Args:
        robot: the robot's name, its namespace below the policy node's.
        policy: that is loaded; None while none is.
        usual: the values of parameters that this robot is not given.
        max_image_age_s: the limit of an image's age, asked for at each one; 0: none.
        diagnostics_period_s: time between two diagnostics.
        node_arguments: those of rclpy.node.Node.

    Raises:
        UserError: a parameter has the wrong type or is out of range.
    """

    def __init__(
        self,
        robot: str,
        policy: Callable[[], LoadedPolicy | None],
        usual: SharedParameters,
        max_image_age_s: Callable[[], float],
        diagnostics_period_s: float,
        **node_arguments: Any,
    ) -> None:
        super().__init__("policy", **node_arguments)
        self._robot, self._policy = robot, policy
        try:
            declare_parameters(self, SharedParameters, lifecycle=True, usual=usual)
        except UserError:
            self.destroy_node()
            raise
        # What is given to every node of the name may be the other's.
        others = [declared.name for declared in walk(PolicyParameters())]
        for name, hint in unknown_parameters(self, [*declared_overrides(self), *others]).items():
            self.get_logger().warning(f"there is no parameter '{name}'; {hint}")
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self.part = RobotPart(self, robot, max_image_age_s)
        self._diagnostics = DiagnosticsPublisher(self, diagnostics_period_s, self.part.statuses)

    def _setup(self) -> None:
        """Takes a place in the engine, and listens to instructions."""
        policy = self._policy()
        if policy is None:
            raise UserError("the policy is not loaded; configure its own node first")
        chosen = read_parameters(self, SharedParameters)
        self.part.configure(policy, chosen.robot)
        self._open(policy, chosen)

    def _start(self) -> None:
        """Listens to images and lets actions out."""
        self.part.activate(read_parameters(self, SharedParameters).robot)

    def _stop(self) -> None:
        """Publishes nothing more, and drops what is in flight; the other robots go on."""
        self.part.deactivate()

    def _teardown(self) -> bool:
        """Gives the place in the engine back."""
        self.part.release()
        return True

    def _on_set_parameters(self, parameters: list[Any]) -> SetParametersResult:
        changed = {parameter.name: parameter.value for parameter in parameters}
        policy = self._policy()
        try:
            check_values(SharedParameters, changed)
            if policy is not None and self.part.configured:
                refuse_fixed(
                    self, SharedParameters, changed, read_in_activate=READ_IN_ACTIVATE, active=self.part.active
                )
                chosen = read_parameters(self, SharedParameters, changed)
                self._open(policy, chosen)
        except UserError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _open(self, policy: LoadedPolicy, chosen: SharedParameters) -> None:
        budget_s, priority = chosen.budget_s, chosen.priority
        policy.thread.call(lambda engine: engine.open(self._robot, budget_s=budget_s, priority=priority))
