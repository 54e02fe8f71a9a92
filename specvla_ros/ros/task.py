# SPDX-License-Identifier: Apache-2.0
"""The node `task`: runs an instruction as the ROS action `run_task`, and stops the robot when it ends."""

import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import rclpy
from action_msgs.msg import GoalStatus
from rclpy.action import ActionServer, CancelResponse
from rclpy.client import Client
from rclpy.context import Context
from rclpy.duration import Duration
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from std_msgs.msg import Bool, String
from std_srvs.srv import SetBool

from specvla_ros.action import RunTask
from specvla_ros.msg import SimEpisode, VlaAction
from specvla_ros.ros.node import STEADY, run_node
from specvla_ros.ros.parameters import parameters_declared, read_parameters
from specvla_ros.ros.qos import ACTION, LATCHED_INSTRUCTION, LATCHED_STATE
from specvla_ros.settings.parameter import parameter

_TICK_S = 0.05
_FEEDBACK_S = 0.5
_SILENT_S = 1.0  # without an action, before the feedback reports silence
_START_S = 5.0  # for the policy to confirm the start of a task
_STOP_S = 1.0  # for policy and driver to confirm the end of a task
_LAST_CALL_S = 4.0  # the same if this node ends during a task; `ros2 launch` kills it after 5 s
_LOST_S = 0.5  # an answer that takes longer was lost, with its server or before discovery was complete
_RATE_OVER_S = 2.0
_ACKNOWLEDGED = Duration(nanoseconds=200_000_000)

Goal = Any  # ServerGoalHandle, generic in some versions of rclpy and not in others


class Judge(str, Enum):
    """The component that decides when a task is done."""

    NONE = "none"  # no judge: the task ends at its time limit
    TOPIC = "topic"  # a message on ~/succeeded
    SIM_EPISODE = "sim_episode"  # the simulated robot


@dataclass(frozen=True)
class TaskParameters:
    """Every parameter of the task node."""

    judge: str = parameter(
        Judge.NONE.value,
        "Decides when a task is done: nothing (it ends at its time limit), a std_msgs/Bool on ~/succeeded, or the "
        "simulated robot.",
        choices=tuple(judge.value for judge in Judge),
    )
    time_limit_s: float = parameter(
        60.0, "Time limit of a goal that gives none, on the node's clock.", unit="s", minimum=0.1, maximum=86_400.0
    )
    max_silence_s: float = parameter(
        10.0,
        "A task fails after this wall time without an action; 0: never.",
        unit="s",
        minimum=0.0,
        maximum=3600.0,
    )


@dataclass
class Progress:
    """A task's elapsed time, on the node's clock, and the rate and silence of its actions, on the steady clock."""

    time_limit_s: float  # on the node's clock
    began_s: float  # on the node's clock
    steady_s: float  # the same moment on the steady clock
    actions: int = 0
    latency_s: float = math.nan
    _heard_s: float = -math.inf  # last action or part of one, on the steady clock
    _arrivals_s: deque[float] = field(default_factory=deque)

    def add_action(self, latency_s: float, steady_s: float) -> None:
        self.actions += 1
        self.latency_s = latency_s
        self.add_part(steady_s)
        self._arrivals_s.append(steady_s)
        self._forget(steady_s)

    def add_part(self, steady_s: float) -> None:
        """Takes a part of an action: it moves the robot, but is not counted."""
        self._heard_s = steady_s

    @property
    def acted(self) -> bool:
        """True after the first action, or part of one."""
        return self._heard_s > -math.inf

    def elapsed_s(self, now_s: float) -> float:
        """Time since the start on the node's clock; 0 while that clock is before the start."""
        return max(0.0, now_s - self.began_s)

    def left_s(self, now_s: float) -> float:
        return max(0.0, self.time_limit_s - self.elapsed_s(now_s))

    def silence_s(self, steady_s: float) -> float:
        return steady_s - max(self._heard_s, self.steady_s)

    def rate_hz(self, steady_s: float) -> float:
        """Actions per second over the last 2 s, or since the start if that is shorter."""
        newest = self._arrivals_s[-1] if self._arrivals_s else self.steady_s
        self._forget(steady_s)
        recent = sum(steady_s - arrival_s <= _RATE_OVER_S for arrival_s in self._arrivals_s)
        span_s = min(_RATE_OVER_S, max(steady_s, newest) - self.steady_s)
        return recent / span_s if span_s > 0 else 0.0

    def _forget(self, steady_s: float) -> None:
        while len(self._arrivals_s) > 1 and steady_s - self._arrivals_s[0] > _RATE_OVER_S:
            self._arrivals_s.popleft()


