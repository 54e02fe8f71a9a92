# SPDX-License-Identifier: Apache-2.0
"""The demo's operator: a node with the dead-man's switch of a commanded arm, and its terminal."""

import os
import select
import sys

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.client import Client
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.task import Future
from rich.console import Group
from rich.table import Table
from rich.text import Text
from sensor_msgs.msg import Image
from std_msgs.msg import Bool, Empty, String
from std_srvs.srv import Trigger

from specvla_ros.lab.ros.demo.record import DemoRecord, Motion, first_values
from specvla_ros.lab.ros.sim_robot.outputs import EPISODE, IMAGE_TOPIC
from specvla_ros.lab.simulation.tasks import Task
from specvla_ros.messages.image_message import rgb_from_image
from specvla_ros.msg import DecodeStats, Reasoning, SimEpisode, VlaAction
from specvla_ros.ros.qos import ACTION, DIAGNOSTICS, INSTRUCTION, LATCHED_INSTRUCTION, NEWEST_IMAGE

try:
    import termios
    import tty
except ImportError:  # no Unix terminal
    termios = None  # type: ignore[assignment]

STOP_KEY, CLEAR_KEY = "\x1b", "\x12"  # Esc, Ctrl-R
_ENTER, _ERASE, _KILL_LINE = ("\n", "\r"), ("\x7f", "\b"), "\x15"
_COLOURS = {"passing": "green", "holding": "yellow", "stopped": "bold red"}
_HEARTBEAT_S = 0.1
_OVER = (SimEpisode.SUCCEEDED, SimEpisode.FAILED)  # an aborted episode restarts with the first command


class Operator(Node):
    """Passes actions, episodes and images to `record`, and holds a commanded arm's dead-man's switch in episodes.

    Between two episodes the world and the arm are reset, which no command may disturb.
    """

    def __init__(self, record: DemoRecord, commanded: bool) -> None:
        super().__init__("demo")
        self.motion = Motion()
        self.answer = ""
        self._record = record
        self._commanded = commanded
        self._held = False
        self._clears = False
        self._instruction = self.create_publisher(String, "/instruction", LATCHED_INSTRUCTION)
        self.create_subscription(VlaAction, "/policy/action", record.on_action, ACTION)
        self.create_subscription(DecodeStats, "/policy/decode_stats", record.on_stats, ACTION)
        self.create_subscription(Reasoning, "/policy/reasoning", record.on_reasoning, ACTION)
        self.create_subscription(SimEpisode, "/sim_robot/episode", self._on_episode, EPISODE)
        self.create_subscription(Image, IMAGE_TOPIC, lambda image: record.on_image(rgb_from_image(image)), NEWEST_IMAGE)
        if not commanded:
            return
        self._enable = self.create_publisher(Bool, "/guard/enable", INSTRUCTION)
        self._stop = self.create_publisher(Empty, "/guard/stop", DIAGNOSTICS)
        self._clear: Client = self.create_client(Trigger, "/guard/clear_stop")
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, DIAGNOSTICS)
        self.create_timer(_HEARTBEAT_S, self._beat, clock=Clock(clock_type=ClockType.STEADY_TIME))

    def instruct(self, instruction: str) -> None:
        self._instruction.publish(String(data=instruction))

    def hold_switch(self, held: bool) -> None:
        """Presses or releases the dead-man's switch. The drawing thread sends its heartbeat, so a hang releases it."""
        self._held = held
        self._enable.publish(Bool(data=held))

    def stop(self) -> None:
        self._stop.publish(Empty())
        self.answer = ""

    def clear_stop(self) -> None:
        """Requests to clear a stop; `answer` says why it was refused."""
        self._clear.call_async(Trigger.Request()).add_done_callback(self._on_cleared)

    def begin_episode(self) -> str:
        """Clears stops that the guard raised itself, until motion begins; a pressed stop stays.

        Returns the reason for the stop that is being cleared, in words; empty if there is none.
        """
        self._clears, self.motion.begun = True, False
        if not self.motion.latched:
            return ""
        self.clear_stop()
        return self.motion.stopped_by

    def _on_episode(self, episode: SimEpisode) -> None:
        self._record.on_episode(episode)
        held = episode.state not in _OVER
        if self._commanded and held is not self._held:
            self.hold_switch(held)

    def _beat(self) -> None:
        if self._held:
            self._enable.publish(Bool(data=True))

    def _on_cleared(self, future: Future) -> None:
        result = future.result()
        self.answer = "" if result is None or result.success else f"the stop is not cleared: {result.message}"

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        episode = self._record.episode
        running = episode is not None and episode.state == SimEpisode.RUNNING
        for status in message.status:
            self.motion.hear(status, held=self._held, count=running)
        self._clears = self._clears and not self.motion.begun
        if self._clears and self.motion.latched:  # the guard refuses while the cause persists
            self.clear_stop()


