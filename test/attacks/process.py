# SPDX-License-Identifier: Apache-2.0
"""A node under attack, in a process of its own, and who attacks it over real DDS."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rclpy
from builtin_interfaces.msg import Time
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node

_START_S, _END_S, _LOAD_S, ANSWER_S = 300.0, 60.0, 300.0, 30.0  # patience on a busy machine
_BROKEN = ("Traceback", "a callback failed", "continued after a fault")
_UP = (
    (State.PRIMARY_STATE_UNCONFIGURED, Transition.TRANSITION_CONFIGURE),
    (State.PRIMARY_STATE_INACTIVE, Transition.TRANSITION_ACTIVATE),
)


class NodeProcess:
    """A node of this package as a process; its output goes to a file.

    Args:
        name: the node's folder under specvla_ros/ros.
        log: file for what it prints.
        parameters: by name, as YAML.
        remaps: topics by name.
        files: parameter files.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        parameters: Mapping[str, object],
        *,
        remaps: Mapping[str, str] | None = None,
        files: tuple[Path, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        arguments = [part for file in files for part in ("--params-file", str(file))]
        arguments += [part for key, value in parameters.items() for part in ("-p", f"{key}:={_yaml(value)}")]
        arguments += [part for key, value in (remaps or {}).items() for part in ("-r", f"{key}:={value}")]
        code = f"from specvla_ros.ros import start; start('specvla_ros.ros.{name}.node')"  # as its script
        self.name, self._log, self._read = name, log, 0
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, "--ros-args", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def send(self, number: int) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def new_output(self) -> str:
        """What it has printed since the last look."""
        with self._log.open("rb") as stream:
            stream.seek(self._read)
            said = stream.read()
        self._read += len(said)
        return said.decode(errors="replace")

    def check(self) -> str:
        """What it has printed since the last look.

        Raises:
            RuntimeError: it has ended, or met what it did not expect.
        """
        said = self.new_output()
        if not self.alive:
            raise RuntimeError(f"{self.name} ended with code {self._process.returncode}: {said[-600:]}")
        if any(words in said for words in _BROKEN):
            raise RuntimeError(f"{self.name} printed: {said[-600:]}")
        return said

    def end(self, *signals: int) -> int:
        """Ends it by signals, a tenth of a second apart; its exit code.

        Raises:
            RuntimeError: it does not end.
        """
        for number in signals or (signal.SIGINT,):
            if self.alive:
                self.send(number)
                time.sleep(0.1)
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(f"{self.name} had to be killed {_END_S:g} s after {signals}") from None


class Attacker:
    """A node that sends whatever it likes, and watches what comes of it."""

    def __init__(self, node: Node, executor: SingleThreadedExecutor) -> None:
        self.node, self._executor = node, executor
        self._clients: dict[str, Any] = {}

    def spin(self, seconds: float) -> None:
        """Listens for a while."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def until(self, condition: Callable[[], object], seconds: float = ANSWER_S) -> bool:
        """Listens until the condition holds; False when it does not in time."""
        end_s = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end_s:
                return False
            self._executor.spin_once(timeout_sec=0.02)
        return True

    def ask(self, kind: Any, name: str, request: Any) -> Any:
        """A future of a service's answer."""
        if name not in self._clients:
            self._clients[name] = self.node.create_client(kind, name)
            if not self.until(self._clients[name].service_is_ready, _START_S):
                raise RuntimeError(f"nobody serves {name}")
            self.spin(1.0)  # or its answer is lost: the server must have found this client too
        return self._clients[name].call_async(request)

    def call(self, kind: Any, name: str, request: Any, seconds: float = ANSWER_S) -> Any:
        """A service's answer.

        Raises:
            RuntimeError: none comes.
        """
        future = self.ask(kind, name, request)
        if not self.until(future.done, seconds):
            raise RuntimeError(f"no answer of {name} in {seconds:g} s")
        return future.result()

    def state(self, name: str) -> int:
        """Of a lifecycle node."""
        return int(self.call(GetState, f"/{name}/get_state", GetState.Request()).current_state.id)

    def change(self, name: str, transition: int) -> bool:
        """Whether a lifecycle node made a transition."""
        request = ChangeState.Request(transition=Transition(id=transition))
        return bool(self.call(ChangeState, f"/{name}/change_state", request, _LOAD_S).success)

    def activate(self, name: str) -> None:
        """Configures and activates a lifecycle node, from wherever it is."""
        for state, transition in _UP:
            if self.state(name) == state and not self.change(name, transition):
                raise RuntimeError(f"{name} refused transition {transition}")


@contextmanager
def attacker(domain: int) -> Iterator[Attacker]:
    """One in a DDS domain of its own, in which processes started meanwhile are too."""
    before = {name: os.environ.get(name) for name in ("ROS_DOMAIN_ID", "ROS_AUTOMATIC_DISCOVERY_RANGE")}
    os.environ.update(ROS_DOMAIN_ID=str(domain), ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    rclpy.init()
    node, executor = rclpy.create_node("attacker", enable_rosout=False), SingleThreadedExecutor()
    executor.add_node(node)
    try:
        yield Attacker(node, executor)
    finally:
        executor.shutdown()
        node.destroy_node()
        rclpy.try_shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def running(*processes: NodeProcess) -> Iterator[None]:
    """Ends them, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            if process.alive:
                process.send(signal.SIGCONT)
                process.send(signal.SIGKILL)


def stamp(ns: int) -> Time:
    """Of nanoseconds."""
    return Time(sec=ns // 10**9, nanosec=ns % 10**9)


def ns_of(time_: Time) -> int:
    """Nanoseconds of a stamp."""
    return int(time_.sec) * 10**9 + int(time_.nanosec)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
