# SPDX-License-Identifier: Apache-2.0
"""Shared by the nodes: running a node, a lifecycle base class with what rclpy's lacks, diagnostics, a steady loop."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import SetParametersResult
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.executors import Executor, ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleNodeMixin, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions, uninstall_signal_handlers

from specvla_ros.errors import UserError
from specvla_ros.ros.parameters import check_values
from specvla_ros.ros.qos import DIAGNOSTICS

AnyNode = TypeVar("AnyNode", bound=Node)

# For timers that must keep firing when simulated time stands still.
STEADY = Clock(clock_type=ClockType.STEADY_TIME)
_SPIN_S = 0.5
_STOP_TIMEOUT_S = 2.0
_USAGE = """usage: {name} [--ros-args [-p NAME:=VALUE] [--params-file FILE] [-r FROM:=TO] ...]

Runs the ROS 2 node {name} until Ctrl-C. `ros2 param list /{name}` lists the parameters of the running node."""


def run_node(
    name: str,
    make_node: Callable[[], AnyNode],
    *,
    close: Callable[[AnyNode], bool],
    finished: Callable[[AnyNode], bool] = lambda node: False,
    failure: Callable[[AnyNode], str] = lambda node: "",
    others: Callable[[AnyNode], Iterable[Node]] = lambda node: (),
    last_words: bool = False,
) -> int:
    """Makes a node and spins it on one thread until SIGINT, SIGTERM or the end of its work.

    Args:
        name: the node, first word of the messages on stderr.
        close: stops what the node runs outside the executor; returns False if something does not stop.
        finished: returns True once the node has done its work; checked twice a second and after each callback.
        failure: returns what went wrong in the node's work, once it is closed; empty: nothing.
        others: returns further nodes to spin; the node destroys them itself.
        last_words: True if `close` still publishes: a signal then ends the node first and its context afterwards.

    Returns:
        The exit code: 0, or 2 for errors that a user can fix. If something does not stop, the process ends here with 1.
    """
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(_USAGE.format(name=name))
        return 0
    told = threading.Event()
    if last_words:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, frame: told.set())
    try:
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO if last_words else None)
    except KeyboardInterrupt:
        return 0
    except Exception as error:  # rclpy has no common type for an unreadable command line or parameter file
        print(f"{name}: {_first_sentence(error)}", file=sys.stderr)
        return 2
    try:
        node = make_node()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    except (KeyboardInterrupt, ExternalShutdownException):
        rclpy.try_shutdown()
        return 0
    except Exception:
        if rclpy.ok():
            raise
        return 0  # a signal ended the context meanwhile
    if isinstance(node, ManagedNode):
        example = f"`ros2 lifecycle set {node.get_fully_qualified_name()} configure`"
        node.get_logger().info(f"unconfigured: waiting for configure, for example {example}")
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    for other in others(node):
        executor.add_node(other)
    with contextlib.suppress(KeyboardInterrupt, ExternalShutdownException):
        _spin(node, executor, lambda: told.is_set() or finished(node))
    # A launcher and the terminal often both send SIGINT: the second must not interrupt the cleanup. And rclpy's
    # thread, which ends every context some time after the signal, must not end one that `close` makes.
    with contextlib.suppress(KeyboardInterrupt):
        uninstall_signal_handlers()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    stopped = close(node)
    executor.shutdown(timeout_sec=1.0)
    node.destroy_node()
    rclpy.try_shutdown()
    if not stopped:
        print(f"{name}: a thread did not stop in time; exiting without it", file=sys.stderr, flush=True)
        os._exit(1)  # the interpreter's own exit would abort in a thread that hangs inside a device driver
    if failure(node):
        print(f"{name}: {failure(node)}", file=sys.stderr)
        return 2
    return 0


def _spin(node: Node, executor: Executor, finished: Callable[[], bool]) -> None:
    """Spins the node. An exception in a callback is logged, and spinning continues."""
    while rclpy.ok() and not finished():
        try:
            executor.spin_once(timeout_sec=_SPIN_S)
        except (KeyboardInterrupt, ExternalShutdownException):
            raise
        except Exception:
            if not rclpy.ok():  # a signal ended the context meanwhile
                return
            node.get_logger().error(f"a callback failed:\n{traceback.format_exc()}", throttle_duration_sec=5.0)


def _first_sentence(error: Exception) -> str:
    """The error's text without the positions in C files that rcl appends."""
    return str(error).split(", at ")[0]


