# SPDX-License-Identifier: Apache-2.0
"""Starts, activates and ends the demo's nodes, each in its own process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import rclpy
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.client import Client
from rclpy.node import Node
from rclpy.task import Future

from specvla_ros.errors import UserError

_ANSWER_S = 5.0
_STOP_TIMEOUT_S = 15.0
_NEXT = {
    State.PRIMARY_STATE_UNCONFIGURED: Transition.TRANSITION_CONFIGURE,
    State.PRIMARY_STATE_INACTIVE: Transition.TRANSITION_ACTIVATE,
}


class NodeProcesses:
    """Nodes of this package, each a process that ends with this one. A context manager that ends them on exit."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        module: str,
        *parameters: str,
        params_file: Path | None = None,
        remaps: Iterable[tuple[str, str]] = (),
        log: Path | None = None,
    ) -> None:
        """Starts a node from a module with a `main` under specvla_ros; its name is the last part other than `node`.

        `parameters` have the form `name:=value`, `remaps` are (from, to); without a `log` errors go to the terminal.
        """
        arguments = [part for parameter in parameters for part in ("-p", parameter)]
        arguments += ["--params-file", str(params_file)] if params_file is not None else []
        arguments += [part for source, target in remaps for part in ("-r", f"{source}:={target}")]
        arguments += ["--log-level", "error"] if log is None else []
        # A killed demo must not leave a policy on the topics of the next one.
        end_with = f"from specvla_ros.lab.jobs.workers import end_with_parent; end_with_parent({os.getpid()})"
        code = f"{end_with}; from specvla_ros.ros import start; start('specvla_ros.{module}')"
        with log.open("wb") if log is not None else nullcontext() as said:
            self._running[module.removesuffix(".node").rpartition(".")[2]] = subprocess.Popen(
                [sys.executable, "-c", code, "--ros-args", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT if said is not None else None,
            )

    def exit_code(self, name: str) -> int | None:
        """The exit code of a node, or None while it runs."""
        return self._running[name].poll()

    def ended(self, names: Iterable[str]) -> str:
        """The first of these nodes that ended, or an empty string."""
        return next((name for name in names if self.exit_code(name) is not None), "")

    def __enter__(self) -> "NodeProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        """Sends SIGINT, like Ctrl-C, and kills the processes that do not end."""
        running = [process for process in self._running.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class LifecycleClient:
    """Requests transitions of a node such as `/policy`, and polls its state instead of waiting for responses.

    A service's response is lost if the server has not yet discovered the client's end of the response topic, which
    happens on a loaded machine. `node` is the client's node and must not be spun elsewhere meanwhile; `explanation`
    tells the user where to find the reason for a refusal.
    """

    def __init__(self, node: Node, name: str, explanation: str = "its own message above says why") -> None:
        self._node = node
        self._name, self._explanation = name.lstrip("/"), explanation
        self._get: Client = node.create_client(GetState, f"{name}/get_state")
        self._change: Client = node.create_client(ChangeState, f"{name}/change_state")

    def activate(self, alive: Callable[[], bool], timeout_s: float) -> None:
        """Configures and activates the node; `alive` returns True while its process runs.

        Raises UserError if the node refuses or does not come up in time.
        """
        deadline = time.monotonic() + timeout_s
        answer: Future[Any] | None = None
        requested, requested_s = 0, 0.0
        seen = State()
        while alive() and time.monotonic() < deadline:
            state = self._state()
            seen = state if state.id else seen
            if state.id == State.PRIMARY_STATE_ACTIVE:
                return
            transition = _NEXT.get(state.id)
            if transition is None:  # unknown, or in a transition
                time.sleep(0.05)
                continue
            if transition == requested and answer is not None:
                result = answer.result() if answer.done() else None
                if result is not None and not result.success:
                    raise UserError(f"the node {self._name} refused to start; {self._explanation}")
                if time.monotonic() - requested_s < _ANSWER_S:
                    rclpy.spin_once(self._node, timeout_sec=0.05)
                    continue
            answer = self._change.call_async(ChangeState.Request(transition=Transition(id=transition)))
            requested, requested_s = transition, time.monotonic()
        if not alive():
            raise UserError(f"the node {self._name} exited before it came up; {self._explanation}")
        raise UserError(
            f"the node {self._name} did not come up in {timeout_s:g} s: {self._how_far(seen)}; `specvla doctor` shows "
            "what to fix"
        )

    def _how_far(self, seen: State) -> str:
        if seen.id:
            return f"its last known state is {seen.label or f'number {seen.id}'}"
        there = self._get.service_is_ready()
        return "it never responded, although its services exist" if there else "its services do not exist"

    def _state(self) -> State:
        """The node's state; unknown (0) if it does not respond."""
        answer = None
        if self._get.wait_for_service(timeout_sec=0.5):
            future = self._get.call_async(GetState.Request())
            rclpy.spin_until_future_complete(self._node, future, timeout_sec=1.0)
            if future.done():
                answer = future.result()
            else:
                self._get.remove_pending_request(future)
        return answer.current_state if answer is not None else State()
