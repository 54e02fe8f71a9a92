# SPDX-License-Identifier: Apache-2.0
"""What the commands show at a terminal, and how Ctrl-C ends them with nothing half written."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_ANY_WIDTH = 10_000


def progress_bar(*, shown: bool = True) -> Progress:
    """A bar on stderr with the count, the time elapsed and the time left."""
    return Progress(
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=not shown,
    )


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, and what advances it: how much is done, how much there is, and what it is."""
    with progress_bar() as bar:
        line = bar.add_task(description, total=None)
        yield lambda done, wanted, what: bar.update(line, completed=done, total=wanted, description=what)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table to stdout whose cells are never cut or wrapped, however narrow the terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in head:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = Console(width=_ANY_WIDTH).measure(table).maximum
    Console(width=width).print(table)


@contextmanager
def deferred_interruption() -> Iterator[Callable[[], bool]]:
    """Gives a function that returns whether SIGINT or SIGTERM has arrived.

    The first signal is only noted; a second one has its usual effect. Signals reach the main thread only: in any other
    thread the handlers are left alone.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        restore()
