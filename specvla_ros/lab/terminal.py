# SPDX-License-Identifier: Apache-2.0
"""The commands' terminal output: progress, tables, and errors as one line with an exit code."""

import errno
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich import progress as columns
from rich.console import Console
from rich.table import Column, Table

from specvla_ros import __version__
from specvla_ros.errors import UserError, missing_package

USER_ERROR, BUG = 2, 3  # exit codes; 1 means that a result breaks a limit
PERIOD_S = 10.0  # between two lines of progress without a terminal
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Progress(columns.Progress):
    """A bar that is drawn only at its end without a terminal, and therefore writes lines until then."""

    _told_s = time.monotonic()

    def start(self) -> None:
        self._told_s = time.monotonic()
        super().start()

    def advance(self, task_id: columns.TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def update(self, task_id: columns.TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def _tell(self, task_id: columns.TaskID) -> None:
        if self.disable or self.console.is_terminal or time.monotonic() - self._told_s < PERIOD_S:
            return
        self._told_s = time.monotonic()
        task = next(each for each in self.tasks if each.id == task_id)
        total = f" of {task.total:g}" if task.total is not None else ""
        self.console.print(f"{task.completed:g}{total} {task.description}", markup=False, soft_wrap=True)


def progress_bar(*, shown: bool = True) -> columns.Progress:
    """A progress bar on stderr with count, elapsed time and time left; without a terminal a line now and then."""
    return _Progress(
        columns.SpinnerColumn(),
        columns.BarColumn(),
        columns.MofNCompleteColumn(),
        columns.TimeElapsedColumn(),
        columns.TextColumn("left"),
        columns.TimeRemainingColumn(),
        columns.TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=not shown,
    )


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a progress bar and yields the function that advances it: done, total, description."""
    with progress_bar() as bar:
        line = bar.add_task(description, total=None)
        yield lambda done, wanted, what: bar.update(line, completed=done, total=wanted, description=what)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table to stdout without truncating or wrapping its cells."""
    table = Table(*(Column(name, no_wrap=True) for name in head), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(width=Console(width=10_000).measure(table).maximum).print(table)


@contextmanager
def one_line_endings() -> Iterator[None]:
    """Turns exceptions into messages and exit codes; SystemExit and KeyboardInterrupt pass.

    A user's error, a full disk or an unreadable file exits with 2. Anything else is a bug of this package: it exits
    with 3 and writes the trace to a file to be reported.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a file's name that is not UTF-8 cannot be printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except UserError as error:
        _end(str(error), USER_ERROR)
    except ModuleNotFoundError as error:
        own = str(error.name).startswith("specvla")  # not a package that a user could install
        _end(*((_bug(error), BUG) if own else (str(missing_package(error)), USER_ERROR)))
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _end(_system_error(error), USER_ERROR)
    except BaseException as error:  # panics of Rust libraries are not Exceptions
        _end(_bug(error), BUG)


def _end(message: str, code: int) -> None:
    text = message.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    typer.secho(f"specvla: {text}", fg=typer.colors.RED, err=True)
    sys.exit(code)


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{str(error.filename)[:200]}: " if error.filename else ""
    if error.errno in _FULL:
        return (
            f"{where}{reason}: what was written before is kept. Free some space, then run the same command again; "
            "commands that write into a directory resume"
        )
    if error.errno is None:  # NumPy's error for a file that is too short
        return f"{where}{reason}; is the disk full?"
    return f"{where}{reason}; check the path and its permissions"


def _bug(error: BaseException) -> str:
    what = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0][:300]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specvla-bug-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"specvla {__version__}, Python {sys.version}\n{sys.argv}\n\n")
            file.write("".join(traceback.format_exception(error)))
        trace = f"the trace is in {file.name}: please report it with that file"
    except OSError as full:
        place = traceback.extract_tb(error.__traceback__)[-1]
        trace = f"at {place.filename}:{place.lineno}; the trace could not be written ({full.strerror})"
    return f"this is a bug of specvla: {what}; {trace}"