class ManagedNode(LifecycleNode):
    """A lifecycle node that sets up in configure and works while active; subclasses implement the hooks below.

    The lifecycle services have their own callback group, which LifecycleNode's constructor does not offer. So
    `get_state`, parameters and diagnostics are served while a transition waits.

    Attributes:
        active: True while the node works.
        stop_reason: why it does not work: the first reason since configure or activate was last tried; empty: none.
    """

    recoverable: type[Exception] = UserError  # errors of `_setup` that a user can fix; others end in `on_error`

    def __init__(self, name: str, **node_arguments: Any) -> None:
        Node.__init__(self, name, **node_arguments)
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        answer_impossible_transitions(self)
        self.active = False
        self.stop_reason = ""

    @abstractmethod
    def _setup(self) -> None:
        """Creates everything that the work needs."""

    @abstractmethod
    def _start(self) -> None:
        """Starts the work."""

    @abstractmethod
    def _stop(self) -> None:
        """Ends the work. May be called again, or after a `_start` that failed."""

    @abstractmethod
    def _teardown(self) -> bool:
        """Releases everything that `_setup` created, also if it failed halfway. Returns False if something hangs."""

    def _change(self, changed: Mapping[str, Any]) -> None:
        """Applies new parameter values, or refuses all of them with UserError; see `_follow_changes`."""

    def _follow_changes(self, kind: type) -> None:
        """Subscribes to parameter changes: checks each new value against `kind` and passes it to `_change`."""

        def on_set(parameters: list[Any]) -> SetParametersResult:
            changed = {parameter.name: parameter.value for parameter in parameters}
            try:
                check_values(kind, changed)
                self._change(changed)
            except UserError as error:
                return SetParametersResult(successful=False, reason=str(error))
            return SetParametersResult(successful=True)

        self.add_on_set_parameters_callback(on_set)

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Sets up. After an error that a user can fix, configure may be tried again."""
        return self._attempt("not configured", self._setup, self.recoverable, undo=self.close)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        answer = self._attempt("not activated", self._start, UserError, undo=self._stop)
        if answer is not TransitionCallbackReturn.SUCCESS:
            return answer
        self.active = True
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._note("deactivated")
        self.active = False
        self._stop()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.close()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Deactivates and cleans up. The node can then only end."""
        return self._end("shut down", state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Returns to unconfigured, with nothing left running."""
        return self._end("an error in a transition", state)

    def close(self) -> bool:
        """Ends the work and releases everything. Returns False if something hangs."""
        self.active = False
        self._stop()
        return self._teardown()

    def _end(self, reason: str, state: LifecycleState) -> TransitionCallbackReturn:
        self._note(reason)
        self.close()
        return super().on_deactivate(state)  # nothing else silences the managed publishers

    def _attempt(
        self, problem: str, hook: Callable[[], None], recoverable: type[Exception], undo: Callable[[], Any]
    ) -> TransitionCallbackReturn:
        self.stop_reason = ""
        try:
            hook()
        except Exception as error:
            self._note(str(error) or repr(error))
            if not isinstance(error, recoverable):
                raise
            undo()
            self.get_logger().error(f"{problem}: {error}")
            return TransitionCallbackReturn.FAILURE
        return TransitionCallbackReturn.SUCCESS

    def _note(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason


def answer_impossible_transitions(node: Node) -> None:
    """Refuses transitions that the state does not allow.

    Jazzy's rclpy raises for them, which leaves a traceback in the log and the client without an answer.
    """
    for service in node.services:
        if service.srv_type is ChangeState:
            service.callback = partial(_change_state, node, service.callback)


def _change_state(node: Node, change: Callable[[Any, Any], Any], request: Any, response: Any) -> Any:
    try:
        return change(request, response)
    except Exception as error:  # rclpy catches what the transitions' own callbacks raise
        reason = _first_sentence(error)
        node.get_logger().warning(f"transition {request.transition.id} is not possible in this state: {reason}")
        response.success = False
        return response


def make_status(level: bytes, message: str, values: Mapping[str, object] | None = None) -> DiagnosticStatus:
    """A status from its level, the cause in words, and values. The publisher fills in the name."""
    pairs = [KeyValue(key=key, value=str(value)) for key, value in (values or {}).items()]
    return DiagnosticStatus(level=level, message=message, values=pairs)


class DiagnosticsPublisher:
    """Publishes every task's status on /diagnostics periodically. The node's full name distinguishes two policies."""

    def __init__(self, node: Node, period_s: float, statuses: Callable[[], Mapping[str, DiagnosticStatus]]) -> None:
        self._clock = node.get_clock()
        self._node_name = node.get_fully_qualified_name()
        self._statuses = statuses
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", DIAGNOSTICS)
        self._timer = node.create_timer(period_s, self._publish, clock=STEADY)

    def set_period(self, period_s: float) -> None:
        self._timer.timer_period_ns = round(period_s * 1e9)

    def _publish(self) -> None:
        array = DiagnosticArray()
        array.header.stamp = self._clock.now().to_msg()
        for task, status in self._statuses().items():
            # Without the leading slash, as diagnostic_updater writes it.
            status.name = f"{self._node_name.lstrip('/')}: {task}"
            status.hardware_id = self._node_name
            array.status.append(status)
        self._publisher.publish(array)


def raise_priority(priority: int) -> str:
    """Schedules every thread of this process before ordinary ones; returns the scheduling in words.

    On a busy machine (load 9 on 2 cores) the 99th percentile of the loop's lateness was 1 ms with this, 15 ms without.
    All threads are raised, as any of them may hold the interpreter's lock. `priority`: of SCHED_FIFO; 0: unchanged.
    """
    if priority == 0:
        return "ordinary"
    try:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(priority))
    except (OSError, AttributeError) as error:  # not allowed, or no Linux
        return f"ordinary: SCHED_FIFO {priority} is not allowed here ({error})"
    return f"SCHED_FIFO {priority}"


class SteadyLoop:
    """Calls `step` at a fixed rate of the steady clock, on its own thread, so that no callback delays output.

    A late tick is not made up for: the next one is due on the old grid. `on_fault` gets the traceback of a step that
    raised; the loop continues.
    """

    def __init__(self, rate_hz: float, step: Callable[[], None], on_fault: Callable[[str], None]) -> None:
        self._period_s, self._step, self._on_fault = 1 / rate_hz, step, on_fault
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._late_s: list[float] = []
        self._took_s: list[float] = []
        self._thread = threading.Thread(target=self._run, name="guard output", daemon=True)

    def start(self) -> None:
        # The collector skips the present objects, which live on: on a busy machine the 99th percentile of lateness was
        # 14 ms with this and 30 ms without. A shorter switch interval of the interpreter changed nothing.
        gc.collect()
        gc.freeze()
        self._thread.start()

    def stop(self) -> bool:
        """Ends the loop. Returns False if a step hangs."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def take_figures(self) -> dict[str, object]:
        """Figures of the ticks since the last call: their number, lateness and duration in milliseconds."""
        with self._lock:
            late_s, self._late_s, took_s, self._took_s = self._late_s, [], self._took_s, []
        figures: dict[str, object] = {"ticks": len(late_s)}
        for name, seconds in (("late", late_s), ("took", took_s)) if late_s else ():
            for share, percent in (("p50", 50), ("p99", 99), ("max", 100)):
                figures[f"{name}_{share}_ms"] = f"{np.percentile(seconds, percent) * 1e3:.2f}"
        return figures

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                self._step()
            except Exception:
                self._on_fault(traceback.format_exc())
            ended_s = time.monotonic()
            with self._lock:
                self._late_s.append(began_s - due_s)
                self._took_s.append(ended_s - began_s)
            due_s += self._period_s * max(1, np.ceil((ended_s - due_s) / self._period_s))
            time.sleep(max(0.0, due_s - time.monotonic()))
