# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `policy`: camera images and an instruction in, stamped actions out."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode, LifecycleNodeMixin, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from std_msgs.msg import Bool
from std_srvs.srv import SetBool

from specvla_ros.bags.action_message import ActionMeaning
from specvla_ros.engine.outcome import Drop, DropReason, Outcome, Question
from specvla_ros.engine.settings import EngineSettings
from specvla_ros.errors import UserError, shortened
from specvla_ros.models.observation import Observation
from specvla_ros.models.tokenizer import text_of
from specvla_ros.ros.diagnostics import DiagnosticsPublisher, make_status
from specvla_ros.ros.lifecycle import answer_impossible_transitions
from specvla_ros.ros.parameters import (
    check_values,
    declare_parameters,
    read_parameters,
    refuse_fixed,
    unknown_parameters,
)
from specvla_ros.ros.policy.action_publisher import ActionPublisher, Published
from specvla_ros.ros.policy.ask_server import AskServer
from specvla_ros.ros.policy.diagnostics import (
    DropLedger,
    InferenceHealth,
    InputHealth,
    loaded_status,
    not_loaded_status,
)
from specvla_ros.ros.policy.image_input import declared_overrides, stamp_problem
from specvla_ros.ros.policy.inference_thread import InferenceThread, Progress, load_engine
from specvla_ros.ros.policy.instruction import Instruction, InstructionInput
from specvla_ros.ros.policy.observation_input import Frames, ObservationInput, Senses
from specvla_ros.ros.policy.parameters import READ_IN_ACTIVATE, PolicyParameters
from specvla_ros.ros.qos import LATCHED_STATE
from specvla_ros.ros.spinning import run_node
from specvla_ros.speculation.settings import AcceptanceSettings

if TYPE_CHECKING:  # it imports torch, which comes when the policy is loaded
    from tokenizers import Tokenizer

    from specvla_ros.engine.engine import Engine

_NS = 1e-9
_LOAD_POLL_S = 0.1
_GRAPH_PERIOD_S = 1.0
_LAST_WORDS_S = 1.0