class Switch:
    """Keeps a SetBool service of another node at a wanted value, also if that node starts later or restarts.

    `reports`: the node reports its value, see `observe`; of another, a service that comes back tells of a restart.
    """

    def __init__(self, node: Node, service: str, *, reports: bool = False) -> None:
        self._reports = reports
        self._client: Client = node.create_client(SetBool, service)
        self.name = node.resolve_service_name(service)
        self._wanted = True
        self._wish = 0  # number of values wanted so far
        self._asked: Future | None = None
        self._asked_s = 0.0
        self._left = False  # the service was there, and is not any more
        self.settled = False
        self.called = False  # at least once: the server may have taken the value even if no answer came

    @property
    def present(self) -> bool:
        return bool(self._client.service_is_ready())

    def want(self, value: bool) -> None:
        """Requests a value at once. `settled` is true once it was confirmed."""
        self._wanted, self.settled, self._asked = value, False, None
        self._wish += 1
        self.keep()

    def observe(self, value: bool) -> None:
        """Handles the value that the other node reports."""
        if self.settled and value is not self._wanted:  # it restarted
            self.want(self._wanted)

    def keep(self) -> None:
        """Repeats a request that got no answer, or whose node has gone and come back. Call this often."""
        if self.settled and self._left and self.present:
            self.settled, self._asked = False, None
        self._left = self.settled and not self._reports and not self.present
        lost = self._asked is not None and time.monotonic() - self._asked_s > _LOST_S
        if self.settled or (self._asked is not None and not lost) or not self.present:
            return
        self.called = True
        self._asked, self._asked_s = self._client.call_async(SetBool.Request(data=self._wanted)), time.monotonic()
        self._asked.add_done_callback(partial(self._on_answer, self._wish))

    def _on_answer(self, wish: int, answered: Future) -> None:
        if wish != self._wish:  # another value has been requested since
            return
        answer = answered.result()  # possibly to a request that was repeated meanwhile
        self.settled, self._asked = bool(answer is not None and answer.success), None


@dataclass
class Run:
    """A goal from its start until it is closed."""

    goal: Goal
    instruction: str
    progress: Progress
    ended: Future = field(default_factory=Future)  # done once the task is over, with `outcome` and `message`
    stopped: Future = field(default_factory=Future)  # done once the stop was confirmed, or not in time
    outcome: int = RunTask.Result.FAILED
    message: str = ""
    ended_s: float = 0.0
    fed_back_s: float = -math.inf
    judged: bool = False  # the judge has started on this task
    unconfirmed: bool = False  # policy or driver did not confirm the stop


