# SPDX-License-Identifier: Apache-2.0
"""`specvla demo`: the policy drives the simulated arm over topics, a terminal shows it and takes instructions."""

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from sensor_msgs.msg import Image
from std_msgs.msg import String

from specvla_ros.bags.image_message import rgb_from_image
from specvla_ros.errors import UserError
from specvla_ros.evaluation.simulate_summary import SimulateSummary
from specvla_ros.evaluation.statistics import Rate
from specvla_ros.models.openvla.config import read_config
from specvla_ros.models.openvla.prompt import normalise_instruction
from specvla_msgs.msg import SimEpisode, VlaAction
from specvla_ros.ros.demo.processes import LifecycleClient, NodeProcess, start_node, stop_node
from specvla_ros.ros.demo.record import DemoRecord
from specvla_ros.ros.qos import ACTION, LATCHED_INSTRUCTION, NEWEST_IMAGE
from specvla_ros.settings.profiles import write_parameters
from specvla_ros.simulation.gl import require_gl
from specvla_ros.simulation.rollout import EpisodeResult
from specvla_ros.simulation.tasks import TASKS, choose_tasks

try:
    import termios
    import tty
except ImportError:  # no Unix terminal
    termios = None  # type: ignore[assignment]

PARAMETERS_FILE = "parameters.yaml"
_CONFIGURE_TIMEOUT_S = 120.0
_SILENCE_S = 60.0  # limit without news of an episode
_CLOCK = "realtime"
_CAMERA = "/camera/image_raw"
_ENTER, _ERASE, _KILL_LINE = ("\n", "\r"), ("\x7f", "\b"), "\x15"


def run_demo(
    out: Path, policy: Path, *, tasks: list[str], episodes: int, seed: int, parameters: Mapping[str, Any]
) -> int:
    """Shows the policy drive the simulated arm, and writes films and a report.

    Args:
        out: directory of the results; films and report in it are made anew.
        policy: checkpoint directory.
        tasks: names; none: all.
        episodes: number per task.
        seed: seed of the first start.
        parameters: of the policy node, by name; written to parameters.yaml in `out`.

    Returns:
        0 when the arm succeeded at least once and everything ran to its end, else 1.

    Raises:
        UserError: no OpenGL, a bad checkpoint, or a process that does not come up.
    """
    require_gl()
    names = ", ".join(task.name for task in choose_tasks(tasks))
    taught = read_config(policy).instructions
    # A simulated policy must not be heard by a robot on the network.
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    record = DemoRecord(out, policy)
    console = Console()
    console.print("[bold]specvla demo[/bold]: sim_robot ⇄ ROS 2 topics ⇄ an OpenVLA policy, trained for this table")
    processes: list[NodeProcess] = []
    rclpy.init(args=[])
    watcher = _Watcher(record)
    finished = False
    try:
        given = {**parameters, "checkpoint": str(policy), "use_sim_time": True}
        write_parameters(out / PARAMETERS_FILE, given, ["Of the policy node in `specvla demo`."])
        node = start_node(
            "policy",
            params_file=out / PARAMETERS_FILE,
            remaps=(f"image:={_CAMERA}", f"image/compressed:={_CAMERA}/compressed"),
        )
        processes.append(node)
        robot = start_node(
            "sim_robot", f"clock:={_CLOCK}", f"tasks:=[{names}]", f"episodes:={episodes}", f"seed:={seed}"
        )
        processes.append(robot)
        LifecycleClient(watcher, "/policy").activate(lambda: node.poll() is None, _CONFIGURE_TIMEOUT_S)
        finished = _show(console, record, watcher, node, robot, taught)
    except (KeyboardInterrupt, ExternalShutdownException):
        console.print("interrupted")
    finally:
        for process in reversed(processes):
            stop_node(process)
        watcher.destroy_node()
        rclpy.try_shutdown()
    summary = record.finish(_CLOCK)
    _print_results(console, summary, out)
    return 0 if finished and summary.success.successes else 1


class _Watcher(Node):
    """Listens, and passes on what is typed."""

    def __init__(self, record: DemoRecord) -> None:
        super().__init__("demo")
        self._instruction = self.create_publisher(String, "/instruction", LATCHED_INSTRUCTION)
        self.create_subscription(VlaAction, "/policy/action", record.on_action, ACTION)
        self.create_subscription(SimEpisode, "/sim_robot/episode", record.on_episode, LATCHED_INSTRUCTION)
        self.create_subscription(Image, _CAMERA, lambda message: record.on_image(rgb_from_image(message)), NEWEST_IMAGE)

    def instruct(self, instruction: str) -> None:
        """Publishes an instruction."""
        self._instruction.publish(String(data=instruction))


