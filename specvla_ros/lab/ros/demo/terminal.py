# SPDX-License-Identifier: Apache-2.0
"""What the demo shows on a terminal, and what is typed there."""

import os
import select
import sys
from types import TracebackType

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from specvla_ros.lab.ros.demo.operator import Motion
from specvla_ros.lab.ros.demo.record import DemoRecord, first_values
from specvla_ros.lab.simulation.tasks import TASKS
from specvla_ros.msg import SimEpisode

try:
    import termios
    import tty
except ImportError:  # no Unix terminal
    termios = None  # type: ignore[assignment]

STOP_KEY, CLEAR_KEY = "\x1b", "\x12"  # Esc, Ctrl-R
_ENTER, _ERASE, _KILL_LINE = ("\n", "\r"), ("\x7f", "\b"), "\x15"
_COLOURS = {"passing": "green", "holding": "yellow", "stopped": "bold red"}


class TypedLine:
    """Reads keys without waiting for Enter and without echo; a context manager that gives the terminal back.

    Where the input is no terminal (a pipe, a service) nothing is ever typed.

    Attributes:
        text: the line so far.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pressed = ""
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

    def take_pressed(self) -> str:
        """STOP_KEY and CLEAR_KEY as they were pressed since the last call; also Esc as it begins other keys' codes."""
        pressed, self._pressed = self._pressed, ""
        return pressed

    def feed(self, keys: str) -> str | None:
        """Takes keys as they were pressed; what follows an Enter begins the next line."""
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


def picture(record: DemoRecord, motion: Motion | None, typed: TypedLine, warning: str) -> Group:
    """What is shown now.

    Args:
        record: of what was seen so far.
        motion: of driver and guard; None: there are none.
        typed: the line that is being typed.
        warning: what somebody should know.
    """
    now = Table.grid(padding=(0, 2))
    episode = record.episode
    if episode is not None:
        state = {SimEpisode.RUNNING: "", SimEpisode.SUCCEEDED: "[green]done[/green]"}.get(
            episode.state, "[red]not done"
        )
        now.add_row("instruction", f"[bold]{episode.instruction}[/bold]  {state}")
        taken = f"{episode.actions} {'actions' if motion is None else 'commands'}"
        now.add_row("episode", f"{episode.episode + 1}, {episode.time_s:.1f} s, {taken}")
    if record.action is not None:
        p50 = float(np.median([latency for _, latency in record.recent])) * 1e3
        now.add_row("policy", f"{record.action_rate_hz:.1f} actions/s, {p50:.0f} ms from image to action")
        values = "  ".join(
            f"{name} {value:+.3f}" for name, value in zip(record.action.names, first_values(record.action), strict=True)
        )
        more = f"  … {record.action.horizon} of them" if record.action.horizon > 1 else ""
        now.add_row("action", values + more)
    if record.stats is not None:
        tokens, forwards = sum(record.stats.tokens_per_forward), record.stats.forwards
        now.add_row("decoded", f"{tokens} tokens in {forwards} forwards, {record.stats.tau:.1f} per forward")
    if record.text:
        now.add_row("it wrote", Text(record.text))
    if motion is not None:
        now.add_row("driver", Text(motion.driver))
        now.add_row("guard", Text(motion.guard, style=_COLOURS.get(motion.guard.partition(":")[0], "")))
    tasks = Table("task", "instruction", "succeeded")
    for task in TASKS:
        done = [episode.succeeded for episode in record.episodes if episode.task == task.name]
        tasks.add_row(task.name, task.instruction, f"{sum(done)} of {len(done)}" if done else "")
    prompt = f"another instruction, then Enter: {typed.text}▏"
    keys = "Esc: stop the arm · Ctrl-R: clear the stop · Ctrl-C: end" if motion is not None else ""
    lines = [Text(keys, style="dim"), Text(prompt)] if typed.usable else []
    return Group(now, tasks, Text(warning, style="red"), *lines)