class PolicyNode(LifecycleNode):
    """Loads in configure, listens to images while active, and publishes what the engine answers.

    Args:
        node_arguments: those of rclpy.node.Node.

    Raises:
        UserError: a parameter has the wrong type or is out of range.
    """

    def __init__(self, **node_arguments: Any) -> None:
        # LifecycleNode's own constructor offers no callback group for the lifecycle services; in one of their own,
        # `get_state`, parameters and diagnostics are served while configure waits for the policy.
        Node.__init__(self, "policy", **node_arguments)
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        answer_impossible_transitions(self)
        self._thread: InferenceThread | None = None
        self._instruction: InstructionInput | None = None
        self._inputs: ObservationInput | None = None
        self._active = False
        self._paused = False
        self._shut_down_s = math.inf
        self._last_arrival_ns = 0
        self._drops = DropLedger()
        self._model_status = not_loaded_status()
        self._input_health, self._inference_health = InputHealth(), InferenceHealth()
        self._chosen = PolicyParameters()  # read when the node is configured
        self._meaning: ActionMeaning | None = None  # of the actions of the policy that is loaded
        self._tokenizer: Tokenizer | None = None  # likewise
        self._senses = Senses()  # likewise
        try:
            declare_parameters(self, PolicyParameters, lifecycle=True)
        except UserError:
            self.destroy_node()
            raise
        for name, hint in unknown_parameters(self, declared_overrides(self)).items():
            self.get_logger().warning(f"there is no parameter '{name}'; {hint}")
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self._publisher = ActionPublisher(
            self, lambda: self._meaning, lambda: self._tokenizer, partial(self._value, "max_image_age_s")
        )
        self._asking = AskServer(self, self._on_question, lambda tokens: text_of(self._tokenizer, tokens))
        self._pause_service = self.create_service(SetBool, "~/pause", self._on_pause)
        self._paused_state = self.create_publisher(Bool, "~/paused", LATCHED_STATE)
        self._paused_state.publish(Bool(data=False))
        self._jump_handle = self.get_clock().create_jump_callback(
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=True),
            post_callback=self._on_clock_jump,
        )
        self._diagnostics = DiagnosticsPublisher(self, self._value("diagnostics_period_s"), self._statuses)
        self._graph_timer = self.create_timer(
            _GRAPH_PERIOD_S, self._follow_publishers, clock=Clock(clock_type=ClockType.STEADY_TIME)
        )

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Loads and warms up the policy; what a user can mend is refused, and configure may be tried again."""
        try:
            self._chosen = read_parameters(self, PolicyParameters)
            self._chosen.check()
            self._diagnostics.set_period(self._chosen.diagnostics_period_s)
            self._thread = InferenceThread(
                self._load,
                on_progress=self._on_progress,
                on_outcome=self._on_outcome,
                on_fault=self._on_fault,
            )
            description = self._wait_loaded(self._thread)
        except Exception as error:
            self._release()
            self._model_status = make_status(DiagnosticStatus.ERROR, str(error).splitlines()[0])
            self.get_logger().error(f"not configured: {error}")
            return TransitionCallbackReturn.FAILURE
        self._model_status = loaded_status(description)
        self.get_logger().info("policy loaded: " + ", ".join(f"{key} {value}" for key, value in description.items()))
        self._instruction = InstructionInput(self, self._chosen.instruction, self._on_new_instruction)
        return TransitionCallbackReturn.SUCCESS

    def _load(self, progress: Progress) -> Engine:
        chosen = self._chosen
        engine = load_engine(chosen, self._now_ns, progress)
        target = engine.target
        convention = chosen.action.convention(target.unnorm_key, target.codec.dt_s)
        self._meaning = ActionMeaning(convention, target.unnorm_key, chosen.base_frame)
        self._tokenizer = target.tokenizer
        self._senses = Senses(target.cameras, target.state_dims)
        return engine

    def _wait_loaded(self, thread: InferenceThread) -> dict[str, str]:
        """Serves everything else meanwhile: the lifecycle wants configure's answer from within its callback.

        One thread for all callbacks, since rclpy's MultiThreadedExecutor hands out the same message again until a
        worker takes it, and so keeps the interpreter from the inference thread for seconds.
        """
        while not thread.loaded and self.executor is not None:
            self.executor.spin_once(timeout_sec=_LOAD_POLL_S)
        return thread.wait_loaded()

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Listens to images and lets actions out."""
        self._drops.start_over()
        self._input_health.start_over()
        self._inference_health.start_over()
        self._publisher.start_over()
        try:
            chosen = read_parameters(self, PolicyParameters)
            self._inputs = ObservationInput(
                self,
                self._senses,
                chosen,
                on_message=self._input_health.add_image,
                on_frames=self._on_frames,
                on_bad=self._drop,
            )
        except UserError as error:
            self.get_logger().error(f"not activated: {error}")
            return TransitionCallbackReturn.FAILURE
        self._active = True
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Publishes nothing more, and drops what is in flight."""
        self._stop_answering()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Lets the policy go, and the memory it took."""
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """As deactivate and cleanup; the node can then only end, and its process with it."""
        self._release()
        self._shut_down_s = time.monotonic()
        return super().on_deactivate(state)  # nothing else silences the managed publishers

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured, with nothing left running."""
        self._release()
        return super().on_deactivate(state)

    @property
    def finished(self) -> bool:
        """Whether it was shut down, and the answer has had time to leave."""
        return time.monotonic() - self._shut_down_s > _LAST_WORDS_S

    def close(self) -> bool:
        """Stops everything that runs beside the executor; False when the inference thread hangs."""
        return self._release()

    def _stop_answering(self) -> None:
        self._asking.end("the policy was deactivated")
        self._begin_epoch(forget_stamps=True)
        self._active = False
        if self._inputs is not None:
            self._inputs.destroy()
            self._inputs = None

    def _release(self) -> bool:
        self._stop_answering()
        if self._instruction is not None:
            self._instruction.destroy()
            self._instruction = None
        thread, self._thread = self._thread, None
        self._model_status = not_loaded_status()
        return thread is None or thread.stop()

    # Inputs

    def _on_frames(self, frames: Frames) -> None:
        frame = frames.lead
        if frame.arrived_ns < self._last_arrival_ns:  # rclpy tells of jumps of simulated time only
            self._start_over(f"the clock went back by {(self._last_arrival_ns - frame.arrived_ns) * _NS:.3f} s")
        self._last_arrival_ns = frame.arrived_ns
        self._input_health.add_frame(frame.stamp_ns, frame.age_s)
        problem = stamp_problem(
            frame.stamp_ns,
            frame.arrived_ns,
            max_age_s=self._value("max_image_age_s"),
            max_future_s=self._value("max_future_s"),
        )
        if problem is not None:
            self._drop(*problem)
            return
        self._submit(frames)

    def _submit(self, frames: Frames) -> None:
        frame = frames.lead
        thread, instruction = self._thread, self._instruction
        if thread is None or instruction is None:  # cleaned up while this callback was on its way
            return
        if self._paused:
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
        )
        thread.submit(observation)

    def _on_new_instruction(self, text: str) -> None:
        thread = self._thread
        if thread is None:
            return
        epoch = self._begin_epoch()
        thread.check_instruction(text, partial(self._on_instruction_checked, text))
        self.get_logger().info(f"instruction of epoch {epoch}: '{shortened(text)}'")

    def _on_instruction_checked(self, text: str, problem: str) -> None:
        instruction = self._instruction
        if problem and instruction is not None and instruction.refuse(text, problem):
            self.get_logger().error(f"instruction '{shortened(text)}' refused, nothing is published: {problem}")

    def _on_question(self, question: Question) -> None:
        thread = self._thread
        if thread is None or not self._active:
            question.problem, question.done = "the policy is not active", True
            return
        thread.ask(question)

    def _on_pause(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """No action of before leaves once this has answered; it holds across the node's states, until it is undone."""
        response.success, response.message = True, "paused" if request.data else "not paused"
        if request.data is not self._paused:
            self._paused = request.data
            epoch = self._begin_epoch()
            self._paused_state.publish(Bool(data=request.data))
            self.get_logger().info(f"{response.message}: epoch {epoch} begins")
        return response

    def _on_clock_jump(self, jump: TimeJump) -> None:
        self._last_arrival_ns = 0
        self._start_over(f"the clock jumped by {jump.delta.nanoseconds * _NS:.3f} s")

    def _start_over(self, why: str) -> None:
        epoch = self._begin_epoch(forget_stamps=True)
        self.get_logger().warning(f"{why}: everything in flight is void, epoch {epoch} begins")

    def _begin_epoch(self, *, forget_stamps: bool = False) -> int:
        """Makes everything in flight void, and frees its slots."""
        epoch = self._publisher.new_epoch(forget_stamps=forget_stamps)
        if self._thread is not None:
            self._thread.begin_epoch(epoch, forget_stamps=forget_stamps)
        return epoch

    def _on_set_parameters(self, parameters: list[Any]) -> SetParametersResult:
        changed = {parameter.name: parameter.value for parameter in parameters}
        try:
            check_values(PolicyParameters, changed)
            if self._thread is not None:  # else they are read when the policy is loaded
                self._change(self._thread, changed)
        except UserError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _change(self, thread: InferenceThread, changed: dict[str, Any]) -> None:
        """Has the engine follow new values, or refuses all of them."""
        refuse_fixed(self, PolicyParameters, changed, read_in_activate=READ_IN_ACTIVATE, active=self._active)
        chosen = read_parameters(self, PolicyParameters, changed)
        if any(name.startswith(EngineSettings.ROS_PREFIX) for name in changed):
            self._model_status = loaded_status(thread.switch(chosen.engine))
        elif any(name.startswith(AcceptanceSettings.ROS_PREFIX) for name in changed):
            thread.set_acceptance(chosen.engine.acceptance)
        if "max_image_age_s" in changed:
            thread.set_max_image_age(changed["max_image_age_s"])

    def _follow_publishers(self) -> None:
        if self._inputs is not None:
            self._inputs.follow_publishers()

    # Called from the inference thread

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Drop):
            self._drop(outcome.reason, outcome.detail)
            return
        try:
            published = self._publisher.publish(outcome, self._drops.since_activation())
        except Exception:
            if self.context.ok():
                raise
            return  # a signal ended the context: nothing can be published any more
        if isinstance(published, Published):
            self._inference_health.add_action(published.latency_s, published.action_dt)
        else:
            self._drop(published.reason, published.detail)

    def _on_fault(self, trace: str) -> None:
        self._inference_health.set_fault(trace.strip().splitlines()[-1])
        self.get_logger().error(f"the inference thread went on after a fault:\n{trace}", throttle_duration_sec=5.0)

    def _on_progress(self, what: str, fraction: float) -> None:
        self._model_status = make_status(DiagnosticStatus.WARN, f"loading: {what} ({fraction:.0%})")

    # Bookkeeping

    def _drop(self, reason: DropReason, detail: str = "") -> None:
        message = self._drops.add(reason, detail)
        if message:
            self.get_logger().warning(message)

    def _statuses(self) -> dict[str, DiagnosticStatus]:
        drops = self._drops.take_recent()
        instruction = self._instruction.current if self._instruction is not None else Instruction()
        idle = "paused" if self._paused else "" if self._active else "not active"
        return {
            "model": self._model_status,
            "inputs": self._input_health.status(self._active, instruction, drops),
            "inference": self._inference_health.status(idle, drops),
        }

    def _now_ns(self) -> int:
        now_ns: int = self.get_clock().now().nanoseconds
        return now_ns

    def _value(self, name: str) -> float:
        value: float = self.get_parameter(name).value
        return value


def main() -> None:
    """Runs the node; the exit code is 2 for a parameter that a user can mend."""
    sys.exit(run_node("policy", PolicyNode, close=PolicyNode.close, finished=lambda node: node.finished))