def _show(
    console: Console,
    record: DemoRecord,
    watcher: _Watcher,
    policy: NodeProcess,
    robot: NodeProcess,
    taught: tuple[str, ...],
) -> bool:
    """Shows what happens until the robot has had its episodes; False when a process ended early or nothing happens."""
    with TypedLine() as typed, Live(console=console, refresh_per_second=8, vertical_overflow="crop") as view:
        warning = ""
        deadline = time.monotonic() + _SILENCE_S
        while robot.poll() is None and policy.poll() is None and time.monotonic() < deadline:
            news, finished = record.episode, len(record.episodes)
            rclpy.spin_once(watcher, timeout_sec=0.05)
            line = typed.poll()
            if line:
                watcher.instruct(line)
                warning = _unknown_instruction(line, taught)
            if record.episode is not news:
                deadline = time.monotonic() + _SILENCE_S
            if len(record.episodes) > finished and not console.is_terminal:
                console.print(_sentence(record.episodes[-1]))  # a log has no live view
            view.update(_picture(record, typed, warning))
    for _ in range(5):  # the last message may still be on its way
        rclpy.spin_once(watcher, timeout_sec=0.1)
    if robot.poll() is None:
        why = "the policy ended" if policy.poll() is not None else f"nothing happened for {_SILENCE_S:g} s"
        console.print(f"[red]{why}; what was seen so far is kept[/red]")
    return robot.poll() == 0


def _unknown_instruction(line: str, taught: tuple[str, ...]) -> str:
    """A warning; empty when the policy was taught this, or does not say what it was taught."""
    if not taught or normalise_instruction(line) in taught:
        return ""
    return f"the policy was never taught “{line}”; it knows: {'; '.join(taught)}"


class TypedLine:
    """Reads keys without waiting for Enter and without echo; a context manager that gives the terminal back.

    Where the input is no terminal (a pipe, a service) nothing is ever typed.

    Attributes:
        text: the line so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._stream = sys.stdin.fileno() if termios is not None and sys.stdin.isatty() else None

    @property
    def usable(self) -> bool:
        """Whether somebody can type."""
        return self._stream is not None

    def __enter__(self) -> "TypedLine":
        if self._stream is not None:
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)

    def poll(self) -> str | None:
        """The line, stripped, once it was ended with Enter; None: not yet, or an empty one."""
        if self._stream is None or not select.select([self._stream], [], [], 0)[0]:
            return None
        return self.feed(os.read(self._stream, 256).decode(errors="ignore"))

    def feed(self, keys: str) -> str | None:
        """Takes keys as they were pressed; what follows an Enter begins the next line."""
        for position, key in enumerate(keys):
            if key in _ENTER:
                line, self.text = self.text.strip(), keys[position + 1 :]
                return line or None
            if key in _ERASE:
                self.text = self.text[:-1]
            elif key == _KILL_LINE:
                self.text = ""
            elif key.isprintable():
                self.text += key
        return None


def _picture(record: DemoRecord, typed: TypedLine, warning: str) -> Group:
    episode = record.episode
    now = Table.grid(padding=(0, 2))
    if episode is not None:
        state = {SimEpisode.RUNNING: "", SimEpisode.SUCCEEDED: "[green]done[/green]"}.get(
            episode.state, "[red]not done"
        )
        now.add_row("instruction", f"[bold]{episode.instruction}[/bold]  {state}")
        now.add_row("episode", f"{episode.episode + 1}, {episode.time_s:.1f} s, {episode.actions} actions")
    if record.action is not None:
        p50 = float(np.median([latency for _, latency in record.recent])) * 1e3
        now.add_row("policy", f"{record.action_rate_hz:.1f} actions/s, {p50:.0f} ms from image to action")
        values = "  ".join(
            f"{name} {value:+.3f}" for name, value in zip(record.action.names, record.action.values, strict=True)
        )
        now.add_row("action", values)
    tasks = Table("task", "instruction", "succeeded")
    for task in TASKS:
        done = [episode.succeeded for episode in record.episodes if episode.task == task.name]
        tasks.add_row(task.name, task.instruction, f"{sum(done)} of {len(done)}" if done else "")
    prompt = Text(f"another instruction, then Enter: {typed.text}▏" if typed.usable else "")
    return Group(now, tasks, Text(warning, style="red"), prompt)


def _sentence(result: EpisodeResult) -> str:
    return f"{result.instruction}: {'done' if result.succeeded else 'not done'} after {result.time_s:.1f} s"


def _print_results(console: Console, summary: SimulateSummary, out: Path) -> None:
    done: Rate = summary.success
    console.print(f"the arm did {done.successes} of {done.n} tasks ({done}, {_CLOCK})")
    if summary.latency_s:
        p50, p95 = summary.latency_s["p50"] * 1e3, summary.latency_s["p95"] * 1e3
        rate = f"{summary.action_rate_hz:.1f} actions/s"
        console.print(f"observation-to-action latency: p50 {p50:.1f} ms, p95 {p95:.1f} ms; {rate}")
    console.print(f"report with films: {out / 'report.html'}")
