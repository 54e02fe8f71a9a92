# SPDX-License-Identifier: Apache-2.0
"""Work for test processes, which must find it in a module."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

from support.patience import PATIENCE_S

from specvla_ros.errors import UserError
from specvla_ros.lab.jobs.workers import Host


def square(job: tuple[int, str]) -> int:
    """Leaves a mark for each attempt; the first one at 3, and each at a negative number, is killed."""
    number, marks = job
    attempt = len(list(Path(marks).glob(f"{number}-*")))
    (Path(marks) / f"{number}-{attempt}").touch()
    if number < 0 or (number == 3 and attempt == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def die(job: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return job


def refuse(job: tuple[int, str]) -> int:
    number, marks = job
    (Path(marks) / str(os.getpid())).touch()
    raise UserError(f"job {number} cannot be")


def unsendable(job: int) -> object:
    return lambda: job


def name_and_wait(marks: str) -> int:
    """Leaves its process id, and works longer than anybody waits."""
    (Path(marks) / str(os.getpid())).touch()
    time.sleep(PATIENCE_S)
    return 0


class Squares:
    """What workers share: it is killed in the middle of the first call for 3."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._asked = Counter[int]()
        (marks / f"made-{os.getpid()}").touch()

    def of(self, place: int, number: int) -> tuple[int, int, int]:
        """The square, who computed it, and how many this place asked for so far."""
        mark = self._marks / "killed"
        if number == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 0:
            raise UserError(f"{number} is not squared")
        self._asked[place] += 1
        return number * number, os.getpid(), self._asked[place]


def no_squares() -> None:
    raise UserError("there are no squares today")


def dead_squares() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_for_square(job: int, host: Host) -> tuple[int, int, int, int]:
    return *host.call("of", host.place, job), host.place