class TypedLine:
    """Reads keys without waiting for Enter and without echo. A context manager that restores the terminal.

    `text` is the line so far. Without a terminal as input (a pipe, a service) no key is ever read.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pressed = ""
        self._stream = sys.stdin.fileno() if termios is not None and sys.stdin.isatty() else None

    @property
    def usable(self) -> bool:
        """True if the input is a terminal."""
        return self._stream is not None

    def __enter__(self) -> "TypedLine":
        if self._stream is not None:
            self._before = termios.tcgetattr(self._stream)
            tty.setcbreak(self._stream)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            termios.tcsetattr(self._stream, termios.TCSADRAIN, self._before)

    def poll(self) -> str | None:
        """The stripped line once Enter was pressed; None before that, or if the line is empty."""
        if self._stream is None or not select.select([self._stream], [], [], 0)[0]:
            return None
        return self.feed(os.read(self._stream, 256).decode(errors="ignore"))

    def take_pressed(self) -> str:
        """STOP_KEY and CLEAR_KEY presses since the last call; other keys' codes that start with Esc count as Esc."""
        pressed, self._pressed = self._pressed, ""
        return pressed

    def feed(self, keys: str) -> str | None:
        """Takes pressed keys; those after an Enter start the next line."""
        self._pressed += "".join(key for key in keys if key in (STOP_KEY, CLEAR_KEY))
        for position, key in enumerate(keys):
            if key in _ENTER:
                line = self.text.strip()
                self.text = "".join(filter(str.isprintable, keys[position + 1 :]))
                return line or None
            if key in _ERASE:
                self.text = self.text[:-1]
            elif key == _KILL_LINE:
                self.text = ""
            elif key.isprintable():
                self.text += key
        return None


def picture(
    record: DemoRecord, motion: Motion | None, typed: TypedLine, warning: str, known: tuple[Task, ...]
) -> Group:
    """The terminal's current content; `known`: the robot's tasks.

    `motion`: that of driver and guard, None if they do not run.
    """
    now = Table.grid(padding=(0, 2))
    episode = record.episode
    if episode is not None:
        states = {SimEpisode.RUNNING: "", SimEpisode.SUCCEEDED: "[green]done[/green]"}
        now.add_row("instruction", Text(episode.instruction, style="bold"))
        taken = f"{episode.actions} {'actions' if motion is None else 'commands'}"
        state = states.get(episode.state, "[red]not done")
        now.add_row("episode", f"{episode.episode + 1}, {episode.task}, {episode.time_s:.1f} s, {taken}  {state}")
    if record.action is not None:
        p50 = float(np.median([latency for _, latency in record.recent])) * 1e3
        now.add_row("policy", f"{record.action_rate_hz:.1f} actions/s, {p50:.0f} ms from image to action")
        named = zip(record.action.names, first_values(record.action), strict=True)
        more = f"  … first of {record.action.horizon}" if record.action.horizon > 1 else ""
        now.add_row("action", "  ".join(f"{name} {value:+.3f}" for name, value in named) + more)
    if record.stats is not None:
        tokens, forwards = sum(record.stats.tokens_per_forward), record.stats.forwards
        now.add_row("decoded", f"{tokens} tokens in {forwards} forwards, {record.stats.tau:.1f} per forward")
    if record.text:
        now.add_row("text", Text(record.text))
    if motion is not None:
        now.add_row("driver", Text(motion.driver))
        now.add_row("guard", Text(motion.guard, style=_COLOURS.get(motion.guard.partition(":")[0], "")))
    tasks = Table("task", "instruction", "succeeded")
    for task in known:
        done = [episode.succeeded for episode in record.episodes if episode.task == task.name]
        tasks.add_row(task.name, task.instruction, f"{sum(done)} of {len(done)}" if done else "")
    prompt = f"another instruction, then Enter: {typed.text}▏"
    keys = "Esc: stop the arm · Ctrl-R: clear the stop · Ctrl-C: end" if motion is not None else ""
    lines = [Text(keys, style="dim"), Text(prompt)] if typed.usable else []
    return Group(now, tasks, Text(warning, style="red"), *lines)
