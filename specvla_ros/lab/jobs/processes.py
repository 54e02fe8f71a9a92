# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine; see `specvla_ros.lab.jobs.workers`."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager
from typing import Any

from specvla_ros.lab.jobs.workers import Holder, Host, ProcessDied, answer_of, opened

_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = 5.0
# Not forked: OpenGL contexts and torch's threads do not survive a fork.
_SPAWN = multiprocessing.get_context("spawn")


def end_with_parent(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    """Has the kernel signal this process when its parent dies, however that dies; only Linux can."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


class ProcessPool:
    """Processes; see `Pool`."""

    def __init__(self, workers: int) -> None:
        self.size = workers

    def start(self, work: Callable[..., Any], *host: Host) -> "_Process":
        return _Process(work, self.size, *host)

    def start_host(self, make: Callable[[], object]) -> "_HostProcess":
        return _HostProcess(make)

    def wait(self, busy: Collection["_Process"]) -> list["_Process"]:
        by_connection = {worker.connection: worker for worker in busy}
        return [by_connection[each] for each in multiprocessing.connection.wait(by_connection)]  # type: ignore[index]

    def close(self) -> None:
        """Nothing is left: workers and hosts are ended one by one."""


class _Process:
    """A worker; `workers` of them share this machine's cores."""

    def __init__(self, work: Callable[..., Any], workers: int, *host: Host) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        arguments = theirs, work, workers, os.getpid(), *host
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that ours is at its end when the process is

    def give(self, job: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: `take` says so
            self.connection.send(job)

    def take(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_ENDS_WITHIN_S)
            code = self._process.exitcode
            raise ProcessDied(signal.Signals(-code).name if code and code < 0 else f"exit code {code}") from None
        return opened(*answer)

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, work: Callable[..., Any], workers: int, parent: int, *host: Host) -> None:
    """What a worker does until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this one
    end_with_parent(parent, signal.SIGTERM)
    _share_cores(workers)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(answer_of(work, connection.recv(), *host))


def _share_cores(workers: int) -> None:
    """Shares the cores among the workers: more threads than cores would slow all of them down."""
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers))))
    torch = sys.modules.get("torch")
    if torch is not None:  # the script that a worker imports again has brought it: it has counted the cores already
        torch.set_num_threads(threads)


class _Manager(BaseManager):
    """Starts the process of what workers share; a thread of it answers each of them."""


_Manager.register("hold", Holder, exposed=("call",))


class _HostProcess:
    def __init__(self, make: Callable[[], object]) -> None:
        self._manager = _Manager(ctx=_SPAWN)
        self._manager.start(end_with_parent, (os.getpid(), signal.SIGTERM))
        self.call = partial(_call, self._manager.hold(make))  # type: ignore[attr-defined]

    def end(self) -> None:
        self._manager.shutdown()


def _call(holder: Any, method: str, *arguments: Any) -> Any:
    """In the command or a worker: calls the shared object over its proxy."""
    try:
        answer = holder.call(method, *arguments)
    except (EOFError, ConnectionError) as error:
        raise ProcessDied(str(error) or type(error).__name__) from None
    return opened(*answer)
