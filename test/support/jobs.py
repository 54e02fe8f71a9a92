# SPDX-License-Identifier: Apache-2.0
"""Work for test processes, which must find it in a module."""

import os
import signal
import time
from pathlib import Path

from support.patience import PATIENCE_S

from specvla_ros.errors import UserError


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
