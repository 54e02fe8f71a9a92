# SPDX-License-Identifier: Apache-2.0
"""One robot's part of a policy node: its inputs, actions, pauses and clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.clock import JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.time import Time
from std_msgs.msg import Bool, Header
from std_srvs.srv import SetBool

from specvla_ros.engine.outcome import Action, Drop, DropReason, Freshness, Outcome
from specvla_ros.errors import shortened
from specvla_ros.messages.action_message import ActionMeaning, decode_stats_fields, vla_action_fields
from specvla_ros.models.observation import Observation
from specvla_ros.models.tokenizer import text_of
from specvla_ros.msg import DecodeStats, Reasoning, VlaAction
from specvla_ros.policy_parameters import RobotParameters
from specvla_ros.ros.node import STEADY
from specvla_ros.ros.policy.diagnostics import DropLedger, InferenceHealth, InputHealth
from specvla_ros.ros.policy.inference_thread import InferenceThread
from specvla_ros.ros.policy.inputs import Frames, Instruction, InstructionInput, ObservationInput, state_reader
from specvla_ros.ros.qos import ACTION, LATCHED_STATE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specvla_ros.models.target import Target

_NS = 1e-9
_GRAPH_PERIOD_S = 1.0


@dataclass(frozen=True)
class Published:
    """A published action."""

    latency_s: float  # image's stamp to publication, on the node's clock
    action_dt: float  # duration of one action in seconds
    continues: bool  # true if earlier actions of the same answer were already published


class ActionPublisher:
    """Publishes all actions, on `~/action` while the node is active; drops void, late and reordered ones.

    `~/decode_stats` has one message per answer, `~/reasoning` one per answer of a policy that writes before it acts.
    The publishers are managed: rclpy keeps them silent in every other state. The lock does the rest: once `new_epoch`
    has returned, no earlier action is published. Arguments that change with the loaded policy are callables.
    """

    def __init__(
        self,
        node: LifecycleNode,
        meaning: Callable[[], ActionMeaning | None],
        tokenizer: Callable[[], Tokenizer | None],
        max_image_age_s: Callable[[], float],
    ) -> None:
        self._clock = node.get_clock()
        self._meaning, self._tokenizer = meaning, tokenizer
        self._max_image_age_s = max_image_age_s
        self._actions = node.create_lifecycle_publisher(VlaAction, "~/action", ACTION)
        self._stats = node.create_lifecycle_publisher(DecodeStats, "~/decode_stats", ACTION)
        self._reasoning = node.create_lifecycle_publisher(Reasoning, "~/reasoning", ACTION)
        self._lock = threading.Lock()
        self._epoch = 0
        self._next_seq = 0
        self._last_stamp_ns = 0
        self._continues = False  # true if more actions with the last stamp may follow

    @property
    def epoch(self) -> int:
        return self._epoch

    def start_over(self) -> None:
        """Counts actions from 0, as on activation."""
        with self._lock:
            self._next_seq, self._last_stamp_ns, self._continues = 0, 0, False

    def new_epoch(self, *, forget_stamps: bool = False) -> int:
        """Voids everything in flight. `forget_stamps`: the next action may have any stamp, as after a clock jump."""
        with self._lock:
            self._epoch += 1
            self._continues = False
            if forget_stamps:
                self._last_stamp_ns = 0
            return self._epoch

    def publish(self, action: Action, drop_counts: Mapping[str, int]) -> Published | Drop:
        """Publishes an action, or returns the reason for dropping it.

        The age is checked once more on the node's clock, after everything that can delay the process.
        """
        observation = action.observation
        text = text_of(self._tokenizer(), action.text_tokens)
        with self._lock:
            meaning = self._meaning()
            if meaning is None or not self._actions.is_activated or observation.epoch != self._epoch:
                return Drop(observation, DropReason.EPOCH_CHANGED)
            continues = self._continues and observation.stamp_ns == self._last_stamp_ns
            if observation.stamp_ns <= self._last_stamp_ns and not continues:
                return Drop(observation, DropReason.OVERTAKEN)
            # Read in this order, so that the stages never sum to more than the latency.
            publish_s = (time.monotonic_ns() - action.finished_ns) * _NS
            now_ns = self._clock.now().nanoseconds
            latency_s = (now_ns - observation.stamp_ns) * _NS
            fresh = Freshness(self._max_image_age_s())
            problem = fresh.problem(observation.stamp_ns, now_ns, DropReason.TOO_OLD)
            if problem is not None:
                return Drop(observation, *problem)
            stamp, seq = Time(nanoseconds=observation.stamp_ns).to_msg(), self._next_seq
            seen = Header(stamp=stamp, frame_id=observation.frame_id)
            if action.text_tokens:
                read = Header(stamp=Time(nanoseconds=action.text_ns).to_msg(), frame_id=observation.frame_id)
                n = len(action.text_tokens)
                self._reasoning.publish(Reasoning(header=read, seq=seq, epoch=self._epoch, text=text, tokens=n))
            fields = vla_action_fields(action, meaning, seq=seq, publish_s=publish_s, latency_s=latency_s)
            self._actions.publish(VlaAction(header=Header(stamp=stamp, frame_id=meaning.base_frame), **fields))
            self._next_seq += 1
            self._last_stamp_ns, self._continues = observation.stamp_ns, action.partial
            if not action.partial:
                stats = decode_stats_fields(action, seq=seq, drop_counts=drop_counts)
                self._stats.publish(DecodeStats(header=seen, **stats))
        return Published(latency_s, fields["action_dt"], continues)


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy in memory."""

    thread: InferenceThread  # runs its engine
    target: Target  # its checkpoint