class TaskNode(Node):
    """Runs one task at a time. A newer goal replaces the older one, as in nav2 and MoveIt.

    While this node runs, the policy acts only during a task. Before the first task and after each one the policy is
    paused, and the driver, if there is one, holds. Both are asked again after a restart.
    """

    def __init__(self, **node_arguments: Any) -> None:
        super().__init__("task", **node_arguments)
        with parameters_declared(self, TaskParameters):
            self._chosen = read_parameters(self, TaskParameters)
        self._run: Run | None = None
        self._stopping: list[Run] = []
        self._pause, self._hold = Switch(self, "policy/pause", reports=True), Switch(self, "driver/hold")
        self._instruction = self.create_publisher(String, "instruction", LATCHED_INSTRUCTION)
        self.create_subscription(VlaAction, "policy/action", self._on_action, ACTION)
        self.create_subscription(Bool, "policy/paused", lambda said: self._pause.observe(said.data), LATCHED_STATE)
        if self._chosen.judge == Judge.TOPIC.value:
            self.create_subscription(Bool, "~/succeeded", self._on_judged, ACTION)
        if self._chosen.judge == Judge.SIM_EPISODE.value:
            self.create_subscription(SimEpisode, "sim_robot/episode", self._on_episode, ACTION)
        self._server = ActionServer(
            self, RunTask, "run_task", execute_callback=self._execute, cancel_callback=self._on_cancel
        )
        self._timer = self.create_timer(_TICK_S, self._on_tick, clock=STEADY)

    def close(self) -> bool:
        """Accepts no more goals, and stops the robot if a task is running."""
        running = self._run is not None or bool(self._stopping)
        self._server.destroy()
        # The policy may act before its service is found, as it starts unpaused.
        asked = [switch.name for switch in (self._pause, self._hold) if switch.called or switch is self._pause]
        silent = _stop_at_last(asked) if running else []
        if silent:  # Ctrl-C at a launch file ends all nodes at once
            why = "did not answer: unless their nodes have ended too, THE ROBOT MAY STILL MOVE"
            print(f"task: {' and '.join(silent)} {why}", file=sys.stderr, flush=True)
        return True

    # Life of a goal

    async def _execute(self, goal: Goal) -> RunTask.Result:
        limit_s = goal.request.time_limit_s or self._chosen.time_limit_s
        run = Run(goal, str(goal.request.instruction), Progress(limit_s, self._now_s(), time.monotonic()))
        run.message = _problem(run.instruction, limit_s)
        if run.message:  # a rejection could not give the reason
            goal.abort()
            return self._result(run)
        self._begin(run)
        await run.ended
        await run.stopped
        self._close(run)
        self.get_logger().info(f"task '{run.instruction}': {run.message}")
        return self._result(run)

    def _begin(self, run: Run) -> None:
        older, self._run = self._run, run
        if older is not None:
            self._end(older, RunTask.Result.PREEMPTED, "replaced by a newer goal")
        self.get_logger().info(f"task '{run.instruction}', {run.progress.time_limit_s:g} s")
        # The policy gets the new instruction before it may act; the driver holds until the policy acts on it.
        self._hold.want(True)
        self._instruction.publish(String(data=run.instruction))
        self._instruction.wait_for_all_acked(_ACKNOWLEDGED)
        self._pause.want(False)

    def _end(self, run: Run, outcome: int, message: str) -> None:
        if run.ended.done():
            return
        run.outcome, run.message, run.ended_s = outcome, message, time.monotonic()
        run.ended.set_result(None)
        if self._run is not run:  # a newer task is running
            run.stopped.set_result(None)
            return
        self._run = None
        self._pause.want(True)
        self._hold.want(True)
        self._stopping.append(run)

    def _close(self, run: Run) -> None:
        """Ends the goal in the state of its outcome. A goal canceled at the last moment ends as canceled."""
        goal, done = run.goal, run.outcome == RunTask.Result.SUCCEEDED
        # Without a judge a task succeeds by running until its time limit.
        done |= run.outcome == RunTask.Result.TIMED_OUT and self._chosen.judge == Judge.NONE.value
        done &= not run.unconfirmed
        if goal.status == GoalStatus.STATUS_CANCELING:
            goal.canceled()
        elif done:
            goal.succeed()
        else:
            goal.abort()

    def _result(self, run: Run) -> RunTask.Result:
        return RunTask.Result(
            outcome=run.outcome,
            message=run.message,
            actions=run.progress.actions,
            duration_s=run.progress.elapsed_s(self._now_s()),
        )

    # During a task

    def _on_tick(self) -> None:
        self._pause.keep()
        self._hold.keep()
        for ending in [*self._stopping]:
            self._check_stopped(ending)
        if (run := self._run) is None:
            return
        self._check_over(run)
        if self._run is run and time.monotonic() - run.fed_back_s >= _FEEDBACK_S:
            self._feed_back(run)

    def _check_stopped(self, run: Run) -> None:
        asked = [switch for switch in (self._pause, self._hold) if switch.present or switch is self._pause]
        unsettled = [switch.name for switch in asked if not switch.settled]
        replaced = self._run is not None  # a newer task is running, so nothing needs to stop
        if unsettled and not replaced and time.monotonic() - run.ended_s < _STOP_S:
            return
        self._stopping.remove(run)
        if unsettled and not replaced:
            run.unconfirmed = True
            run.message += f"; {' and '.join(unsettled)} did not answer: THE ROBOT MAY STILL MOVE"
        run.stopped.set_result(None)

    def _check_over(self, run: Run) -> None:
        progress, steady_s = run.progress, time.monotonic()
        silence_s, limit_s = progress.silence_s(steady_s), self._chosen.max_silence_s
        over = progress.left_s(self._now_s()) <= 0
        if not self._pause.settled and (over or steady_s - progress.steady_s > _START_S):
            why = f"the policy does not answer on {self._pause.name}: is it running, under this name?"
            self._end(run, RunTask.Result.FAILED, why)
        elif over and not progress.acted:
            why = f"no action within the time limit of {progress.time_limit_s:g} s; the policy's /diagnostics say why"
            self._end(run, RunTask.Result.FAILED, why)
        elif over:
            self._end(run, RunTask.Result.TIMED_OUT, f"the time limit of {progress.time_limit_s:g} s is over")
        elif limit_s and silence_s > limit_s:
            self._end(run, RunTask.Result.FAILED, f"no action for {limit_s:g} s; the policy's /diagnostics say why")

    def _feed_back(self, run: Run) -> None:
        progress, steady_s, now_s = run.progress, time.monotonic(), self._now_s()
        run.fed_back_s = steady_s
        silent = progress.silence_s(steady_s) > _SILENT_S
        run.goal.publish_feedback(
            RunTask.Feedback(
                elapsed_s=progress.elapsed_s(now_s),
                time_left_s=progress.left_s(now_s),
                actions=progress.actions,
                action_rate_hz=progress.rate_hz(steady_s),
                latency_s=progress.latency_s,
                activity="waiting" if not progress.acted else "silent" if silent else "acting",
            )
        )

    def _on_action(self, message: VlaAction) -> None:
        if (run := self._run) is None:
            return
        if message.instruction == run.instruction:
            if not run.progress.acted:
                self._hold.want(False)
            if message.partial:
                run.progress.add_part(time.monotonic())
            else:
                run.progress.add_action(message.latency_s, time.monotonic())
        elif run.progress.acted:  # earlier, it may be a late action of the old instruction
            other = f"the policy follows '{message.instruction}', which another node has published"
            self._end(run, RunTask.Result.PREEMPTED, other)

    def _on_judged(self, message: Bool) -> None:
        if self._run is not None:
            self._judge(self._run, message.data, "judged as done" if message.data else "judged as failed")

    def _on_episode(self, episode: SimEpisode) -> None:
        run = self._run
        if run is None or episode.instruction != run.instruction:
            return
        if episode.state == SimEpisode.RUNNING:
            run.judged = True
        elif run.judged:  # otherwise an episode before this task has ended
            succeeded = episode.state == SimEpisode.SUCCEEDED
            why = episode.detail or ("the task is done" if succeeded else "not done within the episode's steps")
            self._judge(run, succeeded, why)

    def _judge(self, run: Run, succeeded: bool, why: str) -> None:
        self._end(run, RunTask.Result.SUCCEEDED if succeeded else RunTask.Result.FAILED, why)

    def _on_cancel(self, goal: Goal) -> CancelResponse:
        if (run := self._run) is not None and run.goal.goal_id == goal.goal_id:
            self._end(run, RunTask.Result.CANCELED, "canceled")
        return CancelResponse.ACCEPT

    def _now_s(self) -> float:
        return float(self.get_clock().now().nanoseconds * 1e-9)


def _stop_at_last(services: list[str]) -> list[str]:
    """Switches services on and returns those that did not answer. Needs its own context: a signal ended the node's."""
    context = Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
    executor = SingleThreadedExecutor(context=context)
    node = Node("task_end", context=context, use_global_arguments=False, enable_rosout=False)
    executor.add_node(node)
    switches = [Switch(node, service) for service in services]
    deadline_s = time.monotonic() + _LAST_CALL_S
    while not all(each.settled for each in switches) and time.monotonic() < deadline_s:
        for each in switches:
            each.keep()
        executor.spin_once(timeout_sec=_TICK_S)
    executor.shutdown()
    node.destroy_node()
    rclpy.shutdown(context=context)
    return [each.name for each in switches if not each.settled]


def _problem(instruction: str, time_limit_s: float) -> str:
    if not instruction.strip():
        return "the instruction is empty: say what the robot should do"
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        return f"time_limit_s is {time_limit_s}: give a positive number of seconds, or 0 for the node's own limit"
    return ""


def main() -> None:
    """Runs the node."""
    sys.exit(run_node("task", TaskNode, close=TaskNode.close))