class RobotPart:
    """Passes a robot's images to the engine and publishes its actions, on the topics of a lifecycle node.

    The node calls `configure`, `activate`, `deactivate` and `release` from its transitions, and `take_outcome` with
    the engine's outcomes for this robot.

    Args:
        stream: the robot's name in the engine.
        max_image_age_s: returns the limit, called for each image; 0: none.
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
        self._graph_timer = node.create_timer(_GRAPH_PERIOD_S, self._follow_publishers, clock=STEADY)

    @property
    def configured(self) -> bool:
        return self._policy is not None

    @property
    def epoch(self) -> int:
        return self._publisher.epoch

    @property
    def instruction(self) -> Instruction:
        return self._instruction.current if self._instruction is not None else Instruction()

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped frames since activation by reason, with every reason included."""
        return self._drops.since_activation()

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return self._policy.target.tokenizer if self._policy is not None else None

    # Transitions

    def configure(self, policy: LoadedPolicy, chosen: RobotParameters) -> None:
        """Subscribes to instructions; raises UserError if the parameters do not fit the policy."""
        target = policy.target
        convention = chosen.action.convention(target.unnorm_key, target.codec.dt_s, target.codec.names)
        self._meaning = ActionMeaning(convention, target.unnorm_key, chosen.base_frame)
        state_reader(target, chosen)  # checked here, so that a wrong state unit fails configure
        self._policy = policy
        self._instruction = InstructionInput(self._node, self._on_new_instruction)
        if chosen.instruction:  # not before: it may be refused at once
            self._instruction.set(chosen.instruction)

    def activate(self, chosen: RobotParameters) -> None:
        """Subscribes to images; raises UserError if a topic does not allow the requested QoS."""
        assert self._policy is not None, "activated before it was configured"
        self._count_from_zero()
        self._publisher.start_over()
        self._inputs = ObservationInput(
            self._node,
            self._policy.target,
            chosen,
            on_message=self._input_health.add_image,
            on_frames=self._on_frames,
            on_bad=self._drop,
            on_bad_beside=self._input_health.add_bad_beside,
        )
        self.active = True

    def deactivate(self) -> None:
        """Stops publishing, and drops everything in flight."""
        self._begin_epoch(forget_stamps=True)
        self.active = False
        if self._inputs is not None:
            self._inputs.destroy()
            self._inputs = None

    def release(self) -> None:
        """Releases the policy and the robot's place in its engine."""
        self.deactivate()
        if self._instruction is not None:
            self._instruction.destroy()
            self._instruction = None
        policy, self._policy = self._policy, None
        if policy is not None:
            # Its newer frames stay: the robot may be active again before the engine handles the call.
            epoch = self._publisher.epoch
            policy.thread.call(lambda engine: engine.close(self._stream, before_epoch=epoch))

    # Inputs

    def _on_frames(self, frames: Frames) -> None:
        frame = frames.lead
        if frame.arrived_ns < self._last_arrival_ns:  # rclpy reports only jumps of simulated time
            self._start_over(f"the clock went back by {(self._last_arrival_ns - frame.arrived_ns) * _NS:.3f} s")
        self._last_arrival_ns = frame.arrived_ns
        self._input_health.add_frame(frame.stamp_ns, frame.age_s)
        if frame.arrived_ns == 0:
            why = "use_sim_time is set, but nothing came on /clock yet: is a bag or simulator running?"
            self._drop(DropReason.BAD_STAMP, why)
            return
        # The age is checked again when decoding starts. Here it reveals a wrong clock, which needs another message.
        fresh = Freshness(self._max_image_age_s(), self._node.get_parameter("max_future_s").value)
        problem = fresh.problem(frame.stamp_ns, frame.arrived_ns)
        if problem is not None:
            self._drop(*problem)
            return
        self._submit(frames)

    def _submit(self, frames: Frames) -> None:
        frame = frames.lead
        policy, instruction = self._policy, self._instruction
        if policy is None or instruction is None:  # cleaned up while this callback was pending
            return
        if self.paused:
            self._drop(DropReason.PAUSED)
            return
        # The epoch first: an instruction in between then voids this frame, and never makes the old text valid.
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
        policy.thread.check_instruction(text, partial(self._on_instruction_checked, text, epoch))

    def _on_instruction_checked(self, text: str, epoch: int, problem: str) -> None:
        instruction = self._instruction
        if not problem:
            self._node.get_logger().info(f"instruction of epoch {epoch}: '{shortened(text)}'")
        elif instruction is not None and instruction.refuse(text, problem):
            self._node.get_logger().error(f"instruction '{shortened(text)}' refused, nothing is published: {problem}")

    def _on_pause(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """Once this has answered, no earlier action is published. A pause outlasts transitions until it is undone."""
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
        if self._inputs is not None:
            self._inputs.start_over()

    def _begin_epoch(self, *, forget_stamps: bool = False) -> int:
        """Voids everything in flight, and frees its slots."""
        epoch = self._publisher.new_epoch(forget_stamps=forget_stamps)
        if self._policy is not None:
            self._policy.thread.begin_epoch(epoch, self._stream, forget_stamps=forget_stamps)
        return epoch

    def _follow_publishers(self) -> None:
        if self._inputs is not None:
            health, several = self._input_health, self._inputs.follow_publishers()
            if several and several != health.several:
                self._node.get_logger().warning(several)
            health.several, health.grey, health.sources = several, self._inputs.grey, self._inputs.sources

    # Called from the inference thread

    def take_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Drop):
            self._drop(outcome.reason, outcome.detail)
            return
        try:
            published = self._publisher.publish(outcome, self._drops.since_activation())
        except Exception:
            if self._node.context.ok():
                raise
            return  # a signal ended the context: nothing more can be published
        if isinstance(published, Drop):
            if not outcome.partial:  # otherwise the end of its answer follows and is counted
                self._drop(published.reason, published.detail)
        elif not published.continues:  # the first message of an answer already moves the robot
            self._inference_health.add_action(published.latency_s, published.action_dt)

    def take_fault(self, what: str) -> None:
        """Reports once on /diagnostics that the inference thread continued after an exception."""
        self._inference_health.set_fault(what)

    # Bookkeeping

    def _count_from_zero(self) -> None:
        self._drops = DropLedger()
        cameras = [*self._policy.target.cameras] if self._policy is not None else []
        self._input_health = InputHealth(cameras if len(cameras) > 1 else ())
        self._inference_health = InferenceHealth()

    def _drop(self, reason: DropReason, detail: str = "") -> None:
        message = self._drops.add(reason, detail)
        if message:
            self._node.get_logger().warning(message)

    def statuses(self) -> dict[str, DiagnosticStatus]:
        """The statuses for /diagnostics; starts a new period for the rates."""
        drops = self._drops.take_recent()
        idle = "paused" if self.paused else "" if self.active else "not active"
        return {
            "inputs": self._input_health.status(self.active, self.instruction, drops),
            "inference": self._inference_health.status(idle, drops),
        }
